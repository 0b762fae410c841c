"""Event logs of runs that never trained, and what must be so of a page."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

EPOCH = 1_790_000_000.0
FORWARD, BACKWARD, START, OPTIMIZER = 0.02, 0.04, 0.004, 0.01
CHUNK_BYTES, CHUNK_SECS = 4_000_000, 0.001


def one_f_one_b(stage: int, pp: int, num_microbatches: int) -> list[tuple[str, float, float]]:
    """Forward and backward steps of a stage, with begin and end in seconds."""
    warm_up = min(pp - stage - 1, num_microbatches)
    steady = num_microbatches - warm_up
    steps = [("forward", 0.0)] * warm_up
    steps += [("forward", 0.0), ("backward", 0.0)] * steady + [("backward", 0.0)] * warm_up
    first = steps.index(("backward", 0.0))
    steps[0] = "forward", stage * FORWARD
    steps[first] = "backward", (pp - stage - 1) * BACKWARD
    placed, now = list[tuple[str, float, float]](), START
    for kind, wait in steps:
        begin = now + wait
        now = begin + (FORWARD if kind == "forward" else BACKWARD)
        placed.append((kind, begin, now))
    return placed


def timeline_line(rank: int, coords: dict[str, int], pp: int, iteration: int, begin: float) -> dict[str, Any]:
    """An iteration of 1F1B with 8 microbatches: copies in the windows first, then in the backward."""
    compute = [one_f_one_b(stage, pp, 8) for stage in range(pp)]
    end = max(steps[-1][2] for steps in compute) + 0.01
    spans: list[list[Any]] = [["start", 0.0, START]]
    for kind, first, last in compute[coords["pp"]]:
        if first > spans[-1][2]:
            spans.append(["window", spans[-1][2], first])
        spans.append([kind, first, last])
    spans += [["tail", spans[-1][2], end], ["fence", end, end + 0.002], ["optimizer", end + 0.002, end + OPTIMIZER]]
    copies, moved = [], defaultdict(int)
    for kind, first, last in spans:
        if kind in ("window", "backward"):
            num = min(5, int((last - first) / CHUNK_SECS))
            copies += [[first + n * CHUNK_SECS, first + (n + 1) * CHUNK_SECS, CHUNK_BYTES] for n in range(num)]
            moved[kind] += num * CHUNK_BYTES
    return {
        "time": begin + end, "event": "timeline", "rank": rank, "pid": 100 + rank, "iteration": iteration,
        "coords": coords, "schedule": "bubble", "begin": begin, "secs": end + OPTIMIZER, "spans": spans,
        "copies": copies, "moved_bytes": moved, "window_capacity_bytes": 10**9, "fence_secs": 0.002,
        "something_new": {"a": [1]},
    }  # fmt: skip


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


LINE = timeline_line(0, {"tp": 0, "pp": 0, "dp": 0}, 2, 5, EPOCH)


class Logs:
    """Event files of one job: ``attempt`` writes what the ranks of one attempt leave."""

    def __init__(self, directory: Path, pp: int = 4, tp: int = 1, dp: int = 2) -> None:
        self.directory = directory
        self.pp = pp
        self.coords = [{"tp": t, "pp": p, "dp": d} for p, d, t in itertools.product(range(pp), range(dp), range(tp))]
        self._attempts = 0
        directory.mkdir(parents=True, exist_ok=True)

    def attempt(self, iterations: range, every: int = 5, skip: dict[int, set[int]] | None = None) -> None:
        """A snapshot for each of ``iterations``, a timeline for each ``every`` but those to ``skip``, by rank."""
        self._attempts += 1
        lineage = f"{self._attempts:032x}"
        for rank, coords in enumerate(self.coords):
            who = {"rank": rank, "pid": 1000 * self._attempts + rank, "time": EPOCH}
            lines: list[dict[str, Any]] = [
                {"event": "joined", "node": f"n{rank // 2}", **who},
                {"event": "restored", "iteration": None, "lineage": lineage, **who},
            ]
            for iteration in iterations:
                lines.append({"event": "snapshot", "iteration": iteration, "blocked_secs": 0.001, **who})
                if iteration % every == 0 and iteration not in (skip or {}).get(rank, ()):
                    begin = EPOCH + 1000 * self._attempts + iteration + 0.0001 * rank
                    lines.append(timeline_line(rank, coords, self.pp, iteration, begin) | {"pid": who["pid"]})
            self.append(rank, *lines)

    def append(self, rank: int, *lines: dict[str, Any]) -> None:
        _append(self.directory / f"rank{rank}.jsonl", lines)


class Page(HTMLParser):
    """Collects tags that are not closed, whatever a browser would fetch, and figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.figures: list[bytes] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            start, comma, data = str(value).partition(",")
            if (tag, name, start, comma) == ("img", "src", "data:image/png;base64", ","):
                self.figures.append(base64.b64decode(data, validate=True))
            elif name in ("src", "href", "xlink:href", "srcset", "data"):
                self.fetched.append(str(value))
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_page(text: str) -> Page:
    """A page that is closed and fetches nothing, with figures that are images."""
    parsed = Page(text)
    assert (parsed.open, parsed.fetched) == ([], [])
    assert all(figure.startswith(b"\x89PNG") for figure in parsed.figures)
    assert not re.search(r"url\(|@import|https?:|<script|<!--", text, re.IGNORECASE)
    return parsed


