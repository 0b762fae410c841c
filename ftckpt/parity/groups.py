"""Parity groups: the arenas whose chunks protect each other. Pure data, equal on every rank.

A group's blocks are computed stripe by stripe (``stripes.py``). Its mode determines who computes them and where they
are stored: for ``node`` and ``peer`` in parity files, for ``replica`` and ``copy`` in a section of the holder's slot.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import xxhash

from ftckpt.parity.holding import ArenaLayout, HoldingSection, pack_lengths, unpack_lengths
from ftckpt.parity.modes import MOST_ARENAS, MOST_MEMBERS, TRAITS, Modes, ModeTraits

T = TypeVar("T")


def spread(members: Sequence[T], domain: Callable[[T], str], most: int = 0, least: int = 2) -> list[list[T]]:
    """Partition ``members`` into groups of similar size whose members are all in different domains.

    Groups have at most ``most`` members (0: no limit), or more if a group would otherwise have fewer than ``least``.
    If domains are equally large, the k-th members of each form a group. Groups of one remain only if one domain has
    more members than all others together.
    """
    sizes = Counter(map(domain, members))
    if not sizes:
        return []
    # Ordered by first appearance, not by hash: all ranks must compute the same groups.
    order = {name: place for place, name in enumerate(sizes)}
    ordered = sorted(members, key=lambda member: order[domain(member)])
    # Round-robin over at least as many groups as the largest domain has members: no group gets two of a domain.
    largest = max(sizes.values())
    num = max(largest, -(-len(ordered) // most) if most else 1)
    if len(ordered) // num < least:
        # ``least`` overrides ``most``: a group must have more members than it may lose.
        num = max(largest, len(ordered) // least, 1)
    return [ordered[place::num] for place in range(num)]


def apart(
    members: Sequence[T], node_of: Callable[[T], str], rack_of: Callable[[T], str], most: int, least: int = 2
) -> list[list[T]]:
    """Partition like ``spread``, over racks if the members are in two or more, otherwise over nodes.

    Members that would be alone because other racks are used up are grouped over nodes: such a group survives the
    loss of a node, not of a rack.
    """
    if len({rack_of(member) for member in members} - {""}) < 2:
        return spread(members, node_of, most, least)
    groups = spread(members, lambda member: rack_of(member) or f"node {node_of(member)}", most, least)
    alone = [group[0] for group in groups if len(group) == 1]
    return [group for group in groups if len(group) > 1] + spread(alone, node_of, most, least)


def replica_partition(
    ranks: Sequence[int], node_of: Callable[[int], str], rack_of: Callable[[int], str], most: int = MOST_MEMBERS
) -> list[tuple[int, ...]]:
    """Partition a replica set into groups whose ranks are on different nodes, and in different racks if possible.

    Every rank is in exactly one tuple. The share of a rank that is alone in its tuple is not protected.
    """
    return [tuple(group) for group in apart(sorted(ranks), node_of, rack_of, most)]


def mirror_nodes(
    nodes: Sequence[str], copies: int, racks: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """Node → the ``copies`` nodes that mirror its packages: the next ones in cyclic order, other racks first.

    With racks of equal size the load is about equal.
    """
    of_rack: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        # A node without a rack label counts as a rack of its own.
        of_rack.setdefault((racks or {}).get(node, "") or f"/{place}", []).append(place)
    keepers: dict[str, tuple[str, ...]] = {}
    for own in of_rack.values():
        # Number of nodes of other racks before each node of this rack: it maps n to the n-th of the others.
        others_before = [place - index for index, place in enumerate(own)]
        others = len(nodes) - len(own)
        for index, place in enumerate(own):
            # Start at the node's own position in ``nodes``, modulo the others: nodes of one rack start at different
            # nodes of other racks. A common start would send all packages of the rack to the same nodes.
            far = [(place + turn) % others for turn in range(min(copies, others))]
            near = (own[index + 1 :] + own[:index])[: copies - len(far)]
            places = [*(number + bisect_right(others_before, number) for number in far), *near]
            keepers[nodes[place]] = tuple(nodes[keeper] for keeper in places)
    return keepers


SLOT_MODES = tuple(mode for mode, traits in TRAITS.items() if traits.in_slots)
"""Modes whose blocks are stored in slots."""

_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class Member:
    """One arena's part in a group: ``lengths`` are the bytes of its chunks ``first``, ``first + 1``, …

    ``arena`` is the name of its directory. ``blocks`` is the chunk of its slot that is its block 0; -1: it has no
    blocks in its slot.
    """

    shard: str
    node: str
    arena: str
    first: int
    lengths: tuple[int, ...]
    blocks: int = -1


@dataclass(frozen=True)
class ParityGroup:
    """Arenas whose chunks are protected by common parity blocks against the loss of any ``losses`` arenas.

    ``name``, 16 hex digits, is a digest of the other fields, or, if blocks are in slots, the name in the slots'
    sections. No chunk is longer than ``chunk_bytes``. The order of ``members`` is part of the geometry.

    Raises:
        ValueError: an impossible group: fewer than two members, a duplicate shard, as many losses as members, ….
    """

    name: str
    mode: str
    losses: int
    chunk_bytes: int
    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"parity group: name {self.name!r} is not 16 hex digits")
        if self.mode not in TRAITS:
            raise ValueError(f"parity group {self.name}: unknown mode {self.mode!r}")
        if len(self.members) < 2 or len(self.places) < len(self.members):
            raise ValueError(f"parity group {self.name}: needs two members or more, each of another shard")
        if not 1 <= self.losses < len(self.members) or (self.mode != "peer" and self.losses != 1):
            raise ValueError(
                f"parity group {self.name}: {self.mode} over {len(self.members)} members cannot survive "
                f"{self.losses} losses"
            )
        for member in self.members:
            # A member may have blocks but no chunks; the substitute still checks that chunk_bytes is positive.
            if not all(0 < nbytes <= self.chunk_bytes for nbytes in (member.lengths or (self.chunk_bytes,))):
                raise ValueError(f"parity group {self.name}: a chunk of {member.shard} is empty or too long")
            if member.first < 0 or member.blocks < -1:
                raise ValueError(f"parity group {self.name}: {member.shard} has a negative chunk")

    @classmethod
    def of(cls, mode: str, losses: int, chunk_bytes: int, members: Sequence[Member]) -> ParityGroup:
        """Create a group named by the digest of its contents."""
        body = [mode, _code(mode, losses), losses, chunk_bytes, [_member_json(member) for member in members]]
        return cls(_digest(body, 16), mode, losses, chunk_bytes, tuple(members))

    @property
    def code(self) -> str:
        """How blocks are computed: ``xor``, ``mirror`` (XOR of a single chunk) or ``rs`` (Reed-Solomon)."""
        return _code(self.mode, self.losses)

    @cached_property
    def places(self) -> dict[str, int]:
        """Shard → its index in ``members``."""
        return {member.shard: index for index, member in enumerate(self.members)}

    @property
    def in_slots(self) -> bool:
        """Whether blocks are stored as chunks of the holders' slots."""
        return self.traits.in_slots

    @property
    def traits(self) -> ModeTraits:
        """The traits of its mode."""
        return TRAITS[self.mode]

    @cached_property
    def chunk_ends(self) -> tuple[int, ...]:
        """Running sums of the members' chunk counts."""
        ends, end = [], 0
        for member in self.members:
            end += len(member.lengths)
            ends.append(end)
        return tuple(ends)

    def to_json(self) -> dict[str, Any]:
        """A JSON value for ``from_json``."""
        return {
            "name": self.name,
            "mode": self.mode,
            "code": self.code,
            "losses": self.losses,
            "chunk_bytes": self.chunk_bytes,
            "members": [_member_json(member) for member in self.members],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ParityGroup:
        """Inverse of ``to_json``; raises ValueError for anything else."""
        try:
            members = tuple(
                Member(str(shard), str(node), str(arena), int(first), unpack_lengths(lengths), int(blocks))
                for shard, node, arena, first, lengths, blocks in value["members"]
            )
            name, mode, code = str(value["name"]), str(value["mode"]), str(value["code"])
            group = cls(name, mode, int(value["losses"]), int(value["chunk_bytes"]), members)
            if code != group.code:
                raise ValueError(f"code {code!r} of mode {mode}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a parity group: {error}") from None
        # Names of groups in slots come from the slots' sections, which do not contain nodes: they are no such digest.
        if not group.in_slots and group.name != cls.of(mode, group.losses, group.chunk_bytes, members).name:
            raise ValueError(f"not a parity group: {name} is not the digest of its contents")
        return group


def node_groups(holdings: Iterable[ArenaLayout]) -> list[ParityGroup]:
    """XOR groups over all chunks of the arenas of each node with two arenas or more.

    The arenas of a node form one group, or several of similar size with at most ``MOST_ARENAS`` members.
    """
    on: dict[str, list[ArenaLayout]] = {}
    for holding in sorted(holdings, key=lambda h: (h.node, h.shard)):
        on.setdefault(holding.node, []).append(holding)
    groups = []
    for arenas in on.values():
        num = -(-len(arenas) // MOST_ARENAS)
        for own in (arenas[len(arenas) * i // num : len(arenas) * (i + 1) // num] for i in range(num)):
            if len(own) > 1:
                members = [Member(h.shard, h.node, h.arena, 0, h.lengths) for h in own]
                groups.append(ParityGroup.of("node", 1, max(h.chunk_bytes for h in own), members))
    return groups


def peer_groups(holdings: Iterable[ArenaLayout], modes: Modes) -> list[ParityGroup]:
    """Groups over nodes, for the chunks that no group with blocks in slots protects.

    Members are on different nodes, in different racks if nodes have rack labels. The largest arenas of each node are
    grouped together, then the next: parity is as large as the longest member. Arenas in no group are not protected.
    """
    if not modes.peer:
        return []
    on: dict[str, list[ArenaLayout]] = {}
    for holding in sorted(holdings, key=lambda h: (h.node, -sum(h.private), h.shard)):
        on.setdefault(holding.node, []).append(holding)
    racks = {node: own[0].rack for node, own in on.items()}
    most = modes.peer_group or MOST_MEMBERS
    groups = []
    for nodes in apart(list(on), lambda node: node, racks.__getitem__, most, modes.peer_losses + 1):
        for own in spread([holding for node in nodes for holding in on[node]], lambda h: h.node):
            if len(own) > 1 and any(holding.private for holding in own):
                # If nodes differ in their number of arenas, a group may be smaller than requested.
                losses = min(modes.peer_losses, len(own) - 1)
                members = [Member(h.shard, h.node, h.arena, 0, h.private) for h in own]
                chunk_bytes = max(holding.chunk_bytes for holding in own)
                groups.append(ParityGroup.of("peer", losses, chunk_bytes, members))
    return groups


def slot_group_name(mode: str, shards: Iterable[str], replica_set: Iterable[str]) -> str:
    """Name of a group with blocks in slots; ``shards`` are its members, a subset of the shards ``replica_set``.

    The first half is a digest of mode and members, by which a reader checks that it has all members. Every member
    must have a section of the group, if only one for blocks.
    """
    return _digest([mode, sorted(shards)], 8) + _set_digest(tuple(replica_set))


@lru_cache(maxsize=4)  # the many groups of a large set are named consecutively
def _set_digest(replica_set: tuple[str, ...]) -> str:
    return _digest(sorted(replica_set), 8)


def slot_group(name: str, mode: str, chunk_bytes: int, members: Iterable[Member]) -> ParityGroup:
    """A group with blocks in slots, members ordered by shard."""
    return ParityGroup(name, mode, 1, chunk_bytes, tuple(sorted(members, key=lambda member: member.shard)))


def slot_groups(holdings: Iterable[ArenaLayout]) -> list[ParityGroup]:
    """The groups named in the slots' sections, sorted by name; groups with a missing member are omitted."""
    members_of: dict[str, dict[str, Member]] = {}
    mode_of: dict[str, str] = {}
    chunk_bytes: dict[str, int] = {}
    for holding in holdings:
        for name in dict.fromkeys(section.group for section in holding.sections if section.group):
            own = [section for section in holding.sections if section.group == name]
            # A member may have blocks but no share: there can be fewer shares than members.
            data = next((s for s in own if s.kind == "shared"), HoldingSection("shared", name, "", 0, ()))
            stored = next((s for s in own if s.kind in ("parity", "copy")), None)
            if stored is not None:
                mode_of[name] = "replica" if stored.kind == "parity" else "copy"
            blocks = -1 if stored is None else stored.first
            member = Member(holding.shard, holding.node, holding.arena, data.first, data.lengths, blocks)
            members_of.setdefault(name, {})[holding.shard] = member
            chunk_bytes[name] = max(chunk_bytes.get(name, 1), holding.chunk_bytes)
    return [
        slot_group(name, mode_of[name], chunk_bytes[name], members.values())
        for name, members in sorted(members_of.items())
        # The first half of the name is a digest of all members: it differs if one is missing.
        if name in mode_of and len(members) > 1 and name[:8] == _digest([mode_of[name], sorted(members)], 8)
    ]


def mirrors(holdings: Iterable[ArenaLayout], modes: Modes) -> dict[str, tuple[str, ...]]:
    """Shard → the nodes that keep its package, its own node first."""
    arenas = list(holdings)
    racks = {holding.node: holding.rack for holding in arenas}
    others = mirror_nodes(sorted(racks), modes.mirror_copies, racks)
    return {holding.shard: (holding.node, *others[holding.node]) for holding in arenas}


def _code(mode: str, losses: int) -> str:
    return "mirror" if mode == "copy" else "xor" if losses == 1 else "rs"


def _member_json(member: Member) -> list[Any]:
    lengths = pack_lengths(member.lengths)
    return [member.shard, member.node, member.arena, member.first, lengths, member.blocks]


def _digest(value: Any, digits: int) -> str:
    text = json.dumps(value, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())[:digits]
