"""``ftckpt plan``: what protection would survive, and what it costs, for a job that need not run yet."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, asdict, fields
from functools import partial
from typing import Any

from ftckpt.commands.node_memory_option import add_node_memory
from ftckpt.commands.plan_holdings import HEADER_BYTES, ProtectionPlan, StartPlan, plan
from ftckpt.commands.plan_intervals import Costs, IntervalForecast, forecast
from ftckpt.commands.plan_job import JobShape, add_shape, job_of
from ftckpt.commands.plan_verdict import PlanAnswer, judge
from ftckpt.config import GIB, Config
from ftckpt.errors import ConfigError, Writing, settings_are_written, written
from ftckpt.model.failures import FailureRecord
from ftckpt.model.text import human
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.place import locate
from ftckpt.persist.storage import open_storage
from ftckpt.setting import convert, reader_of
from ftckpt.smp.link import NetworkLimit, unknown_limit

_MANY_RANKS = 20_000
"""Above that a plan takes seconds: people are told."""


def add_plan(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("plan", help="show what protection would survive and cost for a job of a given size")
    add_shape(parser)
    defaults = Config()
    for name in ("protect", "peer_code"):
        parser.add_argument(_flag(name), default=getattr(defaults, name), help=_help(name))
    settings = {setting.name: setting for setting in fields(Config)}
    for name, of in (
        ("interval", "iterations"),
        ("protect_interval", "snapshots"),
        ("persist_interval", "iterations"),
    ):
        reads = _interval(settings[name], of)
        parser.add_argument(_flag(name), type=reads, default=getattr(defaults, name), help=_help(name))
    for name in (
        "slots", "peer_group", "peer_losses", "objects_mib", "chunk_mib", "memory_limit", "smp_cores", "smp_gbps",
        "protect_timeout_secs", "persist_gbps", "overhead_budget",
    ):  # fmt: skip
        reads = partial(convert, _flag(name), setting=settings[name])
        parser.add_argument(_flag(name), type=reads, default=getattr(defaults, name), metavar="N", help=_help(name))
    for name in ("network_gbps", "persist", "mtbf"):
        parser.add_argument(_flag(name), default=getattr(defaults, name), help=_help(name))
    add_node_memory(
        parser, "host memory of a node beside training, such as 512GiB: whether all fits is answered; status 1: no"
    )
    parser.add_argument(
        "--iteration-secs",
        type=float,
        metavar="SECS",
        help="length of an iteration: what intervals waste is predicted",
    )
    parser.add_argument(
        "--snapshot-cost-secs",
        type=float,
        metavar="SECS",
        help="of training, that a snapshot takes; default: a guess",
    )
    parser.add_argument(
        "--seen", metavar="STORAGE", help="failures count that the job has seen which writes there, as persist has it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and return the exit status: 1 where it does not fit ``--node-memory``.

    Raises:
        ConfigError: a job that cannot be, or nothing at ``--seen``.
        StorageError: what is there cannot be read.
    """
    settings_are_written(Writing.OPTION)
    config = Config(**{s.name: getattr(arguments, s.name) for s in fields(Config) if hasattr(arguments, s.name)})
    job, node_bytes = job_of(arguments, config), arguments.node_memory
    if node_bytes and config.memory_limit * GIB > node_bytes:
        raise ConfigError(
            f"--memory-limit: {config.memory_limit:g} GiB are more than --node-memory has; give "
            "that at most, or leave --memory-limit out"
        )
    if job.ranks > _MANY_RANKS:
        print(f"ftckpt plan: {job.ranks} ranks: this takes a while", file=sys.stderr, flush=True)
    with _without_collection():
        planned = plan(job, config, node_bytes or 0)
    limit = unknown_limit(config.network_gbps)
    costs_of = partial(_costs, arguments, config, limit)
    predicted = _predicted(arguments, config, planned, costs_of(planned.arrangement))
    verdict = judge(planned, config, node_bytes, costs_of, predicted) if node_bytes else None
    assumed = list(_assumptions(config, planned, predicted, verdict))
    if arguments.json:
        value = {**_as_json(config, planned, limit, predicted), "assumed": assumed}
        print(json.dumps(value | ({"verdict": verdict.to_json()} if verdict else {})))
    else:
        for line in (*_lines(config, planned, limit, predicted, verdict), *(f"assumed: {text}" for text in assumed)):
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


def _as_json(
    config: Config, planned: StartPlan, limit: NetworkLimit, predicted: IntervalForecast | None
) -> dict[str, Any]:
    job, table = planned.arrangement.job, planned.table
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    alike = [{"ranks": ranks, "bytes": nbytes, "sets": times} for (ranks, nbytes), times in sorted(sets.items())]
    value = {
        "ranks": job.ranks, "nodes": job.nodes, "protect": ",".join(planned.modes.names) or "none",
        "left_out": planned.left_out, "slots": planned.slots,
        "state": {
            "bytes": job.state_bytes, "private_bytes": job.private_bytes,
            "copied_bytes": planned.arrangement.copied_bytes,
            "replica_sets": alike,
        },
        "protected_every": _protected_every(config, predicted),
        "network_limit": {**asdict(limit), "secs": limit.secs(max(table.network.values()))},
        **table.to_json(),
    }  # fmt: skip
    if predicted is not None:
        value["cadence"] = predicted.to_json()
    return value


