"""Which bytes of the live state go to which bytes of a slot, cut into chunks: pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.arena.image import SlotImage
from ftckpt.state.fragment import Fragment


@dataclass(frozen=True, slots=True)
class Segment:
    """``numel`` elements of piece ``piece`` from ``start`` on, to ``nbytes`` bytes at file offset ``offset``."""

    piece: int
    start: int
    numel: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """All segments that fill one chunk of the slot; many small tensors share one chunk."""

    chunk: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of state in this chunk (its padding is not copied)."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True)
class Part:
    """What this rank copies of one of its pieces: elements ``start`` on, stored as ``fragment``."""

    piece: int
    start: int
    fragment: Fragment


def chunk_copies(image: SlotImage, parts: Sequence[Part]) -> list[ChunkCopy]:
    """One copy per chunk, in chunk order; ``parts[i]`` belongs to ``image.manifest.fragments[i]``.

    Chunks begin on page boundaries and fragments on multiples of their element, so no element is cut.
    """
    segments: list[list[Segment]] = [[] for _ in image.chunks]
    chunk = 0
    for part, offset in zip(parts, image.offsets, strict=True):
        item, done = part.fragment.item_bytes, 0
        while done < part.fragment.nbytes:
            while image.chunks[chunk].end <= offset + done:
                chunk += 1
            nbytes = min(part.fragment.nbytes - done, image.chunks[chunk].end - offset - done)
            segments[chunk].append(
                Segment(part.piece, part.start + done // item, nbytes // item, offset + done, nbytes)
            )
            done += nbytes
    return [ChunkCopy(index, tuple(found)) for index, found in enumerate(segments)]
