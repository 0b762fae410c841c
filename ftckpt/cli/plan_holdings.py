"""The arenas of a job that need not run yet, and what protects them: groups, table and sums as a real start has them.

Only what ranks hold is made up, from the size of the job (``plan_job``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ftckpt.cli.plan_job import JobShape
from ftckpt.config import Config
from ftckpt.errors import ConfigError, MemoryBudgetError
from ftckpt.memory.ledger import require_limit
from ftckpt.memory.parity_file import parity_bytes
from ftckpt.model.shares import equal_cuts
from ftckpt.parity.groups import (
    Member,
    ParityGroup,
    mirrors,
    node_groups,
    peer_groups,
    replica_partition,
    slot_group,
    slot_group_name,
    slot_groups,
)
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes, lessened, possible_modes, require_slots, resolve_modes, ways_to_need_less
from ftckpt.parity.stripes import blocks_bytes
from ftckpt.parity.table import Memory, ProtectionTable, memory_table, network_table, protection_table

HEADER_BYTES = 64 << 10
"""Assumed for the header of a slot, which its package repeats."""

_ELEMENT_BYTES = 4


@dataclass
class _Parts:
    """What one rank's slot holds: private bytes, shares under groups, then copies and parity."""

    private: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    protecting: list[tuple[str, str, str, tuple[int, ...]]] = field(default_factory=list)


