"""One attempt of a launcher at a job: what the record of the launcher run learns of it, and how the attempt before it
ended."""

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
"""Told of how an attempt has ended: the first is the cause, what follows mostly its consequence."""


class AttemptReport(NamedTuple):
    """What one rank knows at the start. ``starts``: that came to nothing, -1 where it speaks for no launcher run;
    ``ends``: what its node has seen of the end of the attempt before, where it leads the node."""

    starts: int
    ends: tuple[ExitNote, ...] = ()


class AttemptRecord:
    """What this process adds to the record of ``run``, which is given to one of the ranks that it started here."""

    def __init__(self, config: Config, topology: Topology, run: LauncherRun, events: Events) -> None:
        self._config = config
        self._topology = topology
        self._run = run
        self._events = events
        self._has_snapshot = False
        self._node_dir: Path | None = None  # where this rank leads its node
        self.ends: list[str] = []
        """What nodes have seen of how the attempt before this one ended, the cause first; from ``begin`` on."""

    @property
    def launch(self) -> str:
        """The name of the launcher run; "" on ranks that do not speak for it, and where it has none."""
        return self._run.name

    def begin(self, sights: Sequence[AttemptReport]) -> None:
        """Refuse what would fail as the attempts before it did: a launcher that has no such rule goes on for days.
        ``sights`` are what all ranks see.

        Raises:
            StalledError: on all ranks alike.
        """
        if self._run.problem:
            log.warning("ftckpt: what this attempt comes to cannot be kept for the next: %s", self._run.problem)
        members = zip(self._topology.members, sights, strict=True)
        told = sorted(((member.node, end) for member, one in members for end in one.ends), key=lambda of: of[1].order)
        self.ends = [f"node {node}: {end.text}" for node, end in told[:_MOST_ENDS]]
        for text in self.ends:
            self._events.announce(f"how the attempt before this one ended: {text}")
        # The least: a node that comes and goes has failed in a row while others made snapshots.
        starts = min((one.starts for one in sights if one.starts >= 0), default=0)
        if starts >= MOST_STARTS:
            error = StalledError(
                f"{starts} attempts in a row have made no snapshot that is whole on all ranks, and came no further "
                "than those before them: what ended them would end the next one, too; see their errors above, and "
                "start the job again when that is mended"
            )
            error.of_all_ranks = True
            raise error

    def trains(self) -> None:
        """Training begins: how the attempt before this one ended has been told."""
        if self._node_dir is not None:
            with suppress(OSError):  # they are told once more
                end_notes.forget(self._node_dir)

    def take_back(self) -> None:
        """Storage is away that this attempt must read: however many wait for it, none of them has failed."""
        self._run.take_back()

    def progress(self) -> None:
        """A snapshot of this attempt is whole: the first one ends the row of those that came to nothing."""
        if not self._has_snapshot:
            self._has_snapshot = True
            self._run.progress()

    def finish(self, iteration: int) -> None:
        """The job is done with ``iteration``: no further attempt trains anything."""
        text = f"job {self._config.job} finished at iteration {iteration}: nothing is left to train"
        self._run.end(0, text, str(Path(self._config.arena).absolute()), self._config.job)

    def look(self, node_dir: Path) -> AttemptReport:
        """Count the attempt; what is known here of those before it."""
        self._node_dir = node_dir if self._topology.is_node_leader else None
        end_notes.are_told_in(node_dir)
        starts = self._run.begin(self._config.job, _reached(node_dir)) if self._run.name else -1
        told: list[ExitNote] = []
        if self._node_dir is not None:
            with suppress(OSError, ValueError):  # it explains the attempt before, and decides nothing
                end_notes.tell_silent(self._node_dir)  # no SMP may have been there to see it
                told = end_notes.read(self._node_dir)
        return AttemptReport(starts, tuple(told[:_MOST_ENDS]))


def _reached(node_dir: Path) -> int:
    """The last boundary that the attempt before this one has passed here: a killed rank has told it by its signs of
    life alone. -1 where nothing is known."""
    if not (node_dir / PULSE_NAME).exists():  # to open it would make it
        return -1
    return Heartbeat.open(node_dir, None).furthest()
