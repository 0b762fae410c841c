"""The sections of a report, each with a figure, a table and terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ftckpt.cli import figures
from ftckpt.cli.event_log import count
from ftckpt.cli.figures import Curve
from ftckpt.cli.history import Line, RunHistory
from ftckpt.cli.recovery import Losses, Recovery
from ftckpt.cli.timeline import PLACES, REMEDY, Timeline
from ftckpt.model.text import human, listed

_MAX_NAMED = 8
_MEANINGS = {
    "lost": "finished iterations that were trained again; the one under way is always trained again",
    "detect": "from the fault until the last process of the old attempt was gone",
    "rejoin": "until the last rank had joined: new rendezvous, imports, building the model",
    "rebuild": "reconstruction of lost shards from parity in the memory of other nodes",
    "load": "the rest of the restore: decide, verify and read the snapshot, allocate arenas; the slowest rank",
    "first step": "until every rank had passed its first boundary",
}


@dataclass(frozen=True)
class PageSection:
    """A section of a page; empty parts are omitted."""

    title: str
    note: str = ""
    figure: bytes = b""
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    terms: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Additions:
    """A caller's additions to the page: a verdict for its head, reference losses, and more tiles, sections and
    conditions."""

    title: str = ""
    text: str = ""
    tone: str = "plain"
    items: Sequence[str] = ()
    reference: Losses = field(default_factory=list)
    reference_name: str = ""
    tiles: Mapping[str, str] = field(default_factory=dict)
    sections: Sequence[PageSection] = ()
    conditions: Mapping[str, str] = field(default_factory=dict)


def sections_of(history: RunHistory, timeline: Timeline | None, additions: Additions) -> Iterator[PageSection]:
    """All sections of the page of a run."""
    yield _losses(history, additions.reference, additions.reference_name)
    yield _restarts(history)
    yield from additions.sections
    yield _blocked(history)
    yield _ages(history)
    yield _protection(history)
    yield _iteration(timeline)
    yield _alarms(history)
    yield _conditions(history, additions.conditions)


def _losses(history: RunHistory, reference: Losses, reference_name: str) -> PageSection:
    title = "Losses"
    if not history.losses:
        return PageSection(
            title,
            "None were found. To draw losses, write JSON lines with iteration and loss to a file NAME.jsonl in the "
            "directory of the events, or above it.",
        )
    marker = "." if len(history.losses) < 200 else ""
    runs = [Curve(reference_name, "#b9c6d8", reference, {"linewidth": 7})] if reference else []
    runs.append(Curve("this run", "#1f5fbf", history.losses, {"marker": marker}))
    figure = figures.curves("loss", runs, history.restarts, from_zero=False)
    return PageSection(title, "An iteration that was trained again is drawn again.", figure)


def _restarts(history: RunHistory) -> PageSection:
    title, restarts = "Restarts: their causes, sources and times", history.restarts
    if not restarts:
        return PageSection(title, f"None: the run has {count(len(history.attempts), 'attempt')}.")
    note = "Bars show the time from the fault to the first boundary after it; rebuild and load are ftckpt's."
    if not all(restart.noted for restart in history.failures):
        note += (
            " Events do not have the time of a fault: it is taken as the earliest last event of a rank, and detected "
            "with the last event of the attempt."
        )
    figure = figures.restart_times(history.failures) if history.failures else b""
    return PageSection(title, note, figure, *restart_table(restarts), _MEANINGS)


def restart_table(restarts: Sequence[Recovery]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of restarts; empty columns are omitted."""
    rows = [
        {
            "restart": one.name,
            "cause": one.cause if one.is_failure else f"launched again, by another launcher; before: {one.cause}",
            "source": one.source.replace("_", " ").replace("+", " + "),
            "ranks": listed([*map(str, one.ranks)], _MAX_NAMED),
            "in iteration": str(one.iteration),
            "restored": str(one.restored_iteration) if one.source != "nothing" else "nothing",
            "lost": str(one.iterations_lost),
            "nodes": one.nodes,
            "layout": one.layout,
            "starts": str(one.starts) if one.starts > 1 else "",
            **{part.replace("-", " "): f"{secs:.2f} s" for part, secs in one.parts.items() if one.is_failure},
            "total": _total(one),
        }
        for one in restarts
    ]
    heads = [head for head in max(rows, key=len) if any(row.get(head) for row in rows)]
    return heads, [[row.get(head, "") for head in heads] for row in rows]


def _total(one: Recovery) -> str:
    if not one.trained:
        return "never trained"
    return f"{one.total_secs:.2f} s" if one.is_failure else ""


def _blocked(history: RunHistory) -> PageSection:
    title = "Training blocked by snapshots"
    if not history.blocked:
        return PageSection(title, "No snapshot was taken.")
    note = (
        "The time for which snapshots blocked training in each iteration. The fence belongs to the previous "
        "snapshot. If copies use the cores that train, measure the overhead on real devices."
    )
    parts = [(iteration, one.boundary, one.fence, one.slowest) for iteration, one in history.blocked.items()]
    drawn = [
        Curve("slowest rank", "#93a4bb", [(iteration, slowest * 1e3) for iteration, _, _, slowest in parts]),
        Curve("median rank, with the fence", "#e0a100", [(one[0], (one[1] + one[2]) * 1e3) for one in parts]),
        Curve("median rank, at the boundary", "#1f5fbf", [(one[0], one[1] * 1e3) for one in parts]),
    ]
    return PageSection(title, note, figures.curves("milliseconds", drawn, history.restarts))


