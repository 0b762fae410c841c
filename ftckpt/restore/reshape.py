"""What a job reads of a snapshot: its keys as the job knows them, in the same layout or in another one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.image import SlotImage
from ftckpt.errors import MismatchError
from ftckpt.layout.replicas import identity, private_key
from ftckpt.restore.plan import Index
from ftckpt.restore.source import Source
from ftckpt.restore.table import encode, index_of
from ftckpt.state.fragment import Fragment
from ftckpt.state.piece import Piece

LOCAL = "local/"
"""Keys that begin so belong to one rank and mean nothing in another layout."""

Hashes = npt.NDArray[np.uint64]


Places = tuple[tuple[Fragment, int], ...]
"""Fragments, and where the first byte of each lies in its slot."""


@dataclass(frozen=True)
class Held:
    """A chosen slot: where it lies, the rank that reads it for other nodes, and what all ranks hear of it.

    ``objects`` are the first byte of its encoded objects and their number. ``copies`` are its private fragments, as
    ``common`` gives them where they are for another layout. ``table`` (``ftckpt.restore.table``) has all fragments.
    """

    source: Source
    reader: int
    shard: str
    objects: tuple[int, int]
    padded: tuple[str, ...]
    copies: Places
    table: bytes

    @classmethod
    def of(cls, source: Source, reader: int, image: SlotImage, objects_used: int, *, reshaped: bool) -> Held:
        """``reshaped``: for a job of another layout, to which private keys are those of the model."""
        manifest = image.manifest
        suffix = private_key("", manifest.shard)
        places = [
            (fragment if not reshaped else common(fragment, manifest.shard), offset, fragment.key.endswith(suffix))
            for fragment, offset in zip(manifest.fragments, image.offsets, strict=True)
        ]
        known = [(fragment, offset, private) for fragment, offset, private in places if fragment is not None]
        copies = tuple((fragment, offset) for fragment, offset, private in known if private)
        table = encode([fragment for fragment, _, _ in known], [offset for _, offset, _ in known])
        objects = (image.objects.begin, objects_used)
        return cls(source, reader, manifest.shard, objects, manifest.padded, copies, table)

    def hashes(self, slot: memoryview) -> Hashes:
        """xxh3-64 of the bytes of each of ``copies``; ``slot`` are all bytes of the slot."""
        spans = [(offset, offset + fragment.nbytes) for fragment, offset in self.copies]
        return np.array([xxhash.xxh3_64_intdigest(slot[begin:end]) for begin, end in spans], np.uint64)


def common(fragment: Fragment, shard: str) -> Fragment | None:
    """What a fragment of ``shard`` is in any layout; None for what only this shard can use."""
    key = fragment.key.removesuffix(private_key("", shard))
    if key.startswith(LOCAL):
        return None
    return fragment if len(key) == len(fragment.key) else fragment.with_key(key)


def tell(held: Sequence[Held]) -> bytes:
    """A message for ``hear``: the length of a JSON text (8 bytes, little endian), the text, all tables."""
    heads = [
        [h.shard, h.objects, h.padded, [[f.to_json(), offset] for f, offset in h.copies], len(h.table)] for h in held
    ]
    text = json.dumps(heads, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *(h.table for h in held)])


def hear(data: bytes, sources: Mapping[str, Source], readers: Mapping[str, int]) -> list[Held]:
    """What ``tell`` was given."""
    position = 8 + int.from_bytes(data[:8], "little")
    found = []
    for shard, (begin, used), padded, private, length in json.loads(data[8:position]):
        copies = tuple((Fragment.from_json(fragment), int(offset)) for fragment, offset in private)
        table, position = data[position : position + length], position + length
        found.append(Held(sources[shard], readers[shard], shard, (begin, used), tuple(padded), copies, table))
    return found


def index_for(pieces: Iterable[Piece], sources: Sequence[Held], shard: str) -> Index:
    """What the snapshot holds of ``pieces`` and of private ones of ``shard``; a have's source is the index of one of
    ``sources``.

    Raises:
        CorruptError: a table that cannot be read.
    """
    keys = {piece.fragment.key for piece in pieces}
    keys |= {private_key(key, shard) for key in keys}
    return index_of(((place, held.table) for place, held in enumerate(sources)), keys.__contains__)


def needs_of(pieces: Iterable[Piece], index: Index, own: Held) -> list[tuple[Piece, Fragment]]:
    """What to read for each piece in the layout of the snapshot: this rank's own private copy where there is one.

    A derived piece is read only if the snapshot holds it, that is, if the rule did not hold then.

    Raises:
        MismatchError: the snapshot does not have a tensor of the model.
    """
    private = {fragment for fragment, _ in own.copies}
    wanted: list[tuple[Piece, Fragment]] = []
    for piece in pieces:
        mine = piece.fragment.with_key(private_key(piece.fragment.key, own.shard))
        if mine in private:  # private copies are never cut
            wanted.append((piece, mine))
        elif _wanted(piece, index, frozenset()):
            wanted.append((piece, piece.fragment))
    return wanted


def needs_across(pieces: Iterable[Piece], index: Index, padded: frozenset[str]) -> list[tuple[Piece, Fragment]]:
    """What to read for each piece from a snapshot of another layout; what belongs to one rank stays as it was built.

    Raises:
        MismatchError: the snapshot does not have a tensor of the model.
    """
    return [
        (piece, piece.fragment)
        for piece in pieces
        if not piece.fragment.key.startswith(LOCAL) and _wanted(piece, index, padded)
    ]


def check_copies(sources: Sequence[Held], hashes: Mapping[str, Hashes], needs: Iterable[Fragment]) -> None:
    """Make sure that what several shards hold for themselves, and any of them may be read for, has the same bits.

    ``hashes`` has ``Held.hashes`` of each shard. Only keys of ``needs`` are looked at.

    Raises:
        MismatchError: two shards differ; the text names the tensor and both.
    """
    keys = {need.key for need in needs}
    first: dict[bytes, tuple[int, str]] = {}
    for held in sources:
        for (fragment, _), value in zip(held.copies, hashes[held.shard].tolist(), strict=True):
            if fragment.key not in keys:
                continue
            other, shard = first.setdefault(identity(fragment), (value, held.shard))
            if value != other:
                raise MismatchError(
                    f"{fragment.name} does not have the same bits in {shard} and {held.shard}, so no other "
                    "layout can take it: start with the layout it was taken in, or load a checkpoint from storage"
                )


def _wanted(piece: Piece, index: Index, padded: frozenset[str]) -> bool:
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
