"""``ftckpt report``: one page of what a run went through, from the events that it left."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ftckpt.commands import page
from ftckpt.commands.charts import Column, Curve, Marker, bar_chart, column_chart, curve_chart
from ftckpt.commands.event_log import EventLogError, count
from ftckpt.commands.history import PARTS, Recovery, RunHistory, read_history
from ftckpt.commands.timeline import picture, replace_file
from ftckpt.commands.timeline import summary as tracks_summary
from ftckpt.commands.tracks import read_tracks
from ftckpt.model.text import listed

REPORT_NAME = "report.html"

_MEANINGS = {
    "lost": "finished iterations that were trained again; the one under way is always trained again",
    "detect": "from the fault until the last process of the old attempt was gone",
    "rejoin": "from then until the last rank had joined: new rendezvous, imports, building the model",
    "rebuild": "what lay in lost memory was made anew from parity in the memory of the other nodes",
    "load": "the rest of ftckpt's restore: decide, verify and read the snapshot, lay out arenas; the slowest rank",
    "first step": "from there until every rank had passed its first boundary",
}


@dataclass(frozen=True)
class Additions:
    """What a caller knows that events do not say: a verdict for the head of the page, losses to compare with, more
    numbers and sections (HTML), more conditions."""

    title: str = ""
    text: str = ""
    tone: str = "plain"
    items: Sequence[str] = ()
    reference: Sequence[tuple[int, float]] = ()
    reference_name: str = ""
    tiles: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[str] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)


def add_report(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("report", help="write a page of what a run went through, from event logs")
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="directory with event logs (--ftckpt-events) at any depth"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=f"the page (default: RUN/{REPORT_NAME})")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the page and return the exit status. Raises EventLogError."""
    output = arguments.output or arguments.run_dir / REPORT_NAME
    history = write_report(arguments.run_dir, output)
    print(f"{_title(history)}, report in {output}")
    for note in history.notes:
        print(f"note: {note}")
    return 0


def write_report(run_dir: Path, output: Path, additions: Additions | None = None) -> RunHistory:
    """Write the page of the run whose events are at or below ``run_dir``; returns what it shows.

    Raises:
        EventLogError: no such directory, or no event logs in it.
        OSError: the page cannot be written.
    """
    history = read_history(run_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, render(history, additions or Additions()))
    return history


def render(history: RunHistory, additions: Additions) -> str:
    """The page as HTML; a section whose data is missing says so."""
    markers = [Marker(restart.iteration, restart.label) for restart in history.restarts]
    parts = [
        page.header(additions.title or _title(history), additions.text or _about(history), _tone(history, additions),
                    additions.items),
        page.tiles({**additions.tiles, **_tiles(history)}),
        _losses(history, additions, markers),
        _restarts(history),
        *additions.sections,
        _blocked(history, markers),
        _ages(history, markers),
        _protection(history, markers),
        _iteration(history),
        _alarms(history),
        _conditions(history, additions),
    ]  # fmt: skip
    return page.document(f"ftckpt: {history.job or history.directory.name}", parts)


def _title(history: RunHistory) -> str:
    return f"{history.job or 'A job'}: {count(len(history.restarts), 'restart')}"


def _tone(history: RunHistory, additions: Additions) -> str:
    return additions.tone if additions.title else "plain" if _ending(history) else "bad"


def _ending(history: RunHistory) -> bool:
    return bool(history.attempts) and history.attempts[-1].ended_well and all(one.trained for one in history.restarts)


def _about(history: RunHistory) -> str:
    if not history.attempts:
        return "No rank of this run came to train."
    last = history.attempts[-1]
    came_back = [restart for restart in history.restarts if restart.source != "nothing"]
    text = f"{len(last.last_signs)} ranks trained to iteration {last.last_iteration}. "
    if history.restarts:
        text += f"{len(came_back)} of {count(len(history.restarts), 'restart')} took up a snapshot from memory. "
    silent = sorted(last.last_signs.keys() - last.closed)
    if silent:
        named = "no rank" if len(silent) == len(last.last_signs) else f"{count(len(silent), 'rank')} never"
        text += f"The last attempt has not ended, or ended by a fault: {named} closed ftckpt."
    return text


