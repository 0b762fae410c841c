"""One attempt of a launcher run: its entry in the launch record, and how the previous attempt ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import StalledError
from ftckpt.events import Events
from ftckpt.memory import end_notes
from ftckpt.memory.directory import PULSE_NAME
from ftckpt.memory.end_notes import ExitNote
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.launch_record import MOST_STARTS, LauncherRun
from ftckpt.model.topology import Topology

log = logging.getLogger("ftckpt")

_MOST_ENDS = 4
"""Exit notes that are reported of an attempt: the first is the cause, the others mostly its consequences."""


class AttemptReport(NamedTuple):
    """One rank's report at start. ``starts``: attempts in a row without progress, -1 if the rank has no launcher run;
    ``ends``: its node's exit notes of the previous attempt, if it leads the node."""

    starts: int
    ends: tuple[ExitNote, ...] = ()


class AttemptRecord:
    """This process's part of the launch record of ``run``, which one of the node's ranks is given."""

    def __init__(self, config: Config, topology: Topology, run: LauncherRun, events: Events) -> None:
        self._config = config
        self._topology = topology
        self._run = run
        self._events = events
        self._has_snapshot = False
        self._node_dir: Path | None = None  # only if this rank leads its node
        self.ends: list[str] = []
        """How the previous attempt ended, by all nodes' exit notes, the cause first; set by ``begin``."""

    @property
    def launch(self) -> str:
        """The name of the launcher run; "" if this rank was given none, or it has no name."""
        return self._run.name

    def begin(self, sights: Sequence[AttemptReport]) -> None:
        """Refuse to start after too many attempts without progress: a launcher may restart a job for days.
        ``sights`` are the reports of all ranks.

        Raises:
            StalledError: on all ranks together.
        """
        if self._run.problem:
            log.warning("ftckpt: the launch record cannot be written for the next attempt: %s", self._run.problem)
        members = zip(self._topology.members, sights, strict=True)
        told = sorted(((member.node, end) for member, one in members for end in one.ends), key=lambda of: of[1].order)
        self.ends = [f"node {node}: {end.text}" for node, end in told[:_MOST_ENDS]]
        for text in self.ends:
            self._events.announce(f"the previous attempt ended: {text}")
        # The minimum: a flapping node fails in a row while the others make progress.
        starts = min((one.starts for one in sights if one.starts >= 0), default=0)
        if starts >= MOST_STARTS:
            error = StalledError(
                f"{starts} attempts in a row have made no snapshot that all ranks have, and got no further than "
                "earlier ones: another attempt would probably fail in the same way; see their errors above, fix the "
                "cause, and start the job again"
            )
            error.of_all_ranks = True
            raise error

    def trains(self) -> None:
        """Training starts: delete the exit notes of the previous attempt, which have been reported."""
        if self._node_dir is not None:
            with suppress(OSError):  # they are reported once more
                end_notes.forget(self._node_dir)

    def take_back(self) -> None:
        """Do not count this attempt as failed: it could not reach the storage that it must read."""
        self._run.take_back()

    def progress(self) -> None:
        """A snapshot of this attempt is committed: the first one resets the count of attempts without progress."""
        if not self._has_snapshot:
            self._has_snapshot = True
            self._run.progress()

    def finish(self, iteration: int) -> None:
        """Record that the job is complete after ``iteration``: no later attempt trains anything."""
        text = f"job {self._config.job} finished at iteration {iteration}: nothing is left to train"
        self._run.end(0, text, str(Path(self._config.arena).absolute()), self._config.job)

    def look(self, node_dir: Path) -> AttemptReport:
        """Count this attempt; returns what this node knows of earlier ones."""
        self._node_dir = node_dir if self._topology.is_node_leader else None
        end_notes.are_told_in(node_dir)
        starts = self._run.begin(self._config.job, _reached(node_dir)) if self._run.name else -1
        told: list[ExitNote] = []
        if self._node_dir is not None:
            with suppress(OSError, ValueError):  # only for the log
                end_notes.tell_silent(self._node_dir)  # for ranks that died without an SMP to note it
                told = end_notes.read(self._node_dir)
        return AttemptReport(starts, tuple(told[:_MOST_ENDS]))


def _reached(node_dir: Path) -> int:
    """The last boundary that the previous attempt passed on this node, by its heartbeats: a killed rank leaves
    nothing else. -1: unknown."""
    if not (node_dir / PULSE_NAME).exists():  # opening would create it
        return -1
    return Heartbeat.open(node_dir, None).furthest()