def _ages(history: RunHistory) -> PageSection:
    title, ages = "Ages of snapshots", list(history.ages())
    if all(age.committed is None for age in ages):
        return PageSection(title, "The events show no committed snapshot.")
    note = (
        "At each boundary: how many iterations old the newest snapshot is that is committed (all ranks have it), "
        "protected (parity is complete), and persisted (on storage). A fault at that instant costs so many. Events "
        "may be an iteration late."
    )
    for name in ("protected", "persisted"):
        note += "" if any(getattr(age, name) is not None for age in ages) else f" None was {name}."
    colors = {"committed": "#13795b", "protected": "#7c4dbd", "persisted": "#c2410c"}
    drawn = []
    for name, color in colors.items():
        points = [(one.iteration, float(age)) for one in ages if (age := getattr(one, name)) is not None]
        drawn.append(Curve(f"newest {name}", color, points, {"drawstyle": "steps-mid"}))
    return PageSection(title, note, figures.curves("iterations", drawn, history.restarts))


def _protection(history: RunHistory) -> PageSection:
    title, event = "Protection", history.protection
    if event is None:
        return PageSection(title, "The events show none: --ftckpt-protect is none, or the run ended too early.")
    try:
        rows = [
            [str(one["lost"]), str(one["cases"]), str(one["survived"]), ", ".join(map(str, one["example"]))]
            for one in event["failures"]
        ]
        memory = {str(name): human(num) for name, num in event["memory_per_node"].items()}
        modes = ", ".join(map(str, event["modes"])) or "none"
    except (KeyError, TypeError, AttributeError, ValueError):
        return PageSection(title, "The event that describes it is malformed.")
    sums = ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in memory.items())
    terms = {"modes": modes, "memory of the fullest node": sums}
    lags = [(iteration, secs) for attempt in history.attempts for iteration, secs in attempt.lags()]
    typical = f"{median(secs for _, secs in lags):.2f} s, median" if lags else "no snapshot was protected"
    terms["from the boundary of a snapshot until it was protected"] = typical
    until = Curve("until protected", "#7c4dbd", lags, {"linestyle": "", "marker": "."})
    figure = figures.curves("seconds", [until], history.restarts) if lags else b""
    return PageSection(title, "", figure, ["loss", "cases", "survived", "example not survived"], rows, terms)


def _iteration(timeline: Timeline | None) -> PageSection:
    title = "One iteration, and the copies of its snapshot"
    if timeline is None:
        return PageSection(title, f"The events have no timeline: {REMEDY}.")
    ranks = figures.shown(timeline)
    note = (
        f"Iteration {timeline.iteration + 1}, while the snapshot of {timeline.iteration} was copied: "
        f"{timeline.summary}. Ranks are aligned by the clocks of their nodes. Next to the page is a trace "
        "for Perfetto."
    )
    if ranks != timeline.ranks:
        note += f" {len(ranks)} of {len(timeline.ranks)} ranks are shown, one of each stage."
    heads = ["rank", "node", "place", "forward", "backward", "idle", "blocked"]
    rows = []
    for rank in ranks:
        secs = [rank.secs_of(*PLACES[place]) for place in ("forward", "backward", "windows", "fence")]
        places = [rank.bytes_of(place) for place in PLACES]
        nbytes = [*places, rank.total_bytes - sum(places)]
        times = [f"{one * 1e3:.1f} ms" for one in secs]
        rows.append([str(rank.rank), rank.node, rank.label, *times, *(human(num) for num in nbytes)])
    heads += [*(f"copied in {place}" for place in PLACES), "elsewhere"]
    return PageSection(title, note, figures.timeline(timeline), heads, rows)


def _alarms(history: RunHistory) -> PageSection:
    title = "Warnings"
    if not history.alarms:
        return PageSection(title, "None.")
    rows = [
        [name, str(alarm.num), f"{alarm.first_at - history.began_at:.1f} s", listed(sorted(alarm.who)), alarm.detail]
        for name, alarm in sorted(history.alarms.items(), key=lambda item: item[1].first_at)
    ]
    return PageSection(title, "", b"", ["event", "times", "first after", "from", "the first"], rows)


def _conditions(history: RunHistory, given: Mapping[str, str]) -> PageSection:
    ranks = max((len(attempt.last_signs) for attempt in history.attempts), default=0)
    nodes = max((len(attempt.nodes) for attempt in history.attempts), default=0)
    machines = [line for line in history.conditions if isinstance(line.get("versions"), dict)]
    versions = {", ".join(f"{name} {num}" for name, num in line["versions"].items()) for line in machines}
    missing = "not in the events"
    terms = {
        "job": f"{history.job}: {count(ranks, 'rank')} on {count(nodes, 'node')}",
        "hardware": "; ".join(sorted({hardware_text(line) for line in machines})) or missing,
        "versions": "; ".join(sorted(versions)) or missing,
        **given,
    }
    if history.iteration_secs:
        terms["median iteration"] = f"{history.iteration_secs:.3f} s"
    terms["events"] = str(history.directory)
    terms |= {f"note {number}": note for number, note in enumerate(history.notes, 1)}
    return PageSection("Conditions", terms=terms)


def hardware_text(line: Line) -> str:
    """The hardware in an event ``conditions``, as text."""
    memory: Any = line.get("memory_bytes", 0)
    gib = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) and memory else ""
    return f"{line.get('cpu')}, {line.get('cores')} cores{gib}; trained on {line.get('device')}"
