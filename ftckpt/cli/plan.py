"""``ftckpt plan``: what protection would survive, what it costs, and whether nodes have that, for a job that need
not run yet."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

from ftckpt.cli.options import add_node_memory
from ftckpt.cli.plan_holdings import HEADER_BYTES, ProtectionPlan, StartPlan, leaner, plan
from ftckpt.cli.plan_job import JobShape, add_shape, job_of
from ftckpt.config import Config
from ftckpt.errors import ConfigError, SettingSyntax, settings_are_written, written
from ftckpt.model.flush_interval import best_interval_secs, mtbf_secs
from ftckpt.model.text import human, human_secs
from ftckpt.parity.table import Memory
from ftckpt.setting import convert
from ftckpt.smp.link import NetworkLimit, unknown_limit
from ftckpt.units import in_words as rate_in_words
from ftckpt.units import rate

_MANY_RANKS = 20_000
"""Above that a plan takes seconds: people are told."""

_STORE_BYTES_PER_SEC = 1e9
"""Assumed rate at which a node writes to storage."""

_FLUSH_SHARE = 0.01
"""Share of training that a flush takes while it runs: assumed."""


def add_plan(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("plan", help="show what protection would survive and cost for a job of a given size")
    add_shape(parser)
    defaults = Config()
    settings = {setting.name: setting for setting in fields(Config)}
    for name in ("slots", "peer_group", "peer_losses", "objects_size", "chunk_size", "memory_limit", "persist_rate"):
        reads = partial(convert, _flag(name), setting=settings[name])
        parser.add_argument(_flag(name), type=reads, default=getattr(defaults, name), metavar="N", help=_help(name))
    for name in ("protect", "network_rate", "persist", "mtbf"):
        parser.add_argument(_flag(name), default=getattr(defaults, name), help=_help(name))
    add_node_memory(
        parser, "host memory of a node beside training, such as 512GiB: whether all fits is answered; status 1: no"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit status: 1 where it does not fit ``--node-memory``.

    Raises:
        ConfigError: a job that cannot be.
    """
    settings_are_written(SettingSyntax.OPTION)
    config = Config(**{s.name: getattr(arguments, s.name) for s in fields(Config) if hasattr(arguments, s.name)})
    job, node_bytes = job_of(arguments, config), arguments.node_memory
    if node_bytes and config.memory_limit_bytes > node_bytes:
        raise ConfigError(
            f"--memory-limit: {config.memory_limit} is more than --node-memory has; give "
            "that at most, or leave --memory-limit out"
        )
    if job.ranks > _MANY_RANKS:
        print(f"ftckpt plan: {job.ranks} ranks: this takes a while", file=sys.stderr, flush=True)
    with _without_collection():
        planned = plan(job, config)
    limit = unknown_limit(config.network_rate)
    verdict = judge(planned, config, node_bytes, limit) if node_bytes else None
    assumed = list(_assumptions(planned, verdict))
    if arguments.json:
        value = {**_as_json(config, planned, limit), "assumed": assumed}
        print(json.dumps(value | ({"verdict": verdict.to_json()} if verdict else {})))
    else:
        for line in (*_lines(config, planned, limit, verdict), *(f"assumed: {text}" for text in assumed)):
            print(line)
    return int(verdict is not None and not verdict.good)


