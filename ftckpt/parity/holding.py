"""The layout of an arena as protection needs it: its place, and the sections and chunks of its slots."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from ftckpt.model.manifest import MAX_CHUNKS


class HoldingSection(NamedTuple):
    """A section of a slot: ``lengths`` are the bytes of its chunks ``first``, ``first + 1``, …. See ``Section``."""

    kind: str
    group: str
    of: str
    first: int
    lengths: tuple[int, ...]

    def to_json(self) -> list[Any]:
        """A JSON value for ``from_json``."""
        # As runs: all chunks of a section but the last have the same length, and there may be a million.
        return [*self[:4], pack_lengths(self.lengths)]

    @classmethod
    def from_json(cls, value: Any) -> HoldingSection:
        """Inverse of ``to_json``; raises ValueError or TypeError for anything else."""
        kind, group, of, first, runs = value
        return cls(str(kind), str(group), str(of), int(first), unpack_lengths(runs))


@dataclass(frozen=True)
class ArenaLayout:
    """The place of one arena and the layout of its slots.

    ``arena`` is the name of its directory, ``digest`` the manifest's in hex. The chunks of ``sections`` are numbered
    from 0; ``volatile`` is the number of the first chunk of mutable state and the lengths of these chunks.
    ``slot_bytes`` is the size of a slot file, ``package_bytes`` the maximum size of the shard's package.
    """

    shard: str
    node: str
    rack: str
    arena: str
    digest: str
    chunk_bytes: int
    sections: tuple[HoldingSection, ...]
    volatile: tuple[int, tuple[int, ...]]
    slot_bytes: int = 0
    package_bytes: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of every chunk of a slot, in order."""
        stepped = tuple(nbytes for section in self.sections for nbytes in section.lengths)
        return stepped + self.volatile[1]

    @property
    def private(self) -> tuple[int, ...]:
        """Bytes of the chunks that no group with blocks in slots protects; they start with chunk 0."""
        return tuple(n for section in self.sections if section.kind == "private" for n in section.lengths)


def pack_lengths(lengths: Iterable[int]) -> list[list[int]]:
    """Runs of equal lengths as [count, bytes]."""
    return [[len(list(run)), nbytes] for nbytes, run in groupby(lengths)]


def unpack_lengths(runs: Any) -> tuple[int, ...]:
    """Inverse of ``pack_lengths``; raises ValueError or TypeError for anything else."""
    pairs = [(int(count), int(nbytes)) for count, nbytes in runs]
    # Checked before the runs are expanded: a message from another node must not make an endless tuple.
    if any(count < 1 for count, _ in pairs) or sum(count for count, _ in pairs) > MAX_CHUNKS:
        raise ValueError("lengths of chunks are not runs of [count, bytes]")
    return tuple(nbytes for count, nbytes in pairs for _ in range(count))
