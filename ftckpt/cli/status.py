"""``ftckpt status``: a job's snapshots on all nodes and the outcome of a restart now. ``ftckpt jobs``: the jobs that
have memory on this machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.cli.answers import Answer, Lines, alarming, warn
from ftckpt.cli.job_nodes import JobNodes, NodeState, nodes_here
from ftckpt.cli.options import add_arena
from ftckpt.cli.snapshots import usable_at
from ftckpt.cli.targets import add_job, job_at, jobs_in
from ftckpt.errors import ArenaError, ConfigError, FtckptError, StorageError
from ftckpt.memory.directory import user_name
from ftckpt.model.text import aligned, human, listed
from ftckpt.persist.paths import Place
from ftckpt.restore.forecast import forecast, unseen_shards
from ftckpt.smp.stall import STATUS, late_rank

_WARNINGS = 5
_EVENTS, _EVENT_CHARS = 5, 160
_WATCH_SECS = 2.0
_MARKS = {"whole": "committed", "protected": "protected"}
"""Names of marks in JSON, and in text."""


def add_status(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``status``."""
    add_job(parser, is_optional=True)
    parser.add_argument("--watch", nargs="?", type=float, const=_WATCH_SECS, metavar="SECS", help="repeat every SECS")
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECS", help="limit for a node's answer (default: %(default)s)"
    )


def run_status(arguments: argparse.Namespace) -> Lines:
    """The status of a job; status 1: a restart would restore nothing. Raises ArenaError."""
    for name in ("timeout", "watch"):
        secs = getattr(arguments, name)
        if secs is not None and not 0 < secs < math.inf:
            raise ConfigError(f"--{name} {secs:g}: it must be finite and above 0 seconds")
    root, job = job_at(arguments.job or _only_job(arguments.arena), arguments.arena)
    if arguments.watch is not None:
        with suppress(KeyboardInterrupt):  # the usual end
            _watch(root, job, arguments)
        return
    status = job_status(root, job, arguments.timeout)
    yield from in_lines(status)
    yield Answer(status, int(status["restart"]["iteration"] < 0))


