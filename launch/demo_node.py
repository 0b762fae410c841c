"""Loses a simulated node of the demo: agent, ranks, SMP and memory, at a random instant inside an iteration."""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from ftckpt.arena.directory import list_arenas
from launch.demo_scenes import NodeLoss

_NUM_TIMES = 8


class Processes(Protocol):
    """Who ends the processes of a node."""

    def lose(self, node: str) -> list[int]:
        """SIGKILL everything of ``node``, its agent first, and return the process ids once all are gone."""


class Losing:
    """Waits for the iteration, and for a snapshot of this attempt that is protected; then loses the node.

    Protection is a matter of the whole job: one rank that has heard that all nodes are done is enough.
    """

    def __init__(self, loss: NodeLoss, node_dir: Path, processes: Processes, replace: Callable[[str], None]) -> None:
        self._loss = loss
        self._node_dir = node_dir
        self._processes = processes
        self._replace = replace
        self._ranks: dict[int, str] = {}
        self._times: list[float] = []
        self._newest = 0
        self._protected: int | None = None
        self._due_at: float | None = None
        self._done = False

    def see(self, kind: str, found: dict[str, Any]) -> None:
        """Take in a line of the training's log, or an event."""
        if kind == "iteration":
            self._newest = found["iteration"]
            self._times = [*self._times, found["time"]][-_NUM_TIMES:]
        elif kind == "event" and found["event"] == "joined":
            self._ranks[found["rank"]] = found["node"]
            self._protected = self._due_at = None  # of an attempt that has ended
        elif kind == "event" and found["event"] == "protected":
            self._protected = found["iteration"]

    def poll(self) -> None:
        """Lose the node if its time has come, and start the one that takes its place, if one does."""
        now = time.monotonic()
        if self._done or self._newest + 1 < self._loss.iteration or self._protected is None:
            return
        if self._due_at is None:
            self._due_at = now + random.uniform(0.1, 0.9) * statistics.median(self._times)
        if now >= self._due_at:
            self._done = True
            self._lose()
            if self._loss.replacement:
                self._replace(self._loss.replacement)

    def _lose(self) -> None:
        shards = [path.name.rpartition(".")[0] for path in list_arenas(self._node_dir)]
        killed_at = time.time()
        pids = self._processes.lose(self._loss.node)
        shutil.rmtree(self._node_dir)
        found = {
            "time": killed_at,
            "iteration": self._newest + 1,
            "protected": self._protected,
            "node": self._loss.node,
            "ranks": sorted(rank for rank, node in self._ranks.items() if node == self._loss.node),
            "pids": pids,
            "shards": shards,
        }
        self._loss.marker.write_text(json.dumps(found))