@contextmanager
def _without_collection() -> Iterator[None]:
    """A plan is millions of objects and no garbage: to look for it takes a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _as_json(config: Config, planned: StartPlan, limit: NetworkLimit) -> dict[str, Any]:
    job, table = planned.arrangement.job, planned.table
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    alike = [{"ranks": ranks, "bytes": nbytes, "sets": times} for (ranks, nbytes), times in sorted(sets.items())]
    return {
        "ranks": job.ranks, "nodes": job.nodes, "protect": ",".join(planned.modes.names) or "none",
        "left_out": planned.left_out, "slots": planned.slots,
        "state": {
            "bytes": job.state_bytes, "private_bytes": job.private_bytes,
            "copied_bytes": planned.arrangement.copied_bytes,
            "replica_sets": alike,
        },
        "persist_interval_secs": _persist_interval_secs(config, planned),
        "network_limit": {**asdict(limit), "secs": limit.secs(max(table.network.values()))},
        **table.to_json(),
    }  # fmt: skip


def _lines(config: Config, planned: StartPlan, limit: NetworkLimit, verdict: PlanAnswer | None) -> Iterator[str]:
    if verdict is not None:
        yield verdict.line()
    job, names = planned.arrangement.job, ",".join(planned.modes.names) or "none"
    yield f"{job.ranks} ranks on {job.nodes} nodes, protect {names}, {planned.slots} slots per arena"
    for text in planned.left_out:
        yield f"left out: {text}"
    yield f"{job.holders.option}: {_held(job)}"
    yield from planned.table.lines()
    if received := max(planned.table.network.values()):
        yield f"network limit: {limit}: {limit.secs(received):.1f} s or more per protected snapshot"
        if fault := limit.too_slow(received, _mtbf_secs(config, planned)):
            yield f"never in time: {': '.join(fault)} suffices"
    every, flush, mtbf = (of(config, planned) for of in (_persist_interval_secs, _flush_secs, _mtbf_secs))
    yield (
        f"--ftckpt-persist-interval auto: a snapshot goes to storage every {human_secs(every)}, as a flush takes "
        f"{human_secs(flush)} and memory is lost once in {human_secs(mtbf)} (--mtbf)"
    )


def _held(job: JobShape) -> str:
    if not job.replica_sets:
        return f"{human(job.private_bytes)} of state on each rank, which no other has"
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    return ", ".join(
        f"{human(nbytes)} of state on {ranks} ranks each ({number} times)"
        for (ranks, nbytes), number in sorted(sets.items())
    )


def _mtbf_secs(config: Config, planned: StartPlan) -> float:
    return mtbf_secs(config.mtbf, planned.arrangement.job.nodes)


def _flush_secs(config: Config, planned: StartPlan) -> float:
    arrangement = planned.arrangement
    node_bytes = arrangement.copied_bytes * arrangement.job.gpus_per_node
    return node_bytes / (rate(config.persist_rate) or _STORE_BYTES_PER_SEC)


def _persist_interval_secs(config: Config, planned: StartPlan) -> float:
    """What ``persist_interval`` auto comes to; a job that runs measures what a flush costs."""
    secs = _flush_secs(config, planned)
    return best_interval_secs(_FLUSH_SHARE * secs, secs, _mtbf_secs(config, planned))


def _assumptions(planned: StartPlan, verdict: PlanAnswer | None) -> Iterator[str]:
    job = planned.arrangement.job
    yield from job.assumptions()
    yield f"objects take all of their room, {job.objects_bytes >> 20} MiB per rank; headers {HEADER_BYTES >> 10} KiB"
    yield (
        f"a node writes {rate_in_words(_STORE_BYTES_PER_SEC)} to storage where --persist-rate does not say it, and a "
        f"flush takes {_FLUSH_SHARE:.0%} of training meanwhile"
    )
    if verdict is not None:
        yield from verdict.assumed()


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(name: str) -> str:
    (text,) = (setting.metadata["help"] for setting in fields(Config) if setting.name == name)
    return f"as --ftckpt-{name.replace('_', '-')}: {text}".replace("%", "%%")  # argparse formats help with %


_TMPFS_SHARE = 0.5
"""Of a node's memory, that a tmpfs may take where nobody has said how much."""


@dataclass(frozen=True)
class PlanAnswer:
    """``need`` is what the fullest node holds of the ``node_bytes`` that there are; ``faults``: why that cannot be,
    each with the setting that changes it, none where all is well.
    """

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
            "answer": "yes" if self.good else "no", "node_memory": self.node_bytes,
            "need": {**asdict(self.need), "sum": self.need.sum}, "slots": self.slots, "protect": self.protect,
            "faults": [{"reason": written(reason), "remedy": written(remedy)} for reason, remedy in self.faults],
        }  # fmt: skip

    def assumed(self) -> Iterator[str]:
        yield "--node-memory is what a node has left beside training, which is not counted here"
        if self.need.sum > _TMPFS_SHARE * self.node_bytes:
            yield (
                f"a tmpfs that takes {human(self.need.sum)}: /dev/shm takes half of a node's memory where it is not "
                "mounted with a size"
            )


def judge(planned: StartPlan, config: Config, node_bytes: int, limit: NetworkLimit) -> PlanAnswer:
    """Whether ``planned`` fits nodes of ``node_bytes``, and whether the network lets its snapshots be protected."""
    need, faults, received_bytes = planned.table.fullest, [], planned.arrangement.received_bytes
    if need.sum > node_bytes:
        setting, arrangement, text = _fitting(planned, config, node_bytes)
        # Peers may have to send what was made of replicas.
        received_bytes = max(received_bytes, arrangement.received_bytes)
        faults.append(("it does not fit", f"{setting} {text}".strip()))
    if fault := limit.too_slow(received_bytes, _mtbf_secs(config, planned)):
        faults.append(fault)
    names = ",".join(planned.modes.names) or "none"
    return PlanAnswer(node_bytes, need, planned.slots, names, tuple(faults))


def _fitting(planned: StartPlan, config: Config, node_bytes: int) -> tuple[str, ProtectionPlan, str]:
    """The first setting with which a node has room, what that leads to, and a text of it; without a setting what is
    lacking with all of them."""
    least, with_setting = planned.table.fullest, ""
    for setting, arrangement, memory in leaner(planned, config):
        if memory.sum <= node_bytes:
            return setting, arrangement, f"needs {human(memory.sum)}"
        if memory.sum < least.sum:
            least, with_setting = memory, f" with {setting}"
    text = f"more ranks, or {human(least.sum)} of a node{with_setting}, the least that any setting needs"
    return "", planned.arrangement, text
