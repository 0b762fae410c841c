"""Recoverability after a loss, and the repairs: one pure function for forecasts and restarts."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ftckpt.parity.groups import ParityGroup
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.stripes import Stripe, num_blocks, stripe, stripe_of, stripe_of_block

BlockId = tuple[str, int, int]
"""Group name, member index of the holder, index of the block among the holder's blocks."""

ChunkId = tuple[str, int]
"""Shard and number of the chunk in the slot."""


@dataclass(frozen=True)
class Repair:
    """The repair of one stripe: ``lost`` chunks from its other chunks and the blocks ``use``.

    If ``use`` is empty, ``lost`` are blocks in slots, to be computed from the stripe's data.
    """

    group: ParityGroup
    stripe: Stripe
    lost: tuple[ChunkId, ...]
    use: tuple[BlockId, ...]


def solve(
    groups: Sequence[ParityGroup], lost_chunks: Set[ChunkId], lost_blocks: Container[BlockId]
) -> tuple[list[Repair], set[ChunkId]]:
    """Return repairs, each of which needs only available or previously repaired chunks, and the unrecoverable chunks.

    ``lost_blocks`` are blocks in parity files; a block in a slot is lost if and only if its chunk is. Stripes of all
    groups are solved one by one until none is solvable. For ``xor`` and ``mirror`` this recovers all lost chunks
    whenever that is possible. Equations of several ``rs`` stripes are not solved jointly.
    """
    return _Solver(groups, set(lost_chunks), lost_blocks).run()


class _Solver:
    def __init__(self, groups: Sequence[ParityGroup], lost: set[ChunkId], lost_blocks: Container[BlockId]) -> None:
        self.groups = sorted(groups, key=lambda group: group.traits.cost)
        self.lost = lost
        self.lost_blocks = lost_blocks
        self.of_shard: dict[str, list[tuple[int, int]]] = {}
        for place, group in enumerate(self.groups):
            for index, member in enumerate(group.members):
                self.of_shard.setdefault(member.shard, []).append((place, index))
        self.queue: list[tuple[int, int]] = []

    def run(self) -> tuple[list[Repair], set[ChunkId]]:
        """Process stripes, cheapest group first; each repair queues the stripes that share its chunks."""
        # A sorted list is a heap. The pairs are group and stripe; groups are in the order of their cost.
        self.queue = sorted({at for chunk in self.lost for at in self._stripes_with(chunk)})
        repairs = []
        while self.queue:
            place, index = heapq.heappop(self.queue)
            repair = self._solved(self.groups[place], index)
            # Not solvable yet, or nothing to do: repairs of stripes that share a chunk with it queue it again.
            if repair is None:
                continue
            repairs.append(repair)
            self.lost.difference_update(repair.lost)
            heapq.heappush(self.queue, (place, index))  # its blocks in slots may now be computable
            for chunk in repair.lost:
                for at in self._stripes_with(chunk):
                    heapq.heappush(self.queue, at)
        return repairs, self.lost

    def _stripes_with(self, chunk: ChunkId) -> Iterator[tuple[int, int]]:
        """Pairs of group and stripe that contain the chunk as data or as a block."""
        shard, number = chunk
        for place, index in self.of_shard.get(shard, ()):
            group = self.groups[place]
            member = group.members[index]
            if 0 <= number - member.first < len(member.lengths):
                yield place, stripe_of(group, index, number - member.first)
            elif group.in_slots and member.blocks >= 0 and 0 <= number - member.blocks < num_blocks(group, index):
                yield place, stripe_of_block(group, index, number - member.blocks)

    def _solved(self, group: ParityGroup, index: int) -> Repair | None:
        candidate = stripe(group, index)
        lost = tuple(
            chunk
            for member, offset in candidate.data
            if offset >= 0 and (chunk := _data_chunk(group, member, offset)) in self.lost
        )
        # ``gone``: blocks lost with their slot, which can be computed once all data of the stripe is available.
        # Blocks in files are not chunks of a slot, and are not repaired.
        good: list[BlockId] = []
        gone: list[ChunkId] = []
        for holder, block in candidate.blocks:
            chunk_of_block = block_chunk(group, holder, block)
            if chunk_of_block is not None and chunk_of_block in self.lost:
                gone.append(chunk_of_block)
            elif (group.name, holder, block) not in self.lost_blocks:
                good.append((group.name, holder, block))
        if lost and len(lost) <= len(good):
            return Repair(group, candidate, lost, tuple(good[: len(lost)]))
        return Repair(group, candidate, tuple(gone), ()) if gone and not lost else None


