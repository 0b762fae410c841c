"""``ftckpt plan``: which losses a planned job survives, what protection costs, and whether nodes have room for it."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from ftckpt.cli.answers import Answer, Lines, warn
from ftckpt.cli.options import add_node_memory
from ftckpt.cli.plan_holdings import HEADER_BYTES, ProtectionPlan, StartPlan, leaner, plan
from ftckpt.cli.plan_job import JobShape, add_shape, job_of
from ftckpt.cli.plan_names import CLUSTERS
from ftckpt.cli.plan_outlook import ASSUMPTIONS, Pace, outlook_of
from ftckpt.config import Config
from ftckpt.errors import ConfigError, SettingSyntax, settings_are_written, written
from ftckpt.model.flush_interval import best_interval_secs, mtbf_secs
from ftckpt.model.text import human, human_secs
from ftckpt.parity.table import Memory
from ftckpt.setting import convert
from ftckpt.smp.link import SHARE, NetworkLimit, unknown_limit
from ftckpt.units import in_words as rate_in_words
from ftckpt.units import rate, seconds

_MANY_RANKS = 20_000
"""Above that a plan takes seconds, and a line warns of it."""

_STORE_BYTES_PER_SEC = 1e9
"""Assumed rate at which a node writes to storage."""

_FLUSH_SHARE = 0.01
"""Assumed slowdown of training during a flush."""


_SETTINGS = (
    "slots", "interval", "peer_group", "peer_losses", "objects_size", "chunk_size", "memory_limit", "persist_rate",
    "protect", "network_rate", "persist", "mtbf",
)  # fmt: skip
"""Settings that a plan depends on; the command has them as options."""
_REMEDY_FLAG = re.compile(r"(?:^| )(--ftckpt-[a-z-]+) (\S+)")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_shape(parser)
    defaults = Config()
    settings = {setting.name: setting for setting in fields(Config)}
    for name in _SETTINGS:
        reads = partial(convert, _flag(name), setting=settings[name])
        parser.add_argument(_flag(name), type=reads, default=getattr(defaults, name), metavar="N", help=_help(name))
    text = "host memory of a node that training leaves free, such as 512GiB; exit status 1: the job does not fit"
    add_node_memory(parser, f"{text} (default: all of a node of --cluster)")
    mtbf = "mean time until a node's memory is lost; default: half of 6.5 failures in 1000 days"
    for option, secs, text in (("--iteration-time", "10s", "time of an iteration"), ("--node-mtbf", "308d", mtbf)):
        parser.add_argument(option, type=partial(_secs, option), default=secs, metavar="TIME", help=text)


def run_plan(arguments: argparse.Namespace) -> Lines:
    """The plan; status 1: it does not fit ``--node-memory``.

    Raises:
        ConfigError: an impossible job.
    """
    settings_are_written(SettingSyntax.OPTION)
    config = Config(**{s.name: getattr(arguments, s.name) for s in fields(Config) if hasattr(arguments, s.name)})
    job, cluster = job_of(arguments, config), CLUSTERS.get(arguments.cluster)
    node_bytes = arguments.node_memory or (cluster.node_bytes if cluster is not None else 0)
    if node_bytes and config.memory_limit_bytes > node_bytes:
        raise ConfigError(
            f"--memory-limit: {config.memory_limit} is more than --node-memory; lower it, or leave it out"
        )
    if job.ranks > _MANY_RANKS:
        warn(f"{job.ranks} ranks: this takes some seconds")
    planned = plan(job, config)
    limit = unknown_limit(config.network_rate)
    if cluster is not None and config.network_rate == "auto":
        source = f"{SHARE:.0%} of one link of {arguments.cluster}, {cluster.link_gbits:g} Gbit/s"
        limit = NetworkLimit(SHARE * cluster.link_gbits * 1e9 / 8, source)
    pace = _pace(planned, config, limit, arguments.iteration_time)
    verdict = judge(planned, config, node_bytes, limit, pace.mtbf_secs) if node_bytes else None
    outlook = outlook_of(planned, pace, arguments.node_mtbf)
    assumed = list(_assumptions(planned, verdict))
    if verdict is not None:
        yield verdict.line()
    yield from _lines(planned, limit, pace)
    yield from outlook.lines()
    yield from (f"assumed: {text}" for text in assumed)
    flags = _flags(config, verdict)
    yield f"flags: {flags}"
    value = {**_as_json(planned, limit, pace), **outlook.to_json(), "assumed": assumed, "flags": flags}
    yield Answer(
        value | ({"verdict": verdict.to_json()} if verdict else {}), int(not (verdict is None or verdict.good))
    )


def _pace(planned: StartPlan, config: Config, limit: NetworkLimit, iteration_secs: float) -> Pace:
    """The times that follow from rates; a running job measures the cost of a flush."""
    job, storage_rate = planned.arrangement.job, rate(config.persist_rate) or _STORE_BYTES_PER_SEC
    flush_secs = planned.arrangement.copied_bytes * job.gpus_per_node / storage_rate
    mtbf = mtbf_secs(config.mtbf, job.nodes)
    return Pace(
        iteration_secs=iteration_secs,
        snapshot_secs=iteration_secs * (config.interval if isinstance(config.interval, int) else 1),
        protect_secs=limit.secs(max(planned.table.network.values())),
        flush_secs=flush_secs,
        flush_interval_secs=best_interval_secs(_FLUSH_SHARE * flush_secs, flush_secs, mtbf),
        mtbf_secs=mtbf,
        link_rate=(limit.bytes_per_sec or math.inf) / (SHARE if config.network_rate == "auto" else 1),
    )


def _flags(config: Config, verdict: PlanAnswer | None) -> str:
    """The flags of the planned job, with the remedies of ``verdict`` that are flags."""
    remedies: dict[str, str] = {}
    for _, remedy in verdict.faults if verdict is not None else ():
        if remedy.startswith("--"):  # not advice to take other nodes
            remedies |= _REMEDY_FLAG.findall(remedy)
    words = [word for word in replace(config, enabled=True).flags() if word.partition("=")[0] not in remedies]
    return shlex.join([*words, *(f"{flag}={value}" for flag, value in remedies.items())])


def _secs(option: str, text: str) -> float:
    try:
        secs = seconds(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    if not 0 < secs < math.inf:
        raise ConfigError(f"{option}: {text} is out of range; it must be above 0")
    return secs


def _as_json(planned: StartPlan, limit: NetworkLimit, pace: Pace) -> dict[str, Any]:
    job, table = planned.arrangement.job, planned.table
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    alike = [{"ranks": ranks, "bytes": nbytes, "sets": times} for (ranks, nbytes), times in sorted(sets.items())]
    copied_bytes = planned.arrangement.copied_bytes
    state = {"bytes": job.state_bytes, "private_bytes": job.private_bytes, "copied_bytes": copied_bytes}
    return {
        "ranks": job.ranks,
        "nodes": job.nodes,
        "protect": ",".join(planned.modes.names) or "none",
        "left_out": planned.left_out,
        "slots": planned.slots,
        "state": {**state, "replica_sets": alike},
        "persist_interval_secs": pace.flush_interval_secs,
        "network_limit": {**asdict(limit), "secs": pace.protect_secs},
        **table.to_json(),
    }


def _lines(planned: StartPlan, limit: NetworkLimit, pace: Pace) -> Iterator[str]:
    job, names = planned.arrangement.job, ",".join(planned.modes.names) or "none"
    yield f"{job.ranks} ranks on {job.nodes} nodes, protect {names}, {planned.slots} slots per arena"
    for text in planned.left_out:
        yield f"left out: {text}"
    yield f"{job.holders.option}: {_held(job)}"
    yield from planned.table.lines()
    if received := max(planned.table.network.values()):
        yield f"network limit: {limit}: {pace.protect_secs:.1f} s or more per protected snapshot"
        if fault := limit.too_slow(received, pace.mtbf_secs):
            yield f"never in time: {': '.join(fault)} suffices"
    yield (
        f"--ftckpt-persist-interval auto: a flush every {human_secs(pace.flush_interval_secs)}, as it takes "
        f"{human_secs(pace.flush_secs)} and memory is lost once in {human_secs(pace.mtbf_secs)} (--mtbf)"
    )


def _held(job: JobShape) -> str:
    if not job.replica_sets:
        return f"{human(job.private_bytes)} of state on each rank, without replicas"
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    return ", ".join(
        f"{human(nbytes)} of state on {ranks} ranks each ({number} times)"
        for (ranks, nbytes), number in sorted(sets.items())
    )


def _assumptions(planned: StartPlan, verdict: PlanAnswer | None) -> Iterator[str]:
    job = planned.arrangement.job
    yield from job.assumptions()
    yield from ASSUMPTIONS
    if job.nodes_per_rack:
        yield "each node starts with the label of its rack (--ftckpt-rack)"
    yield f"objects fill their space, {job.objects_bytes >> 20} MiB per rank; headers take {HEADER_BYTES >> 10} KiB"
    yield (
        f"without --persist-rate, a node writes {rate_in_words(_STORE_BYTES_PER_SEC)} to storage; a flush slows "
        f"training by {_FLUSH_SHARE:.0%}"
    )
    if verdict is not None:
        yield from verdict.assumed()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(name: str) -> str:
    (text,) = (setting.metadata["help"] for setting in fields(Config) if setting.name == name)
    return f"as --ftckpt-{name.replace('_', '-')}: {text}".replace("%", "%%")  # argparse formats help with %


_TMPFS_SHARE = 0.5
"""Share of a node's memory that a tmpfs mounted without a size may take."""


