"""The slots of a restart's decision: their contents, and the reads of one rank from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ftckpt.array_types import Buffer, Hashes
from ftckpt.events import Events
from ftckpt.group import Group, gather_bytes, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Fragment
from ftckpt.model.topology import Topology, first_of_each_stage
from ftckpt.model.training_state import Piece
from ftckpt.restore.decide import Decision, readers_of
from ftckpt.restore.load import Transfer, fetch, reader_for, transfers_of
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.restore.search import PendingLoad
from ftckpt.restore.tensor_index import (
    LOCAL,
    Index,
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

Needs = list[tuple[Piece, Fragment]]
"""Pieces of the live state, and the fragment that is read into each."""


class SelectedSlots:
    """The slots of one decision; none if that is None. Each rank calls ``describe``, then ``join`` with the results
    of all ranks, then the other methods.

    ``coming``: the pending load that reads the bytes; None: they are verified and read from the arenas.
    """

    def __init__(
        self, group: Group, topology: Topology, events: Events, arenas: OpenArenas, *, coming: PendingLoad | None,
        decision: Decision | None,
    ) -> None:  # fmt: skip
        self._group, self._topology, self._events, self._arenas = group, topology, events, arenas
        self._coming = coming
        self._sources: Mapping[str, SlotAt] = decision.sources if decision is not None else {}
        self._ranks: Mapping[str, int] = decision.ranks if decision is not None else {}
        self._readers = readers_of(topology, decision) if decision is not None else {}
        self._contents: Mapping[str, SlotContents] = {}

    def describe(self) -> bytes:
        """The encoded contents of the slots that this rank reads."""
        mine = [
            self._contents_of(shard, at)
            for shard, at in self._sources.items()
            if self._readers[shard] == self._group.rank
        ]
        return encode_contents(mine)

    def join(self, described: Sequence[bytes]) -> None:
        """Take the contents of all slots from the results of ``describe``, in the order of the ranks."""
        self._contents = {
            slot.shard: slot for data in described for slot in decode_contents(data, self._sources, self._readers)
        }

    @property
    def own(self) -> SlotContents | None:
        """The slot of the shard that this rank continues; None in another layout."""
        return self._contents[self._topology.me.shard] if self._ranks else None

    @property
    def capacities(self) -> list[int | None]:
        """See ``Restart.capacities``; in the order of the snapshot's ranks."""
        return [self._contents[shard].capacity for shard in self._ranks]

    def plan(self, pieces: Sequence[Piece], padded: frozenset[str]) -> tuple[Needs, list[Transfer]]:
        """The fragment that this rank reads for each piece, and the transfers. ``padded``: keys of vocabularies.

        Raises:
            MismatchError: a tensor is missing or of another shape, or this rank's slot has one that no piece reads.
        """
        own = self.own
        if own is None:
            padded = padded.union(*(slot.padded for slot in self._contents.values()))
            return self._plan_others(pieces, padded, None)
        require_none(unwanted(own.keys, pieces))
        # On the same layout a tensor padded to another size is an error: no keys are ``padded``.
        image = self._image_of(own)
        whole, others = whole_in(pieces, own, image) if image is not None else ([], pieces)
        needs, transfers = self._plan_others(others, frozenset(), own) if others else ([], [])
        mine = [(offset, piece.tensor) for piece, _, offset in whole]
        here = [fetch(own.at, self._topology.rank, *mine)] if mine else []
        return [*((piece, need) for piece, need, _ in whole), *needs], [*here, *transfers]

    def require_all_taken(self, pieces: Sequence[Piece]) -> None:
        """Check that some rank reads each tensor of a snapshot in another layout. Collective.

        Raises:
            MismatchError: no rank reads some tensor; on all ranks.
        """
        keys = sorted({key for slot in self._contents.values() for key in slot.keys if not key.startswith(LOCAL)})
        masks = gather_bytes(self._group, lambda: np.packbits(np.isin(keys, [*unwanted(keys, pieces)])).tobytes())
        left = np.bitwise_and.reduce([np.frombuffer(mask, np.uint8) for mask in masks])
        require_none(key for key, is_left in zip(keys, np.unpackbits(left), strict=False) if is_left)

    def check_copies(self, needs: Sequence[Fragment]) -> None:
        """Check that private copies of a tensor are equal in all shards before one is read for all. Collective.

        Raises:
            MismatchError: two differ; on all ranks.
        """
        mine = [slot for slot in self._contents.values() if self._reads(slot)]
        hashed = gather_bytes(
            self._group, lambda: b"".join(slot.hashes(partial(self._bytes, slot)).tobytes() for slot in mine)
        )
        hashes: dict[str, Hashes] = {}
        # One reader's hashes are in the order of the slots, which is the same on all ranks.
        position = [0] * len(hashed)
        for shard, slot in self._contents.items():
            hashes[shard] = np.frombuffer(hashed[slot.reader], np.uint64, len(slot.copies), position[slot.reader])
            position[slot.reader] += hashes[shard].nbytes
        together(self._group, lambda: check_copies(list(self._contents.values()), hashes, needs))

    def own_objects(self) -> tuple[torch.Tensor, list[Transfer]]:
        """A buffer for the encoded objects of the shard that this rank continues, and the transfer that fills it."""
        own = self.own
        if own is None:
            return host_memory(0), []
        begin, used = own.objects
        buffer = host_memory(used)
        return buffer, [fetch(own.at, reader_for(self._topology, own.at), (begin, buffer))]

    def first_objects(self) -> list[bytes]:
        """Encoded objects of the first rank of each pipeline stage, in the order of the stages. Collective."""
        firsts = [self._contents[shard] for shard in first_of_each_stage(list(self._contents))]
        mine = together(self._group, lambda: {one.shard: self._objects(one) for one in firsts if self._reads(one)})
        # A broadcast needs equal sizes on all ranks: the others pass zeros of that length.
        return [self._group.broadcast(mine.get(one.shard, bytes(one.objects[1])), one.reader) for one in firsts]

    def _contents_of(self, shard: str, at: SlotAt) -> SlotContents:
        if self._coming is not None and self._coming.slots is not None:
            file = self._coming.slots.files.get(shard)
            used, capacity = file.entry.objects_used, file.image.manifest.capacity
            return SlotContents.of(at, self._group.rank, file.image, used, capacity)
        # Image and record have their own checksums; bytes of a pending load are verified when they are read.
        arena = self._arenas.get(at.arena)
        used = arena.control.record(at.slot).objects_used
        return SlotContents.of(
            at, self._group.rank, arena.image, used, arena.manifest.capacity or arena.control.capacity()
        )

    def _plan_others(
        self, pieces: Sequence[Piece], padded: frozenset[str], own: SlotContents | None
    ) -> tuple[Needs, list[Transfer]]:
        """As ``plan``, for pieces that may be read from any slot."""
        slots = list(self._contents.values())
        index = index_for(pieces, slots, own.shard if own is not None else None)
        needs = needs_of(pieces, index, own, padded)
        self._report_padding(index, [need for _, need in needs])
        wanted = [(need, piece.tensor) for piece, need in needs]
        at = own.at if own is not None else None
        return needs, transfers_of(self._topology, index, wanted, [slot.at for slot in slots], padded=padded, own=at)

    def _image_of(self, own: SlotContents) -> SlotImage | None:
        """The image of a slot that this rank reads; None if another rank reads it."""
        if own.reader != self._group.rank:
            return None
        if self._coming is not None and self._coming.slots is not None:
            return self._coming.slots.files.get(own.shard).image
        return self._arenas.get(own.at.arena).image

    def _report_padding(self, index: Index, needs: Sequence[Fragment]) -> None:
        """Log a padded size that differs from the snapshot's: the vocabulary may be another one."""
        for need in needs:
            for shape in index.shapes(need.key, need.dtype) - {need.global_shape}:
                here = need.global_shape[0]
                self._events.announce(f"{need.key}: padded to {here} rows, {shape[0]} in the snapshot")
                return  # the others are padded alike

    def _reads(self, slot: SlotContents) -> bool:
        return slot.reader == self._group.rank

    def _objects(self, slot: SlotContents) -> bytes:
        if self._coming is not None:
            return self._coming.straight.objects(slot.shard)
        begin, used = slot.objects
        return bytes(self._bytes(slot, begin, begin + used))

    def _bytes(self, slot: SlotContents, begin: int, end: int) -> Buffer:
        if self._coming is not None:
            return self._coming.straight.read(slot.shard, begin, end)
        return self._arenas.view(slot.at)[begin:end]
