"""How many iterations lie between snapshots, when the fence asks for fewer of them: the same on all ranks."""

from __future__ import annotations


class Interval:
    """The configured interval times a stretch that all ranks learn from the same answers.

    What an answer asks for begins ``delay`` snapshots later. A rank that hears nothing for that long has turned
    everybody off, so whoever still trains knows of a change before it comes. Snapshots are counted, not
    iterations: the numbers of these may jump.
    """

    def __init__(self, iterations: int, delay: int) -> None:
        self.number = 0
        """Snapshots that were due so far."""
        self._iterations = iterations
        self._delay = delay
        self._changes: list[tuple[int, int]] = [(0, 1)]

    def heard(self, number: int, stretch: int) -> bool:
        """The ranks' largest wish, told with snapshot ``number``; whether it changes anything.

        Every rank must be told the same sequence.
        """
        begin, known = self._changes[-1]
        if stretch == known or number < begin:
            return False
        self._changes.append((number + self._delay, stretch))
        return True

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is to be taken at this boundary; asked once at each, on all ranks."""
        stretch = next(stretch for begin, stretch in reversed(self._changes) if begin <= self.number)
        is_due = iteration % (self._iterations * stretch) == 0
        self.number += is_due
        return is_due
