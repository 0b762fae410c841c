"""Deadlines of what a rank waits for while it trains. One that passes costs a snapshot, and never training."""

from __future__ import annotations

FENCE_SECS = 120.0
"""For an unfinished copy before its snapshot is dropped. Copies take seconds; a device that stands still for minutes
comes back no sooner for those who wait."""

EARLIER_SECS = 0.0
"""For the copies of the snapshot before, at a boundary where the next one is due: no time at all, as a snapshot that
is skipped costs less than training that waits."""

VOTE_SECS = 120.0
"""For the votes of the other ranks before a slot is reused. They are posted an iteration earlier, so that only a rank
that stands still is late."""

LOCK_SECS = 20.0
"""For processes of an earlier attempt to leave the arenas. A launcher kills them before it starts others, and the
kernel needs some seconds to free gigabytes."""
