"""A snapshot's identifier: its lineage, and the iteration at whose step boundary it was taken."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import total_ordering
from typing import Any

LINEAGE_BYTES = 16
_LAYOUT = struct.Struct("<16sq")  # lineage, iteration
# One text per snapshot, without leading zeros: file names are compared as text.
_TEXT = re.compile(r"([0-9a-f]{32})\.(0|[1-9][0-9]{0,18})")
_MAX_ITERATION = (1 << 63) - 1


@total_ordering
@dataclass(frozen=True, slots=True)
class SnapshotId:
    """The snapshot of ``iteration`` in ``lineage``, 16 random bytes that all ranks agree on at their start.

    Snapshots sort by iteration. The order of two lineages at the same iteration has no meaning.

    Raises:
        ValueError: the lineage does not have 16 bytes, or the iteration is not 0 to 2**63 - 1.
    """

    lineage: bytes
    iteration: int

    NBYTES = _LAYOUT.size
    """Size of the byte form."""

    def __post_init__(self) -> None:
        if len(self.lineage) != LINEAGE_BYTES:
            raise ValueError(f"a lineage has {LINEAGE_BYTES} bytes, not {len(self.lineage)}")
        if not 0 <= self.iteration <= _MAX_ITERATION:
            raise ValueError(f"no snapshot has iteration {self.iteration}")

    def __lt__(self, other: SnapshotId) -> bool:
        return (self.iteration, self.lineage) < (other.iteration, other.lineage)

    def __str__(self) -> str:
        """The text form, valid as a file name: ``{lineage in hex}.{iteration}``."""
        return f"{self.lineage.hex()}.{self.iteration}"

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """Inverse of ``str``; raises ValueError for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:80]!r} names no snapshot")
        return cls(bytes.fromhex(match[1]), int(match[2]))

    def pack(self) -> bytes:
        """The byte form: the lineage, then the iteration as a little-endian i64."""
        return _LAYOUT.pack(self.lineage, self.iteration)

    @classmethod
    def unpack(cls, data: bytes) -> SnapshotId:
        """Inverse of ``pack``; raises ValueError for anything else."""
        if len(data) != cls.NBYTES:
            raise ValueError(f"{len(data)} bytes name no snapshot")
        return cls(*_LAYOUT.unpack(data))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of events and reports: ``iteration``, and ``lineage`` in hex."""
        return {"iteration": self.iteration, "lineage": self.lineage.hex()}
