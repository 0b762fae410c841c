"""What the chosen slots offer, and what this rank needs of it.

Whether the job has the layout of the snapshot is no matter of these functions but of their data: a rank that
continues a shard (``own``) reads for itself what that shard held for itself; where no rank continues a shard, what
shards held for themselves is read from any of them, if all agree, and what belongs to one rank stays as it was built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.errors import MismatchError
from ftckpt.model.fragment import Fragment
from ftckpt.model.replicas import disagreement, private_key
from ftckpt.model.training_state import Piece
from ftckpt.restore.index import Index, Offer, encode_table
from ftckpt.restore.locations import SlotAt
from ftckpt.store.image import SlotImage

LOCAL = "local/"
"""Keys that begin so belong to one rank and mean nothing to another."""

Hashes = npt.NDArray[np.uint64]
Placed = tuple[tuple[Fragment, int], ...]
"""Fragments, and where the first byte of each lies in its slot."""


@dataclass(frozen=True)
class SlotContents:
    """A chosen slot: where it lies, the rank that reads it for other nodes, and what all ranks must know of it.

    ``objects`` are the first byte of its encoded objects and their number. ``private`` are the fragments that the
    shard holds for itself, under the keys of the model; ``table`` (``ftckpt.restore.index``) has all others.
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
        """From the slot's image, and the number of bytes that its objects take."""
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
        """Of ``private`` what means something to other shards."""
        return tuple((fragment, offset) for fragment, offset in self.private if not fragment.key.startswith(LOCAL))

    def hashes(self, slot: memoryview) -> Hashes:
        """xxh3-64 of the bytes of each of ``copies``; ``slot`` are all bytes of the slot."""
        spans = [(offset, offset + fragment.nbytes) for fragment, offset in self.copies]
        return np.array([xxhash.xxh3_64_intdigest(slot[begin:end]) for begin, end in spans], np.uint64)


def encode_contents(slots: Sequence[SlotContents]) -> bytes:
    """A message of slots: the length of a JSON text (8 bytes, little endian), the text, all tables.

    Tables are not part of the text: they are most of the message, and compressed.
    """
    heads = [
        [s.shard, s.objects, s.padded, [[f.to_json(), offset] for f, offset in s.private], len(s.table)]
        for s in slots
    ]
    text = json.dumps(heads, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(slot.table for slot in slots)])


def decode_contents(data: bytes, sources: Mapping[str, SlotAt], readers: Mapping[str, int]) -> list[SlotContents]:
    """Inverse of ``encode_contents``; all ranks know already where the slots lie and who reads them."""
    position = 8 + int.from_bytes(data[:8], "little")
    slots = []
    for shard, (begin, used), padded, private, length in json.loads(data[8:position]):
        placed = tuple((Fragment.from_json(fragment), int(offset)) for fragment, offset in private)
        table, position = data[position : position + length], position + length
        slots.append(SlotContents(sources[shard], readers[shard], shard, (begin, used), tuple(padded), placed, table))
    return slots


def index_for(pieces: Iterable[Piece], slots: Sequence[SlotContents], own: str | None) -> Index:
    """What the snapshot offers of ``pieces``; an offer's source is the index of one of ``slots``.

    What the shard ``own`` holds for itself stands there under its private keys. Without ``own``, what any shard holds
    for itself stands there under the model's.

    Raises:
        CorruptError: a table that cannot be read.
    """
    keys = {piece.fragment.key for piece in pieces}
    index = Index()
    index.add_tables(
        ((place, slot.table) for place, slot in enumerate(slots)), lambda key: key if key in keys else None
    )
    for place, slot in enumerate(slots):
        if own not in (None, slot.shard):
            continue
        for fragment, offset in slot.copies if own is None else slot.private:
            if fragment.key in keys:
                key = fragment.key if own is None else private_key(fragment.key, own)
                index.add(Offer(place, fragment.with_key(key), offset))
    return index


def needs_of(
    pieces: Iterable[Piece], index: Index, own: SlotContents | None, padded: frozenset[str]
) -> list[tuple[Piece, Fragment]]:
    """What to read for each piece; ``own`` is the shard that this rank continues.

    What is derived is read only if the snapshot holds it, that is, if the rule did not hold then.

    Raises:
        MismatchError: the snapshot does not have a tensor of the model.
    """
    private = {fragment for fragment, _ in own.private} if own is not None else set()
    needs: list[tuple[Piece, Fragment]] = []
    for piece in pieces:
        fragment = piece.fragment
        if own is not None and fragment in private:  # private fragments are never cut
            needs.append((piece, fragment.with_key(private_key(fragment.key, own.shard))))
        elif own is None and fragment.key.startswith(LOCAL):
            continue
        elif _is_there(piece, index, padded):
            needs.append((piece, fragment))
    return needs


def check_copies(slots: Sequence[SlotContents], hashes: Mapping[str, Hashes], needs: Iterable[Fragment]) -> None:
    """Make sure that what several shards hold for themselves, and any of them may be read for, has the same bits.

    ``hashes`` has ``SlotContents.hashes`` of each shard. Only keys of ``needs`` are looked at.

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
            f"{fragment.name} does not have the same bits in {one} and {other}, so no other "
            "layout can take it: start with the layout it was taken in, or load a checkpoint from storage"
        )


def _is_there(piece: Piece, index: Index, padded: frozenset[str]) -> bool:
    fragment = piece.fragment
    shapes = index.shapes(fragment.key, fragment.dtype)
    shape = fragment.global_shape
    if shape in shapes:
        return True
    if fragment.key in padded and any(other[1:] == shape[1:] and len(other) == len(shape) for other in shapes):
        return True
    if piece.derived_from is not None:
        return False
    there = f" ({', '.join(str(list(other)) for other in sorted(shapes))} is there)" if shapes else ""
    raise MismatchError(
        f"the snapshot is of another model: it has no {fragment.key} of type {fragment.dtype} and shape "
        f"{list(shape)}{there}; start the model it was taken from, or remove it with 'ftckpt clean JOB'"
    )
