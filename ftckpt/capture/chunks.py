"""The mapping from bytes of the live state to chunks of a slot, and the XOR that computes parity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Fragment


class Segment(NamedTuple):
    """``numel`` elements of ``piece``, from ``start``, and their destination: ``nbytes`` bytes at file ``offset``."""

    piece: int
    start: int
    numel: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """All segments that fill one chunk of the slot; many small tensors share one chunk.

    ``xor``: segments overlap and the chunk is their XOR, zero in gaps. Otherwise they are disjoint and ascending.
    """

    chunk: int
    segments: tuple[Segment, ...]
    xor: bool = False

    @property
    def begin(self) -> int:
        """File offset of the first byte of any segment."""
        return min((segment.offset for segment in self.segments), default=0)

    @property
    def end(self) -> int:
        """File offset after the last byte of any segment."""
        return max((segment.offset + segment.nbytes for segment in self.segments), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes written to the slot (a chunk's padding is not copied)."""
        return self.end - self.begin if self.xor else sum(segment.nbytes for segment in self.segments)


class CopyPart(NamedTuple):
    """The part of a piece that this rank copies: its elements from ``start``, stored as ``fragment``.

    Parity is computed from many pieces: ``piece`` is -1, and the fragment is the XOR of ``strips``. These are sorted
    by offset, relative to the fragment's first byte.
    """

    piece: int
    start: int
    fragment: Fragment
    strips: tuple[Segment, ...] = ()


def chunk_copies(image: SlotImage, parts: Sequence[CopyPart]) -> list[ChunkCopy]:
    """One copy per chunk, in chunk order; ``parts[i]`` belongs to ``image.manifest.fragments[i]``.

    Chunks start on page boundaries and fragments on multiples of their element size, so no element is cut.
    """
    segments: list[list[Segment]] = [[] for _ in image.chunks]
    ends = [span.end for span in image.chunks]
    chunk = 0
    for part, offset in zip(parts, image.offsets, strict=True):
        whole = (part.piece, part.start, part.fragment.numel, 0, part.fragment.nbytes)
        for piece, first, numel, inside, nbytes in part.strips or (whole,):
            start, at, end = first, offset + inside, offset + inside + nbytes
            # Bytes per element of the piece that is read: a parity fragment is uint8 whatever its pieces are.
            item = nbytes // max(numel, 1)
            while at < end:
                # Fragments are sorted by file offset, so ``chunk`` only grows.
                while ends[chunk] <= at:
                    chunk += 1
                stop = min(end, ends[chunk])
                count = (stop - at) // item
                segments[chunk].append(Segment(piece, start, count, at, stop - at))
                start, at = start + count, stop
    return [ChunkCopy(index, tuple(own), _overlap(own)) for index, own in enumerate(segments)]


def _overlap(segments: Sequence[Segment]) -> bool:
    """Whether segments, sorted by offset, overlap."""
    return any(before.offset + before.nbytes > after.offset for before, after in pairwise(segments))


def divided(copy: ChunkCopy, nbytes: int) -> ChunkCopy:
    """Splits segments at file offsets that are multiples of ``nbytes``, itself a multiple of every element size."""
    segments: list[Segment] = []
    for piece, first, numel, at, left in copy.segments:
        start, offset, rest = first, at, left
        while rest > (room := nbytes - offset % nbytes):
            count = room * numel // left
            segments.append(Segment(piece, start, count, offset, room))
            start, offset, rest = start + count, offset + room, rest - room
        segments.append(Segment(piece, start, first + numel - start, offset, rest))
    return ChunkCopy(copy.chunk, tuple(segments), copy.xor)


_WORD = torch.int64
"""Element type of the XOR where alignment allows it: an eighth as many elements as bytes."""


def combine(  # noqa: PLR0917 - the last one is optional
    tensors: Sequence[torch.Tensor],
    segments: Iterable[Segment],
    target: torch.Tensor,
    begin: int,
    end: int,
    onto: bool = False,
) -> None:
    """Computes the XOR of ``segments`` into ``target``, uint8, which holds file offsets ``begin`` to ``end``.

    The target is zeroed first, unless ``onto``. Work on a device is enqueued on the current stream.
    """
    target = target[: end - begin]
    if not onto:
        target.zero_()
    xor_onto(tensors, segments, target, begin)


def xor_onto(tensors: Sequence[torch.Tensor], segments: Iterable[Segment], target: torch.Tensor, at: int = 0) -> None:
    """XORs ``segments`` into ``target``, uint8, whose first byte is file offset ``at``."""
    for segment in segments:
        live = tensors[segment.piece].detach()[segment.start : segment.start + segment.numel].view(torch.uint8)
        place = target[segment.offset - at : segment.offset - at + segment.nbytes]
        if _in_words(live) and _in_words(place):
            live, place = live.view(_WORD), place.view(_WORD)
        place.bitwise_xor_(live)


def xor_parts(copy: ChunkCopy, nbytes: int) -> Iterator[ChunkCopy]:
    """Splits an XOR as ``divided`` does, into a copy for each part."""
    parts: dict[int, list[Segment]] = {}
    for segment in divided(copy, nbytes).segments:
        parts.setdefault(segment.offset // nbytes, []).append(segment)
    for _, segments in sorted(parts.items()):
        yield ChunkCopy(copy.chunk, tuple(segments), copy.xor)


def _in_words(data: torch.Tensor) -> bool:
    """Whether bytes can be viewed as words."""
    # torch needs the length and the offset in the storage to be multiples of a word, a device the address.
    size = _WORD.itemsize
    return data.numel() % size == data.storage_offset() % size == data.data_ptr() % size == 0
