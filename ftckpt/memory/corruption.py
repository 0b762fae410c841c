"""What does not verify in a slot or a parity file, as a value: by it is decided what can be put right.

Its names are for people.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADER, PADDING, OBJECTS = "header", "padding", "objects"
"""Parts of a slot that are no chunks: they can be put right without parity."""
RECORD = "record"
"""What says which snapshot a parity file holds, where it is torn."""


@dataclass(frozen=True)
class Corruption:
    """Chunks and other ``parts`` that are bad, or ``reason``: why nothing of it can be used.

    False where nothing is bad.
    """

    chunks: tuple[int, ...] = ()
    parts: tuple[str, ...] = ()
    reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self.chunks or self.parts) or self.useless

    @property
    def useless(self) -> bool:
        return self.reason is not None

    @property
    def names(self) -> list[str]:
        """For events and messages."""
        if self.reason is not None:
            return [self.reason]
        chunks = [f"chunk {chunk}" for chunk in self.chunks]
        front = [part for part in self.parts if part != OBJECTS]
        return [*front, *chunks, *self.parts[len(front) :]]
