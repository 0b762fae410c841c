"""When snapshots are due, and which of them come with a proof that replicas agree: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftckpt.model.sampled import position_of


@dataclass
class Interval:
    """The configured interval times a stretch that all ranks read from the same verdicts.

    What a verdict asks for begins ``delay`` snapshots later. A rank that reads nothing for that long has turned
    everybody off, so whoever still trains knows of a change before it comes. Snapshots are counted, not
    iterations: the numbers of these may jump.
    """

    iterations: int
    delay: int
    number: int = 0
    """Snapshots that were due so far."""
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

    def resume(self, stretch: int) -> None:
        """Begin with a ``stretch`` that all ranks know before the first boundary."""
        self.changes = [(0, stretch)]

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is to be taken at this boundary; asked once at each."""
        is_due = iteration % self.spacing == 0
        self.number += is_due
        return is_due

    @property
    def spacing(self) -> int:
        """Iterations from one snapshot to the next, as they are now."""
        place = -1
        while self.changes[place][0] > self.number:
            place -= 1
        return self.iterations * self.changes[place][1]


_LAST_PROOF = 8


@dataclass
class Proofs:
    """Which snapshots, counted from 1, come with a proof that replicas still hold the same bits.

    What a configuration makes differ shows in the first optimizer steps, so proofs come at 1, 2, 4 and 8. These count
    from where steps begin: while every step is skipped, as when a loss scale is being found, a proof proves nothing
    and the next snapshot has another. Samples compare from there on.

    ``repeats``: whether any but the first has one.
    """

    repeats: bool
    begin: int = 0
    """The last snapshot whose proof proved nothing."""
    begun: bool = False

    def due(self, number: int) -> bool:
        """Whether snapshot ``number`` has one. It is collective: every rank must come to the same answer, late or
        not, so this depends on nothing that only some ranks have read."""
        since = number - self.begin
        return number == 1 or (self.repeats and since <= _LAST_PROOF and since & (since - 1) == 0)

    def learn(self, number: int, stepped: bool) -> None:
        """Snapshot ``number`` had a proof; ``stepped``: stepped state may have changed on some rank, as all know."""
        self.begun = self.begun or stepped
        if not self.begun:
            self.begin = number


class ReplicaTrust:
    """Since when replicas are known to be the same: from samples, one position with each snapshot, and proofs.

    State that differs stays different until it is loaded again. So all of it was the same at an iteration since which
    every position has matched.

    Args:
        positions: of samples, see ``position_of``.
        iteration: at which everything was the same.
    """

    def __init__(self, positions: int, iteration: int) -> None:
        self._matched = [iteration] * max(1, positions)

    @property
    def iteration(self) -> int:
        """The newest at which everything was the same."""
        return min(self._matched)

    def match(self, number: int, iteration: int) -> None:
        """The sample of snapshot ``number``, of ``iteration``, has matched."""
        position = position_of(number, len(self._matched))
        # A rank that reads late may learn of a sample after a newer proof.
        self._matched[position] = max(self._matched[position], iteration)

    def prove(self, iteration: int) -> None:
        """Everything is the same at ``iteration``."""
        self._matched = [iteration] * len(self._matched)