def _watch(root: Path, job: str, arguments: argparse.Namespace) -> NoReturn:
    """Shows the status until interrupted: in place on a terminal, else one after the other; as JSON one line each."""
    clear, end = ("\x1b[H\x1b[2J", "\n") if sys.stdout.isatty() else ("", "\n\n")
    while True:
        try:
            status = job_status(root, job, arguments.timeout)
        except (FtckptError, OSError) as error:  # the job ends, or restarts
            status = {"error": str(error)}
        if arguments.json:
            print(json.dumps(status), flush=True)
        else:
            lines = [status["error"]] if "error" in status else in_lines(status)
            print(clear + "\n".join([time.strftime("%X"), *lines]), end=end, flush=True)
        time.sleep(arguments.watch)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``jobs``."""
    add_arena(parser)


def run_jobs(arguments: argparse.Namespace) -> Lines:
    """A line per job. Raises ConfigError if ``--arena`` is not a directory."""
    if not arguments.arena.is_dir():
        raise ConfigError(f"--arena: {arguments.arena} is not a directory; name that of the jobs")
    found, states = jobs_in(arguments.arena), dict[str, JobNodes]()
    for one in found:
        with suppress(ArenaError, FileNotFoundError):  # it has ended since the listing, or is another user's
            states[one.job] = nodes_here(arguments.arena, one.job, 1.0)
    jobs = [{"job": job, **_summary(state.nodes), **_memory(state.nodes)} for job, state in states.items()]
    if jobs:
        columns = ("JOB", "NODES", "RANKS", "ITERATION", "COMMITTED", "PROTECTED", "MEMORY")
        yield aligned([columns, *map(_job_row, jobs)], 2)
    else:
        yield f"no job has memory under {arguments.arena}"
    if closed := [f"{one.job} of {user_name(one.uid)}" for one in found if not one.is_open]:
        warn(f"skipped, readable by their users only: {listed(closed)}")
    yield Answer(jobs)


def _job_row(job: dict[str, Any]) -> tuple[str, ...]:
    marks = (_number(job[name]) for name in ("iteration", *_MARKS))
    return str(job["job"]), listed(job["nodes"]), str(job["ranks"]), *marks, human(job["bytes"])


def job_status(root: Path, job: str, timeout_secs: float) -> dict[str, Any]:
    """The object that ``--json`` prints.

    ``nodes``: per node whether it ``answers``, its ``problem``, ranks and SMP; ``ends_in_secs``: the time until the
    idle SMP stops, null while a rank trains. ``iteration``: the last step boundary that a rank has passed. ``whole``,
    ``protected``: the newest committed and the newest protected snapshot, -1: none. ``protects``: whether protection
    is on. ``restart``: a ``RestartForecast``; ``lost_iterations``, null if training's progress is unknown; ``gone``:
    the nodes that do not answer, counted as lost. ``late``: see ``smp.stall.late_rank``.

    Raises:
        ArenaError: the job has no memory on this machine.
    """
    seen = nodes_here(root, job, timeout_secs).with_others()
    storage, stored = _storage(seen)
    summary = _summary(seen.nodes)
    expected = forecast(seen.inventory, stored, seen.protection)
    if expected.problem and not seen.description and (unseen := unseen_shards(seen.inventory)):
        text = f"no SMP is known here, so shards on other nodes cannot be seen ({listed(unseen)}): ask on each node"
        expected = replace(expected, problem=text)
    nodes = [_node(node) for node in seen.nodes]
    lost = summary["iteration"] - expected.iteration if summary["iteration"] >= 0 else None
    return {
        "job": job,
        "time": time.time(),
        **summary,
        "nodes": nodes,
        "late": late_rank({node["node"]: node["trainers"] for node in nodes}, STATUS),
        "protects": seen.protects,
        "slots": sorted({slot.snapshot.iteration for report in seen.inventory.arenas for slot in report.slots}),
        "interval": seen.description.get("settings", {}).get("interval"),
        "storage": storage,
        "restart": {
            **asdict(expected),
            "lost_iterations": lost if lost is None else max(0, lost),
            "gone": [node.node for node in seen.nodes if not node.was_read],
        },
    }


def in_lines(status: Mapping[str, Any]) -> Iterator[str]:
    """``job_status`` as text."""
    nodes = status["nodes"]
    yield (
        f"job {status['job']}: {status['ranks']} ranks train on {len(nodes)} node(s), "
        f"past iteration {_number(status['iteration'])}"
    )
    yield ""
    yield aligned(
        [("NODE", "RANKS", "ITERATION", "WHERE", "SMP", "COMMITTED", "PROTECTED", "MEMORY"), *map(_row, nodes)], 1
    )
    yield ""
    if (late := status["late"]) is not None:
        yield alarming(
            f"all ranks wait for rank {late['rank']} on {late['node']}: {late['behind']} iteration(s) behind, no "
            f"step for {late['secs']:.0f} s, in {late['phase'] or 'set-up'}"
        )
    yield from _facts(status)
    warnings = [f"  {node['node']}: {text}" for node in nodes for text in node["warnings"][-_WARNINGS:]]
    if warnings:
        yield "the SMPs' last warnings:"
        yield from warnings
    events = [(event, node["node"]) for node in nodes for event in node["events"]]
    if events:
        yield "the SMPs' last events:"
        newest = sorted(events, key=lambda one: one[0]["time"])[-_EVENTS:]
        yield from (f"  {node}: {_event(event)}" for event, node in newest)
    yield ""
    yield _outlook(status["restart"])


def _event(event: Mapping[str, Any]) -> str:
    at = time.strftime("%X", time.localtime(event["time"]))
    fields = [f"{name} {value}" for name, value in event.items() if name not in ("time", "event")]
    return f"{at} {event['event']} {', '.join(fields)}"[:_EVENT_CHARS]


def _facts(status: Mapping[str, Any]) -> Iterator[str]:
    for name, word in _MARKS.items():
        marks = [node[name] for node in status["nodes"] if node[name]["iteration"] == status[name] >= 0]
        none = "none" if name == "whole" or status["protects"] else "none: nothing is protected"
        yield f"newest {word}: {_in_words(marks[0]) if marks else none}"
    without = [
        f"rank {trainer['rank']} on {node['node']}"
        for node in status["nodes"]
        for trainer in node["trainers"]
        if trainer.get("counts", {}).get("no_snapshots")
    ]
    if without:
        yield f"no snapshots are taken by {listed(without)}: the job's log reports the reason once a minute"
    waiting = {node["node"]: node["ends_in_secs"] for node in status["nodes"] if node["ends_in_secs"] is not None}
    if waiting:
        yield (
            f"no rank trains on {listed(sorted(waiting))}: memory stays for a restart, until "
            f"'ftckpt clean {status['job']}'; the SMP ends in {min(waiting.values()) / 60:.0f} min"
        )
    served = [f"{node['node']}: {node['metrics']}" for node in status["nodes"] if node["metrics"]]
    if served:
        yield f"metrics: {', '.join(served)}"
    yield f"in slots: iterations {', '.join(map(str, status['slots'])) or 'none'}"
    storage = status["storage"]
    if storage["where"]:
        newest = storage["iterations"][0] if storage["iterations"] else None
        text = f"storage: {storage['where']}: " + ("nothing" if newest is None else f"iteration {newest}")
        if storage["flushing"] is not None:
            text += f"; iteration {storage['flushing']} is being flushed"
        yield f"{text}; {storage['problem']}" if storage["problem"] else text


def _outlook(restart: dict[str, Any]) -> str:
    gone = f" ({listed(restart['gone'])} gone)" if restart["gone"] else ""
    if restart["iteration"] < 0:
        why = restart["problem"] or "memory has no committed snapshot"
        verb = "finds none" if restart["problem"] else "starts from scratch"
        return alarming(f"a restart now{gone} {verb}: {why}")
    parts = [f"a restart now{gone} takes iteration {restart['iteration']} from {restart['source']}"]
    if restart["rebuilt"]:
        each = [f"{shard} from {' and '.join(of) or 'its package'}" for shard, of in restart["rebuilt"].items()]
        parts.append(f"rebuilding {listed(each)}")
    elif restart["source"] == "memory":
        parts.append("rebuilding nothing")
    if restart["lost_iterations"] is not None:
        parts.append(f"losing {restart['lost_iterations']} iteration(s)")
    if restart["passed_over"]:
        parts.append(f"passing over {listed(restart['passed_over'])}")
    return "; ".join(parts)


def _only_job(root: Path) -> str:
    # Root may read all jobs.
    jobs = [one.job for one in jobs_in(root) if one.is_open and one.uid == os.geteuid()]
    if len(jobs) != 1:
        raise ConfigError(f"no job is named: name one; under {root} are {', '.join(jobs) or 'none'} (see --arena)")
    return jobs[0]


def _storage(seen: JobNodes) -> tuple[dict[str, Any], list[int]]:
    """The state of the job's storage, and the checkpoints there that a restart may use."""
    settings, stored, problem = seen.description.get("settings", {}), list[int](), ""
    where = Place.of(str(settings.get("persist") or ""), str(settings.get("persist_format") or "")).snapshots
    if where:
        try:
            stored = usable_at(where)
        except StorageError as error:
            problem = f"cannot be read: {error}"
    flushing = None
    for node in seen.nodes:
        tasks = (node.smp or {}).get("tasks", {})
        problem = problem or tasks.get("storage", {}).get("problem", "")
        flushing = (tasks.get("flushing") or {}).get("iteration", flushing)
    return {"where": where, "iterations": stored, "flushing": flushing, "problem": problem}, stored


