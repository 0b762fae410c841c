"""How many bytes may be copied where: windows first, then forward, then backward, at last the fence.

The rule needs no schedule of copies made in advance. At each place of the iteration it looks at how much is
left and at how much the later windows can still take; only what they cannot take is spilled, and into
backward steps only what later forward steps cannot take either. So a window that turned out shorter is made
up for by the next ones as long as they have room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.capture.iteration import IDLE
from ftckpt.capture.profile import Timeline


@dataclass(frozen=True)
class Plan:
    """What each place of an iteration can take, in bytes: its length times the rate of copies."""

    timeline: Timeline
    bytes_per_sec: float
    capacity: tuple[int, ...]
    later_windows: tuple[int, ...]
    """Of all windows after a place, the sum."""
    later_forwards: tuple[int, ...]

    @classmethod
    def of(cls, timeline: Timeline, bytes_per_sec: float, unit_bytes: int) -> Plan:
        """``unit_bytes`` is the size of a copy: a window takes whole ones."""
        capacity = []
        for kind, secs in zip(timeline.kinds, timeline.secs, strict=True):
            room = secs * bytes_per_sec
            capacity.append(round(room / unit_bytes) * unit_bytes if kind in IDLE else int(room))
        windows = [nbytes if kind in IDLE else 0 for kind, nbytes in zip(timeline.kinds, capacity, strict=True)]
        forwards = [n if kind == "forward" else 0 for kind, n in zip(timeline.kinds, capacity, strict=True)]
        return cls(timeline, bytes_per_sec, tuple(capacity), _later(windows), _later(forwards))

    @property
    def window_bytes(self) -> int:
        """What all windows together can take."""
        return self.later_windows[0] + (self.capacity[0] if self.timeline.kinds[0] in IDLE else 0)

    def knows(self, place: int, kind: str) -> bool:
        """Whether the iteration under way goes as planned, as far as this place shows."""
        return place < len(self.capacity) and self.timeline.kinds[place] == kind

    def allowed(self, place: int, left_bytes: int) -> int:
        """Bytes that may be copied at ``place`` when ``left_bytes`` are left."""
        kind, room = self.timeline.kinds[place], self.capacity[place]
        if kind == "boundary":
            return 0  # the trainer waits
        if kind in IDLE:
            return min(room, left_bytes)
        spill = left_bytes - self.later_windows[place]
        if kind == "forward":
            return max(0, min(room, spill))
        if kind == "backward":
            return max(0, min(room, spill - self.later_forwards[place]))
        return left_bytes

    def forecast(self, total_bytes: int) -> dict[str, int]:
        """Bytes by kind of place if the iteration goes as planned."""
        left, found = total_bytes, dict.fromkeys(("window", "forward", "backward", "fence"), 0)
        for place, kind in enumerate(self.timeline.kinds):
            nbytes = self.allowed(place, left)
            found["window" if kind in IDLE else kind if kind in found else "fence"] += nbytes
            left -= nbytes
        return found


def _later(values: Sequence[int]) -> tuple[int, ...]:
    """For each place the sum of the values behind it."""
    total, sums = 0, []
    for value in reversed(values):
        sums.append(total)
        total += value
    return tuple(reversed(sums))