def build(job: JobShape, modes: Modes) -> list[ArenaLayout]:
    """The holdings of a job under these modes, rank by rank."""
    parts = [_Parts(job.private_bytes) for _ in range(job.ranks)]
    for ranks, nbytes in job.replica_sets.items():
        if ranks in job.small_sets:
            for rank in ranks:
                parts[rank].private += nbytes
            continue
        # Between elements, of which there may be fewer than ranks.
        cuts = (equal_cuts(nbytes // _ELEMENT_BYTES, len(ranks)) * _ELEMENT_BYTES).tolist()
        share = {rank: cuts[place + 1] - cuts[place] for place, rank in enumerate(ranks)}
        replica_set = tuple(job.shards[rank] for rank in ranks)
        for group in replica_partition(ranks, job.node, job.rack):
            if not modes.replica or len(group) < 2:
                for rank in group:
                    parts[rank].private += share[rank]
                continue
            own = {job.shards[rank]: (parts[rank], share[rank]) for rank in group}
            _protect(job, modes.replica, own, replica_set)
    return [_holding(job, rank, parts[rank]) for rank in range(job.ranks)]


def _protect(job: JobShape, mode: str, own: Mapping[str, tuple[_Parts, int]], replica_set: tuple[str, ...]) -> None:
    """Have the members of a group, by their shards, keep their shares and what guards those of the others."""
    if not any(nbytes for _, nbytes in own.values()):
        return

    def blocks_of(shards: Sequence[str]) -> tuple[int, ...]:
        return _blocks(mode, job.chunk_bytes, tuple(_cut(own[shard][1], job.chunk_bytes) for shard in shards))

    shards = sorted(own)
    blocks = blocks_of(shards)
    # As a start does where there is less to share than there are ranks: who would store nothing is left out.
    kept = [shard for shard, nbytes in zip(shards, blocks, strict=True) if own[shard][1] or nbytes]
    if len(kept) < len(shards):
        shards, blocks = kept, blocks_of(kept)
    name = slot_group_name(mode, shards, replica_set)
    for holder, (shard, stored) in enumerate(zip(shards, blocks, strict=True)):
        parts, nbytes = own[shard]
        if nbytes:
            parts.shared[name] = nbytes
        # Holder 0 keeps that of the last: members copy each other in a ring.
        kind, of = ("parity", "") if mode == "replica" else ("copy", shards[holder - 1])
        if stored:
            parts.protecting.append((kind, name, of, _cut(stored, job.chunk_bytes)))


@lru_cache(maxsize=1024)  # few groups of a job differ
def _blocks(mode: str, chunk_bytes: int, lengths: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """What each member of a group in slots stores for the others, in bytes, by the lengths of all their chunks."""
    members = [Member(f"{place:06d}", "", "", 0, of_member) for place, of_member in enumerate(lengths)]
    group = slot_group("0" * 16, mode, chunk_bytes, members)
    return tuple(blocks_bytes(group, holder) for holder in range(len(lengths)))


def _holding(job: JobShape, rank: int, parts: _Parts) -> ArenaLayout:
    shard = job.shards[rank]
    wanted = [("private", "", "", _cut(parts.private, job.chunk_bytes))] if parts.private else []
    wanted += [("shared", name, "", _cut(nbytes, job.chunk_bytes)) for name, nbytes in sorted(parts.shared.items())]
    sections, first, data = [], 0, 0
    for kind, group, of, lengths in wanted + sorted(parts.protecting):
        sections.append(HoldingSection(kind, group, of, first, lengths))
        first += len(lengths)
        data += sum(lengths)
    return ArenaLayout(
        shard=shard,
        node=job.node(rank),
        rack=job.rack(rank),
        # Any name that differs between ranks will do: nothing of it exists.
        arena=shard,
        digest="",
        chunk_bytes=job.chunk_bytes,
        sections=tuple(sections),
        volatile=(first, ()),
        slot_bytes=data + job.objects_bytes + HEADER_BYTES,
        # 8 bytes for the checksum of each chunk.
        package_bytes=job.objects_bytes + HEADER_BYTES + 8 * first,
    )


@lru_cache(maxsize=1024)  # few ranks of a job differ: thousands of the longest tuples would fill memory
def _cut(nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True)
class ProtectionPlan:
    """What the ranks of a job hold under some modes, and what protects it."""

    job: JobShape
    modes: Modes

    @cached_property
    def holdings(self) -> list[ArenaLayout]:
        return build(self.job, self.modes)

    @cached_property
    def groups(self) -> list[ParityGroup]:
        """In the order of a start."""
        holdings, modes = self.holdings, self.modes
        files = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes)]
        return [*files, *slot_groups(holdings)]

    @cached_property
    def mirrors(self) -> Mapping[str, Sequence[str]]:
        return mirrors(self.holdings, self.modes)

    @property
    def copied_bytes(self) -> int:
        """What a rank copies of stepped state per snapshot, at the most."""
        return max(sum(sum(section.lengths) for section in holding.sections) for holding in self.holdings)

    @property
    def received_bytes(self) -> int:
        """What a node receives per protected snapshot, at the most."""
        return max(network_table(self.holdings, self.groups, self.mirrors).values())

    def table(self, slots: int) -> ProtectionTable:
        return protection_table(self.holdings, self.groups, self.mirrors, slots, parity_bytes)

    def fullest(self, slots: int) -> Memory:
        """The memory of the node that needs most, as ``table`` has it, without what is survived."""
        memory = memory_table(self.holdings, self.groups, self.mirrors, slots, parity_bytes)
        return max(memory.values(), key=lambda node: node.sum)


@dataclass(frozen=True)
class StartPlan:
    """How a job would start: its modes, its slots per arena, and what protects it."""

    arrangement: ProtectionPlan
    slots: int
    table: ProtectionTable
    left_out: tuple[str, ...] = ()
    """Of what ``protect`` asks for, in words: what this job cannot have."""

    @property
    def modes(self) -> Modes:
        return self.arrangement.modes


def resolved(job: JobShape, config: Config) -> tuple[Modes, tuple[str, ...]]:
    """Those that ``config`` means for a job, and a text for each thing that a start leaves out.

    Raises:
        ConfigError: modes or slots that a start refuses.
    """
    nodes = list(map(job.node, range(job.ranks)))
    asked: dict[str, Any] = {"peer_losses": config.peer_losses, "peer_group": config.peer_group}
    # As a start, which refuses what cannot work before it knows what ranks hold, and leaves out the rest behind that.
    resolve_modes(config.protect, nodes, job.nodes > 1, **asked)
    dealt = (ranks for ranks in job.replica_sets if ranks not in job.small_sets)
    spans = any(job.node(ranks[0]) != job.node(rank) for ranks in dealt for rank in ranks)
    modes, left_out = possible_modes(config.protect, nodes, spans, **asked)
    if left_out and not modes.names:
        raise ConfigError(left_out[0])
    require_slots(config, modes)
    return modes, left_out


def plan(job: JobShape, config: Config) -> StartPlan:
    """How a job would start on nodes that have as much memory as it takes.

    Raises:
        ConfigError: as ``resolved``.
        MemoryBudgetError: more than ``memory_limit`` with as few modes as can be.
    """
    modes, left_out = resolved(job, config)
    arrangement = ProtectionPlan(job, modes)
    slots = config.num_slots(bool(modes.names))
    while True:
        table = arrangement.table(slots)
        node, memory = max(table.memory.items(), key=lambda one: one[1].sum)
        try:
            remedies = ways_to_need_less(config, slots, bool(arrangement.modes.names))
            require_limit(
                config.memory_limit_bytes, node, memory.slots, memory.parity, memory.packages, remedies=remedies
            )
        except MemoryBudgetError:
            # As a start does: without a mode that nobody has named.
            fewer = lessened(arrangement.modes) if config.protect == "auto" else None
            if fewer is None:
                raise
            arrangement = ProtectionPlan(job, fewer)
        else:
            return StartPlan(arrangement, slots, table, left_out)


def leaner(planned: StartPlan, config: Config) -> Iterator[tuple[str, ProtectionPlan, Memory]]:
    """Settings with which a node needs less, what they lead to, and the fullest then; first what survives most.

    Slots that are set stay as they are where modes alone are named.
    """
    yield from _with_slots((), planned.arrangement, config)
    job, names = planned.arrangement.job, planned.modes.names
    # Without what stays inside a node first: that brings no node back.
    fewer = [tuple(name for name in names if name not in without) for without in _WITHOUT]
    for wanted in dict.fromkeys([*filter(None, fewer), ("none",)] if names else ()):
        if wanted == names:
            continue
        protect = ",".join(wanted)
        arrangement = ProtectionPlan(job, resolved(job, replace(config, protect=protect, slots=0))[0])
        least = config.slots or config.least_slots(bool(arrangement.modes.names))
        yield f"--ftckpt-protect {protect}", arrangement, arrangement.fullest(least)
        yield from _with_slots((f"--ftckpt-protect {protect}",), arrangement, config)


def _with_slots(
    beside: Sequence[str], arrangement: ProtectionPlan, config: Config
) -> Iterator[tuple[str, ProtectionPlan, Memory]]:
    """With as few slots as can be, where more are set."""
    least = config.least_slots(bool(arrangement.modes.names))
    if config.slots > least:
        yield " ".join([*beside, f"--ftckpt-slots {least}"]), arrangement, arrangement.fullest(least)


_WITHOUT = (("node",), ("node", "replica", "copy"), ("node", "peer"), ("replica", "copy", "peer"))
