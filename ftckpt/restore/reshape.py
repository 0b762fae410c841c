"""What a job reads of a snapshot: its keys as the job knows them, in the same layout or in another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.arena.image import SlotImage
from ftckpt.errors import MismatchError
from ftckpt.layout.replicas import identity, private_key
from ftckpt.restore.plan import Have, Index
from ftckpt.restore.source import Source
from ftckpt.state.fragment import Fragment
from ftckpt.state.piece import Piece

LOCAL = "local/"
"""Keys that begin so belong to one rank and mean nothing in another layout."""

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Held:
    """A chosen slot: where it lies, the rank that reads it for other nodes, and what is in it."""

    source: Source
    reader: int
    image: SlotImage
    objects_used: int

    @property
    def shard(self) -> str:
        """The shard it is of."""
        return self.image.manifest.shard

    @property
    def places(self) -> Iterator[tuple[Fragment, int]]:
        """Each fragment, and where its first byte lies."""
        return zip(self.image.manifest.fragments, self.image.offsets, strict=True)

    def common(self, fragment: Fragment) -> Fragment | None:
        """What ``fragment`` is in any layout; None for what only this shard can use."""
        suffix = private_key("", self.shard)
        key = fragment.key.removesuffix(suffix)
        if key.startswith(LOCAL):
            return None
        return fragment if len(key) == len(fragment.key) else fragment.with_key(key)

    @cached_property
    def copies(self) -> tuple[tuple[Fragment, int], ...]:
        """Private fragments that other shards may hold too, as ``common`` gives them, and where each lies."""
        suffix = private_key("", self.shard)
        private = [place for place in self.places if place[0].key.endswith(suffix)]
        found = [(self.common(fragment), offset) for fragment, offset in private]
        return tuple((common, offset) for common, offset in found if common is not None)

    def hashes(self, slot: memoryview) -> Hashes:
        """xxh3-64 of the bytes of each of ``copies``; ``slot`` are all bytes of the slot."""
        spans = [(offset, offset + fragment.nbytes) for fragment, offset in self.copies]
        return np.array([xxhash.xxh3_64_intdigest(slot[begin:end]) for begin, end in spans], np.uint64)


def index_of(sources: Sequence[Held], reshaped: bool) -> Index:
    """All that the snapshot holds; a have's source is the index of one of ``sources``."""
    if not reshaped:
        return Index(Have(i, fragment, offset) for i, held in enumerate(sources) for fragment, offset in held.places)
    return Index(
        Have(i, common, offset)
        for i, held in enumerate(sources)
        for fragment, offset in held.places
        if (common := held.common(fragment)) is not None
    )


def needs_of(pieces: Iterable[Piece], index: Index, own: Held) -> list[tuple[Piece, Fragment]]:
    """What to read for each piece in the layout of the snapshot: this rank's own private copy where there is one.

    A derived piece is read only if the snapshot holds it, that is, if the rule did not hold then.

    Raises:
        MismatchError: the snapshot does not have a tensor of the model.
    """
    private = set(own.image.manifest.fragments)
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
