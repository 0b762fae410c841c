"""One iteration in the Chrome trace format, which https://ui.perfetto.dev opens: a process for each node, a thread
for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ftckpt.commands.timeline import IDLE, RankTimeline, Timeline


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """The trace. Times are microseconds since the earliest boundary; copies may overlap, so they are asynchronous
    events beside the spans of their rank's thread."""
    nodes = sorted({rank.node for rank in timeline.ranks})
    events: list[dict[str, Any]] = [
        # 0 is the idle process to Perfetto.
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"node {node}" if node else "ranks"}}
        for pid, node in enumerate(nodes, 1)
    ]
    for rank in timeline.ranks:
        events += _rank_events(timeline, rank, nodes.index(rank.node) + 1)
    about = {"snapshot of iteration": timeline.iteration, "notes": list(timeline.notes)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rank_events(timeline: Timeline, rank: RankTimeline, pid: int) -> Iterator[dict[str, Any]]:
    where = {"pid": pid, "tid": rank.rank}
    shift = rank.begin - timeline.origin

    def micros(secs: float) -> float:
        return round(max(0.0, shift + secs) * 1e6, 3)

    yield {"ph": "M", **where, "name": "thread_name", "args": {"name": f"rank {rank.rank} {rank.label}".rstrip()}}
    yield {"ph": "M", **where, "name": "thread_sort_index", "args": {"sort_index": rank.stage}}
    done = 0.0
    for span in rank.spans:
        # Event logs round times: neighbours may seem to overlap.
        begin = max(done, micros(span.begin))
        done = max(begin, micros(span.end))
        kind = "bubble" if span.kind in IDLE else "training"
        yield {"ph": "X", **where, "name": span.kind, "cat": kind, "ts": begin, "dur": done - begin}
    for number, copy in enumerate(rank.copies):
        one = {**where, "cat": "copy", "name": f"rank {rank.rank} copy", "id": f"{rank.rank}.{number}"}
        yield {"ph": "b", **one, "ts": micros(copy.begin), "args": {"bytes": copy.nbytes}}
        yield {"ph": "e", **one, "ts": micros(copy.end)}
