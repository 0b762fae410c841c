"""When a chunk may be copied: the seam between the copier and the pipeline schedule."""

from __future__ import annotations

import threading
from typing import Protocol


class Windows(Protocol):
    """Asked by the copier, on its own thread, before each chunk."""

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> None:
        """Return when ``nbytes`` may be copied; at once when ``hurry`` is set: the trainer stands at the fence."""


class Always:
    """Copy at once: the stream level, without knowledge of the schedule."""

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> None:
        """Return at once."""
