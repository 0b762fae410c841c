"""The reminder that this rank takes no snapshots: training goes on, and what a failure would lose grows."""

from __future__ import annotations

import time

from ftckpt.events import Events

_REPEAT_SECS = 60.0


class Reminder:
    """Repeats the reason in the log, once a minute, for as long as it lasts."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._next_secs: float | None = None

    def update(self, reason: str) -> None:
        """Training is at a boundary; ``reason`` is empty where snapshots are taken."""
        now_secs = time.monotonic()
        if not reason:
            self._next_secs = None
        elif self._next_secs is None:  # the first time the cause itself is logged
            self._next_secs = now_secs + _REPEAT_SECS
        elif now_secs >= self._next_secs:
            self._next_secs = now_secs + _REPEAT_SECS
            self._events.warn(f"no snapshots are taken: {reason}")
