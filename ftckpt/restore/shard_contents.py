"""Contents of the selected slots, as all ranks must know them, and the fragments that this rank needs of them.

On another layout the functions are the same, with other data. A rank that continues a shard (``own``) reads that
shard's private fragments. If no rank continues a shard, fragments private to shards are read from any of them, if all
agree, and ``local/`` ones stay as they were built.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from ftckpt.array_types import Buffer, Hashes
from ftckpt.errors import MismatchError
from ftckpt.memory.image import SlotImage
from ftckpt.memory.locations import SlotAt
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import PARITY_PREFIX
from ftckpt.model.replicas import disagreement, private_key
from ftckpt.model.text import listed
from ftckpt.model.training_state import Piece
from ftckpt.restore.tensor_index import Index, ShardEntry, encode_table, keys_of_table

LOCAL = "local/"
"""Prefix of keys that belong to one rank and mean nothing to others."""

Placed = tuple[tuple[Fragment, int], ...]
"""Fragments, and the offset of each one's first byte in its slot."""


@dataclass(frozen=True)
class SlotContents:
    """A selected slot: its place, the rank that reads it for others, and the contents that all ranks must know.

    ``objects``: the offset of its encoded objects, and their bytes. ``private``: the fragments private to the shard,
    under the keys of the model; ``table`` (see ``encode_table``) has all others.
    """

    at: SlotAt
    reader: int
    shard: str
    objects: tuple[int, int]
    padded: tuple[str, ...]
    private: Placed
    table: bytes

    @classmethod
    def of(cls, at: SlotAt, reader: int, image: SlotImage, objects_used: int) -> SlotContents:
        """The contents by the slot's image and the number of bytes of its objects."""
        manifest = image.manifest
        suffix = private_key("", manifest.shard)
        placed = list(zip(manifest.fragments, image.offsets, strict=True))
        private = tuple(
            (fragment.with_key(fragment.key.removesuffix(suffix)), offset)
            for fragment, offset in placed
            if fragment.key.endswith(suffix)
        )
        shared = [(fragment, offset) for fragment, offset in placed if not fragment.key.endswith(suffix)]
        table = encode_table([fragment for fragment, _ in shared], [offset for _, offset in shared])
        objects = (image.objects.begin, objects_used)
        return cls(at, reader, manifest.shard, objects, manifest.padded, private, table)

    @property
    def copies(self) -> Placed:
        """The fragments of ``private`` that other shards may read."""
        return tuple((fragment, offset) for fragment, offset in self.private if not fragment.key.startswith(LOCAL))

    @property
    def keys(self) -> set[str]:
        """The keys of all tensors that the slot has a part of, as in the model; parity excluded."""
        keys = keys_of_table(self.table) | {fragment.key for fragment, _ in self.private}
        return {key for key in keys if not key.startswith(PARITY_PREFIX)}

    def hashes(self, read: Callable[[int, int], Buffer]) -> Hashes:
        """The xxh3-64 of the bytes of each of ``copies``; ``read`` gives a range of the slot's bytes."""
        spans = [(offset, offset + fragment.nbytes) for fragment, offset in self.copies]
        return np.array([xxhash.xxh3_64_intdigest(read(begin, end)) for begin, end in spans], np.uint64)


def encode_contents(slots: Sequence[SlotContents]) -> bytes:
    """A message of slots: the length of a JSON text (8 bytes, little endian), the text, all tables.

    Tables are not in the text: they are most of the message, and compressed.
    """
    heads = [
        [s.shard, s.objects, s.padded, [[f.to_json(), offset] for f, offset in s.private], len(s.table)]
        for s in slots
    ]
    text = json.dumps(heads, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(slot.table for slot in slots)])


def decode_contents(data: bytes, sources: Mapping[str, SlotAt], readers: Mapping[str, int]) -> list[SlotContents]:
    """Inverse of ``encode_contents``; all ranks already know the places and readers of the slots."""
    position = 8 + int.from_bytes(data[:8], "little")
    slots = []
    for shard, (begin, used), padded, private, length in json.loads(data[8:position]):
        placed = tuple((Fragment.from_json(fragment), int(offset)) for fragment, offset in private)
        table, position = data[position : position + length], position + length
        at, objects = sources[shard], (begin, used)
        slots.append(SlotContents(at, readers[shard], shard, objects, tuple(padded), placed, table))
    return slots


def index_for(pieces: Iterable[Piece], slots: Sequence[SlotContents], own: str | None) -> Index:
    """The index of the fragments that ``pieces`` need; an entry's source is the index of one of ``slots``.

    Private fragments of the shard ``own`` have its private keys. Without ``own``, those of all shards have the
    model's keys, and of equal ones only the first is used, so that all ranks read the same.

    Raises:
        CorruptError: a table cannot be read.
    """
    keys = {piece.fragment.key for piece in pieces}
    keys |= {other for key in keys if (other := _same_bits(key)) is not None}
    index = Index(once=own is None)
    index.add_tables(
        ((place, slot.table) for place, slot in enumerate(slots)), lambda key: key if key in keys else None
    )
    for place, slot in enumerate(slots):
        if own not in (None, slot.shard):
            continue
        # A rank that continues the shard reads all its private fragments, ``local/`` too; others only ``copies``.
        for fragment, offset in slot.copies if own is None else slot.private:
            if fragment.key in keys:
                key = fragment.key if own is None else private_key(fragment.key, own)
                index.add(ShardEntry(place, fragment.with_key(key), offset))
    return index


