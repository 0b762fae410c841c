"""Which bytes of the live state go to which bytes of a slot, in chunks, and the XOR that makes parity of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Fragment


class Segment(NamedTuple):
    """``numel`` elements of piece ``piece`` from ``start`` on, to ``nbytes`` bytes at file offset ``offset``."""

    piece: int
    start: int
    numel: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """All segments that fill one chunk of the slot; many small tensors share one chunk.

    ``xor``: segments overlap, and the chunk is their XOR, zero where none lies. Otherwise they follow each other.
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
        """File offset behind the last byte of any segment."""
        return max((segment.offset + segment.nbytes for segment in self.segments), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes that go to the slot (a chunk's padding is not copied)."""
        return self.end - self.begin if self.xor else sum(segment.nbytes for segment in self.segments)


class CopyPart(NamedTuple):
    """What this rank copies of one of its pieces: elements ``start`` on, stored as ``fragment``.

    Parity is of many pieces: ``piece`` is -1 and ``strips`` are the elements whose XOR it is, in the order of
    their offsets, which count from the fragment's first byte.
    """

    piece: int
    start: int
    fragment: Fragment
    strips: tuple[Segment, ...] = ()


def chunk_copies(image: SlotImage, parts: Sequence[CopyPart]) -> list[ChunkCopy]:
    """One copy per chunk, in chunk order; ``parts[i]`` belongs to ``image.manifest.fragments[i]``.

    Chunks begin on page boundaries and fragments on multiples of their element, so no element is cut.
    """
    segments: list[list[Segment]] = [[] for _ in image.chunks]
    ends = [span.end for span in image.chunks]
    chunk = 0
    for part, offset in zip(parts, image.offsets, strict=True):
        whole = (part.piece, part.start, part.fragment.numel, 0, part.fragment.nbytes)
        for piece, first, numel, inside, nbytes in part.strips or (whole,):
            start, at, end = first, offset + inside, offset + inside + nbytes
            # Bytes per element of the piece that is read. A fragment of parity is of bytes, whatever its pieces are.
            item = nbytes // max(numel, 1)
            while at < end:
                # Fragments stand in the order of the file: the chunk only ever moves on.
                while ends[chunk] <= at:
                    chunk += 1
                stop = min(end, ends[chunk])
                count = (stop - at) // item
                segments[chunk].append(Segment(piece, start, count, at, stop - at))
                start, at = start + count, stop
    return [ChunkCopy(index, tuple(own), _overlap(own)) for index, own in enumerate(segments)]


def _overlap(segments: Sequence[Segment]) -> bool:
    """Whether segments in the order of their offsets lie on one another."""
    return any(before.offset + before.nbytes > after.offset for before, after in pairwise(segments))


def divided(copy: ChunkCopy, nbytes: int) -> ChunkCopy:
    """The same bytes in segments that each lie in one block of ``nbytes``, counted from the file's first byte."""
    segments: list[Segment] = []
    for segment in copy.segments:
        rest = [segment]
        while rest:
            head, *rest = split(rest[0], (rest[0].offset // nbytes + 1) * nbytes)
            segments.append(head)
    return ChunkCopy(copy.chunk, tuple(segments), copy.xor)


def split(segment: Segment, end: int) -> list[Segment]:
    """What of a segment lies before file offset ``end``, and, if anything does, what behind; no element is cut."""
    if segment.offset + segment.nbytes <= end:
        return [segment]
    nbytes = end - segment.offset
    # Exact, since callers cut at multiples of any element's size.
    numel = nbytes * segment.numel // segment.nbytes
    head = Segment(segment.piece, segment.start, numel, segment.offset, nbytes)
    tail = Segment(segment.piece, segment.start + numel, segment.numel - numel, end, segment.nbytes - nbytes)
    return [head, tail]


_WORD = torch.int64
"""What XOR goes over where it can: an eighth as many elements as bytes."""


def combine(  # noqa: PLR0917 - the last one is optional
    tensors: Sequence[torch.Tensor],
    segments: Iterable[Segment],
    target: torch.Tensor,
    begin: int,
    end: int,
    onto: bool = False,
) -> None:
    """Make ``target``, uint8, the XOR of ``segments``: its first byte is file offset ``begin``, its last ``end - 1``.

    Zero where no segment lies, unless it goes ``onto`` what is there. On a device all of it is enqueued on the
    current stream.
    """
    target = target[: end - begin]
    if not onto:
        target.zero_()
    xor_onto(tensors, segments, target, begin)


def xor_onto(tensors: Sequence[torch.Tensor], segments: Iterable[Segment], target: torch.Tensor, at: int = 0) -> None:
    """XOR ``segments`` into ``target``, uint8, whose first byte is file offset ``at``."""
    for segment in segments:
        live = tensors[segment.piece].detach()[segment.start : segment.start + segment.numel].view(torch.uint8)
        place = target[segment.offset - at : segment.offset - at + segment.nbytes]
        if _in_words(live) and _in_words(place):
            live, place = live.view(_WORD), place.view(_WORD)
        place.bitwise_xor_(live)


def xor_parts(copy: ChunkCopy, nbytes: int) -> Iterator[ChunkCopy]:
    """The same XOR in copies that end where ``nbytes``, a multiple of any element's bytes, divides file offsets."""
    waiting = sorted(copy.segments, key=lambda segment: segment.offset)
    begin = copy.begin
    while waiting:
        end = (begin // nbytes + 1) * nbytes
        first = next((i for i, segment in enumerate(waiting) if segment.offset >= end), len(waiting))
        heads, later = [], []
        for segment in waiting[:first]:
            head, *tail = split(segment, end)
            heads.append(head)
            later += tail
        if heads:
            yield ChunkCopy(copy.chunk, tuple(heads), copy.xor)
        # In order without another sort: what was cut begins at ``end``, the others at it or behind.
        waiting = later + waiting[first:]
        begin = end


def _in_words(data: torch.Tensor) -> bool:
    """True if bytes can be read as words: a device must not read across its words."""
    # torch wants length and offset in the storage to be multiples of a word; the address is for the device.
    size = _WORD.itemsize
    return data.numel() % size == data.storage_offset() % size == data.data_ptr() % size == 0
