"""The shared context of the parts of one rank's session, created when it attaches to its job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.events import MAX_LOG_BYTES, Events
from ftckpt.group import Group
from ftckpt.memory.launch_record import LauncherRun
from ftckpt.memory.memory_limits import may_hang
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import TrainingState
from ftckpt.session import deadlines
from ftckpt.session.arenas import NodeArenas
from ftckpt.session.attempt import AttemptRecord
from ftckpt.session.counters import RankNumbers
from ftckpt.session.protection import Protection
from ftckpt.session.session import SessionState
from ftckpt.session.vote import Agreement

T = TypeVar("T")


class GroupPair:
    """The groups that connect all ranks: ``group`` for blocking collectives, ``agreement`` for votes.

    A rank that cannot reach the others through one of them breaks both, so that all ranks notice.

    Args:
        start_timeout_secs: longest wait for other ranks at start and end.
        connect_timeout_secs: longest wait to reconnect a broken group at the end.
        group: all ranks; a new group if None.
    """

    def __init__(self, start_timeout_secs: float, connect_timeout_secs: float, group: Group | None = None) -> None:
        self.group = group or Group(start_timeout_secs)
        # A separate group: votes pair up by order, and any other collective would shift them.
        self._votes = Group(start_timeout_secs, partners=0)
        self.agreement = Agreement(self._votes)
        self._start_timeout_secs, self._connect_timeout_secs = start_timeout_secs, connect_timeout_secs

    @property
    def broken(self) -> bool:
        """Whether some rank is unreachable."""
        return self.group.broken or self.agreement.broken

    def give_up(self, reason: str) -> None:
        """Break both groups, which ends the wait of other ranks in them."""
        self.group.give_up(reason)
        self._votes.give_up(reason)

    def part(self, leave: Callable[[], None]) -> None:
        """Run ``leave`` as the last collective, then close the vote group; raises as ``meet``."""
        self.meet("end", leave)
        self._votes.close()

    def meet(self, place: str, action: Callable[[], T]) -> T:
        """Run ``action``, which must be collective and repeatable, at the end of the job. A broken group is
        reconnected for it, once. ``place`` must be unique to this call.

        Raises:
            RuntimeError: raised by ``action``.
            LaunchError: the group could not be reconnected.
        """
        self.group.timeout_secs = self._start_timeout_secs
        begin = time.monotonic()
        try:
            return action()
        except RuntimeError:
            left_secs = self._start_timeout_secs - (time.monotonic() - begin)
            if not self.group.broken or left_secs <= 0:
                raise
            self.group.renew(f"{self.group.name}/{place}", min(left_secs, self._connect_timeout_secs))
            return action()


@dataclass(frozen=True)
class RankContext:
    """The shared parts of a rank's session. ``config.slots`` is the resolved number of slots."""

    config: Config
    topology: Topology
    events: Events
    links: GroupPair
    training_state: TrainingState
    protection: Protection
    arenas: NodeArenas
    attempt: AttemptRecord
    numbers: RankNumbers
    state: SessionState

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.links.group

    @property
    def flushes_at_end(self) -> bool:
        """Whether the job's last snapshot is flushed at its end."""
        return bool(self.config.persist) and self.config.persist_at_end == "on"

    @classmethod
    def attach(
        cls, config: Config, training_state: TrainingState, topology: Topology, group: Group | None, run: LauncherRun
    ) -> RankContext:
        """Create all parts. Collective; see ``Checkpointer`` for arguments and errors."""
        if not config.job or not config.node:
            raise ConfigError("job and node: both need a name")
        try:
            hangs = may_hang(config.events_dir)
            events = Events(config.events_dir, topology.rank, limit_bytes=MAX_LOG_BYTES, may_hang=hangs)
        except OSError as error:
            raise ConfigError(
                f"--ftckpt-events: {config.events} cannot be written: {error.strerror}; name another directory"
            ) from None
        links = GroupPair(config.start_timeout_secs, deadlines.VOTE_SECS, group)
        protection = Protection(config, topology, links.group, events)
        config = replace(config, slots=protection.slots)
        nodes = len({member.node for member in topology.members})
        state = SessionState(config, protection.protects, nodes)
        arenas = NodeArenas(config, topology, links.group, events, protects=protection.protects)
        return cls(
            config, topology, events, links, training_state, protection, arenas,
            AttemptRecord(config, topology, run, events), RankNumbers(), state,
        )  # fmt: skip