def whole_in(
    pieces: Iterable[Piece], own: SlotContents, image: SlotImage
) -> tuple[list[tuple[Piece, Fragment, int]], list[Piece]]:
    """The ``pieces`` that the slot ``own`` has as complete fragments, and the others. ``image`` is that of ``own``.

    The first come with their fragments, as in ``needs_of``, and offsets in the slot. No source is cheaper, so they
    need no plan. On the same layout they are all pieces, except those assigned to other replicas.
    """
    private = dict(own.private)
    shared = {
        fragment.name: (fragment, offset)
        for fragment, offset in zip(image.manifest.fragments, image.offsets, strict=True)
    }
    whole: list[tuple[Piece, Fragment, int]] = []
    others: list[Piece] = []
    for piece in pieces:
        fragment = piece.fragment
        # By name, which is cached; it does not include dtype and shape, so fragments are compared below.
        there, offset = shared.get(fragment.name, (None, 0))
        if (at := private.get(fragment)) is not None:
            whole.append((piece, fragment.with_key(private_key(fragment.key, own.shard)), at))
        elif there == fragment:
            whole.append((piece, fragment, offset))
        else:
            others.append(piece)
    return whole, others


def needs_of(
    pieces: Iterable[Piece], index: Index, own: SlotContents | None, padded: frozenset[str]
) -> list[tuple[Piece, Fragment]]:
    """The fragment to read for each piece; ``own`` is the slot of the shard that this rank continues.

    A derived piece is read only if the snapshot has it, that is, if it differed from its derivation.

    Raises:
        MismatchError: the snapshot lacks a tensor of the model.
    """
    private = {fragment for fragment, _ in own.private} if own is not None else set()
    needs: list[tuple[Piece, Fragment]] = []
    for piece in pieces:
        fragment = piece.fragment
        if own is not None and fragment in private:  # private fragments are never cut
            needs.append((piece, fragment.with_key(private_key(fragment.key, own.shard))))
        elif own is None and fragment.key.startswith(LOCAL):
            continue
        elif (there := _found(piece, index, padded)) is not None:
            needs.append((piece, there))
    return needs


def unwanted(keys: Iterable[str], pieces: Iterable[Piece]) -> set[str]:
    """The ``keys`` of a snapshot from which no piece can be read."""
    wanted = {piece.fragment.key for piece in pieces}
    return {key for key in keys if key not in wanted and _same_bits(key) not in wanted}


def require_none(left: Iterable[str]) -> None:
    """Raises MismatchError if there are keys of a snapshot (``left``) that no rank reads."""
    keys = sorted(left)
    if not keys:
        return
    more = f" and {len(keys) - 1} more tensors" if len(keys) > 1 else ""
    raise MismatchError(
        f"the snapshot is of another model or optimizer: this job has no tensor for its {keys[0]}{more} (roles "
        f"{listed(sorted({key.partition('/')[0] for key in keys}))}); start with the model and the optimizer it was "
        "taken from, or give this job another name and another --ftckpt-persist ('ftckpt clean JOB' removes "
        "snapshots from memory)"
    )


def check_copies(slots: Sequence[SlotContents], hashes: Mapping[str, Hashes], needs: Iterable[Fragment]) -> None:
    """Check that private copies of a tensor, any of which may be read, have the same bits in all shards.

    ``hashes`` has ``SlotContents.hashes`` of each shard. Only keys of ``needs`` are checked.

    Raises:
        MismatchError: two shards differ; the text names the tensor and both.
    """
    keys = {need.key for need in needs}
    differing = disagreement(
        (fragment, slot.shard, content)
        for slot in slots
        for (fragment, _), content in zip(slot.copies, hashes[slot.shard].tolist(), strict=True)
        if fragment.key in keys
    )
    if differing is not None:
        fragment, one, other = differing
        raise MismatchError(
            f"{fragment.name} does not have the same bits in {one} and {other}, so it cannot be restored on another "
            "layout: start with the layout it was taken in, or load a checkpoint from storage"
        )


def _same_bits(key: str) -> str | None:
    """The key of the master of a weight, or the reverse; None for others. With one dtype both have the same bits, and
    some layouts save only one of them."""
    role, _, name = key.partition("/")
    other = {"weight": "master", "master": "weight"}.get(role)
    return f"{other}/{name}" if other is not None else None


def _found(piece: Piece, index: Index, padded: frozenset[str]) -> Fragment | None:
    """The fragment from which ``piece`` can be read; None if it is derived."""
    fragment, other = piece.fragment, _same_bits(piece.fragment.key)
    if _has(index, fragment, padded):
        return fragment
    if piece.derived_from is not None:
        return None
    if other is not None and _has(index, fragment.with_key(other), padded):
        return fragment.with_key(other)
    shapes = index.shapes(fragment.key, fragment.dtype)
    there = f" (it has {', '.join(str(list(shape)) for shape in sorted(shapes))})" if shapes else ""
    raise MismatchError(
        f"the snapshot is of another model: it has no {fragment.key} of type {fragment.dtype} and shape "
        f"{list(fragment.global_shape)}{there}; start the model it was taken from, or give this one another job name "
        "and another --ftckpt-persist ('ftckpt clean JOB' removes snapshots from memory)"
    )


def _has(index: Index, fragment: Fragment, padded: frozenset[str]) -> bool:
    shapes, shape = index.shapes(fragment.key, fragment.dtype), fragment.global_shape
    if shape in shapes:
        return True
    return fragment.key in padded and any(other[1:] == shape[1:] and len(other) == len(shape) for other in shapes)
