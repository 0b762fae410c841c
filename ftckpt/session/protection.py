"""One rank's interface to protection: modes and groups at start, then the state of its node's SMP at boundaries.

``ftckpt.session.protection_scheduler`` chooses the snapshot to protect and decides when to give it up.
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
from ftckpt.memory.ledger import PATIENCE_SECS, MemoryNeeds, protection_needs, refusal, require_limit
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
"""Age of the SMP's heartbeat from which it counts as dead."""


class ArenaRemains(NamedTuple):
    """The snapshots of an earlier attempt in one rank's arena."""

    protected: SnapshotId | None = None
    sealed: tuple[SnapshotId, ...] = ()


def in_all_arenas(
    ranks: Sequence[ArenaRemains], restored: SnapshotId | None, rebuilt: bool = False
) -> tuple[SnapshotId | None, SnapshotId | None]:
    """The newest protected snapshot that all ``ranks`` have sealed, and ``restored``, if all have it; else None.

    The restored snapshot is not in these arenas if they belong to another layout. If parts of it were reconstructed
    (``rebuilt``), its parity may be lost, too: it then counts as unprotected.
    """

    def everywhere(snapshot: SnapshotId | None) -> SnapshotId | None:
        return snapshot if all(snapshot in rank.sealed for rank in ranks) else None

    # Marks may differ by a result that some ranks had not read. One mark suffices: it follows from all nodes' votes.
    named = filter(None, {everywhere(rank.protected) for rank in ranks} - {restored if rebuilt else None})
    return max(named, key=lambda snapshot: snapshot.iteration, default=None), everywhere(restored)


class RankReport(NamedTuple):
    """One rank's report on its arena and its node's SMP; ``secret``: see ``NodeSmp.offer_secret``."""

    holding: ArenaLayout
    held: ArenaRemains
    secret: bytes
    smp: SmpReport


