"""When snapshots are due, and which of them come with a proof that replicas agree: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftckpt.windows.cost import CYCLE

_FIRST_PROBE = 24
"""Snapshots: what ranks conclude from two thirds of them is in force when the last has been taken."""

_PROBE, _PROBES_APART = 12, 512
"""A probe has so many snapshots, and begins after so many: of intervals that are too short to show what one costs."""


@dataclass
class Interval:
    """The configured interval times a stretch that all ranks read from the same verdicts.

    What a verdict asks for begins ``delay`` snapshots later. A rank that reads nothing for that long has turned
    everybody off, so whoever still trains knows of a change before it comes. Snapshots are counted, not
    iterations: the numbers of these may jump.
    """

    iterations: int
    delay: int
    probes: bool = False
    """Whether spacings are to show what a snapshot costs: at first, and now and then where it is a short one."""
    number: int = 0
    """Snapshots that were due so far."""
    probe_end: int = _FIRST_PROBE
    """The snapshot with which the first probe ends."""
    changes: list[tuple[int, int]] = field(default_factory=lambda: [(0, 1)])
    """From which snapshot on which stretch is in force."""

    def learn(self, number: int, stretch: int) -> bool:
        """The ranks' largest wish in round ``number``; whether it changes anything."""
        begin, known = self.changes[-1]
        # Rounds from before the last change is in force: their wishes were measured without it.
        if stretch == known or number < begin:
            return False
        self.changes.append((number + self.delay, stretch))
        return True

    def skipped(self, number: int) -> None:
        """No rank has taken what was due in round ``number``: the first probe, if it is on, has yet to begin."""
        if number + self.delay <= self.probe_end:  # as of a change, everybody knows of it by then
            self.probe_end = number + _FIRST_PROBE

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is to be taken at this boundary; asked once at each."""
        is_due = iteration % self.spacing == 0
        self.number += is_due
        return is_due

    @property
    def spacing(self) -> int:
        """Iterations from one snapshot to the next, as they are now."""
        stretch = next(stretch for begin, stretch in reversed(self.changes) if begin <= self.number)
        return self.iterations * (max(stretch, CYCLE) if self._probing else stretch)

    @property
    def _probing(self) -> bool:
        return self.probes and (self.number < self.probe_end or self.number % _PROBES_APART < _PROBE)


@dataclass
class Proofs:
    """Which snapshots, counted from 1, come with a proof that replicas still hold the same bits.

    What a configuration makes differ shows in the first optimizer steps, so proofs are close at first: at 1, 2, 4,
    8 … These count from where steps begin: while every step is skipped, as when a loss scale is being found, a
    proof proves nothing and the next snapshot has another.

    ``interval``, in iterations: the first snapshot so long after a proof has the next one; 0: only the first has one.
    """

    interval: int
    last: int = -1
    """The iteration of the last proof."""
    held: int = -1
    """The iteration of the last proof by which everything was as it was taken to be; -1: there was none."""
    begin: int = 0
    """The last snapshot whose proof proved nothing."""
    begun: bool = False

    def due(self, iteration: int, number: int) -> bool:
        """Whether snapshot ``number`` has one. It is collective: every rank must come to the same answer, late or
        not, so this depends on nothing that only some ranks have read."""
        since = number - self.begin
        # A power of two, or as often as the user wants at least.
        often = bool(self.interval) and (since & (since - 1) == 0 or iteration - self.last >= self.interval)
        return number == 1 or often

    def learn(self, number: int, stepped: bool, held: bool = True) -> None:
        """Snapshot ``number`` had a proof; ``stepped``: stepped state may have changed on some rank, as all know.
        ``held``: what was taken for granted is so."""
        if held:
            self.held = self.last
        self.begun = self.begun or stepped
        if not self.begun:
            self.begin = number
