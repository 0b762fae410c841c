"""The way into a node's directory: one job at a time, one directory for the ranks of a node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.events import Events
from ftckpt.group import Group, together
from ftckpt.memory.directory import (
    WORD_NAME,
    leave_word,
    list_arenas,
    node_directory,
    read_word,
    refuse_renamed,
    remove_half_made,
    remove_stale,
    wait_for_writer,
)
from ftckpt.memory.interval_file import read_interval, write_interval
from ftckpt.memory.locks import JOB_LOCK_NAME, JobLock, holder_of
from ftckpt.model.topology import Topology
from ftckpt.session import deadlines
from ftckpt.session.addresses import whereabouts


class NodeReport(NamedTuple):
    """What a rank has written into its node's directory, if it is the first there, what it has read, and where.

    ``interval``: with ``interval`` auto, the one with which an earlier attempt kept the budget; 0: nothing is known.
    """

    written: str
    read: str
    where: str
    interval: int = 0


class NodeJoin:
    """Of one rank; the first of a node holds the job's lock there."""

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self.path = Path()
        """The directory; from ``enter`` on."""
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._job_lock: JobLock | None = None
        self._word = ""  # that this rank has written as the first of its node

    @property
    def is_held(self) -> bool:
        """Whether this rank holds the lock for its node."""
        return self._job_lock is not None

    def enter(self) -> None:
        """Make sure that no other live process uses this job's arenas on this node. Collective.

        Raises:
            ArenaError: the directory cannot be used, or a live process holds the job or one of its arenas.
        """
        self._word = together(self._group, self._enter)

    def release(self) -> None:
        """Give the lock up."""
        if self._job_lock is not None:
            self._job_lock.release()
            self._job_lock = None

    def _enter(self) -> str:
        """Returns the word that this rank has written as the first of its node, for the others to read."""
        self.path = node_directory(Path(self._config.arena), self._config.job, self._topology.me.node)
        if not self._leads:
            return ""
        refuse_renamed(self.path, {member.node for member in self._topology.members})
        deadline_secs = deadlines.LOCK_SECS
        if (holder := holder_of(self.path / JOB_LOCK_NAME)) not in (None, 0, os.getpid()):
            self._events.announce(
                f"waits {deadline_secs:g} s at most for the end of process {holder}, which runs a job "
                f"{self._config.job!r} on this node"
            )
        # The job's lock keeps new processes out; only then can what others still write, or left, be waited for.
        self._job_lock = JobLock(self.path, deadline_secs)
        for path in list_arenas(self.path):
            wait_for_writer(path, deadline_secs)
            # Whoever wrote it may have died with slots that had their memory and no name yet: no arena counts those.
            remove_half_made(path, "slot*")
        remove_stale(self.path)
        return leave_word(self.path)

    def look(self) -> NodeReport:
        """What this rank sees of its node's directory, behind ``enter`` of all ranks."""
        config = self._config
        interval = read_interval(self.path, config.overhead_budget) if config.interval == "auto" else 0
        return NodeReport(self._word, read_word(self.path), whereabouts(os.environ), interval)

    def keep_interval(self, interval: int) -> None:
        """Leave it for the next attempt to see."""
        if self._leads:
            write_interval(self.path, interval, self._config.overhead_budget)

    def require_one_directory(self, seen: Sequence[NodeReport]) -> None:
        """Two machines with one name would find out at the first restart, when half of the snapshots is not there.

        Raises:
            ConfigError: ranks that call their node alike do not see the same directory; on all ranks alike.
        """
        if self._leads:
            (self.path / WORD_NAME).unlink(missing_ok=True)  # all have read it
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
