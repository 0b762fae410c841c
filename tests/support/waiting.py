"""Waiting for a condition, with a deadline and never for time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def until(condition: Callable[[], object], what: str | Callable[[], str] = "", secs: float = 60.0) -> float:
    """Waits until ``condition`` is true and returns the seconds; after ``secs`` an AssertionError names ``what``."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin >= secs:
            named = what() if callable(what) else what
            raise AssertionError(f"not within {secs:g} s: {named or 'the condition'}")
        # Long waits look less often: what is looked at may cost more than what is waited for.
        time.sleep(min(0.05, max(0.002, (time.monotonic() - begin) / 20)))
    return time.monotonic() - begin


def meet(place: Path, num: int, secs: float = 60.0) -> None:
    """Until ``num`` processes are at ``place``, a directory: a barrier for ranks whose groups are of no use."""
    place.mkdir(exist_ok=True)
    (place / str(os.getpid())).touch()
    until(lambda: len(list(place.iterdir())) >= num, f"{num} at {place.name}", secs)
