"""The arenas of a planned job and their protection: groups, table and sums, computed as at a real start.

Only the content of the shards is assumed, from the size of the job (``plan_job``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ftckpt.cli.plan_job import JobShape
from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.memory.ledger import require_limit
from ftckpt.memory.parity_file import parity_bytes
from ftckpt.model.replicas import equal_cuts
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
from ftckpt.parity.modes import Modes, possible_modes, require_slots, resolve_modes, ways_to_need_less
from ftckpt.parity.stripes import blocks_bytes
from ftckpt.parity.table import Memory, ProtectionTable, memory_table, network_table, protection_table

HEADER_BYTES = 64 << 10
"""The assumed size of a slot's header, which its package repeats."""

_ELEMENT_BYTES = 4


@dataclass
class _Parts:
    """The content of one rank's slot: private bytes, shares by parity group, copies and parity of other shares."""

    private: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    protecting: list[tuple[str, str, str, tuple[int, ...]]] = field(default_factory=list)


def build(job: JobShape, modes: Modes) -> list[ArenaLayout]:
    """The arena layouts of a job's ranks under these modes."""
    parts = [_Parts(job.private_bytes) for _ in range(job.ranks)]
    for ranks, nbytes in job.replica_sets.items():
        if ranks in job.small_sets:
            for rank in ranks:
                parts[rank].private += nbytes
            continue
        # Cuts fall between elements, of which there may be fewer than ranks.
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
    """Adds to each member of a parity group its share, and its blocks or copy of the other members' shares."""
    if not any(nbytes for _, nbytes in own.values()):
        return

    def blocks_of(shards: Sequence[str]) -> tuple[int, ...]:
        return _blocks(mode, job.chunk_bytes, tuple(_cut(own[shard][1], job.chunk_bytes) for shard in shards))

    shards = sorted(own)
    blocks = blocks_of(shards)
    # As at a start: with fewer elements than ranks, ranks that would store nothing are omitted.
    kept = [shard for shard, nbytes in zip(shards, blocks, strict=True) if own[shard][1] or nbytes]
    if len(kept) < len(shards):
        shards, blocks = kept, blocks_of(kept)
    name = slot_group_name(mode, shards, replica_set)
    for holder, (shard, stored) in enumerate(zip(shards, blocks, strict=True)):
        parts, nbytes = own[shard]
        if nbytes:
            parts.shared[name] = nbytes
        # Members copy each other in a ring: holder 0 has the copy of the last one's share.
        kind, of = ("parity", "") if mode == "replica" else ("copy", shards[holder - 1])
        if stored:
            parts.protecting.append((kind, name, of, _cut(stored, job.chunk_bytes)))


@lru_cache(maxsize=1024)  # most groups of a job are equal
def _blocks(mode: str, chunk_bytes: int, lengths: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The bytes of blocks that each member of a group in slots stores, from all members' chunk lengths."""
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
        # Any unique name: the arena does not exist.
        arena=shard,
        digest="",
        chunk_bytes=job.chunk_bytes,
        sections=tuple(sections),
        volatile=(first, ()),
        slot_bytes=data + job.objects_bytes + HEADER_BYTES,
        # 8: bytes of a chunk's checksum.
        package_bytes=job.objects_bytes + HEADER_BYTES + 8 * first,
    )


@lru_cache(maxsize=1024)  # most ranks of a job are equal; thousands of long tuples would exhaust memory
def _cut(nbytes: int, chunk_bytes: int) -> tuple[int, ...]:
    whole, rest = divmod(nbytes, chunk_bytes)
    return (chunk_bytes,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True)
