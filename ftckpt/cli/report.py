"""``ftckpt report``: writes a page about a run, from the events of its ranks and SMPs."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from statistics import median

from ftckpt.cli.answers import Answer, Lines, ProgressLine
from ftckpt.cli.event_log import count
from ftckpt.cli.history import RunHistory, read_history
from ftckpt.cli.recovery import Recovery
from ftckpt.cli.sections import Additions, sections_of
from ftckpt.cli.timeline import Timeline, read_timeline, trace_of
from ftckpt.errors import ConfigError, EventLogError
from ftckpt.memory.atomic_files import fresh_name
from ftckpt.model.text import aligned

REPORT_NAME, TRACE_NAME = "report.html", "trace.json"
_TEMPLATE = "report.html.j2"
_PACKAGES = {"matplotlib": "matplotlib", "jinja2": "Jinja2"}


def add_report(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    text = "directory with event logs (--ftckpt-events) at any depth"
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=text)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the page (default: RUN/{REPORT_NAME})")
    text = "snapshot whose timeline is shown (default: the newest that all ranks have)"
    parser.add_argument("--iteration", type=int, help=text)


def run_report(arguments: argparse.Namespace) -> Lines:
    """Writes the page, and the timeline next to it as a trace. Raises EventLogError, ConfigError."""
    output = arguments.output or arguments.run_dir / REPORT_NAME
    with ProgressLine("reading event logs") as progress:
        history = read_history(arguments.run_dir, progress)
    timeline = _timeline(history, arguments.iteration)
    yield from summary(history, timeline)
    if timeline is not None:
        yield f"trace in {write_trace(timeline, output)}: open it in https://ui.perfetto.dev"
    write_page(history, timeline, output)
    yield f"report in {output}"
    yield Answer({
        "job": history.job,
        "events": str(history.directory),
        "restarts": [asdict(one) | {"total_secs": one.total_secs} for one in history.restarts],
        "tiles": _tiles(history),
        "notes": history.notes,
        "report": str(output),
    })  # fmt: skip


def write_report(run_dir: Path, output: Path, additions: Additions | None = None) -> RunHistory:
    """Writes the page of the run whose events are at or below ``run_dir``, and a trace of one iteration next to it.

    Raises:
        EventLogError: no such directory, or no event logs in it.
        ConfigError: a package is missing.
        OSError: a file cannot be written.
    """
    history = read_history(run_dir)
    timeline = _timeline(history)
    write_page(history, timeline, output, additions)
    if timeline is not None:
        write_trace(timeline, output)
    return history


def write_trace(timeline: Timeline, page: Path) -> Path:
    """Writes the timeline in the Chrome trace format next to ``page``; returns the path. Raises OSError."""
    output = page.with_name(TRACE_NAME)
    _replace_file(output, json.dumps(trace_of(timeline), separators=(",", ":")) + "\n")
    return output


def write_page(
    history: RunHistory, timeline: Timeline | None, output: Path, additions: Additions | None = None
) -> None:
    """Writes the page.

    Raises:
        ConfigError: a package is missing.
        OSError: it cannot be written.
    """
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            problem = f"the page needs {package}, which is not installed: pip install 'ftckpt[report]'"
            raise ConfigError(f"{output}: {problem}")
    _replace_file(output, render(history, timeline, additions or Additions()))


def render(history: RunHistory, timeline: Timeline | None, additions: Additions) -> str:
    """The page as HTML with embedded figures."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    template = environment.from_string(files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8"))
    head = additions
    if not additions.title:
        head = replace(additions, title=_title(history), text=_about(history), tone=_tone(history))
    tiles, sections = {**additions.tiles, **_tiles(history)}, sections_of(history, timeline, additions)
    return template.render(name=history.job or history.directory.name, head=head, tiles=tiles, sections=sections)


def summary(history: RunHistory, timeline: Timeline | None) -> Iterator[str]:
    """The page in a few lines of text."""
    yield f"{_title(history)}. {_about(history)}"
    if history.restarts:
        heads = ("RESTART", "ITERATION", "SOURCE", "LOST", "SECONDS", "CAUSE")
        yield aligned([heads, *map(_row, history.restarts)], len(heads))
    if timeline is not None:
        yield f"iteration {timeline.iteration + 1}: {timeline.summary}"
    for note in dict.fromkeys([*history.notes, *(timeline.notes if timeline is not None else ())]):
        yield f"note: {note}"


def _row(one: Recovery) -> tuple[str, ...]:
    secs = f"{one.total_secs:.1f}" if one.is_failure and one.trained else "-"
    cause = one.cause if one.is_failure else f"launched again; {one.cause}"
    return one.name, str(one.iteration), one.source, str(one.iterations_lost), secs, cause


def _timeline(history: RunHistory, iteration: int | None = None) -> Timeline | None:
    """The timeline of ``iteration``; None if none is named and there is none."""
    with nullcontext() if iteration is not None else suppress(EventLogError):
        return read_timeline(history, iteration)
    return None


def _title(history: RunHistory) -> str:
    num_launches = len(history.restarts) - len(history.failures)
    launches = f", {count(num_launches, 'new launch', 'new launches')}" if num_launches else ""
    return f"{history.job or 'A job'}: {count(len(history.failures), 'restart')}{launches}"


def _tone(history: RunHistory) -> str:
    last = history.attempts[-1:]
    return "plain" if last and last[0].ended_well and all(one.trained for one in history.restarts) else "bad"


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


def _tiles(history: RunHistory) -> dict[str, str]:
    tiles = {}
    if failures := history.failures:
        lost = sum(restart.iterations_lost for restart in failures)
        tiles[f"finished iterations lost in {count(len(failures), 'failure')}"] = str(lost)
    if loads := [one.parts["load"] + one.parts["rebuild"] for one in history.restarts if one.source != "nothing"]:
        tiles["median time to load a snapshot"] = f"{median(loads):.2f} s"
    if blocked := history.blocked.values():
        cost = median(one.boundary + one.fence for one in blocked)
        tiles["median blocked time per snapshot"] = f"{cost * 1e3:.1f} ms"
    return tiles


def _replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically, so that no reader sees a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with fresh_name(path) as temporary:
        # JSON may contain lone surrogates, which cannot be encoded.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
