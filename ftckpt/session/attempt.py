"""The start of an attempt: its entry into its node's directory, one process tree per job and one directory per node,
and into the launch record."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import ConfigError, StalledError
from ftckpt.events import Events
from ftckpt.group import Group, together
from ftckpt.memory import end_notes
from ftckpt.memory.atomic_files import read_link, remove_unfinished, replace_link
from ftckpt.memory.directory import (
    INTERVAL_NAME,
    PULSE_NAME,
    TOKEN_NAME,
    list_arenas,
    node_directory,
    refuse_renamed,
    remove_stale,
    wait_for_writer,
    write_token,
)
from ftckpt.memory.end_notes import ExitNote
from ftckpt.memory.heartbeat import Heartbeat
from ftckpt.memory.launch_record import MOST_STARTS, LauncherRun
from ftckpt.memory.locks import JOB_LOCK_NAME, JobLock, holder_of
from ftckpt.model.topology import Topology
from ftckpt.session import deadlines
from ftckpt.session.addresses import machine

log = logging.getLogger("ftckpt")

_MOST_ENDS = 4
"""Exit notes that are reported of an attempt: the first is the cause, the others mostly its consequences."""


class NodeReport(NamedTuple):
    """The token that a rank has ``written`` into its node's directory, if it leads the node, the token that it has
    ``read`` there, and its machine. ``interval``: with ``interval`` auto, the one that kept the budget in an earlier
    attempt; 0: unknown.
    """

    written: str
    read: str
    where: str
    interval: int = 0


class NodeJoin:
    """One rank's entry; the node's leader takes the job's lock."""

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self.path = Path()
        """The node's directory; valid after ``enter``."""
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._job_lock: JobLock | None = None
        self._token = ""  # the token that this rank has written as its node's leader

    @property
    def is_held(self) -> bool:
        """Whether this rank has the lock for its node."""
        return self._job_lock is not None

    def enter(self) -> None:
        """Lock this job's arenas on this node against other processes. Collective.

        Raises:
            ArenaError: the directory cannot be used, or a live process has locked the job or one of its arenas.
        """
        self._token = together(self._group, self._enter)

    def release(self) -> None:
        """Release the lock."""
        if self._job_lock is not None:
            self._job_lock.release()
            self._job_lock = None

    def _enter(self) -> str:
        """The local part of ``enter``; returns the token that this rank has written as its node's leader, or ""."""
        self.path = node_directory(Path(self._config.arena), self._config.job, self._topology.me.node)
        if not self._leads:
            return ""
        refuse_renamed(self.path, {member.node for member in self._topology.members})
        deadline_secs = deadlines.LOCK_SECS
        if (holder := holder_of(self.path / JOB_LOCK_NAME)) not in (None, 0, os.getpid()):
            self._events.announce(
                f"waiting at most {deadline_secs:g} s for process {holder} to exit, which runs a job "
                f"{self._config.job!r} on this node"
            )
        # The job's lock first: it keeps new processes out while this waits for, and cleans up after, earlier ones.
        self._job_lock = JobLock(self.path, deadline_secs)
        for path in list_arenas(self.path):
            wait_for_writer(path, deadline_secs)
            # The writer may have died during an allocation: slots without their final name, which no ledger counts.
            remove_unfinished(path, "slot*")
        remove_stale(self.path)
        return write_token(self.path)

    def look(self) -> NodeReport:
        """Report on this rank's node directory, after all ranks' ``enter``."""
        config = self._config
        interval = _read_interval(self.path, config.overhead_budget) if config.interval == "auto" else 0
        return NodeReport(
            self._token, read_link(self.path / TOKEN_NAME), f"{socket.gethostname()} ({machine()})", interval
        )

    def keep_interval(self, interval: int) -> None:
        """Store the interval for the next attempt."""
        if self._leads:
            write_interval(self.path, interval, self._config.overhead_budget)

    def require_one_directory(self, seen: Sequence[NodeReport]) -> None:
        """Refuse two machines with one node name, which would lack half of the snapshots at the first restart.

        Raises:
            ConfigError: ranks with the same node name see different directories; on all ranks together.
        """
        if self._leads:
            (self.path / TOKEN_NAME).unlink(missing_ok=True)  # all have read it
        for rank, mine in enumerate(seen):
            node = self._topology.members[rank].node
            first = self._topology.ranks_on(node)[0]
            if mine.read != seen[first].written:
                raise ConfigError(
                    f"--ftckpt-node: two machines are called {node!r}: rank {first} is on {seen[first].where}, rank "
                    f"{rank} is "
                    f"on {mine.where}, and they do not see the same {self.path}. Give each machine a name of its own "
                    "with --ftckpt-node or FTCKPT_NODE; containers that share a name must share that directory"
                )


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


def write_interval(node_dir: Path, interval: int, budget: float) -> None:
    """Store the interval that keeps ``budget``. If that fails, the next attempt measures again."""
    with suppress(OSError):
        replace_link(node_dir / INTERVAL_NAME, f"{interval} at {budget!r}")


def _read_interval(node_dir: Path, budget: float) -> int:
    """The node's interval for this ``budget``; 0 if there is none."""
    interval, _, measured_for = read_link(node_dir / INTERVAL_NAME).partition(" at ")
    with suppress(ValueError):
        return int(interval) if float(measured_for) == budget else 0
    return 0


def _reached(node_dir: Path) -> int:
    """The last boundary that the previous attempt passed on this node, by its heartbeats: a killed rank leaves
    nothing else. -1: unknown."""
    if not (node_dir / PULSE_NAME).exists():  # opening would create it
        return -1
    return Heartbeat.open(node_dir, None).furthest()
