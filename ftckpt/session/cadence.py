"""The iterations at which snapshots are due, and the proofs of replicas with them: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftckpt.model.sampled import position_of


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


_LAST_PROOF = 8


@dataclass
class Proofs:
    """The snapshots, counted from 1, with a proof that replicas are still identical.

    Replicas that differ by configuration do so in the first optimizer steps, so proofs come at 1, 2, 4 and 8, counted
    from the first real step: while all steps are skipped, as during the search for a loss scale, a proof proves
    nothing, and the next snapshot has another one. Later snapshots are only sampled.

    ``repeats``: whether snapshots after the first have proofs.
    """

    repeats: bool
    begin: int = 0
    """The last snapshot whose proof preceded all steps."""
    begun: bool = False

    def due(self, number: int) -> bool:
        """Whether snapshot ``number`` has a proof. A proof is collective, so this must not depend on vote results,
        which some ranks may not have read."""
        since = number - self.begin
        return number == 1 or (self.repeats and since <= _LAST_PROOF and since & (since - 1) == 0)

    def learn(self, number: int, stepped: bool) -> None:
        """Note the proof of snapshot ``number``; ``stepped``: state may have changed on some rank (gathered)."""
        self.begun = self.begun or stepped
        if not self.begun:
            self.begin = number


class ReplicaTrust:
    """The newest iteration at which replicas were identical, by proofs and by samples of one position per snapshot.

    State that differs keeps differing until it is loaded again. So all of it was identical at an iteration since
    which every position has matched.

    Args:
        positions: number of sample positions, see ``position_of``.
        iteration: an iteration at which all state was identical.
    """

    def __init__(self, positions: int, iteration: int) -> None:
        self._matched = [iteration] * max(1, positions)

    @property
    def iteration(self) -> int:
        """The newest iteration at which all state was identical."""
        return min(self._matched)

    def match(self, number: int, iteration: int) -> None:
        """Note that the sample of snapshot ``number``, at ``iteration``, matched."""
        position = position_of(number, len(self._matched))
        # A rank that reads late may learn of a sample after a newer proof.
        self._matched[position] = max(self._matched[position], iteration)

    def prove(self, iteration: int) -> None:
        """Note a proof that all state is identical at ``iteration``."""
        self._matched = [iteration] * len(self._matched)
