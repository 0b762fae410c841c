"""Entry of the ranks into their node's directory: one process tree per job, one directory per node."""

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
        self._word = ""  # the token that this rank has written as its node's leader

    @property
    def is_held(self) -> bool:
        """Whether this rank has the lock for its node."""
        return self._job_lock is not None

    def enter(self) -> None:
        """Lock this job's arenas on this node against other processes. Collective.

        Raises:
            ArenaError: the directory cannot be used, or a live process has locked the job or one of its arenas.
        """
        self._word = together(self._group, self._enter)

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
            remove_half_made(path, "slot*")
        remove_stale(self.path)
        return leave_word(self.path)

    def look(self) -> NodeReport:
        """Report on this rank's node directory, after all ranks' ``enter``."""
        config = self._config
        interval = read_interval(self.path, config.overhead_budget) if config.interval == "auto" else 0
        return NodeReport(self._word, read_word(self.path), whereabouts(os.environ), interval)

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
