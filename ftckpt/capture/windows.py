"""When a chunk may be copied: the seam between the copier and the pipeline schedule."""

from __future__ import annotations

from typing import Protocol


class Windows(Protocol):
    """Asked by the copier, on its own thread, before each chunk."""

    def wait_turn(self, nbytes: int, hurry_at: float) -> None:
        """Return when ``nbytes`` may be copied, at ``hurry_at`` (``time.monotonic``) at the latest."""


class Always:
    """Copy at once: the stream level, without knowledge of the schedule."""

    def wait_turn(self, nbytes: int, hurry_at: float) -> None:
        """Return at once."""
