"""``ftckpt timeline``: one iteration and the copies in it, as a table, a picture and a trace that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ftckpt.commands.charts import shown_tracks, tracks_chart
from ftckpt.commands.page import aligned, card, document, header, legend, ms, notes, share, size, table
from ftckpt.commands.tracks import IDLE, PLACES, IterationTracks, Track, TrackCopy, TrackSpan, read_tracks

HTML_NAME = "timeline.html"
TRACE_NAME = "timeline.json"

NUM_NAMES = 3
"""Columns that hold names and not numbers; they come first."""

_NS_PER_SEC = 1e9
# Event logs round times to microseconds: neighbours may seem to overlap by one.
_ROUNDING_NS = 1000

_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "window": "window: idle, or waiting for other ranks",
    "optimizer": "optimizer",
    "fence": "boundary and fence: training waits for the snapshot",
    "copy": "background copy of the snapshot",
    "parity": "parity",
    "hidden": "bytes copied in windows",
    "other": "anything else",
}
_KNOWN = {"boundary", "start", "tail", *_LEGEND}

TraceEvent = dict[str, Any]


def add_timeline(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("timeline", help="draw one iteration and the copies in it, from event logs")
    parser.add_argument(
        "events", type=Path, metavar="RUN", help="directory with event logs (--ftckpt-events) at any depth"
    )
    parser.add_argument(
        "--iteration", type=int, help="of the snapshot; default: the newest that all ranks left a timeline of"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the files go (default: RUN)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write both files, print the table, and return the exit status. Raises EventLogError."""
    tracks = read_tracks(arguments.events, arguments.iteration)
    html, trace = write_timeline(tracks, arguments.output or arguments.events)
    print(text_table(tracks))
    print(f"iteration {tracks.iteration + 1}, snapshot of {tracks.iteration}: {summary(tracks)}")
    for note in notes_of(tracks):
        print(f"note: {note}")
    print(f"picture {html}")
    print(f"trace   {trace} (opens in https://ui.perfetto.dev)")
    return 0


def write_timeline(tracks: IterationTracks, directory: Path) -> tuple[Path, Path]:
    """Write ``timeline.html`` and ``timeline.json`` into ``directory``, which is made if it is not there.

    Returns both paths.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    html, trace = directory / HTML_NAME, directory / TRACE_NAME
    replace_file(html, page(tracks))
    replace_file(trace, json.dumps(trace_of(tracks), separators=(",", ":"), allow_nan=False) + "\n")
    return html, trace


def remove_timeline(directory: Path) -> None:
    """Delete what ``write_timeline`` wrote into ``directory``, if it is there."""
    for name in (HTML_NAME, TRACE_NAME):
        (directory / name).unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Replace a file whole, so that whoever opens it never sees half of it."""
    # In the same directory: a rename across file systems is no rename. Named for the process, as two may write one
    # page.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # What a file says in broken UTF-16 can be read from JSON, but not be encoded.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def page(tracks: IterationTracks) -> str:
    """A whole HTML page that needs nothing else."""
    first = tracks.tracks[0]
    num_stages = len({track.stage for track in tracks.tracks})
    about = [f"{len(tracks.tracks)} ranks, {num_stages} pipeline stage{'s' * (num_stages != 1)}"]
    if first.schedule:
        about.append(f"copies scheduled by “{first.schedule}”")
    about += [summary(tracks), f"from {tracks.directory}"]
    title = f"Iteration {tracks.iteration + 1}: how the snapshot of {tracks.iteration} was copied"
    return document(title, [header(title, f"{'; '.join(about)}."), card("Every rank", "", picture(tracks))])


def picture(tracks: IterationTracks) -> str:
    """Legend, chart, remarks and table, for a section of a page."""
    kinds = {span.kind for track in tracks.tracks for span in track.spans}
    absent = {"parity"} if not any(track.parity for track in tracks.tracks) else set()
    absent |= {"other"} if kinds <= _KNOWN and not _elsewhere(tracks) else set()
    names = {f"track-{kind}": text for kind, text in _LEGEND.items() if kind not in absent}
    texts = [*notes_of(tracks), "Ranks are aligned by the clocks of their machines; 0 is the earliest boundary."]
    texts.append("“In windows” counts what was copied while the rank neither computed nor waited in the fence.")
    rows = table(heads_of(tracks), rows_of(tracks), NUM_NAMES)
    return f"{legend(names)}{tracks_chart(tracks)}{notes(texts)}{rows}"


def notes_of(tracks: IterationTracks) -> list[str]:
    """Remarks for whoever looks at the picture or the table: what they do not show comes first."""
    num, total = len(shown_tracks(tracks)), len(tracks.tracks)
    hidden = [f"{num} of {total} ranks shown, one for each stage; the trace holds all"] if num < total else []
    return [*hidden, *tracks.notes]


def heads_of(tracks: IterationTracks) -> tuple[str, ...]:
    """Names of the columns of ``rows_of``; "elsewhere" is one only where bytes were copied there."""
    where = (f"in {'windows' if place == 'window' else place}" for place in PLACES)
    times = ("stage", "rank", "coordinates", "forward", "backward", "idle", "idle share")
    return (*times, *where, *(["elsewhere"] if _elsewhere(tracks) else []), "windows' share", "fence")


