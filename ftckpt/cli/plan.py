"""``ftckpt plan``: which losses a planned job survives, what protection costs, and whether nodes have room for it."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

from ftckpt.cli.answers import Answer, Lines, warn
from ftckpt.cli.options import add_node_memory
from ftckpt.cli.plan_holdings import HEADER_BYTES, ProtectionPlan, StartPlan, leaner, plan
from ftckpt.cli.plan_job import JobShape, add_shape, job_of
from ftckpt.cli.plan_names import CLUSTERS
from ftckpt.config import Config
from ftckpt.errors import ConfigError, SettingSyntax, settings_are_written, written
from ftckpt.model.flush_interval import best_interval_secs, mtbf_secs
from ftckpt.model.text import human, human_secs
from ftckpt.parity.table import Memory
from ftckpt.setting import convert
from ftckpt.smp.link import SHARE, NetworkLimit, unknown_limit
from ftckpt.units import in_words as rate_in_words
from ftckpt.units import rate

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
    flushes = _flushes(planned, config)
    verdict = judge(planned, config, node_bytes, limit, flushes.mtbf_secs) if node_bytes else None
    assumed, flags = list(_assumptions(planned, verdict)), shlex.join(replace(config, enabled=True).flags())
    if verdict is not None:
        yield verdict.line()
    yield from _lines(planned, limit, flushes)
    yield from (f"assumed: {text}" for text in assumed)
    yield f"flags: {flags}"
    value = {**_as_json(planned, limit, flushes), "assumed": assumed, "flags": flags}
    yield Answer(
        value | ({"verdict": verdict.to_json()} if verdict else {}), int(not (verdict is None or verdict.good))
    )


class FlushTimes(NamedTuple):
    """Seconds of a flush, between flushes, and between losses of all memory."""

    secs: float
    interval_secs: float
    mtbf_secs: float


def _flushes(planned: StartPlan, config: Config) -> FlushTimes:
    """The times that follow from rates; a running job measures the cost of a flush."""
    job, storage_rate = planned.arrangement.job, rate(config.persist_rate) or _STORE_BYTES_PER_SEC
    secs = planned.arrangement.copied_bytes * job.gpus_per_node / storage_rate
    mtbf = mtbf_secs(config.mtbf, job.nodes)
    return FlushTimes(secs, best_interval_secs(_FLUSH_SHARE * secs, secs, mtbf), mtbf)


def _as_json(planned: StartPlan, limit: NetworkLimit, flushes: FlushTimes) -> dict[str, Any]:
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
        "persist_interval_secs": flushes.interval_secs,
        "network_limit": {**asdict(limit), "secs": limit.secs(max(table.network.values()))},
        **table.to_json(),
    }


def _lines(planned: StartPlan, limit: NetworkLimit, flushes: FlushTimes) -> Iterator[str]:
    job, names = planned.arrangement.job, ",".join(planned.modes.names) or "none"
    yield f"{job.ranks} ranks on {job.nodes} nodes, protect {names}, {planned.slots} slots per arena"
    for text in planned.left_out:
        yield f"left out: {text}"
    yield f"{job.holders.option}: {_held(job)}"
    yield from planned.table.lines()
    if received := max(planned.table.network.values()):
        yield f"network limit: {limit}: {limit.secs(received):.1f} s or more per protected snapshot"
        if fault := limit.too_slow(received, flushes.mtbf_secs):
            yield f"never in time: {': '.join(fault)} suffices"
    yield (
        f"--ftckpt-persist-interval auto: a flush every {human_secs(flushes.interval_secs)}, as it takes "
        f"{human_secs(flushes.secs)} and memory is lost once in {human_secs(flushes.mtbf_secs)} (--mtbf)"
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
