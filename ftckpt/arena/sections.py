"""The regions of a slot below its entries: spans, sections, and how fragments are placed in a section."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ftckpt.state.fragment import Fragment

PAGE_BYTES = 4096
"""Regions and sections begin on multiples of this."""

WIDE_BYTES = 64
"""Alignment of fragments of a page or more; smaller ones are aligned to their items."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``begin`` to ``end`` (exclusive) of a slot file."""

    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    def shifted(self, by: int) -> Span:
        """The same length, ``by`` bytes further on."""
        return Span(self.begin + by, self.end + by)

    def cut(self, nbytes: int) -> tuple[Span, ...]:
        """Pieces of ``nbytes``, the last one possibly shorter; none of an empty span."""
        return tuple(Span(at, min(at + nbytes, self.end)) for at in range(self.begin, self.end, nbytes))


@dataclass(frozen=True, slots=True)
class SectionSpan:
    """Where a section of the manifest lies: its bytes, and its chunks ``first_chunk`` on of the slot.

    ``kind``, ``group`` and ``of`` are those of ``Section``. ``span`` ends with the last byte of the last
    fragment.
    """

    kind: str
    group: str
    of: str
    span: Span
    first_chunk: int
    num_chunks: int


def _alignment(fragment: Fragment) -> int:
    """``fragment`` begins on a multiple of this, in bytes."""
    return WIDE_BYTES if fragment.nbytes >= PAGE_BYTES else fragment.item_bytes


def section_layout(fragments: Iterable[Fragment]) -> tuple[tuple[int, ...], int]:
    """Offset of each fragment from the begin of their section, and the section's length, in bytes.

    Sections begin on pages, so this is the same wherever in a slot, and in whose slot, the section lies.
    """
    offsets, end = [], 0
    for fragment in fragments:
        begin = end + -end % _alignment(fragment)
        offsets.append(begin)
        end = begin + fragment.nbytes
    return tuple(offsets), end


def gaps(spans: Sequence[Span], file_bytes: int) -> tuple[Span, ...]:
    """What lies between ``spans``, which stand in order, and behind the last of them."""
    ends = [*(span.begin for span in spans[1:]), file_bytes]
    return tuple(Span(span.end, end) for span, end in zip(spans, ends, strict=True))
