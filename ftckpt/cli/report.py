"""``ftckpt report``: describes a run by the events of its ranks and SMPs, and writes one iteration as a trace."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median

from ftckpt.cli.answers import Answer, Lines, ProgressLine
from ftckpt.cli.event_log import count
from ftckpt.cli.history import RunHistory, read_history
from ftckpt.cli.recovery import PARTS, Recovery
from ftckpt.cli.timeline import REMEDY, Timeline, read_timeline, trace_of
from ftckpt.errors import EventLogError
from ftckpt.memory.atomic_files import fresh_name
from ftckpt.model.text import aligned, human, listed

TRACE_NAME = "trace.json"


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    text = "directory with event logs (--ftckpt-events) at any depth"
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=text)
    text = f"the trace of an iteration, for https://ui.perfetto.dev (default: RUN/{TRACE_NAME})"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=text)
    text = "snapshot whose iteration is shown (default: the newest that all ranks have)"
    parser.add_argument("--iteration", type=int, help=text)


def run_report(arguments: argparse.Namespace) -> Lines:
    """Describes the run, and writes the trace. Raises EventLogError."""
    with ProgressLine("reading event logs") as progress:
        history = read_history(arguments.run_dir, progress)
    timeline: Timeline | None = None
    # An iteration that the user names must exist; otherwise there may be none.
    with nullcontext() if arguments.iteration is not None else suppress(EventLogError):
        timeline = read_timeline(history, arguments.iteration)
    yield from describe(history, timeline)
    if timeline is not None:
        yield f"trace in {write_trace(timeline, arguments.output or arguments.run_dir / TRACE_NAME)}"
    yield Answer({
        "job": history.job,
        "events": str(history.directory),
        "restarts": [asdict(one) | {"total_secs": one.total_secs} for one in history.restarts],
        "costs": costs(history),
        "protection": history.protection,
        "warnings": {name: alarm.num for name, alarm in history.alarms.items()},
        "notes": history.notes,
    })  # fmt: skip


def write_trace(timeline: Timeline, output: Path) -> Path:
    """Writes the timeline in the Chrome trace format; returns the path. Raises OSError."""
    output.parent.mkdir(parents=True, exist_ok=True)
    # Replaced atomically, so that no reader sees a part of it.
    with fresh_name(output) as temporary:
        # JSON may contain lone surrogates, which cannot be encoded.
        text = json.dumps(trace_of(timeline), separators=(",", ":")) + "\n"
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(output)
    return output


def describe(history: RunHistory, timeline: Timeline | None) -> Iterator[str]:
    """All that the events say, as text."""
    yield f"{_title(history)}. {_about(history)}"
    if history.restarts:
        heads = ("RESTART", "ITERATION", "RESTORED", "LOST", "SOURCE", *map(str.upper, PARTS), "SUM", "CAUSE")
        yield aligned([heads, *map(_row, history.restarts)], len(heads))
    for name, text in {**costs(history), **_protection(history)}.items():
        yield f"{name}: {text}"
    if timeline is not None:
        yield f"iteration {timeline.iteration + 1}: {timeline.summary}"
    else:
        yield f"no timeline of an iteration: {REMEDY}"
    for name, alarm in sorted(history.alarms.items(), key=lambda item: item[1].first_at):
        first = f"first after {alarm.first_at - history.began_at:.1f} s from {listed(sorted(alarm.who))}"
        yield f"warning: {name}: {count(alarm.num, 'time')}, {first}: {alarm.detail}"
    for note in dict.fromkeys([*history.notes, *(timeline.notes if timeline is not None else ())]):
        yield f"note: {note}"


def _row(one: Recovery) -> tuple[str, ...]:
    secs = [f"{value:.1f}" if one.is_failure else "-" for value in one.parts.values()]
    total = f"{one.total_secs:.1f}" if one.is_failure and one.trained else "-"
    texts = [one.cause if one.is_failure else f"launched again; {one.cause}", one.nodes, one.layout]
    restored = str(one.restored_iteration) if one.source != "nothing" else "nothing"
    cause = "; ".join(filter(None, texts))
    return one.name, str(one.iteration), restored, str(one.iterations_lost), one.source, *secs, total, cause


def _title(history: RunHistory) -> str:
    num_launches = len(history.restarts) - len(history.failures)
    launches = f", {count(num_launches, 'new launch', 'new launches')}" if num_launches else ""
    return f"{history.job or 'A job'}: {count(len(history.failures), 'restart')}{launches}"


def _about(history: RunHistory) -> str:
    if not history.attempts:
        return "No rank of this run trained."
    last = history.attempts[-1]
    text = f"{len(last.last_signs)} ranks trained to iteration {last.last_iteration}."
    if sources := Counter(_origin(one.source) for one in history.restarts):
        text += f" Restarted from {', '.join(f'{name}: {num}' for name, num in sources.items())}."
    if silent := last.last_signs.keys() - last.closed:
        named = "no rank" if len(silent) == len(last.last_signs) else f"{count(len(silent), 'rank')} never"
        text += f" The last attempt has not ended, or ended by a fault: {named} closed ftckpt."
    return text


def _origin(source: str) -> str:
    if source == "nothing":
        return "no snapshot"
    if "storage" not in source.split("+"):
        return "memory"
    return "storage" if source == "storage" else "memory and storage"


def costs(history: RunHistory) -> dict[str, str]:
    """The costs of failures and of snapshots."""
    found = {}
    if failures := history.failures:
        lost = sum(restart.iterations_lost for restart in failures)
        found[f"finished iterations lost in {count(len(failures), 'failure')}"] = str(lost)
    if loads := [one.parts["load"] + one.parts["rebuild"] for one in history.restarts if one.source != "nothing"]:
        found["median time to load a snapshot"] = f"{median(loads):.2f} s"
    if blocked := history.blocked.values():
        cost, slowest = median(one.boundary + one.fence for one in blocked), max(one.slowest for one in blocked)
        found["median blocked time per snapshot"] = f"{cost * 1e3:.1f} ms (longest, any rank: {slowest * 1e3:.1f} ms)"
    if history.iteration_secs:
        found["median iteration"] = f"{history.iteration_secs:.3f} s"
    return found


def _protection(history: RunHistory) -> dict[str, str]:
    found, event = {}, history.protection
    if event is not None:
        try:
            survived = [f"{one['survived']} of {one['cases']} cases of {one['lost']}" for one in event["failures"]]
            memory = human(event["memory_per_node"]["sum"])
            found["protection"] = f"{', '.join(map(str, event['modes'])) or 'none'}; {memory} on the fullest node"
            found["survived losses"] = ", ".join(survived) or "none"
        except (KeyError, TypeError, AttributeError, ValueError):
            found["protection"] = "the event that describes it is malformed"
    if lags := [secs for attempt in history.attempts for secs in attempt.lags()]:
        found["median time until a snapshot was protected"] = f"{median(lags):.2f} s"
    return found