def rows_of(tracks: IterationTracks) -> Iterator[tuple[str, ...]]:
    """A row for each rank that is shown: times of one iteration and where its copies fell."""
    places = [*PLACES, *(["elsewhere"] if _elsewhere(tracks) else [])]
    for track in shown_tracks(tracks):
        idle_secs = track.secs_of(*IDLE)
        others = " ".join(f"{name}{at}" for name, at in track.coords.items() if name != "pp")
        yield (
            str(track.stage),
            str(track.rank),
            others or "-",
            *(ms(track.secs_of(kind)) for kind in ("forward", "backward")),
            ms(idle_secs),
            share(idle_secs, track.secs),
            *(size(track.bytes_of(place)) for place in places),
            share(track.bytes_of("window"), track.total_bytes),
            ms(track.fence_secs),
        )


def text_table(tracks: IterationTracks) -> str:
    """The rows as text, numbers to the right."""
    rows = [tuple(head.upper() for head in heads_of(tracks)), *rows_of(tracks)]
    return aligned(rows, NUM_NAMES)


def summary(tracks: IterationTracks) -> str:
    """One sentence: how much was copied in windows, and what the fence cost."""
    total = sum(track.total_bytes for track in tracks.tracks)
    hidden = sum(track.bytes_of("window") for track in tracks.tracks)
    slowest = max(tracks.tracks, key=lambda track: track.fence_secs)
    cost = f"{ms(slowest.fence_secs)} ({share(slowest.fence_secs, slowest.secs)} of its iteration)"
    copied = f"{share(hidden, total)} of {size(total)} were copied in windows" if total else "nothing was copied"
    return f"{copied}; the longest fence was {cost}, on rank {slowest.rank}"


def _elsewhere(tracks: IterationTracks) -> bool:
    return any(track.bytes_of("elsewhere") for track in tracks.tracks)


def trace_of(tracks: IterationTracks) -> dict[str, Any]:
    """The Chrome trace-event format: a process per rank, with a thread each for training, copies and parity.

    Times are microseconds since the earliest boundary; processes are sorted by stage. Copies that overlap get
    further threads, because a thread holds only events that follow or contain each other. ``bytes copied`` is a
    counter that grows to what the rank has copied.
    """
    events: list[TraceEvent] = []
    for place, track in enumerate(tracks.tracks):
        events += _process(tracks, track, place)
    places = (*PLACES, "elsewhere")
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "snapshot of iteration": tracks.iteration,
            "computed meanwhile": tracks.iteration + 1,
            "notes": list(tracks.notes),
            "bytes copied": {
                str(one.rank): {place: one.bytes_of(place) for place in places} for one in tracks.tracks
            },
        },
    }


def _process(tracks: IterationTracks, track: Track, place: int) -> Iterator[TraceEvent]:
    # 0 is the idle process to Perfetto, so ranks count from 1 here.
    pid = track.rank + 1
    coords = f" · {track.label}" if track.label else ""
    yield _metadata(pid, "process_name", name=f"rank {track.rank}{coords}")
    yield _metadata(pid, "process_sort_index", sort_index=place)
    tid = 0
    threads: dict[str, Sequence[TrackSpan | TrackCopy]] = {
        "training": track.spans,
        "copy": track.copies,
        "parity": track.parity,
    }
    for name, items in threads.items():
        for number, lane in enumerate(_lanes(tracks, track, items), 1):
            tid += 1
            yield _metadata(pid, "thread_name", tid, name=name if number == 1 else f"{name} {number}")
            yield _metadata(pid, "thread_sort_index", tid, sort_index=tid)
            for begin, end, item in lane:
                about = _about(item, name, tracks.iteration)
                yield {"ph": "X", "pid": pid, "tid": tid, "ts": begin / 1000, "dur": (end - begin) / 1000, **about}
    yield from _counter(tracks, track, pid)


def _about(item: TrackSpan | TrackCopy, lane: str, iteration: int) -> TraceEvent:
    if isinstance(item, TrackSpan):
        return {"name": item.kind, "cat": lane, "args": {"iteration": iteration + 1}}
    secs = item.end - item.begin
    rate = {"GB/s": round(item.nbytes / secs / 1e9, 3)} if secs > 0 else {}
    return {"name": lane, "cat": lane, "args": {"bytes": item.nbytes, "snapshot": iteration, **rate}}


def _counter(tracks: IterationTracks, track: Track, pid: int) -> Iterator[TraceEvent]:
    copied = 0
    for copy in sorted(track.copies, key=lambda copy: copy.end):
        copied += copy.nbytes
        at = _ns(tracks.at(track, copy.end)) / 1000
        yield {"ph": "C", "pid": pid, "name": "bytes copied", "ts": at, "args": {"bytes": copied}}


def _metadata(pid: int, kind: str, tid: int = 0, **args: Any) -> TraceEvent:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _lanes(
    tracks: IterationTracks, track: Track, items: Sequence[TrackSpan | TrackCopy]
) -> list[list[tuple[int, int, TrackSpan | TrackCopy]]]:
    """The items with begin and end in whole nanoseconds, spread over as few lanes as hold them without overlap."""
    lanes: list[list[tuple[int, int, TrackSpan | TrackCopy]]] = []
    for item in sorted(items, key=lambda item: (item.begin, item.end)):
        begin, end = (_ns(tracks.at(track, secs)) for secs in (item.begin, item.end))
        for lane in lanes:
            last = lane[-1][1]
            # What overlaps by no more than the rounding of the log begins where the one before it ends.
            if begin >= last - _ROUNDING_NS:
                lane.append((min(max(begin, last), max(end, last)), max(end, last), item))
                break
        else:
            lanes.append([(begin, end, item)])
    return lanes


def _ns(secs: float) -> int:
    return round(secs * _NS_PER_SEC)
