"""One rank's parts: made where it attaches to its job, for as long as it trains there."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.events import MAX_LOG_BYTES, Events
from ftckpt.group import Group
from ftckpt.job import deadlines
from ftckpt.job.agreement import Links
from ftckpt.job.arenas import NodeArenas
from ftckpt.job.attempt import AttemptRecord
from ftckpt.job.numbers import RankNumbers
from ftckpt.job.protection import Protection
from ftckpt.job.rank_storage import RankStorage
from ftckpt.job.session import RankState
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import TrainingState
from ftckpt.store.memory import may_hang
from ftckpt.store.outcome import LauncherRun


@dataclass(frozen=True)
class RankParts:
    """What the parts of a rank's session share.

    ``config``: with as many slots as the job has.
    """

    config: Config
    topology: Topology
    events: Events
    links: Links
    training_state: TrainingState
    protection: Protection
    arenas: NodeArenas
    attempt: AttemptRecord
    storage: RankStorage
    numbers: RankNumbers
    state: RankState

    @property
    def group(self) -> Group:
        """All ranks."""
        return self.links.group

    @classmethod
    def attach(
        cls, config: Config, training_state: TrainingState, topology: Topology, group: Group | None, run: LauncherRun
    ) -> RankParts:
        """Collective; see ``Checkpointer`` for the arguments, and what it raises."""
        if not config.job or not config.node:
            raise ConfigError("job and node: both need a name")
        try:
            hangs = may_hang(config.events_dir)
            events = Events(config.events_dir, topology.rank, limit_bytes=MAX_LOG_BYTES, may_hang=hangs)
        except OSError as error:
            raise ConfigError(
                f"--ftckpt-events: {config.events} cannot be written: {error.strerror}; name another directory"
            ) from None
        links = Links(config.start_timeout_secs, deadlines.VOTE_SECS, group)
        protection = Protection(config, topology, links.group, events)
        config = replace(config, slots=protection.slots)
        nodes = len({member.node for member in topology.members})
        state = RankState(config, protection.protects, nodes)
        arenas = NodeArenas(config, topology, links.group, events, protects=protection.protects)
        return cls(
            config, topology, events, links, training_state, protection, arenas,
            AttemptRecord(config, topology, run, events), RankStorage(config, links.group, events, protection, state),
            RankNumbers(), state,
        )  # fmt: skip