def _summary(nodes: tuple[NodeState, ...]) -> dict[str, Any]:
    """Totals over all nodes."""
    trainers = [trainer for node in nodes for trainer in node.trainers]
    newest = {name: max((_mark(node, name)["iteration"] for node in nodes), default=-1) for name in _MARKS}
    return {
        "ranks": sum(trainer["lives"] is not False for trainer in trainers),
        "iteration": max((trainer["iteration"] for trainer in trainers), default=-1),
        **newest,
    }


def _mark(node: NodeState, name: str) -> dict[str, Any]:
    """The newest snapshot so marked: from the SMP, with its age, or without an SMP from the arenas."""
    return (node.smp or {}).get(name) or {"iteration": getattr(node, name)}


def _memory(nodes: tuple[NodeState, ...]) -> dict[str, Any]:
    return {"nodes": [node.node for node in nodes], "bytes": sum(node.nbytes for node in nodes)}


def _node(node: NodeState) -> dict[str, Any]:
    smp = node.smp or {}
    living = [trainer for trainer in node.trainers if trainer["lives"] is not False]
    return {
        "node": node.node,
        "answers": node.was_read,
        "problem": node.problem,
        "smp": smp.get("pid"),
        "ends_in_secs": smp.get("ends_in_secs"),
        "trainers": living,
        "iteration": max((trainer["iteration"] for trainer in node.trainers), default=-1),
        "bytes": node.nbytes or None,
        "warnings": smp.get("warnings", []),
        "events": smp.get("events", []),
        "metrics": smp.get("metrics", ""),
        **{name: _mark(node, name) for name in _MARKS},
    }


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    trainers = node["trainers"]
    slowest = min(trainers, key=lambda trainer: (trainer["iteration"], -trainer["secs"]), default=None)
    where = (slowest["phase"] or "set-up") if slowest is not None else "-"
    smp = str(node["smp"]) if node["smp"] is not None else node["problem"] or "-"
    memory = human(node["bytes"]) if node["bytes"] is not None else "-"
    marks = (_number(node[name]["iteration"]) for name in _MARKS)
    return node["node"], str(len(trainers)), _number(node["iteration"]), where, smp, *marks, memory


def _in_words(mark: dict[str, Any]) -> str:
    text = f"iteration {mark['iteration']}"
    if mark.get("age_secs") is not None:
        text += f", seen {mark['age_secs']:.1f} s ago"
    if mark.get("every_secs"):
        text += f"; one in {mark['every_iterations']:.3g} iterations, {mark['every_secs']:.3g} s"
    return text


def _number(iteration: int) -> str:
    return "-" if iteration < 0 else str(iteration)
