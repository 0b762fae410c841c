"""A rank's part of replicated state: its share, and copies or parity of other ranks' shares.

All members of a run hold all of its bytes and know the cuts. So each can compute any member's share and its position
in the section, and read the bytes from its own live replica. Nothing is exchanged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ftckpt.array_types import Array
from ftckpt.capture.chunks import CopyPart, Segment
from ftckpt.errors import ConfigError
from ftckpt.memory.image import Span, section_layout
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import Section, parity_fragment
from ftckpt.model.replica_groups import WHOLE
from ftckpt.model.replicas import ReplicaSets, own_parts, run_indices, run_share
from ftckpt.parity.groups import SLOT_MODES, Member, ParityGroup, replica_partition, slot_group, slot_group_name
from ftckpt.parity.stripes import Stripe, stripes

Pairs = list[tuple[int, Fragment]]
"""Parts of fragments, each with its fragment's index."""


@dataclass(frozen=True)
class Redundancy:
    """The protection mode of replicated state; by default none.

    ``mode`` is "" (none), "replica" (parity of other ranks' shares) or "copy" (the share of another rank).
    ``nodes[rank]`` and ``racks[rank]`` name each rank's node and rack; a rack of "" is unknown.

    Raises:
        ConfigError: unknown mode, or the numbers of nodes and racks differ.
    """

    mode: str = ""
    nodes: tuple[str, ...] = ()
    racks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode and self.mode not in SLOT_MODES:
            raise ConfigError(
                f"--ftckpt-protect: {self.mode!r} does not protect replicas; use one of {', '.join(SLOT_MODES)}"
            )
        if len(self.racks) != len(self.nodes):
            raise ConfigError(
                f"--ftckpt-protect: got {len(self.nodes)} nodes and {len(self.racks)} racks, needs one per rank"
            )

    @property
    def digest(self) -> str:
        """A hash that is equal on two ranks if and only if their values are."""
        return xxhash.xxh3_64_hexdigest(repr((self.mode, self.nodes, self.racks)).encode())

    def groups(self, members: Array) -> list[tuple[int, ...]]:
        """Members of a run that protect each other: groups of at least two ranks, all on different nodes."""
        if not self.mode or len(members) < 2:
            return []
        groups = replica_partition(members.tolist(), self.nodes.__getitem__, self.racks.__getitem__)
        return [group for group in groups if len(group) > 1]


NO_REDUNDANCY = Redundancy()


@dataclass(frozen=True)
class SlotParts:
    """One rank's copies of optimizer-updated state, in the order of its slot; no ``sections``: all is private."""

    parts: tuple[CopyPart, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Share:
    """One member's share of a run as stored in its slot; part offsets are relative to the section's start."""

    shard: str
    pairs: Pairs
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, shard: str, pairs: Pairs) -> Share:
        return cls(shard, pairs, *section_layout([part for _, part in pairs]))

    def chunks(self, chunk_bytes: int) -> tuple[int, ...]:
        return tuple(span.nbytes for span in Span(0, self.nbytes).cut(chunk_bytes))

    def strips(self, fragments: Sequence[Fragment], begin: int, end: int, at: int) -> Iterator[Segment]:
        """Segments for bytes ``begin`` to ``end`` of the section, to be placed from offset ``at`` on."""
        # From the part that contains ``begin``; -1 is an empty share.
        for place in range(max(bisect_right(self.offsets, begin) - 1, 0), len(self.pairs)):
            (index, part), offset = self.pairs[place], self.offsets[place]
            if offset >= end:
                break
            first, last = max(begin, offset), min(end, offset + part.nbytes)
            if first < last:
                # Exact: chunks and parts start at multiples of the element's size.
                item, start = part.item_bytes, part.start - fragments[index].start
                skipped, numel = (first - offset) // item, (last - first) // item
                yield Segment(index, start + skipped, numel, at + first - begin, last - first)


@dataclass(frozen=True)
class SharePlan:
    """Inputs that are equal on all ranks: every rank's shard name, the chunk size, and the mode."""

    shards: Sequence[str]
    chunk_bytes: int
    redundancy: Redundancy = NO_REDUNDANCY


