"""Protection as a rank drives it: modes and groups at start, the SMP of its node, what it sees of it at boundaries.

What is to be protected, and when a target is given up, ``ftckpt.session.protection_scheduler`` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.capture.redundancy import Redundancy
from ftckpt.config import MAX_REST_SECS, Config
from ftckpt.errors import ConfigError, MemoryBudgetError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, together
from ftckpt.memory.arena import Arena
from ftckpt.memory.checks import CheckState
from ftckpt.memory.heartbeat import FlushState, Heartbeat
from ftckpt.memory.image import SlotImage
from ftckpt.memory.ledger import PATIENCE_SECS, Ledger, for_protection, refusal, require_limit
from ftckpt.memory.parity_file import parity_bytes, parity_path
from ftckpt.model import codec
from ftckpt.model.flush_interval import mtbf_secs
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import human
from ftckpt.model.topology import Topology
from ftckpt.parity.groups import ParityGroup, mirrors, node_groups, peer_groups, slot_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import (
    PARITY_FILES,
    Modes,
    lessened,
    possible_modes,
    require_slots,
    resolve_modes,
    ways_to_need_less,
)
from ftckpt.parity.table import ProtectionTable, protection_table
from ftckpt.session.actions import UpdateTargets
from ftckpt.session.addresses import machine
from ftckpt.session.flush_scheduler import NO_FLUSH, FlushStatus
from ftckpt.session.node_smp import NodeSmp, SmpReport
from ftckpt.session.protection_scheduler import ProtectionStatus

_SMP_SILENT_SECS = 10.0
"""An SMP that gave no sign of life for so long guards nothing."""


class ArenaRemains(NamedTuple):
    """What one rank's arena has of an earlier attempt."""

    protected: SnapshotId | None = None
    sealed: tuple[SnapshotId, ...] = ()


def in_all_arenas(
    ranks: Sequence[ArenaRemains], restored: SnapshotId | None, rebuilt: bool = False
) -> tuple[SnapshotId | None, SnapshotId | None]:
    """Of the snapshots that all ``ranks`` hold the protected one, and ``restored``.

    What was restored does not lie in these arenas where they are those of another layout. Where some of it was
    ``rebuilt``, its parity may be lost, too: marks that others have made of it say nothing any more.
    """

    def everywhere(snapshot: SnapshotId | None) -> SnapshotId | None:
        return snapshot if all(snapshot in rank.sealed for rank in ranks) else None

    # Marks may differ by a verdict that some ranks had not read yet; one is proof enough, and the newest counts.
    named = filter(None, {everywhere(rank.protected) for rank in ranks} - {restored if rebuilt else None})
    return max(named, key=lambda snapshot: snapshot.iteration, default=None), everywhere(restored)


class RankReport(NamedTuple):
    """What one rank tells of its arena and its node's SMP; ``secret`` as for ``NodeSmp``."""

    holding: ArenaLayout
    held: ArenaRemains
    secret: bytes
    smp: SmpReport


@dataclass(frozen=True)
class Arrangement:
    """Who protects whom, which every rank computes alike from what all ranks hold.

    ``groups`` are those whose parity SMPs keep, ``in_slots`` those whose parity lies in the slots themselves,
    ``mirrors`` of each shard its own node and those that keep its package.
    """

    holdings: Sequence[ArenaLayout]
    groups: Sequence[ParityGroup]
    in_slots: Sequence[ParityGroup]
    mirrors: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, holdings: Sequence[ArenaLayout], in_slots: Sequence[ParityGroup], modes: Modes) -> Arrangement:
        """Arrange what the ranks hold by the modes in force."""
        groups = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes)]
        return cls(holdings, groups, in_slots, mirrors(holdings, modes))

    def report(self, num_slots: int) -> ProtectionTable:
        """What it survives, and what it costs."""
        return protection_table(self.holdings, [*self.groups, *self.in_slots], self.mirrors, num_slots, parity_bytes)

    def packages_on(self, node: str) -> dict[str, dict[str, int]]:
        """Of each other node the shards whose packages ``node`` keeps, and the most bytes that each takes."""
        most_bytes = {holding.shard: holding.package_bytes for holding in self.holdings}
        shards: dict[str, dict[str, int]] = {}
        for shard, (home, *others) in self.mirrors.items():
            if node in others:
                shards.setdefault(home, {})[shard] = most_bytes[shard]
        return shards

    def account(self, node: str, node_dir: Path, need_bytes: int, num_slots: int) -> Ledger:
        """What it takes of the memory of ``node``, where parity files and packages have ``need_bytes`` in all.

        Only parity files of these groups, in these arenas, are written over.
        """
        arenas = {holding.arena: holding.slot_bytes for holding in self.holdings if holding.node == node}
        members = [(group.mode, member) for group in self.groups for member in group.members if member.node == node]
        return for_protection(
            node_dir,
            need_bytes,
            arenas=arenas,
            slots=num_slots,
            parity=[
                parity_path(node_dir / member.arena, mode, index)
                for mode, member in members
                if member.arena in arenas
                for index in range(PARITY_FILES)
            ],
            shards={shard for shard, nodes in self.mirrors.items() if node in nodes},
        )


