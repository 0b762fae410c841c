"""The timelines of one iteration in the Chrome trace-event format, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ftckpt.timeline.model import PLACES, Recording, Span, Timeline, Transfer

Event = dict[str, Any]

_NS_PER_SEC = 1e9
_ROUNDING_NS = 1000


def trace_of(recording: Recording) -> dict[str, Any]:
    """A process per rank, sorted by stage, with a thread each for training, copies and parity.

    Times are microseconds since the earliest boundary. Copies that overlap get further threads, because a thread
    holds only events that follow or contain each other. ``bytes copied`` is a counter that grows to what the
    rank has copied.
    """
    events: list[Event] = []
    for place, timeline in enumerate(recording.timelines):
        events += _process(recording, timeline, place)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "snapshot of iteration": recording.iteration,
            "computed meanwhile": recording.iteration + 1,
            "notes": list(recording.notes),
            "bytes copied": {str(timeline.rank): _bytes(timeline) for timeline in recording.timelines},
        },
    }


def _bytes(timeline: Timeline) -> dict[str, int]:
    return {place: timeline.bytes_of(place) for place in (*PLACES, "elsewhere")}


def _process(recording: Recording, timeline: Timeline, place: int) -> Iterator[Event]:
    # 0 is the idle process to Perfetto, so ranks count from 1 here.
    pid = timeline.rank + 1
    coords = f" · {timeline.label}" if timeline.label else ""
    yield _metadata(pid, "process_name", name=f"rank {timeline.rank}{coords}")
    yield _metadata(pid, "process_sort_index", sort_index=place)
    tid = 0
    recorded: dict[str, Sequence[Span | Transfer]] = {
        "training": timeline.spans,
        "copy": timeline.copies,
        "parity": timeline.parity,
    }
    for name, items in recorded.items():
        for number, lane in enumerate(_lanes(recording, timeline, items), 1):
            tid += 1
            yield _metadata(pid, "thread_name", tid, name=name if number == 1 else f"{name} {number}")
            yield _metadata(pid, "thread_sort_index", tid, sort_index=tid)
            for begin, end, item in lane:
                shown = _shown(item, name, recording.iteration)
                yield {"ph": "X", "pid": pid, "tid": tid, "ts": begin / 1000, "dur": (end - begin) / 1000, **shown}
    yield from _counter(recording, timeline, pid)


def _shown(item: Span | Transfer, lane: str, iteration: int) -> Event:
    if isinstance(item, Span):
        return {"name": item.kind, "cat": lane, "args": {"iteration": iteration + 1}}
    secs = item.end - item.begin
    args = {"bytes": item.nbytes, "snapshot": iteration}
    rate = {"GB/s": round(item.nbytes / secs / 1e9, 3)} if secs > 0 else {}
    return {"name": lane, "cat": lane, "args": args | rate}


def _counter(recording: Recording, timeline: Timeline, pid: int) -> Iterator[Event]:
    copied = 0
    for copy in sorted(timeline.copies, key=lambda copy: copy.end):
        copied += copy.nbytes
        at = _ns(recording.at(timeline, copy.end)) / 1000
        yield {"ph": "C", "pid": pid, "name": "bytes copied", "ts": at, "args": {"bytes": copied}}


def _metadata(pid: int, kind: str, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _lanes(
    recording: Recording, timeline: Timeline, items: Sequence[Span | Transfer]
) -> list[list[tuple[int, int, Span | Transfer]]]:
    """The items with begin and end in whole nanoseconds, spread over as few lanes as hold them without overlap.

    What overlaps by no more than the rounding of the log begins where the one before it ends.
    """
    lanes: list[list[tuple[int, int, Span | Transfer]]] = []
    for item in sorted(items, key=lambda item: (item.begin, item.end)):
        begin, end = (_ns(recording.at(timeline, secs)) for secs in (item.begin, item.end))
        for lane in lanes:
            last = lane[-1][1]
            if begin >= last - _ROUNDING_NS:
                lane.append((min(max(begin, last), max(end, last)), max(end, last), item))
                break
        else:
            lanes.append([(begin, end, item)])
    return lanes


def _ns(secs: float) -> int:
    return round(secs * _NS_PER_SEC)