@dataclass(frozen=True)
class PlanAnswer:
    """The ``need`` of the fullest node compared to ``node_bytes``, and the ``faults``: reasons and remedies."""

    node_bytes: int
    need: Memory
    slots: int
    protect: str
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def good(self) -> bool:
        return not self.faults

    def line(self) -> str:
        needs = f"a node needs {human(self.need.sum)} of {human(self.node_bytes)}"
        facts = f"{needs} ({self.slots} slots, protect {self.protect})"
        if self.good:
            return written(f"yes: {facts}")
        faults = "; ".join(f"{reason}: {remedy}" for reason, remedy in self.faults)
        return written(f"no: {faults}; as planned {facts}")

    def to_json(self) -> dict[str, Any]:
        return {
            "answer": "yes" if self.good else "no",
            "node_memory": self.node_bytes,
            "need": {**asdict(self.need), "sum": self.need.sum},
            "slots": self.slots,
            "protect": self.protect,
            "faults": [{"reason": written(reason), "remedy": written(remedy)} for reason, remedy in self.faults],
        }

    def assumed(self) -> Iterator[str]:
        yield f"training leaves {human(self.node_bytes)} of a node's host memory free (--node-memory)"
        if self.need.sum > _TMPFS_SHARE * self.node_bytes:
            yield f"the tmpfs has room for {human(self.need.sum)}; /dev/shm has half of a node's memory by default"