class Protection:
    """One rank's part. Construction and ``arrange`` are collective.

    At a start the gather of ``NodeArenas.open`` carries what ``tell`` has for other ranks to ``join``; ``arrange``
    does the same for arenas that are there.

    Nothing but ``__init__``, ``arrange`` and its parts raises: where protection fails, snapshots are not protected,
    an event says so, and training goes on.
    """

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        places = codec.gather(group, (config.rack, machine()), tuple[str, str])
        self._racks = [rack for rack, _ in places]
        nodes = [member.node for member in topology.members]
        self._reasons: set[str] = set()  # why modes were left out, for one event each
        self._gives_up = False  # modes, see ``lessen``
        self.modes = together(group, lambda: self._first_modes(spans_nodes=len(set(nodes)) > 1))
        self.smp = NodeSmp(config, topology, group, events, [name for _, name in places])
        self.redundancy = Redundancy(self.modes.replica, tuple(nodes), tuple(self._racks))
        self._arena: Arena | None = None
        self._pulse: Heartbeat | None = None
        self._digest = 0
        self._held: Sequence[ArenaRemains] = ()  # by rank
        self._arrangement: Arrangement | None = None  # between ``join`` and ``begin``
        self._table: ProtectionTable | None = None  # of it, on a node's leader
        self._reports: Sequence[SmpReport] = ()  # of its ranks
        self.is_set_up = False
        """Whether training has come to a boundary in this attempt."""

    @property
    def protects(self) -> bool:
        """Whether anything is protected."""
        return bool(self.modes.names)

    @property
    def slots(self) -> int:
        """How many slots an arena has."""
        return self._config.num_slots(self.protects)

    @property
    def smp_guards(self) -> bool:
        """Whether this node's SMP gave a sign of life lately, and knows what it is to guard for this attempt."""
        # An SMP that came anew, or has not heard of a new layout yet, guards other groups than these.
        pulse = self._pulse
        return pulse is not None and pulse.smp_alive(_SMP_SILENT_SECS) and pulse.smp_guards(self._digest)

    def survey(
        self, restored: SnapshotId | None, rebuilt: bool = False
    ) -> tuple[SnapshotId | None, SnapshotId | None]:
        """What of an earlier attempt's snapshots all ranks hold in their arenas; see ``in_all_arenas``."""
        return in_all_arenas(self._held, restored, rebuilt)

    def arrange(self, arena: Arena, coming_bytes: int, slots: int) -> None:
        """Know what all ranks hold: groups, memory, the SMP of this node and those of others.

        ``coming_bytes`` are those that slots of this node take from now on beside old arenas; an arena that has all
        has ``slots``.

        Raises:
            ConfigError: modes, groups, secret or address that cannot work; all on all ranks together.
        """
        self._arena = arena  # first: whatever fails below, marks go to the arena that is written
        told = gather_all(self._group, lambda: self.tell(arena.image, arena.path.name, arena), RankReport)
        # Training runs: what there is no room for waits.
        together(self._group, lambda: self.join(arena, told, coming_bytes, slots, lacking=True))
        # Together, too: what one rank alone gave up would set its rounds apart from those of the others.
        together(self._group, self.begin)

    def tell(self, image: SlotImage, name: str, existing: Arena | None) -> RankReport:
        """What other ranks must know of this one's arena, ``name``, which need not be there yet.

        Raises:
            ConfigError: the secret cannot be used, or no address can be found.
        """
        holding = image.holding(self._topology.me.node, self._config.rack, name)
        held = ArenaRemains()
        if existing is not None:
            held = ArenaRemains(existing.control.protected(), tuple(existing.snapshots()))
        return RankReport(holding, held, self.smp.offer_secret(), self.smp.report())

    def join(self, arena: Arena, ranks: Sequence[RankReport], coming_bytes: int, slots: int, lacking: bool) -> None:
        """Find out by what all ``ranks`` have told who protects whom, and that it can be; raises as ``arrange``.

        Raises:
            MemoryBudgetError: the node has no room for parity and packages, and may not be ``lacking`` it.
        """
        self._arena, node_dir = arena, arena.path.parent
        self._held = [rank.held for rank in ranks]
        self._open_pulse(node_dir)
        self.smp.agree_on_secret([rank.secret for rank in ranks])
        holdings = [rank.holding for rank in ranks]
        in_slots = slot_groups(holdings)
        # Resolved again: only the arenas tell whether replica sets do span nodes.
        self.modes = self.resolve(spans_nodes=bool(in_slots), lessens=True)
        self._arrangement = Arrangement.of(holdings, in_slots, self.modes)
        self._reports = [rank.smp for rank in ranks]
        if self._topology.is_node_leader:  # memory is the node's
            self._table = self._check(self._arrangement, node_dir, coming_bytes, slots, lacking)

    def begin(self) -> None:
        """Have the SMP of this node protect what ``join`` has arranged, on all ranks."""
        arrangement, table, reports, arena = self._arrangement, self._table, self._reports, self._arena
        node = self._topology.me.node
        assert arrangement is not None and arena is not None, "behind ``join``"
        self._arrangement, self._table, self._reports = None, None, ()  # as large as the job
        packages, holdings = arrangement.packages_on(node), arrangement.holdings
        received_bytes = table.network[node] if table is not None else 0
        self._digest = self.smp.configure(
            arena.path.parent, reports, holdings, arrangement.groups, packages,
            modes=self.modes.names, received_bytes=received_bytes,
        )  # fmt: skip
        self._tell_network(received_bytes)

    def lessen(self, error: MemoryBudgetError) -> bool:
        """With ``memory_limit`` a mode that nobody has named is given up; see ``lessened``."""
        modes = lessened(self.modes) if self._config.memory_limit_bytes and self._config.protect == "auto" else None
        if modes is None:
            return False
        without = ",".join(name for name in self.modes.names if name not in modes.names)
        self._tell_less([f"{error}; given up: {without}, which --ftckpt-protect would insist on"])
        self.modes, self._gives_up = modes, True
        return True

    def _open_pulse(self, node_dir: Path) -> None:
        if self._pulse is not None:
            return  # a new layout of the same ranks changes nobody's place on the node
        local = self._topology.ranks_on(self._topology.me.node)
        self._pulse = Heartbeat.open(node_dir, local.index(self._topology.rank), self._topology.rank)
        if self._pulse.problem is not None:
            self._events.emit("smp_error", error=self._pulse.problem)
        if self._topology.is_node_leader:
            self._pulse.forget_others(len(local))

    def mark(self, marks: UpdateTargets) -> None:
        """Tell the SMP what to protect, and readers of the arena what is protected."""
        if self._arena is not None:
            self._arena.control.mark_protected(marks.protected)
            self._arena.control.mark_target(marks.target)
            self._arena.control.mark_flush(marks.flush)

    def beat(self, iteration: int, phase: str) -> None:
        """Training is in ``phase`` of ``iteration``: the SMP and ``ftckpt status`` see it. Takes microseconds."""
        if self._pulse is not None:
            self._pulse.beat(iteration, phase)

    def tell_copying(self, copying: bool) -> None:
        """Whether this rank copies now: the SMP leaves cores and memory to its copies. For any thread."""
        if self._pulse is not None:
            self._pulse.tell_copying(copying)

    def tell_counts(self, counts: Sequence[int]) -> None:
        """What this rank has counted: who watches the node sees it."""
        if self._pulse is not None:
            self._pulse.tell_counts(counts)

    def observe(self, target: SnapshotId | None) -> ProtectionStatus:
        """What the node's SMP is seen to do, and to have done for the target."""
        if self._pulse is None or self._arena is None:
            return ProtectionStatus()
        try:
            slot = self._arena.find(target)
            check = self._arena.check(slot) if slot is not None else None
            configured = self._pulse.smp_guards(self._digest)
            return ProtectionStatus(
                alive=self._pulse.smp_alive(_SMP_SILENT_SECS),
                configured=configured,
                sealed=slot is not None,
                covered=check is not None and check.state == CheckState.COVERED,
                gave_up=configured and target is not None and self._pulse.smp_cannot(target.iteration),
                rests=self._pulse.smp_rests(),
                wait_secs=self._pulse.smp_wait_secs() if configured else 0.0,
            )
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever protection does
            self._events.emit("smp_error", error=repr(error))
            return ProtectionStatus()

    def observe_flush(self, snapshot: SnapshotId | None) -> FlushStatus:
        """What the node's SMP is seen to do, and to have done to bring ``snapshot`` to storage."""
        if self._pulse is None or self._arena is None or not self._config.persist:
            return NO_FLUSH
        try:
            ready = self.smp_guards
            sealed = self._arena.find(snapshot) is not None
            # What an SMP says that has not heard of this attempt yet it says of an earlier one.
            knows = snapshot is not None and self._pulse.smp_guards(self._digest)
            state = self._pulse.flush_state(snapshot) if snapshot is not None and knows else FlushState.NONE
            if state == FlushState.CANNOT and not self._topology.is_node_leader:
                state = FlushState.WORKING  # the leader, who alone can ask the SMP why, is to say so
            return FlushStatus(ready, sealed, state)
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever storage does
            self._events.emit("smp_error", error=repr(error))
            return NO_FLUSH

    def close(self) -> None:
        """This rank trains no more; the SMP stays."""
        self.smp.release()
        if self._pulse is not None:
            self._pulse.leave()

    def _first_modes(self, spans_nodes: bool) -> Modes:
        """What is protected, as far as it can be known without arenas, and that slots suffice for it."""
        modes = self.resolve(spans_nodes)
        require_slots(self._config, modes)
        return modes

    def resolve(self, spans_nodes: bool, lessens: bool = False) -> Modes:
        """Where layouts are listed the job may have fewer nodes than ``protect`` was written for: it goes on.

        ``lessens``: it goes on too where one of several modes cannot be had. Replicas may drift apart in training,
        and then nothing of a slot is any other rank's; what else was asked for stays.
        """
        config, nodes = self._config, [member.node for member in self._topology.members]
        peer: dict[str, Any] = {"peer_losses": config.peer_losses, "peer_group": config.peer_group}
        if config.layouts or lessens:
            modes, left_out = possible_modes(config.protect, nodes, spans_nodes, **peer)
            if left_out and not (modes.names or config.layouts):
                raise ConfigError(left_out[0])
            self._tell_less(left_out)
        else:
            modes = resolve_modes(config.protect, nodes, spans_nodes, **peer)
        return (lessened(modes) if self._gives_up else None) or modes

    def _tell_less(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason not in self._reasons:
                self._reasons.add(reason)
                self._events.emit("protection_lessened", reason=reason)

    def _check(
        self, arrangement: Arrangement, node_dir: Path, coming_bytes: int, slots: int, lacking: bool
    ) -> ProtectionTable:
        """Show what is protected, and refuse to start where the node has no room for it and may not be ``lacking``
        it; returns the costs."""
        node, names = self._topology.me.node, self.modes.names
        table = arrangement.report(slots)
        self._events.emit("protection", modes=names, **table.to_json())
        lines = [f"protection: {', '.join(names)}, {self._often}", *table.lines()] if names else [self._unprotected]
        for line in lines:
            self._events.announce(line)
        memory = table.memory[node]
        remedies = ways_to_need_less(self._config, slots, bool(names))
        require_limit(
            self._config.memory_limit_bytes, node, memory.slots, memory.parity, memory.packages, remedies=remedies
        )
        account = arrangement.account(node, node_dir, table.smp_bytes(node), slots)
        self._require_room(account, coming_bytes, node_dir, lacking)
        return table

    @property
    def _unprotected(self) -> str:
        """What is lost where nothing is protected, in words."""
        left = (
            "the newest snapshot on storage"
            if self._config.persist
            else "what the script itself has loaded, if anything"
        )
        return (
            "protection: none: processes that die cost nothing, but a node that is lost, or the memory of one rank, "
            f"takes all snapshots with it, and a restart goes on from {left}; protected is what three ranks or more "
            "of a node have, or two nodes or more"
        )

    @property
    def _often(self) -> str:
        """In words."""
        config = self._config
        if config.protect_interval != "auto":
            return f"of one snapshot of {config.protect_interval}"
        share = f"{config.smp_cores:g} of a node's idle cores allows" if config.smp_cores else "it is done"
        return f"as often as {share}, and once in {MAX_REST_SECS:.0f} s at least"

    def _tell_network(self, nbytes: int) -> None:
        """What this node takes of the network for a snapshot, of which it receives ``nbytes``."""
        limit = self.smp.network
        if limit is None or nbytes == 0:
            return
        secs, nodes = limit.secs(nbytes), len({member.node for member in self._topology.members})
        self._events.announce(f"protection: network: {limit}; a snapshot needs {human(nbytes)}: {secs:.1f} s or more")
        if fault := limit.too_slow(nbytes, mtbf_secs(self._config.mtbf, nodes)):
            reason = f"{fault[0]}: {limit}; {fault[1]} suffices"
            self._events.emit("protection_slow", secs=round(secs, 1), reason=reason)

    def _require_room(self, account: Ledger, coming_bytes: int, node_dir: Path, lacking: bool) -> None:
        need_bytes = account.later_bytes
        reason = refusal(node_dir, need_bytes, PATIENCE_SECS)
        if reason and not lacking:
            raise MemoryBudgetError(
                f"no room for what protects the snapshots (protect: {','.join(self.modes.names)}): {reason}; "
                "or protect less (--ftckpt-protect)"
            )
        # What was just found to be there is not asked for again.
        now_bytes = account.now_bytes + coming_bytes
        if not reason and account.now_bytes and now_bytes > need_bytes:
            need_bytes, reason = now_bytes, refusal(node_dir, now_bytes)
        if reason:
            self._events.emit("protection_waits", need_bytes=need_bytes, reason=reason)