def _data_chunk(group: ParityGroup, member: int, offset: int) -> ChunkId:
    return group.members[member].shard, group.members[member].first + offset


def block_chunk(group: ParityGroup, holder: int, block: int) -> ChunkId | None:
    """The chunk of the holder's slot that is its block; None if blocks are in parity files."""
    member = group.members[holder]
    return (member.shard, member.blocks + block) if group.in_slots and member.blocks >= 0 else None


class Forecast:
    """Recoverability of one job's shards, evaluated for many losses.

    ``packages``: the nodes that keep the package of a shard, its own node among them; mutable state is restored from
    packages. A lost arena includes its parity files, a lost node its arenas and the packages on it. A shard is
    recoverable if all of its chunks are and a package is left to verify them.

    Most cases are decided on entire arenas. The others are solved chunk by chunk.
    """

    def __init__(
        self, groups: Sequence[ParityGroup], packages: Mapping[str, Sequence[str]], holdings: Iterable[ArenaLayout]
    ) -> None:
        self.packages = packages
        self.groups = list(groups)
        self.holdings = {holding.shard: holding for holding in holdings}
        self.on_node: dict[str, list[str]] = {}
        for holding in self.holdings.values():
            self.on_node.setdefault(holding.node, []).append(holding.shard)
        self.groups_of: dict[str, list[int]] = {shard: [] for shard in self.holdings}
        """Shard → indices in ``groups`` of the groups that its arena is a member of."""
        for place, group in enumerate(self.groups):
            for member in group.members:
                self.groups_of.setdefault(member.shard, []).append(place)
        self._parts = {shard: self._covers(holding) for shard, holding in self.holdings.items()}

    def survived(self, lost_shards: Set[str], lost_nodes: Set[str]) -> bool:
        """Whether all shards are recoverable after the loss of these arenas and nodes."""
        lost = self._lost(lost_shards, lost_nodes)
        return not self._bare(lost, lost_nodes) and self.recovers(lost)

    def recovers(self, lost: Sequence[str]) -> bool:
        """Whether all chunks of these lost arenas are recoverable; packages are not considered."""
        # Cheap and sufficient in most cases; only the remaining sections are solved chunk by chunk.
        left = self._left_by_arenas(lost)
        if not left:
            return True
        # Fewer lost chunks are easier to solve: if a few fail, all fail. The first chunks decide most cases. Two
        # periods of the longest group contain every arrangement of holders.
        longest = max((len(self.groups[g].members) for shard in lost for g in self.groups_of[shard]), default=0)
        return not self._unsolved(lost, 1, left) and not any(self._unsolved(lost, few) for few in (2 * longest, None))

    def unrecoverable(self, lost_shards: Set[str], lost_nodes: Set[str]) -> list[str]:
        """The unrecoverable shards after the loss of these arenas and nodes, sorted."""
        lost = self._lost(lost_shards, lost_nodes)
        bare = self._bare(lost, lost_nodes)
        return sorted(bare | self._unsolved(lost, None) if self._left_by_arenas(lost) else bare)

    def near(self, *, nodes: bool) -> dict[str, set[str]]:
        """Shard, or node → the others whose simultaneous loss may matter: those with a common group or package."""
        name = {shard: holding.node if nodes else shard for shard, holding in self.holdings.items()}
        together: dict[str, set[str]] = {of: set() for of in name.values()}
        for group in self.groups:
            members = {name[member.shard] for member in group.members if member.shard in name}
            for member in members:
                together[member] |= members
        if nodes:
            for shard, mirrors in self.packages.items():
                for node in mirrors:
                    together[name[shard]].add(node)
                    together.setdefault(node, set()).add(name[shard])
        return {of: others - {of} for of, others in together.items()}

    def _lost(self, lost_shards: Set[str], lost_nodes: Set[str]) -> list[str]:
        on_nodes = {shard for node in lost_nodes for shard in self.on_node.get(node, ())}
        return sorted(on_nodes | (lost_shards & self.holdings.keys()))

    def _bare(self, lost: Iterable[str], lost_nodes: Set[str]) -> set[str]:
        """Lost shards without a remaining package, which could not be verified after reconstruction."""
        # A shard without any package is included: the empty set is a subset of every set.
        return {shard for shard in lost if lost_nodes >= set(self.packages.get(shard, ()))}

    def _covers(self, holding: ArenaLayout) -> list[tuple[int, ...]]:
        """For each non-empty section, the groups that can reconstruct all of it."""
        parts = []
        for section in holding.sections:
            covers = []
            for place in self.groups_of[holding.shard]:
                member = self.groups[place].members[self.groups[place].places[holding.shard]]
                # Groups protect entire sections: ``node`` all, ``peer`` the private one, others one each.
                as_data = member.first <= section.first
                as_data &= section.first + len(section.lengths) <= member.first + len(member.lengths)
                if as_data or (self.groups[place].in_slots and member.blocks == section.first):
                    covers.append(place)
            if section.lengths:
                parts.append(tuple(covers))
        return parts

    def _left_by_arenas(self, lost: Sequence[str]) -> Collection[tuple[str, int]]:
        """Sections that cannot be reconstructed by groups with at most ``losses`` lost members, applied repeatedly.

        Keys are the shard and the section's index among the non-empty ones. An empty result proves recoverability. A
        non-empty one proves nothing: a group with more lost members may still solve some of its stripes.
        """
        parts = {(shard, part): covers for shard in lost for part, covers in enumerate(self._parts[shard])}
        while parts:
            # Blocks in files stay lost with their arena; blocks in slots are recovered with the slot's chunks.
            by_file = Counter(place for shard in lost for place in self.groups_of[shard])
            by_slot = Counter(place for _, place in {(at[0], g) for at, covers in parts.items() for g in covers})
            spare = {
                place
                for place in by_file
                if (by_slot if self.groups[place].in_slots else by_file)[place] <= self.groups[place].losses
            }
            left = {at: covers for at, covers in parts.items() if spare.isdisjoint(covers)}
            if len(left) == len(parts):
                break
            parts = left
        return parts

    def _unsolved(
        self, lost: Sequence[str], few: int | None, among: Collection[tuple[str, int]] | None = None
    ) -> set[str]:
        """Shards with unrecoverable chunks if only the first ``few`` chunks of each section are lost.

        None: all chunks. ``among`` limits the loss to these sections, in the format of ``_left_by_arenas``.
        """
        places = {place for shard in lost for place in self.groups_of[shard]}
        chunks = {
            (shard, section.first + chunk)
            for shard in lost
            for part, section in enumerate(s for s in self.holdings[shard].sections if s.lengths)
            if among is None or (shard, part) in among
            for chunk in range(len(section.lengths))[:few]
        }
        groups = [self.groups[place] for place in sorted(places)]
        _, unsolved = solve(groups, chunks, _BlocksOf(groups, lost))
        return {shard for shard, _ in unsolved}


