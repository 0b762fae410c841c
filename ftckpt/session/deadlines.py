"""Deadlines of a rank's waits. Past one a snapshot may be lost; training continues."""

from __future__ import annotations

FENCE_SECS = 120.0
"""For an unfinished copy; then its snapshot is dropped. Copies take seconds: a device that has hung for minutes does
not recover by waiting."""

EARLIER_SECS = 0.0
"""For the copies of the previous snapshot at a boundary where the next one is due: none, as a skipped snapshot costs
less than a wait of training."""

VOTE_SECS = 120.0
"""For the votes of the other ranks before a slot is reused. They are posted an iteration earlier: only a stalled rank
is late."""

LOCK_SECS = 20.0
"""For processes of an earlier attempt to leave the arenas. A launcher kills them before it starts others, and the
kernel needs some seconds to free gigabytes."""