def _tiles(history: RunHistory) -> dict[str, str]:
    restarts, blocked = history.restarts, history.blocked.values()
    lost = sum(restart.iterations_lost for restart in restarts)
    numbers = {}
    if restarts:
        numbers[f"finished iterations lost in {count(len(restarts), 'fault')}"] = str(lost)
        load = median(restart.parts["load"] + restart.parts["rebuild"] for restart in restarts)
        numbers["median time to load from memory"] = f"{load:.2f} s"
    cost = f"{median((one.boundary + one.fence) * 1e3 for one in blocked):.1f} ms" if blocked else "none"
    return {**numbers, "median blocked time per snapshot": cost}


def _losses(history: RunHistory, additions: Additions, markers: Sequence[Marker]) -> str:
    title = "Losses"
    if not history.losses:
        return page.card(
            title,
            "The script left none: JSON lines with iteration and loss, in a file NAME.jsonl in the directory of the "
            "events or beside it, would be drawn here.",
        )
    curves = [Curve("loss", history.losses, dotted=True)]
    names = {"loss": "this run"}
    if additions.reference:
        curves.insert(0, Curve("reference", additions.reference))
        names = {"reference": additions.reference_name, "loss": "this run: ftckpt and faults"}
    note = "Where training went back and trained an iteration again, its loss is drawn again."
    chart = curve_chart("Training loss over iterations", "loss", curves, markers)
    return page.card(title, note, page.legend(names), chart)


def _restarts(history: RunHistory) -> str:
    title = "What happened, and where the restart time went"
    restarts = history.restarts
    if not restarts:
        return page.card(title, f"Nothing: the run has {count(len(history.attempts), 'attempt')}.")
    note = "From the fault to the first boundary after it. Of it, ftckpt's are rebuild and load."
    if not all(restart.noted for restart in restarts):
        note += (
            " Events do not say when a process died: a fault counts from the last event of the rank that fell silent "
            "first, and is detected with the last event of the attempt."
        )
    bars = [(restart.name, restart.parts) for restart in restarts]
    legend = page.legend({part: part.replace("-", " ") for part in PARTS})
    chart = bar_chart("Seconds from each fault to the first boundary after it", bars)
    heads, rows = restart_table(restarts)
    return page.card(title, note, legend, chart, page.table(heads, rows), page.terms(_MEANINGS, "note terms"))