@dataclass(frozen=True)
class Arrangement:
    """The parity groups and package mirrors of a job, computed identically by all ranks from all arenas' layouts.

    ``groups``: SMPs store their parity. ``in_slots``: their parity is part of the slots. ``mirrors``: for each shard
    its own node, then the nodes that keep its package.
    """

    holdings: Sequence[ArenaLayout]
    groups: Sequence[ParityGroup]
    in_slots: Sequence[ParityGroup]
    mirrors: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, holdings: Sequence[ArenaLayout], in_slots: Sequence[ParityGroup], modes: Modes) -> Arrangement:
        """Form the groups for the ranks' arenas and the modes in force."""
        groups = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes)]
        return cls(holdings, groups, in_slots, mirrors(holdings, modes))

    def report(self, num_slots: int) -> ProtectionTable:
        """The failures that it survives, and its costs."""
        return protection_table(self.holdings, [*self.groups, *self.in_slots], self.mirrors, num_slots, parity_bytes)

    def packages_on(self, node: str) -> dict[str, dict[str, int]]:
        """The shards, by other node, whose packages ``node`` keeps, with the maximum size of each in bytes."""
        most_bytes = {holding.shard: holding.package_bytes for holding in self.holdings}
        shards: dict[str, dict[str, int]] = {}
        for shard, (home, *others) in self.mirrors.items():
            if node in others:
                shards.setdefault(home, {})[shard] = most_bytes[shard]
        return shards

    def account(self, node: str, node_dir: Path, need_bytes: int, num_slots: int) -> MemoryNeeds:
        """The needs of ``node`` for parity files and packages of ``need_bytes`` in all.

        Only existing parity files of these groups, in these arenas, are overwritten.
        """
        arenas = {holding.arena: holding.slot_bytes for holding in self.holdings if holding.node == node}
        members = [(group.mode, member) for group in self.groups for member in group.members if member.node == node]
        return protection_needs(
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


class JoinedNodes(NamedTuple):
    """The protection that all ranks have computed; ``reports`` on SMPs by rank. ``received_bytes``: network traffic
    to this node per snapshot, 0 unless this rank leads it."""

    arrangement: Arrangement
    reports: Sequence[SmpReport]
    received_bytes: int


class Protection:
    """One rank's protection. Construction and ``arrange`` are collective.

    At start, the gather of ``NodeArenas.open`` carries every rank's ``report`` to all others, which ``join`` with
    them; ``arrange`` does the same for rebuilt arenas.

    Only ``__init__``, ``arrange`` and its parts raise. If protection fails later, an event says so, snapshots stay
    unprotected, and training continues.
    """

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self._config, self._topology = config, topology
        self._group, self._events = group, events
        places = codec.gather(group, (config.rack, machine()), tuple[str, str])
        nodes = [member.node for member in topology.members]
        self._reasons: set[str] = set()  # why modes were dropped, for one event each
        self.modes = together(group, lambda: self._first_modes(spans_nodes=len(set(nodes)) > 1))
        self.smp = NodeSmp(config, topology, group, events, [name for _, name in places])
        self.redundancy = Redundancy(self.modes.replica, tuple(nodes), tuple(rack for rack, _ in places))
        self._arena: Arena | None = None
        self._pulse = Heartbeat.unshared("this rank has not joined yet")
        self._digest = 0
        self._held: Sequence[ArenaRemains] = ()  # by rank

    @property
    def protects(self) -> bool:
        """Whether anything is protected."""
        return bool(self.modes.names)

    @property
    def slots(self) -> int:
        """The number of slots of an arena."""
        return self._config.num_slots(self.protects)

    @property
    def smp_guards(self) -> bool:
        """Whether this node's SMP is alive and configured for this attempt."""
        # A restarted SMP, or one that has not received a new layout yet, protects other groups.
        return self._pulse.smp_alive(_SMP_SILENT_SECS) and self._pulse.smp_guards(self._digest)

    def survey(
        self, restored: SnapshotId | None, rebuilt: bool = False
    ) -> tuple[SnapshotId | None, SnapshotId | None]:
        """The snapshots of an earlier attempt that all ranks have in their arenas; see ``in_all_arenas``."""
        return in_all_arenas(self._held, restored, rebuilt)

    def arrange(self, arena: Arena, coming_bytes: int, slots: int) -> None:
        """Set up protection for rebuilt arenas: groups, memory, this node's SMP and its peers.

        ``coming_bytes``: memory that slots of this node will take in addition to old arenas. ``slots``: the number
        of slots of a complete arena.

        Raises:
            ConfigError: invalid modes, groups, secret or address; on all ranks together.
        """
        self._arena = arena  # first: whatever fails below, marks must go to the arena in use
        told = gather_all(self._group, lambda: self.report(arena.image, arena.path.name, arena), RankReport)
        # Training runs: protection for which there is no room waits.
        joined = together(self._group, lambda: self.join(arena, told, coming_bytes, slots, lacking=True))
        # Together, too: if one rank alone stopped protection, its votes would differ from the others'.
        together(self._group, lambda: self.begin(arena, joined))

    def report(self, image: SlotImage, name: str, existing: Arena | None) -> RankReport:
        """Report this rank's arena, ``name``, which need not exist yet, and its SMP to the other ranks.

        Raises:
            ConfigError: the secret cannot be used, or no address can be found.
        """
        holding = image.holding(self._topology.me.node, self._config.rack, name)
        held = ArenaRemains()
        if existing is not None:
            held = ArenaRemains(existing.control.protected(), tuple(existing.snapshots()))
        return RankReport(holding, held, self.smp.offer_secret(), self.smp.report())

    def join(
        self, arena: Arena, ranks: Sequence[RankReport], coming_bytes: int, slots: int, lacking: bool
    ) -> JoinedNodes:
        """Compute the parity groups from the reports of all ``ranks``, and check them; raises as ``arrange``.

        Raises:
            MemoryBudgetError: the node has no room for parity and packages, and ``lacking`` does not permit that.
        """
        self._arena, node, node_dir = arena, self._topology.me.node, arena.path.parent
        self._held = [rank.held for rank in ranks]
        self._open_pulse(node_dir)
        self.smp.agree_on_secret([rank.secret for rank in ranks])
        holdings = [rank.holding for rank in ranks]
        in_slots = slot_groups(holdings)
        # Resolved again: only the arenas show whether replica sets span nodes.
        self.modes = self.resolve(spans_nodes=bool(in_slots), lessens=True)
        arrangement, received_bytes = Arrangement.of(holdings, in_slots, self.modes), 0
        if self._topology.is_node_leader:  # once per node
            received_bytes = self._check(arrangement, node_dir, coming_bytes, slots, lacking).network[node]
        return JoinedNodes(arrangement, [rank.smp for rank in ranks], received_bytes)

    def begin(self, arena: Arena, joined: JoinedNodes) -> None:
        """Configure this node's SMP with the groups that ``join`` computed on all ranks."""
        arrangement, nbytes = joined.arrangement, joined.received_bytes
        packages = arrangement.packages_on(self._topology.me.node)
        self._digest = self.smp.configure(
            arena.path.parent, joined.reports, arrangement.holdings, arrangement.groups, packages,
            modes=self.modes.names, received_bytes=nbytes,
        )  # fmt: skip
        self._report_network(nbytes)

    def _open_pulse(self, node_dir: Path) -> None:
        if self._pulse.problem is None:
            return  # a new layout of the same ranks keeps their places in the file
        local = self._topology.ranks_on(self._topology.me.node)
        self._pulse = Heartbeat.open(node_dir, local.index(self._topology.rank), self._topology.rank)
        if self._pulse.problem is not None:
            self._events.emit("smp_error", error=self._pulse.problem)
        if self._topology.is_node_leader:
            self._pulse.forget_others(len(local))

    def mark(self, marks: UpdateTargets) -> None:
        """Publish the targets in the arena, for the SMP and other readers."""
        if self._arena is not None:
            self._arena.control.mark_protected(marks.protected)
            self._arena.control.mark_target(marks.target)
            self._arena.control.mark_flush(marks.flush)

    def beat(self, iteration: int, phase: str) -> None:
        """Write a heartbeat for the SMP and ``ftckpt status``; takes microseconds."""
        self._pulse.beat(iteration, phase)

    def report_copying(self, copying: bool) -> None:
        """Publish whether this rank copies now: the SMP then leaves CPU and memory bandwidth to it. Thread-safe."""
        self._pulse.tell_copying(copying)

    def publish_counts(self, counts: Sequence[int]) -> None:
        """Publish this rank's counters, for monitoring."""
        self._pulse.tell_counts(counts)

    def observe(self, target: SnapshotId | None) -> ProtectionStatus:
        """The state of the node's SMP, and of the target's protection."""
        if self._arena is None:
            return ProtectionStatus()
        try:
            slot = self._arena.find(target)
            check = self._arena.check(slot) if slot is not None else None
            configured = self._pulse.smp_guards(self._digest)
            return ProtectionStatus(
                alive=self._pulse.smp_alive(_SMP_SILENT_SECS),
                configured=configured,
                sealed=slot is not None,
                covered=check is not None and check.state == CheckState.ENCODED,
                gave_up=configured and target is not None and self._pulse.smp_cannot(target.iteration),
                rests=self._pulse.smp_rests(),
                wait_secs=self._pulse.smp_wait_secs() if configured else 0.0,
            )
        except Exception as error:  # noqa: BLE001 - promise 4: training continues whatever protection does
            self._events.emit("smp_error", error=repr(error))
            return ProtectionStatus()

    def observe_flush(self, snapshot: SnapshotId | None) -> FlushStatus:
        """The state of the node's SMP, and of its flush of ``snapshot``."""
        if self._arena is None or not self._config.persist:
            return NO_FLUSH
        try:
            ready = self.smp_guards
            sealed = self._arena.find(snapshot) is not None
            # An SMP that is not configured for this attempt yet still reports on an earlier one.
            knows = snapshot is not None and self._pulse.smp_guards(self._digest)
            state = self._pulse.flush_state(snapshot) if snapshot is not None and knows else FlushState.NONE
            if state == FlushState.CANNOT and not self._topology.is_node_leader:
                state = FlushState.WORKING  # left to the leader, which alone can ask the SMP for the reason
            return FlushStatus(ready, sealed, state)
        except Exception as error:  # noqa: BLE001 - promise 4: training continues whatever storage does
            self._events.emit("smp_error", error=repr(error))
            return NO_FLUSH

    def close(self) -> None:
        """End this rank's part; the SMP keeps running."""
        self.smp.release()
        self._pulse.leave()

    def _first_modes(self, spans_nodes: bool) -> Modes:
        """Resolve the modes as far as possible before arenas exist, and check that there are enough slots."""
        modes = self.resolve(spans_nodes)
        require_slots(self._config, modes)
        return modes

    def resolve(self, spans_nodes: bool, lessens: bool = False) -> Modes:
        """Resolve ``protect`` into modes. With ``layouts``, impossible ones are dropped: the job may be smaller.

        ``lessens``: also drop an impossible one of several modes. Replicas may diverge in training, and then no slot
        shares a part with another rank's; the other modes stay.
        """
        config, nodes = self._config, [member.node for member in self._topology.members]
        peer: dict[str, Any] = {"peer_losses": config.peer_losses, "peer_group": config.peer_group}
        if config.layouts or lessens:
            modes, left_out = possible_modes(config.protect, nodes, spans_nodes, **peer)
            if left_out and not (modes.names or config.layouts):
                raise ConfigError(left_out[0])
            self._report_less(left_out)
        else:
            modes = resolve_modes(config.protect, nodes, spans_nodes, **peer)
        return modes

    def _report_less(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason not in self._reasons:
                self._reasons.add(reason)
                self._events.emit("protection_lessened", reason=reason)

    def _check(
        self, arrangement: Arrangement, node_dir: Path, coming_bytes: int, slots: int, lacking: bool
    ) -> ProtectionTable:
        """Log the protection and its costs, which are returned. Raises if the node has no room for it, unless
        ``lacking``."""
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
        """The consequences of no protection, as a sentence."""
        left = (
            "the newest snapshot on storage"
            if self._config.persist
            else "the checkpoint that the script itself loads, if any"
        )
        return (
            "protection: none: snapshots survive dead processes, but the loss of a node, or of one rank's memory, "
            f"loses them all, and a restart resumes from {left}; protection needs three ranks per node, or two nodes"
        )

    @property
    def _often(self) -> str:
        """How often snapshots are protected, as a phrase."""
        config = self._config
        if config.protect_interval != "auto":
            return f"every {config.protect_interval} snapshot(s)"
        share = f"{config.smp_cores:g} of a node's idle cores allows" if config.smp_cores else "possible"
        return f"as often as {share}, at least every {MAX_REST_SECS:.0f} s"

    def _report_network(self, nbytes: int) -> None:
        """Log the network load of a snapshot, of which this node receives ``nbytes``; warn if it takes too long."""
        limit = self.smp.network
        if limit is None or nbytes == 0:
            return
        secs, nodes = limit.secs(nbytes), len({member.node for member in self._topology.members})
        self._events.announce(f"protection: network: {limit}; a snapshot needs {human(nbytes)}: {secs:.1f} s or more")
        if fault := limit.too_slow(nbytes, mtbf_secs(self._config.mtbf, nodes)):
            reason = f"{fault[0]}: {limit}; {fault[1]} suffices"
            self._events.emit("protection_slow", secs=round(secs, 1), reason=reason)

    def _require_room(self, account: MemoryNeeds, coming_bytes: int, node_dir: Path, lacking: bool) -> None:
        need_bytes = account.later_bytes
        reason = refusal(node_dir, need_bytes, PATIENCE_SECS)
        if reason and not lacking:
            raise MemoryBudgetError(
                f"no room for parity and packages (protect: {','.join(self.modes.names)}): {reason}; "
                "or reduce protection (--ftckpt-protect)"
            )
        # The amount that was checked above is not checked again.
        now_bytes = account.now_bytes + coming_bytes
        if not reason and account.now_bytes and now_bytes > need_bytes:
            need_bytes, reason = now_bytes, refusal(node_dir, now_bytes)
        if reason:
            self._events.emit("protection_waits", need_bytes=need_bytes, reason=reason)