def lay_out(fragments: Sequence[Fragment], sets: ReplicaSets, rank: int, job: SharePlan) -> SlotParts:
    """The parts of ``fragments`` that ``rank`` copies, in sections.

    The private section comes first: the rank's own fragments and shares of unprotected runs, in the order of
    ``fragments``. Its last parts are those that other ranks copy as well, next to each other, so that a reader who
    needs only these reads few chunks. Then follow protected shares, copies of others' shares, and parity, each sorted
    by group name.
    """
    shards = job.shards
    private = own_parts(fragments, sets, shards[rank])
    rest: dict[str, list[tuple[Section, list[CopyPart]]]] = {"shared": [], "copy": [], "parity": []}
    for run, indices in run_indices(fragments, sets).items():
        members = sets.runs[run].members
        # A rank without a replica on another node is in no group; its share is private.
        ranks = next((group for group in job.redundancy.groups(members) if rank in group), (rank,))
        places = np.searchsorted(members, ranks).tolist()
        cuts = sets.runs[run].cuts
        shares = [
            Share.of(shards[other], run_share(fragments, indices, cuts, place))
            for other, place in zip(ranks, places, strict=True)
        ]
        if len(ranks) == 1:
            private += shares[0].pairs
            continue
        replicas = Replicas(fragments, shares, [shards[other] for other in members.tolist()], job)
        for section, parts in replicas.sections(shards[rank]):
            rest[section.kind].append((section, parts))
    groups = sets.group_of.tolist()
    private.sort(key=lambda pair: (groups[pair[0]] == WHOLE, pair[0]))
    sections = [(Section("private", len(private)), _parts(fragments, private))] if private else []
    for pairs in rest.values():
        sections += sorted(pairs, key=lambda pair: pair[0].group)
    all_parts = tuple(part for _, parts in sections for part in parts)
    return SlotParts(all_parts, tuple(section for section, _ in sections) if any(rest.values()) else ())


class Replicas:
    """The shares of one group's members in one run, of which every member holds all bytes.

    ``replica_set`` names the shards of all members of the run. A member with neither a share nor blocks, as in a run
    with fewer cut units than ranks, is left out, because it stores nothing that names the group.
    """

    def __init__(
        self, fragments: Sequence[Fragment], shares: Sequence[Share], replica_set: Sequence[str], job: SharePlan
    ) -> None:
        self._fragments = fragments
        self._mode = job.redundancy.mode
        ordered = sorted(shares, key=lambda share: share.shard)
        self._group = self._group_of(ordered, replica_set, job.chunk_bytes)
        blocks = {stripe.blocks[0][0] for stripe in stripes(self._group) if stripe.length}
        # Leaving members out moves no chunk to another stripe: they come after the holder of the last stripe.
        self._shares = [share for index, share in enumerate(ordered) if share.nbytes or index in blocks]
        if 1 < len(self._shares) < len(ordered):
            self._group = self._group_of(self._shares, replica_set, job.chunk_bytes)

    def sections(self, shard: str) -> Iterator[tuple[Section, list[CopyPart]]]:
        """The non-empty sections that the rank of ``shard`` stores."""
        mine = next((index for index, share in enumerate(self._shares) if share.shard == shard), -1)
        if mine < 0:
            return
        name = self._group.name
        if self._shares[mine].pairs:
            parts = _parts(self._fragments, self._shares[mine].pairs)
            yield Section("shared", len(parts), name), parts
        own_stripes = [stripe for stripe in stripes(self._group) if stripe.blocks[0][0] == mine and stripe.length]
        if self._mode == "copy":
            for member in dict.fromkeys(stripe.data[0][0] for stripe in own_stripes):
                parts = _parts(self._fragments, self._shares[member].pairs)
                yield Section("copy", len(parts), name, self._shares[member].shard), parts
        elif own_stripes:
            yield Section("parity", 1, name), [self._parity(own_stripes)]

    def _group_of(self, shares: Sequence[Share], replica_set: Sequence[str], chunk_bytes: int) -> ParityGroup:
        name = slot_group_name(self._mode, [share.shard for share in shares], replica_set)
        # Geometry alone: the nodes of arenas are not known yet, and a group in slots does not need them.
        members = [Member(share.shard, "", share.shard, 0, share.chunks(chunk_bytes)) for share in shares]
        return slot_group(name, self._mode, chunk_bytes, members)

    def _parity(self, own_stripes: Sequence[Stripe]) -> CopyPart:
        """One fragment: block b starts at byte b * chunk_bytes and is the XOR of its stripe's chunks."""
        strips: list[Segment] = []
        size = self._group.chunk_bytes
        for stripe in own_stripes:
            begin = stripe.blocks[0][1] * size
            for member, chunk in stripe.data:
                if chunk >= 0:
                    strips += self._shares[member].strips(self._fragments, chunk * size, (chunk + 1) * size, begin)
        # As ``chunk_copies`` requires.
        strips.sort(key=lambda strip: strip.offset)
        # Blocks start at multiples of a chunk, so each has its own chunk; nothing follows the last.
        nbytes = own_stripes[-1].blocks[0][1] * size + own_stripes[-1].length
        return CopyPart(-1, 0, parity_fragment(self._group.name, nbytes), tuple(strips))


def _parts(fragments: Sequence[Fragment], pairs: Pairs) -> list[CopyPart]:
    return [CopyPart(index, part.start - fragments[index].start, part) for index, part in pairs]