class ProtectionPlan:
    """The arenas of a job under some modes, and the groups that protect them."""

    job: JobShape
    modes: Modes

    @cached_property
    def holdings(self) -> list[ArenaLayout]:
        return build(self.job, self.modes)

    @cached_property
    def groups(self) -> list[ParityGroup]:
        """All parity groups, in the order of a start."""
        holdings, modes = self.holdings, self.modes
        files = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes)]
        return [*files, *slot_groups(holdings)]

    @cached_property
    def mirrors(self) -> Mapping[str, Sequence[str]]:
        return mirrors(self.holdings, self.modes)

    @property
    def copied_bytes(self) -> int:
        """The most optimizer-updated state, with its parity and copies, that any rank writes per snapshot."""
        return max(sum(sum(section.lengths) for section in holding.sections) for holding in self.holdings)

    @property
    def received_bytes(self) -> int:
        """The most bytes that any node receives per protected snapshot."""
        return max(network_table(self.holdings, self.groups, self.mirrors).values())

    def table(self, slots: int) -> ProtectionTable:
        return protection_table(self.holdings, self.groups, self.mirrors, slots, parity_bytes)

    def fullest(self, slots: int) -> Memory:
        """The memory of the node that needs most, as in ``table``, without computing which losses are survived."""
        memory = memory_table(self.holdings, self.groups, self.mirrors, slots, parity_bytes)
        return max(memory.values(), key=lambda node: node.sum)


@dataclass(frozen=True)
class StartPlan:
    """The outcome of a planned job's start: its modes, slots per arena, and protection."""

    arrangement: ProtectionPlan
    slots: int
    table: ProtectionTable
    left_out: tuple[str, ...] = ()
    """Texts about requested modes that are impossible for this job."""

    @property
    def modes(self) -> Modes:
        return self.arrangement.modes


def resolved(job: JobShape, config: Config) -> tuple[Modes, tuple[str, ...]]:
    """The modes that ``config`` means for a job, and a text for each mode that a start omits.

    Raises:
        ConfigError: modes or slots that a start refuses.
    """
    nodes = list(map(job.node, range(job.ranks)))
    peer: dict[str, Any] = {"peer_losses": config.peer_losses, "peer_group": config.peer_group}
    # As at a start: first refuses modes that cannot work for any state, then omits those without use for this state.
    resolve_modes(config.protect, nodes, job.nodes > 1, **peer)
    dealt = (ranks for ranks in job.replica_sets if ranks not in job.small_sets)
    spans = any(job.node(ranks[0]) != job.node(rank) for ranks in dealt for rank in ranks)
    modes, left_out = possible_modes(config.protect, nodes, spans, **peer)
    if left_out and not modes.names:
        raise ConfigError(left_out[0])
    require_slots(config, modes)
    return modes, left_out


def plan(job: JobShape, config: Config) -> StartPlan:
    """The outcome of a start on nodes with enough memory.

    Raises:
        ConfigError: as ``resolved``.
        MemoryBudgetError: it exceeds ``memory_limit``.
    """
    modes, left_out = resolved(job, config)
    arrangement = ProtectionPlan(job, modes)
    slots = config.num_slots(bool(modes.names))
    table = arrangement.table(slots)
    node, memory = max(table.memory.items(), key=lambda one: one[1].sum)
    remedies = ways_to_need_less(config, slots, bool(modes.names))
    require_limit(config.memory_limit_bytes, node, memory.slots, memory.parity, memory.packages, remedies=remedies)
    return StartPlan(arrangement, slots, table, left_out)


def leaner(planned: StartPlan, config: Config) -> Iterator[tuple[str, ProtectionPlan, Memory]]:
    """Settings with which nodes need less memory, the plan with each, and the memory of its fullest node; those that
    survive most come first. Where only ``--ftckpt-protect`` is named, slots stay as set."""
    job, names = planned.arrangement.job, planned.modes.names
    # First without node parity: it cannot reconstruct a lost node.
    fewer = [tuple(name for name in names if name not in without) for without in _WITHOUT]
    for wanted in dict.fromkeys([names, *filter(None, fewer), *([("none",)] if names else [])]):
        arrangement, settings = planned.arrangement, list[str]()
        if wanted != names:
            protect = ",".join(wanted)
            arrangement = ProtectionPlan(job, resolved(job, replace(config, protect=protect, slots=0))[0])
            settings.append(f"--ftckpt-protect {protect}")
        least = config.least_slots(bool(arrangement.modes.names))
        if settings:
            yield settings[0], arrangement, arrangement.fullest(config.slots or least)
        if config.slots > least:
            yield " ".join([*settings, f"--ftckpt-slots {least}"]), arrangement, arrangement.fullest(least)


_WITHOUT = (("node",), ("node", "replica", "copy"), ("node", "peer"), ("replica", "copy", "peer"))
