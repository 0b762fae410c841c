"""The rank that all others wait for, by the heartbeats of all nodes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.smp.client import ask_node
from ftckpt.smp.footprint import load_description
from ftckpt.smp.liveness import Liveness
from ftckpt.smp.reports import rank_report
from ftckpt.smp.requests import ReportRequest

_LOOK_SECS, _ANSWER_SECS = 10.0, 5.0
_MOST_AT_ONCE = 32
_PAUSE = "pause"
"""The phase of an evaluation or a save: no step is expected."""


class Patience(NamedTuple):
    """A step is late after ``secs`` and after ``iterations`` times the duration of the iteration before."""

    secs: float
    iterations: float


STATUS, EVENT = Patience(5.0, 3.0), Patience(60.0, 10.0)


def late_rank(nodes: Mapping[str, Iterable[Mapping[str, Any]]], patience: Patience) -> dict[str, Any] | None:
    """The rank that the others wait for; None if no step is late, or nobody knows how long one takes.

    The lowest iteration decides, then the oldest heartbeat: ranks that wait in a collective have entered its phase
    after the rank that they wait for has entered its own. ``nodes``: live ranks by node, see ``reports.rank_report``.
    The result has ``rank``, ``node``, ``phase``, ``behind``, iterations behind the furthest rank, and ``secs`` since
    its last step boundary.
    """
    found = [{**one, "node": node} for node, ranks in nodes.items() for one in ranks]
    last = min(found, key=lambda one: (one["iteration"], -one["secs"]), default=None)
    if last is None or last["step_secs"] is None:
        return None
    behind = max(one["iteration"] for one in found) - last["iteration"]
    usual_secs = last["iteration_secs"]
    late = usual_secs is not None and last["step_secs"] > max(patience.secs, patience.iterations * usual_secs)
    if not late and behind < 2:
        return None
    return {**{name: last[name] for name in ("rank", "node", "phase")}, "behind": behind, "secs": last["step_secs"]}


class StallWatch:
    """Finds the late rank of the job once per late step; only on the first of its nodes, which asks the others."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._pulse, self._liveness = Heartbeat.open(node_dir, None), Liveness(node_dir)
        self._next_secs, self._told = 0.0, -2

    def look(self) -> dict[str, Any] | None:
        """Poll; returns a late rank that was not returned before."""
        if (now_secs := time.monotonic()) < self._next_secs:
            return None
        self._next_secs = now_secs + _LOOK_SECS
        pulses = self._liveness.judge(self._pulse.ranks())
        here = [rank_report(pulse) for pulse in pulses if pulse.lives is not False]
        iteration = min((one["iteration"] for one in here), default=-2)
        if iteration == self._told or (late := late_rank({"": here}, EVENT)) is None:
            return None
        self._next_secs = now_secs + max(_LOOK_SECS, late["secs"])  # it may last for hours
        description = load_description(self._node_dir) or {}
        names, node = sorted(map(str, description.get("nodes", ()))), self._node_dir.name
        if names[:1] != [node]:
            return None

        def ranks_of(name: str) -> list[dict[str, Any]]:
            if name == node:
                return here
            with suppress(FtckptError):
                fields = ask_node(description, name, ReportRequest(), _ANSWER_SECS).fields
                return [one for one in fields.get("trainers", ()) if one["lives"] is not False]
            return []

        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(names))) as threads:
            late = late_rank(dict(zip(names, threads.map(ranks_of, names), strict=True)), EVENT)
        if late is None or (late["phase"] == _PAUSE and not late["behind"]):
            return None
        self._told = iteration
        return late
