"""The corrupt parts of a slot or a parity file, as a value from which repairs are chosen."""

from __future__ import annotations

from dataclasses import dataclass

HEADER, PADDING, OBJECTS = "header", "padding", "objects"
"""Parts of a slot outside the chunks, which are repaired without parity."""
RECORD = "record"
"""The record of a parity file, which names its snapshot, if it is torn."""


@dataclass(frozen=True)
class Corruption:
    """Corrupt chunks and other ``parts``, or the ``reason`` why the entire file is unusable. False if intact."""

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
        """The corrupt parts as text, for events and messages."""
        if self.reason is not None:
            return [self.reason]
        chunks = [f"chunk {chunk}" for chunk in self.chunks]
        front = [part for part in self.parts if part != OBJECTS]
        return [*front, *chunks, *self.parts[len(front) :]]