class LossUnits:
    """Whether the job survives the loss of one or of two units; a unit is an arena, or all arenas of a node.

    Same result as ``Forecast.survived``, computed once per kind of unit or pair. Units of a kind have arenas of the
    same layout at the same positions of groups of the same shape; pairs of a kind also share the same of these
    groups. A job of thousands of nodes has few kinds.
    """

    def __init__(self, forecast: Forecast, *, nodes: bool) -> None:
        self._forecast = forecast
        self._nodes = nodes
        # Shapes are numbered: they are compared very often, and are long tuples.
        shapes: dict[Any, int] = {}
        self._shape_of = [shapes.setdefault(_group_shape(group), len(shapes)) for group in forecast.groups]
        self._cut_of = {shard: shapes.setdefault(_cut(own), len(shapes)) for shard, own in forecast.holdings.items()}
        arenas = {shard: [shard] for shard in forecast.holdings}
        self._shards = {node: sorted(own) for node, own in forecast.on_node.items()} if nodes else arenas
        # Unit → its groups, numbered within the unit: two units' shared groups are identified by these numbers.
        self._groups = {
            unit: {group: at for at, group in enumerate(dict.fromkeys(g for s in own for g in forecast.groups_of[s]))}
            for unit, own in self._shards.items()
        }
        kinds: dict[Any, int] = {}
        self._kind = {unit: kinds.setdefault(self._looks(unit), len(kinds)) for unit in self._shards}
        self._bare = self._alone_with_packages()
        self._known: dict[Any, bool] = {}

    @property
    def names(self) -> list[str]:
        """The names of all units, sorted."""
        return sorted(self._shards)

    def survived(self, one: str, two: str = "") -> bool:
        """Whether the job survives the loss of unit ``one``, or of both units."""
        bare = (*self._bare.get(one, ()), *self._bare.get(two, ())) if self._bare else ()
        if any(nodes <= {one, two} for nodes in bare):
            return False
        key: Any = self._kind[one]
        if two:
            other = self._groups[two]
            shared = tuple((at, other[group]) for group, at in self._groups[one].items() if group in other)
            key = key, self._kind[two], shared
        if key not in self._known:
            lost = [shard for unit in (one, two) if unit for shard in self._shards[unit]]
            self._known[key] = self._forecast.recovers(lost)
        return self._known[key]

    def _looks(self, unit: str) -> Any:
        forecast, places = self._forecast, self._groups[unit]
        arenas = tuple(
            (
                self._cut_of[shard],
                *((places[g], forecast.groups[g].places[shard]) for g in forecast.groups_of[shard]),
            )
            for shard in self._shards[unit]
        )
        return arenas, tuple(self._shape_of[place] for place in places)

    def _alone_with_packages(self) -> dict[str, list[set[str]]]:
        """Unit → the nodes with packages of its arenas, for arenas with packages on at most two nodes."""
        packages, found = self._forecast.packages, {}
        for unit, shards in self._shards.items():
            # The loss of a single arena leaves all packages, also on its own node.
            keepers = (set(packages.get(shard, ())) for shard in shards)
            if few := [nodes for nodes in keepers if not nodes or (self._nodes and len(nodes) <= 2)]:
                found[unit] = few
        return found


class _BlocksOf(Container[BlockId]):
    """The set of all blocks in parity files of the lost arenas."""

    def __init__(self, groups: Iterable[ParityGroup], lost: Iterable[str]) -> None:
        gone = set(lost)
        self._holders = {
            (group.name, index)
            for group in groups
            if not group.in_slots
            for shard, index in group.places.items()
            if shard in gone
        }

    def __contains__(self, block: object) -> bool:
        return isinstance(block, tuple) and block[:2] in self._holders


def _group_shape(group: ParityGroup) -> Any:
    cuts = tuple((member.first, len(member.lengths), member.blocks) for member in group.members)
    return group.mode, group.losses, cuts


def _cut(holding: ArenaLayout) -> Any:
    return tuple((section.first, len(section.lengths)) for section in holding.sections)
