"""The iterations at which snapshots are due: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Interval:
    """The configured interval times a factor (stretch) that all ranks read from the same vote results.

    A change takes effect ``delay`` snapshots after its result. A rank that reads nothing for that long has turned all
    ranks off, so every rank that is still on knows of a change before it takes effect. The delay counts snapshots,
    not iterations, whose numbers may jump.
    """

    iterations: int
    delay: int
    number: int = 0
    """Snapshots that were due so far."""
    changes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])
    """(number of the first snapshot, stretch) of each change."""

    def learn(self, number: int, stretch: int) -> bool:
        """Apply the maximum request in the vote of snapshot ``number``; returns whether it changes the interval."""
        begin, known = self.changes[-1]
        # Votes from before the last change took effect: their requests were measured without it.
        if stretch == known or number < begin:
            return False
        self.changes.append((number + self.delay, stretch))
        return True

    def resume(self, stretch: int) -> None:
        """Start with a ``stretch`` that all ranks know before the first boundary."""
        self.changes = [(0, stretch)]

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is due at this boundary; call it exactly once per boundary."""
        is_due = iteration % self.spacing == 0
        self.number += is_due
        return is_due

    @property
    def spacing(self) -> int:
        """The current number of iterations from one snapshot to the next."""
        place = -1
        while self.changes[place][0] > self.number:
            place -= 1
        return self.iterations * self.changes[place][1]