class RunLogs:
    """Logs of a run of two ranks on two nodes: attempts, each with a joined, a restore of 0.2 s and a boundary a
    second, which rank 1 reaches a bit later; snapshots are copied after 0.5 s and protected after 1.5 s."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.directory = run / "events"
        self.directory.mkdir(parents=True)

    def attempt(
        self, lineage: str, pids: tuple[int, int], joined: float, start: int | None, last: int, *,
        closed: bool = False, protects: bool = True, nodes: tuple[str, str] = ("n0", "n1"),
        between: Sequence[dict[str, Any]] = (), source: str = "memory", ends: Sequence[str] = (), launch: str = "",
    ) -> None:  # fmt: skip
        """``between`` are events of rank 0 before it has restored. Rank 0 speaks for ``launch``."""
        for rank, pid in enumerate(pids):
            at = joined + 0.1 * rank
            first = (start or 0) + 1
            restored = {"iteration": start, "lineage": lineage, "source": source if start else None, "ends": ends}
            who = {"job": "j", "node": nodes[rank], "launch": "" if rank else launch}
            events: list[dict[str, Any]] = [{"event": "joined", "time": at, **who}]
            events += [{"time": at + 0.1, **event} for event in between if rank == 0]
            events.append({"event": "restored", "time": at + 0.2, "blocked_secs": 0.2, **restored})
            for iteration in range(first, last + 1):
                when = at + 1 + iteration - first
                events.append({"event": "fence", "time": when - 0.2, "blocked_secs": 0.01})
                events.append({"event": "fence", "time": when - 0.1, "blocked_secs": 0.02 * rank})
                events.append({"event": "snapshot", "time": when, "iteration": iteration, "blocked_secs": 0.001})
                events.append({"event": "copied", "time": when + 0.5, "iteration": iteration, "secs": 1.0})
                if protects:
                    events.append({"event": "protected", "time": when + 1.5, "iteration": iteration})
            if closed:
                events.append({"event": "closed", "time": at + 2 + last - first, "iteration": last})
            events.sort(key=lambda event: float(event["time"]))
            self.write(f"rank{rank}", *({"rank": rank, "pid": pid, **event} for event in events))

    def write(self, name: str, *events: dict[str, Any]) -> None:
        _append(self.directory / f"{name}.jsonl", events)

    def losses(self, *iterations: int) -> None:
        _append(self.run / "log.jsonl", [{"iteration": n, "loss": 5.0 - n / 8, "lr": 0.1} for n in iterations])


PROTECTION = {
    "event": "protection", "modes": ["node", "peer"],
    "failures": [{"lost": "one node", "cases": 2, "survived": 2, "example": []},
                 {"lost": "any two nodes", "cases": 1, "survived": 0, "example": ["n0", "<n1>"]}],
    "memory_per_node": {"slots": 4_000_000, "in_slots": 0, "parity": 1_000_000, "packages": 0, "sum": 5_000_000},
    "network_bytes": {"node": 1000, "job": 2000},
}  # fmt: skip
