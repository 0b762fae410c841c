"""The objects that make up one rank's session, created when it attaches to its job."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from ftckpt.session.rank_storage import RankStorage
from ftckpt.session.session import SessionState
from ftckpt.session.vote import GroupPair


@dataclass(frozen=True)
class RankContext:
    """The shared context of the parts of a rank's session.

    ``config.slots`` is the resolved number of slots.
    """

    config: Config
    topology: Topology
    events: Events
    links: GroupPair
    training_state: TrainingState
    protection: Protection
    arenas: NodeArenas
    attempt: AttemptRecord
    storage: RankStorage
    numbers: RankNumbers
    state: SessionState

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.links.group

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
            AttemptRecord(config, topology, run, events), RankStorage(config, links.group, events, protection, state),
            RankNumbers(), state,
        )  # fmt: skip
