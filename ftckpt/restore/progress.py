"""Log lines on the progress of long operations."""

from __future__ import annotations

import time

from ftckpt.events import log


class Progress:
    """Logs the progress of a long operation every ``every_secs``; silent if it takes less."""

    def __init__(self, what: str, every_secs: float = 3.0) -> None:
        self._what = what
        self._every_secs = every_secs
        self._begun = self._logged = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Reports progress; may be called at any rate."""
        now = time.monotonic()
        if now - self._logged >= self._every_secs:
            self._logged = now
            rate = done_bytes / (now - self._begun) / 1e9
            log.info("ftckpt: %s: %.1f of %.1f GB, %.1f GB/s", self._what, done_bytes / 1e9, total_bytes / 1e9, rate)
