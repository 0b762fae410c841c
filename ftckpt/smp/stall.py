"""The rank that all others wait for, by the heartbeats of all nodes."""

from __future__ import annotations

import math
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
"""Nodes that are asked at the same time."""


class Patience(NamedTuple):
    """A step is late after ``secs`` and ``times`` the duration of the iteration before, or, if the rank is two
    iterations behind, after ``secs_behind``."""

    secs: float
    times: float
    secs_behind: float


STATUS, EVENT = Patience(5.0, 3.0, 0.0), Patience(60.0, 10.0, 60.0)
"""Of a person who asks; and of an alarm: devices run behind their hosts by iterations."""


def late_rank(nodes: Mapping[str, Iterable[Mapping[str, Any]]], least: Patience) -> dict[str, Any] | None:
    """The rank that the others wait for; None if no step is late. ``nodes``: reports of live ranks by node.

    The lowest iteration decides, then the oldest heartbeat: ranks that wait in a collective have entered its phase
    after the rank that they wait for has entered its own. ``behind``: iterations behind the furthest rank; ``secs``:
    since its last step boundary.
    """
    found = [{**one, "node": node} for node, ranks in nodes.items() for one in ranks]
    last = min(found, key=lambda one: (one["iteration"], -one["secs"]), default=None)
    if last is None or (secs := last["step_secs"]) is None:
        return None
    behind, usual_secs = max(one["iteration"] for one in found) - last["iteration"], last["iteration_secs"]
    usual = math.inf if usual_secs is None else max(least.secs, least.times * usual_secs)
    if secs <= (least.secs_behind if behind >= 2 else usual):
        return None
    return {**{name: last[name] for name in ("rank", "node", "phase")}, "behind": behind, "secs": secs}


class StallWatch:
    """Finds the late rank of the job once per late step; only on the first of its nodes, which asks the others."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir, self._pulse, self._liveness = node_dir, Heartbeat.open(node_dir, None), Liveness(node_dir)
        self._next_secs, self._told = 0.0, -2

    def look(self) -> dict[str, Any] | None:
        """Poll; returns a late rank that was not returned before."""
        if (now_secs := time.monotonic()) < self._next_secs:
            return None
        self._next_secs = now_secs + _LOOK_SECS
        here = [rank_report(one) for one in self._liveness.judge(self._pulse.ranks()) if one.lives is not False]
        iteration = min((one["iteration"] for one in here), default=-2)
        if iteration == self._told or (late := late_rank({"": here}, EVENT)) is None:
            return None
        self._next_secs = now_secs + max(_LOOK_SECS, late["secs"])  # it may last for hours
        description = load_description(self._node_dir) or {}
        names = sorted(map(str, description.get("nodes", ())))
        if names[:1] != [self._node_dir.name]:
            return None

        def ranks_of(name: str) -> list[dict[str, Any]]:
            with suppress(FtckptError):
                fields = ask_node(description, name, ReportRequest(), _ANSWER_SECS).fields
                return [one for one in fields.get("trainers", ()) if one["lives"] is not False]
            return []

        with ThreadPoolExecutor(_MOST_AT_ONCE) as threads:
            nodes = dict(zip(names[1:], threads.map(ranks_of, names[1:]), strict=True))
        late = late_rank({names[0]: here, **nodes}, EVENT)
        if late is None or (late["phase"] == "pause" and not late["behind"]):  # all evaluate, or save
            return None
        self._told = iteration
        return late