def judge(planned: StartPlan, config: Config, node_bytes: int, limit: NetworkLimit, mtbf: float) -> PlanAnswer:
    """Checks whether ``planned`` fits nodes of ``node_bytes``, and whether the network is fast enough for it."""
    need, faults, received_bytes = planned.table.fullest, [], planned.arrangement.received_bytes
    if need.sum > node_bytes:
        setting, arrangement, text = _fitting(planned, config, node_bytes)
        # Without a mode on replicas, peers send more.
        received_bytes = max(received_bytes, arrangement.received_bytes)
        faults.append(("it does not fit", f"{setting} {text}".strip()))
    if fault := limit.too_slow(received_bytes, mtbf):
        faults.append(fault)
    names = ",".join(planned.modes.names) or "none"
    return PlanAnswer(node_bytes, need, planned.slots, names, tuple(faults))


def _fitting(planned: StartPlan, config: Config, node_bytes: int) -> tuple[str, ProtectionPlan, str]:
    """The first setting that makes it fit, the plan with it, and its memory as text. If none does, the setting is
    empty and the text names the smallest need."""
    least, with_setting = planned.table.fullest, ""
    for setting, arrangement, memory in leaner(planned, config):
        if memory.sum <= node_bytes:
            return setting, arrangement, f"needs {human(memory.sum)}"
        if memory.sum < least.sum:
            least, with_setting = memory, f" with {setting}"
    text = f"more ranks, or nodes with {human(least.sum)}{with_setting}, the smallest need of any setting"
    return "", planned.arrangement, text
