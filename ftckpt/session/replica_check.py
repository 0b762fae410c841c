"""Whether replicas are still identical, by proofs and by samples."""

from __future__ import annotations

from ftckpt.model.sampled import SampleOutcome, position_of
from ftckpt.session.actions import Divergence
from ftckpt.session.vote import VoteResult

# Replicas that drift mostly do so in the first iterations: full comparisons at 1, 2, 4 and 8 snapshots.
_LAST_PROOF = 8


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


class ReplicaCheck:
    """Proofs, samples and alarms. A pure state machine as ``ftckpt.session.session``: the same on all ranks, as soon
    as they have read the same results.

    Replicas that differ by configuration do so in the first optimizer steps, so proofs come at snapshots 1, 2, 4 and
    8, counted from the first real step: while all steps are skipped, as during the search for a loss scale, a proof
    proves nothing, and the next snapshot has another one. Later snapshots are only sampled.

    An alarm is a sample that differs. No snapshot is taken from then on until a proof, which all ranks enter once
    each of them has read of the alarm.

    Args:
        repeats: whether snapshots after the first have proofs.
        delay: snapshots after which every rank that is still on has read a result.
    """

    def __init__(self, repeats: bool, delay: int) -> None:
        self._repeats, self._delay = repeats, delay
        self._begin = 0  # the last snapshot whose proof preceded all steps
        self._has_stepped = False  # at the last proof, on some rank
        self._trust = ReplicaTrust(0, -1)
        self._trusted_before = -1  # ``trusted`` just before the last proof
        self._proved = 0  # the number of the snapshot with the last proof
        self.alarm: int | None = None
        """The number of the snapshot whose samples differ, until a proof."""
        self._is_stale = False  # the copy plan is wrong, and a rank has not rebuilt its arena yet
        self._iterations: dict[int, int] = {}  # iterations by number, of snapshots whose result is unread
        self._before = self._iteration = -1  # the iterations of the last two snapshots that were due

    def lay_out(self, positions: int, iteration: int) -> None:
        """Start anew for a layout whose samples have that many ``positions`` (0: none), all identical at
        ``iteration``."""
        self._trust = ReplicaTrust(positions, iteration)
        self._iteration = iteration

    def due(self, number: int, iteration: int) -> None:
        """Note that snapshot ``number`` is due at ``iteration``."""
        self._before, self._iteration = self._iteration, iteration
        self._iterations[number] = iteration

    @property
    def trusted(self) -> int:
        """The newest iteration at which replicas are known to be identical; -1: none."""
        return self._trust.iteration

    @property
    def obstacle(self) -> str:
        """Why no snapshot may be taken now; empty if one may."""
        if self._is_stale:
            return "the copy plan changed, and a rank has not rebuilt its arena yet"
        if self.alarm is not None:
            return "replicas differ: the next proof finds them, and each rank then copies its own"
        return ""

    def proof_due(self, number: int) -> bool:
        """Whether snapshot ``number`` is preceded by a proof, which all ranks enter."""
        # Every rank that is still on has read of the alarm by then.
        is_alarm_due = self.alarm is not None and number >= self.alarm + self._delay
        # A proof is collective: whether it is due must not depend on results that some ranks may not have read.
        since = number - self._begin
        is_early = number == 1 or (self._repeats and since <= _LAST_PROOF and since & (since - 1) == 0)
        return self._is_stale or is_alarm_due or is_early

    def compare(self, result: VoteResult) -> list[Divergence]:
        """Apply the sample that accompanied ``result``."""
        iteration = self._iterations.pop(result.number, -1)
        if result.replicas == SampleOutcome.MATCHED:
            self._trust.match(result.number, iteration)
        if result.replicas != SampleOutcome.DIFFER or self.alarm is not None:
            return []
        if result.number < self._proved:  # read late: a newer proof has settled it
            return [Divergence(self._trusted_before, iteration)]
        self.alarm = result.number
        return [Divergence(self.trusted, iteration)]

    def mistrust(self) -> list[Divergence]:
        """A proof has failed. Samples cover the state in turn and may not have detected it yet: snapshots since
        ``trusted`` may mix states."""
        is_known = self.alarm is not None or self._is_stale or self.trusted >= self._before
        return [] if is_known else [Divergence(self.trusted, self._before)]

    def proved(self, number: int, stepped: bool, changed: bool, new_arenas: bool) -> None:
        """Apply the outcome of the proof before snapshot ``number``, see ``Proof``. ``stepped``: state may have
        changed on some rank.

        If the arenas could not be rebuilt at once, no snapshot is taken until they are: it would be committed and
        wrong.
        """
        self._has_stepped = self._has_stepped or stepped
        if not self._has_stepped:
            self._begin = number
        self._is_stale = changed and not new_arenas
        self.alarm, self._proved, self._trusted_before = None, number, self.trusted
        if not changed:
            self._trust.prove(self._iteration)
