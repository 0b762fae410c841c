"""Waiting for a condition, with a deadline and never for time."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str = "", secs: float = 60.0) -> float:
    """Seconds until ``condition`` held; an AssertionError that names ``what`` where it does not within ``secs``."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < secs, f"not within {secs:g} s: {what or 'the condition'}"
        time.sleep(0.005)
    return time.monotonic() - begin