def restart_table(restarts: Sequence[Recovery]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows; columns in which nothing stands are left out."""
    rows = []
    for one in restarts:
        others = {"nodes": one.nodes, "layout": one.layout, "starts": str(one.starts) if one.starts > 1 else ""}
        rows.append(
            {
                "fault": one.name,
                "ranks": page.ranges(one.ranks),
                "in iteration": str(one.iteration),
                "restored": str(one.restored_iteration) if one.source != "nothing" else "nothing",
                "lost": str(one.iterations_lost),
                "source": one.source.replace("_", " ").replace("+", " + "),
                **others,
                **{part.replace("-", " "): f"{secs:.2f} s" for part, secs in one.parts.items()},
                "total": f"{one.total_secs:.2f} s" if one.trained else "never trained",
            }
        )
    heads = [head for head in rows[0] if any(row[head] for row in rows)]
    return heads, [[row[head] for head in heads] for row in rows]


def _blocked(history: RunHistory, markers: Sequence[Marker]) -> str:
    title = "Training blocked by snapshots"
    if not history.blocked:
        return page.card(title, "No snapshot was taken.")
    columns = [
        Column(iteration, {"boundary": one.boundary * 1e3, "fence": one.fence * 1e3}, one.slowest * 1e3)
        for iteration, one in history.blocked.items()
    ]
    legend = page.legend(
        {
            "boundary": "at the boundary, median rank",
            "fence": "in the fence before the optimizer, median rank",
            "slowest": "slowest rank",
        }
    )
    note = (
        "How long training stood still for snapshots in each iteration. The fence of a column belongs to the "
        "snapshot before it. Tall columns come with snapshots 1, 2, 4, 8 and so on after each start: there the ranks "
        "also prove that replicas hold the same bits. Where copies use the cores that train, real overhead has to be "
        "measured on real devices."
    )
    chart = column_chart(
        "Time that training was blocked by snapshots, per iteration", "milliseconds", columns, markers
    )
    return page.card(title, note, legend, chart)


def _ages(history: RunHistory, markers: Sequence[Marker]) -> str:
    title = "Ages of snapshots"
    ages = [age for attempt in history.attempts for age in attempt.ages()]
    whole = [(age.iteration, float(age.whole)) for age in ages if age.whole is not None]
    protected = [(age.iteration, float(age.protected)) for age in ages if age.protected is not None]
    curves = [Curve(name, points) for name, points in (("whole", whole), ("protected", protected)) if points]
    if not curves:
        return page.card(title, "The events show no snapshot that was whole on all ranks.")
    note = (
        "At each boundary: how many iterations before it the newest snapshot was taken that was whole on all ranks, "
        "and the newest that was protected; a fault at that instant would have cost so many. Times are those of "
        "events, which may come an iteration late."
    )
    if not protected:
        note += " None was protected."
    legend = page.legend({"whole": "newest whole", "protected": "newest protected"})
    return page.card(title, note, legend, curve_chart("Ages of snapshots", "iterations", curves, markers, low=0.0))


def _protection(history: RunHistory, markers: Sequence[Marker]) -> str:
    title = "Protection"
    event = history.protection
    lags = [(iteration, secs) for attempt in history.attempts for iteration, secs in attempt.lags()]
    if event is None:
        return page.card(title, "The events show none: the run had protection none, or did not come so far.")
    contents = []
    try:
        rows = [
            [str(one["lost"]), str(one["cases"]), str(one["survived"]), ", ".join(map(str, one["example"]))]
            for one in event["failures"]
        ]
        memory = {name: page.size(num) for name, num in event["memory_per_node"].items()}
        modes = ", ".join(map(str, event["modes"])) or "none"
    except (KeyError, TypeError, AttributeError, ValueError):
        return page.card(title, "The event that describes it is broken.")
    contents.append(page.table(["what is lost", "cases", "survived", "one that is not"], rows))
    sums = ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in memory.items())
    contents.append(page.terms({"modes": modes, "memory of the fullest node": sums}, "note terms"))
    if lags:
        contents.append(page.notes([f"From the boundary of a snapshot until it was protected: "
                                    f"{median(secs for _, secs in lags):.2f} s, median."]))  # fmt: skip
        curve = Curve("protected", lags, dotted=True)
        contents.append(curve_chart("Seconds until protected", "seconds", [curve], markers, low=0.0))
    else:
        contents.append(page.notes(["No snapshot was protected."]))
    return page.card(title, "", *contents)


def _iteration(history: RunHistory) -> str:
    title = "One iteration, and when its snapshot was copied"
    try:
        tracks = read_tracks(history.directory)
    except EventLogError:
        return page.card(title, "The run left no timeline.")
    note = (
        f"Iteration {tracks.iteration + 1}, while the snapshot of {tracks.iteration} was copied: "
        f"{tracks_summary(tracks)}. ftckpt timeline writes a trace of it, which Perfetto opens."
    )
    return page.card(title, note, picture(tracks))


def _alarms(history: RunHistory) -> str:
    title = "What ftckpt warned of"
    if not history.alarms:
        return page.card(title, "Nothing.")
    rows = []
    for name, alarm in sorted(history.alarms.items(), key=lambda item: item[1].first_at):
        rows.append(
            [
                name,
                str(alarm.num),
                f"{alarm.first_at - history.began_at:.1f} s",
                listed(sorted(alarm.who)),
                alarm.detail,
            ]
        )
    return page.card(title, "", page.table(["event", "times", "first after", "from", "the first"], rows, 1, 4))


def _conditions(history: RunHistory, additions: Additions) -> str:
    rows = dict(additions.conditions)
    ranks = max((len(attempt.last_signs) for attempt in history.attempts), default=0)
    nodes = max((len(attempt.nodes) for attempt in history.attempts), default=0)
    rows["job"] = rows.get("job") or f"{history.job}: {count(ranks, 'rank')} on {count(nodes, 'node')}"
    machines = [line for line in history.conditions if isinstance(line.get("versions"), dict)]
    hardware = sorted({hardware_text(line) for line in machines})
    versions = sorted({", ".join(f"{name} {num}" for name, num in line["versions"].items()) for line in machines})
    missing = "not in the events"
    rows["hardware"] = rows.get("hardware") or "; ".join(hardware) or missing
    rows["versions"] = rows.get("versions") or "; ".join(versions) or missing
    if history.iteration_secs:
        rows["median iteration"] = f"{history.iteration_secs:.3f} s"
    rows["events"] = str(history.directory)
    return page.card("Conditions", "", page.terms(rows), page.notes(history.notes))


def hardware_text(line: Mapping[str, Any]) -> str:
    """The machine of an event ``conditions``."""
    memory = line.get("memory_bytes", 0)
    gib = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) and memory else ""
    return f"{line.get('cpu')}, {line.get('cores')} cores{gib}; trained on {line.get('device')}"
