"""The shards of a restart's decision: their contents, and the reads of one rank from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ftckpt.array_types import Buffer, Hashes
from ftckpt.group import gather_bytes, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Fragment
from ftckpt.model.topology import first_of_each_stage
from ftckpt.model.training_state import Piece
from ftckpt.restore.chunk_reads import read_range
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import readers_of
from ftckpt.restore.load import Reads, Transfer, fetch, reader_for, transfers_of
from ftckpt.restore.search import SearchResult
from ftckpt.restore.shard_contents import (
    LOCAL,
    SlotContents,
    check_copies,
    decode_contents,
    encode_contents,
    index_for,
    needs_of,
    require_none,
    unwanted,
    whole_in,
)
from ftckpt.restore.tensor_index import Index
from ftckpt.restore.verify import SlotAge

_TWICE_SHARE = 0.125
"""Maximum share of the snapshot's bytes to be read more than once, by several ranks: else it is read once, to slots,
and redistributed from memory."""

_TWICE_BYTES = 64 << 20
"""Bytes read more than once that are accepted per rank in any case: chunks are read completely."""

Needs = list[tuple[Piece, Fragment]]
"""Pieces of the live state, and the fragment that is read into each."""


class ReadEstimate(NamedTuple):
    """The planned read of one rank: its stored bytes, the stored bytes of the shards that it opens for all ranks,
    whether it opens all its sources itself, the chunks and bytes that it reads, and the ages of those shards' slots.
    """

    nbytes: int
    there_bytes: int
    is_direct: bool
    counts: dict[str, int]
    ages: tuple[SlotAge, ...] = ()


class LoadPlan(NamedTuple):
    """One rank's plan: the fragment for each piece, its reads, and their estimate.

    ``objects`` gives the encoded objects of the shard that the rank continues, once the reads are performed.
    ``ages``: the ages of the slots that it opens for all ranks, by shard."""

    needs: Needs
    reads: Reads
    estimate: ReadEstimate
    objects: Callable[[], Buffer]
    ages: Mapping[str, SlotAge]


class SelectedShards:
    """The shards of one decision; none if ``found`` is None. Each rank calls ``describe``, then ``join`` with the
    results of all ranks, then the other methods."""

    def __init__(self, context: RestoreContext, found: SearchResult | None) -> None:
        self._context = context
        self._found = found
        decision = found.decision if found is not None else None
        self._readers = readers_of(context.topology, decision) if decision is not None else {}
        self._ranks: Mapping[str, int] = decision.ranks if decision is not None else {}
        self._contents: Mapping[str, SlotContents] = {}

    @property
    def found(self) -> SearchResult:
        """The result of the search."""
        assert self._found is not None, "there is something to load"
        return self._found

    def describe(self) -> bytes:
        """The encoded contents of the shards that this rank opens."""
        if self._found is None:
            return encode_contents([])
        rank, described, found = self._context.group.rank, [], self._found
        # Image and record have their own checksums; other bytes may be verified when they are read.
        open_shard = self._context.arenas.shard if found.fetch is None else found.open_shard
        for shard, at in self._found.decision.sources.items():
            if self._readers[shard] == rank:
                source = open_shard(at)
                described.append(SlotContents.of(at, rank, source.image, source.objects_used))
        return encode_contents(described)

    def join(self, described: Sequence[bytes]) -> None:
        """Take the contents of all shards from the results of ``describe``, in the order of the ranks."""
        sources = self._found.decision.sources if self._found is not None else {}
        self._contents = {
            slot.shard: slot for data in described for slot in decode_contents(data, sources, self._readers)
        }

    @property
    def own(self) -> SlotContents | None:
        """The slot of the shard that this rank continues; None in another layout."""
        return self._contents[self._context.topology.me.shard] if self._ranks else None

    def plan(self, pieces: Sequence[Piece], padded: frozenset[str]) -> LoadPlan:
        """This rank's plan to fill ``pieces``; ``padded``: keys of vocabularies.

        Raises:
            MismatchError: a tensor is missing or of another shape, or this rank's slot has one that no piece reads.
            ArenaError, StorageError: a shard cannot be opened.
        """
        rank, found = self._context.group.rank, self.found
        needs, transfers = self._transfers(pieces, padded)
        read_objects, of_objects = self._own_objects()
        transfers += of_objects
        if found.fetch is not None:  # storage is near all ranks
            transfers = [replace(one, reader=rank) for one in transfers]
        mine = {slot.shard: slot.at for slot in self._contents.values() if self._opens(slot)}
        # Slots that are verified on the way are verified completely, by the rank that opens them for all.
        in_slots = found.fetch is None and not found.is_verified
        ages = {shard: SlotAge.of(self._context.arenas, at) for shard, at in mine.items()} if in_slots else {}
        reads = Reads.of(rank, transfers, found.open_shard, [*mine.values()] if in_slots else ())
        there = [found.open_shard(at) for at in mine.values()]
        counts = {"chunks": len(reads.chunks), "bytes": sum(chunk.nbytes for chunk in reads.chunks)}
        estimate = ReadEstimate(
            sum(chunk.stored_bytes for chunk in reads.chunks),
            sum(sum(map(source.stored_bytes, range(len(source.image.chunks)))) for source in there),
            not reads.remote, counts, tuple(ages.values()),
        )  # fmt: skip
        return LoadPlan(needs, reads, estimate, read_objects, ages)

    def require_all_taken(self, pieces: Sequence[Piece]) -> None:
        """Check that some rank reads each tensor of a snapshot in another layout. Collective.

        Raises:
            MismatchError: no rank reads some tensor; on all ranks.
        """
        keys = sorted({key for slot in self._contents.values() for key in slot.keys if not key.startswith(LOCAL)})
        group = self._context.group
        masks = gather_bytes(group, lambda: np.packbits(np.isin(keys, [*unwanted(keys, pieces)])).tobytes())
        left = np.bitwise_and.reduce([np.frombuffer(mask, np.uint8) for mask in masks])
        require_none(key for key, is_left in zip(keys, np.unpackbits(left), strict=False) if is_left)

    def check_copies(self, needs: Sequence[Fragment]) -> None:
        """Check that private copies of a tensor are equal in all shards before one is read for all. Collective.

        Raises:
            MismatchError: two differ; on all ranks.
        """
        mine = [slot for slot in self._contents.values() if self._opens(slot)]
        hashed = gather_bytes(
            self._context.group,
            lambda: b"".join(
                slot.hashes(partial(read_range, self.found.open_shard(slot.at))).tobytes() for slot in mine
            ),
        )
        hashes: dict[str, Hashes] = {}
        # One reader's hashes are in the order of the slots, which is the same on all ranks.
        position = [0] * len(hashed)
        for shard, slot in self._contents.items():
            hashes[shard] = np.frombuffer(hashed[slot.reader], np.uint64, len(slot.copies), position[slot.reader])
            position[slot.reader] += hashes[shard].nbytes
        together(self._context.group, lambda: check_copies(list(self._contents.values()), hashes, needs))

    def first_objects(self) -> list[bytes]:
        """Encoded objects of the first rank of each pipeline stage, in the order of the stages. Collective."""
        group, firsts = self._context.group, [self._contents[s] for s in first_of_each_stage(list(self._contents))]

        def read() -> dict[str, bytes]:
            return {one.shard: bytes(self.found.open_shard(one.at).objects()) for one in firsts if self._opens(one)}

        mine = together(group, read)
        # A broadcast needs equal sizes on all ranks: the others pass zeros of that length.
        return [group.broadcast(mine.get(one.shard, bytes(one.objects[1])), one.reader) for one in firsts]

    def _transfers(self, pieces: Sequence[Piece], padded: frozenset[str]) -> tuple[Needs, list[Transfer]]:
        """The fragment that this rank reads for each piece, and the transfers."""
        own = self.own
        if own is None:
            padded = padded.union(*(slot.padded for slot in self._contents.values()))
            return self._transfers_of_others(pieces, padded, None)
        require_none(unwanted(own.keys, pieces))
        # On the same layout a tensor padded to another size is an error: no keys are ``padded``.
        image = self._image_of(own)
        whole, others = whole_in(pieces, own, image) if image is not None else ([], pieces)
        needs, transfers = self._transfers_of_others(others, frozenset(), own) if others else ([], [])
        mine = [(offset, piece.tensor) for piece, _, offset in whole]
        here = [fetch(own.at, self._context.group.rank, *mine)] if mine else []
        return [*((piece, need) for piece, need, _ in whole), *needs], [*here, *transfers]

    def _transfers_of_others(
        self, pieces: Sequence[Piece], padded: frozenset[str], own: SlotContents | None
    ) -> tuple[Needs, list[Transfer]]:
        """The fragments and transfers for pieces that may be read from any slot."""
        slots = list(self._contents.values())
        index = index_for(pieces, slots, own.shard if own is not None else None)
        needs = needs_of(pieces, index, own, padded)
        self._report_padding(index, [need for _, need in needs])
        wanted = [(need, piece.tensor) for piece, need in needs]
        at, places = own.at if own is not None else None, [slot.at for slot in slots]
        return needs, transfers_of(self._context.topology, index, wanted, places, padded=padded, own=at)

    def _own_objects(self) -> tuple[Callable[[], Buffer], list[Transfer]]:
        """The function that gives the encoded objects of the shard that this rank continues, and its transfers."""
        if (own := self.own) is None:
            return bytes, []
        if self.found.fetch is not None or own.at.node == self._context.topology.me.node:
            return lambda: self.found.open_shard(own.at).objects(), []
        begin, used = own.objects
        buffer = host_memory(used)
        transfer = fetch(own.at, reader_for(self._context.topology, own.at), (begin, buffer))
        return lambda: buffer.numpy().data, [transfer]

    def _image_of(self, own: SlotContents) -> SlotImage | None:
        """The image of a slot that this rank opens; None if another rank does."""
        return self.found.open_shard(own.at).image if self._opens(own) else None

    def _report_padding(self, index: Index, needs: Sequence[Fragment]) -> None:
        """Log a padded size that differs from the snapshot's: the vocabulary may be another one."""
        for need in needs:
            for shape in index.shapes(need.key, need.dtype) - {need.global_shape}:
                here = need.global_shape[0]
                self._context.events.announce(f"{need.key}: padded to {here} rows, {shape[0]} in the snapshot")
                return  # the others are padded alike

    def _opens(self, slot: SlotContents) -> bool:
        return slot.reader == self._context.group.rank


def reads_little_twice(read_bytes: Sequence[int], there_bytes: int) -> bool:
    """Whether ranks that read ``read_bytes`` each read few of the ``there_bytes`` more than once."""
    return sum(read_bytes) - there_bytes <= max(_TWICE_BYTES * len(read_bytes), _TWICE_SHARE * there_bytes)


def fits(estimates: Sequence[ReadEstimate]) -> bool:
    """Whether all ranks can verify what they read on the way."""
    there_bytes = sum(one.there_bytes for one in estimates)
    is_direct = all(one.is_direct for one in estimates)
    return is_direct and reads_little_twice([one.nbytes for one in estimates], there_bytes)