def _lines(
    config: Config,
    planned: StartPlan,
    limit: NetworkLimit,
    predicted: IntervalForecast | None,
    verdict: PlanAnswer | None,
) -> Iterator[str]:
    if verdict is not None:
        yield verdict.line()
    job, names = planned.arrangement.job, ",".join(planned.modes.names) or "none"
    yield f"{job.ranks} ranks on {job.nodes} nodes, protect {names}, {planned.slots} slots per arena"
    for text in planned.left_out:
        yield f"left out: {text}"
    yield f"{job.holders.option}: {_held(job)}"
    yield from planned.table.lines()
    if planned.modes.names:
        if received := max(planned.table.network.values()):
            yield f"network limit: {limit}: {limit.secs(received):.1f} s or more per protected snapshot"
        every = _protected_every(config, predicted)
        age = f"; the newest is at most {predicted.protected_age_secs:.3g} s old" if predicted else ""
        often = f"one iteration of {every}" if every > 1 else "every iteration"
        if config.protect_interval == "auto" and not predicted:
            often += " at most"
        yield f"protected is {often}{age}"
    if predicted is not None:
        yield from predicted.lines()


def _held(job: JobShape) -> str:
    if not job.replica_sets:
        return f"{human(job.private_bytes)} of state on each rank, which no other has"
    sets = Counter((len(ranks), nbytes) for ranks, nbytes in job.replica_sets.items())
    return ", ".join(
        f"{human(nbytes)} of state on {ranks} ranks each ({number} times)"
        for (ranks, nbytes), number in sorted(sets.items())
    )


def _protected_every(config: Config, predicted: IntervalForecast | None) -> int:
    """Iterations from one protected snapshot to the next, at the least."""
    least = 1 if config.protect_interval == "auto" else config.protect_interval
    return predicted.protected if predicted else config.least_interval * least


def _costs(
    arguments: argparse.Namespace, config: Config, limit: NetworkLimit, arrangement: ProtectionPlan
) -> Costs | None:
    """None where the length of an iteration is not known."""
    if arguments.iteration_secs is None:
        return None
    return Costs.guess(
        config, arguments.iteration_secs, arguments.snapshot_cost_secs,
        rank_bytes=arrangement.copied_bytes, ranks=arrangement.job.gpus_per_node,
        network=limit.secs(arrangement.received_bytes),
    )  # fmt: skip


def _predicted(
    arguments: argparse.Namespace, config: Config, planned: StartPlan, costs: Costs | None
) -> IntervalForecast | None:
    """What intervals waste; None where the length of an iteration is not known."""
    if costs is None:
        for name in ("seen", "snapshot_cost_secs"):
            if getattr(arguments, name) is not None:
                raise ConfigError(
                    f"{_flag(name)}: give --iteration-secs, too: of intervals alone it changes what is predicted"
                )
        return None
    nodes, modes = planned.arrangement.job.nodes, planned.modes
    survives_nodes = nodes > 1 and bool(modes.replica or modes.peer)
    return forecast(config, costs, nodes, survives_nodes, _seen(arguments), is_short=planned.is_short)


def _seen(arguments: argparse.Namespace) -> FailureRecord | None:
    """What the job at ``--seen`` knows of failures. Raises ConfigError where nothing is there."""
    if arguments.seen is None:
        return None
    where = arguments.seen
    if "://" not in where and not os.path.exists(where):
        raise ConfigError(f"--seen: {where} is not there; name the storage that the job writes to")
    last = last_attempt(open_storage(locate(where).where, "--seen"))
    if last is None:
        raise ConfigError(f"--seen: {where}: no job has told there what failures it has seen")
    return last.counted()


def _assumptions(
    config: Config, planned: StartPlan, predicted: IntervalForecast | None, verdict: PlanAnswer | None
) -> Iterator[str]:
    job = planned.arrangement.job
    yield from job.assumptions()
    yield f"objects take all of their room, {job.objects_bytes >> 20} MiB per rank; headers {HEADER_BYTES >> 10} KiB"
    if predicted is not None:
        yield from map(written, predicted.assumed)
    elif "auto" in (
        config.interval, config.persist_interval, config.protect_interval if planned.modes.names else 0
    ):  # fmt: skip
        yield "what auto comes to is not known without the length of an iteration (--iteration-secs)"
    if verdict is not None:
        yield from verdict.assumed()


def _interval(setting: Field[Any], of: str) -> Callable[[str], int | str]:
    """What reads an interval, which is a number ``of`` iterations or snapshots."""

    def read(text: str) -> int | str:
        try:
            value: int | str = reader_of(setting)(text)
        except ValueError:
            raise ConfigError(
                f"{_flag(setting.name)}: {text!r} is no interval; give a number of {of}, or auto"
            ) from None
        return value

    return read


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help(name: str) -> str:
    (text,) = (setting.metadata["help"] for setting in fields(Config) if setting.name == name)
    return f"as --ftckpt-{name.replace('_', '-')}: {text}".replace("%", "%%")  # argparse formats help with %
