"""What a rank decides, and from what: a state with no clock, memory or network of its own.

Ranks that train come to the same boundaries and read the same sequence of verdicts, though not the same number of
them at a time. Whatever must be alike on all ranks follows from boundaries and verdicts alone: when snapshots are
due, when replicas are proven, what is protected. What only one rank knows (a failed copy, a missed deadline) it
posts. Time is an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ftckpt.config import Config
from ftckpt.job.actions import (
    Action,
    Announcement,
    Arrange,
    OldArenaRemoval,
    Skip,
    Take,
    TargetMarks,
    TurnOff,
    WholeMark,
)
from ftckpt.job.agreement import NO_TIMES, Round, Verdict, Will
from ftckpt.job.cadence import Interval, Proofs
from ftckpt.job.flushes import NO_FLUSH, Flushes, FlushGuard
from ftckpt.job.slow_ranks import SlowRanks
from ftckpt.job.targets import Guard, Targets
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist_setting import taken_over
from ftckpt.windows.cost import Wish

ERROR_LIMIT = 3
"""Failed snapshots in a row after which a rank turns snapshots off: one may be bad luck, the third is a fault that
stays."""

_MORE_ROUNDS = 5
"""Rounds beyond ``ERROR_LIMIT`` after which a new interval begins: whoever still trains then has read of it."""

_LONGEST_STEP_SECS = 10.0
"""What an iteration counts at most while ranks look for each other: where training stands still nobody searches."""

_MOST_COST = 1e6
"""Iterations that a snapshot may cost, as far as rounds say."""

_REMEMBERED = 64
"""Verdicts that a rank keeps for others that have not read them; whoever misses so many has been off for long."""


class Standing(NamedTuple):
    """What a rank knows when ranks have lost each other; these of all ranks make them alike again.

    ``number``: of snapshots that were due so far. ``begun``, ``wrong``: what came of proofs. ``layouts``: how often
    arenas were laid out anew, as far as it knows, ``arranged``: up to which of these it has arranged protection.
    ``verdicts``: the newest that it has read.
    """

    number: int
    begun: bool
    wrong: bool
    layouts: int
    arranged: int
    verdicts: tuple[Verdict, ...]

    @property
    def read(self) -> int:
        """The number of the last verdict."""
        return self.verdicts[-1].number if self.verdicts else 0

    def encode(self) -> bytes:
        return json.dumps([*self[:-1], [verdict.row for verdict in self.verdicts]]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Standing:
        number, begun, wrong, layouts, arranged, rows = json.loads(data)
        return cls(number, begun, wrong, layouts, arranged, tuple(Verdict.from_row(row) for row in rows))


class RankState:
    """One rank's session, as far as it decides.

    Events come in the order of training: ``begin`` once; at each boundary ``boundary`` and, where a snapshot is due,
    the round of the snapshot before (``round_to_post``, ``posted``) if it was not posted earlier, then ``learn`` or
    ``miss``, then the proof, if ``proof_due``, and ``take``. ``fail`` and ``turn_off`` may come at any time; from
    ``lose`` to ``reunite`` boundaries bring a ``search`` and nothing else.
    """

    def __init__(
        self, config: Config, protects: bool = False, slow_ranks: SlowRanks | None = None, nodes: int = 1
    ) -> None:
        self._config = config
        self.lineage = b""
        self.whole: SnapshotId | None = None
        """The newest snapshot that all ranks are known to have sealed."""
        self.iteration = -1
        """Of the last snapshot that was due, or of the one that was restored."""
        self.off = False
        self.lost = False
        """Whether ranks have lost each other: until they are reunited nothing is posted, read or taken."""
        self.failures = 0
        """In a row: a snapshot that was sealed ends the row."""
        # A rank that reads nothing posts OFF after ERROR_LIMIT rounds, so it is off before a change that it missed.
        probes = config.interval == "auto" and config.overhead_budget > 0
        self._error_limit = ERROR_LIMIT
        self.interval = Interval(config.least_interval, ERROR_LIMIT + _MORE_ROUNDS, probes)
        self.proofs = Proofs(config.replica_check_interval)
        self.targets = Targets.of(config) if protects else Targets(0)
        self.flushes = Flushes.of(config, nodes)
        self._slow_ranks = slow_ranks
        self._is_exact = bool(taken_over(config.persist))
        self._stepped = False
        self._wrong = False  # what ranks copy must change, and has not yet
        self._last_posted = 0  # the number of a round
        self._reads = False  # verdicts, for the snapshot of this boundary, whose own round comes behind them
        self._newest = -1  # as posted
        self._will: Will | None = None  # of all ranks, None: it was not read at this boundary
        self._last_round: int | None = None  # with which all ranks turned off
        self._said_off = False  # in a round that was not read yet
        self._gives_up = False
        self._missed = False  # the verdicts of this boundary
        self._verdicts: deque[Verdict] = deque(maxlen=_REMEMBERED)
        self._searched_secs = 0.0
        self._seen_secs: float | None = None  # when the search came to a boundary
        self._num_searched = 0  # boundaries
        self._whole_here_secs: float | None = None  # when a snapshot was whole in the arenas as they are laid out
        self._old_arenas = True
        self._layouts = self._arranged = 0
        self._named: tuple[SnapshotId | None, ...] = ()
        self._keep: frozenset[SnapshotId] = frozenset()

    def begin(self, lineage: bytes, restored: SnapshotId | None, now_secs: float, in_memory: bool = True) -> None:
        """Snapshots have ``lineage`` from now on; training goes on from ``restored``, which is the first to be
        protected where it lies ``in_memory``."""
        self.lineage, self.whole = lineage, restored if in_memory else None
        self.iteration = restored.iteration if restored is not None else -1
        self.targets.target = self.whole if self.targets.interval else None
        self.targets.chosen_secs = now_secs
        self.flushes.resume(self.iteration)

    def take_over(self, protected: SnapshotId | None, target: SnapshotId | None) -> None:
        """What the arenas of all ranks hold of what an earlier attempt protected, and of what was restored."""
        self.targets.protected, self.targets.target = protected, target

    def undoes(self, iteration: int) -> bool:
        """Whether training went back: ``iteration`` ends a second time."""
        return iteration <= self.iteration

    def went_back(self, iteration: int) -> list[Action]:
        """Training goes on from before the last snapshot: nothing of this lineage may be combined with it. It may go
        back further, off as it is."""
        reason = f"iteration {iteration} after {self.iteration}: training went back; restart the job"
        self.targets.forget()
        self.flushes.forget()
        self.iteration = iteration - 1  # what is left is no newer
        if self.whole is not None and self.whole.iteration >= iteration:
            self.whole = None
        return [] if self.off else [self.turn_off(reason)]

    def boundary(self, iteration: int) -> bool:
        """Training is at the boundary of ``iteration``; whether a snapshot is due."""
        due = self.interval.due(iteration)
        if due:
            self.iteration, self._will, self._missed, self._reads = iteration, None, False, True
        return due

    def stepped(self) -> None:
        """Stepped state may change from now on."""
        self._stepped = True

    @property
    def owes_round(self) -> bool:
        """Whether this rank has yet to post what it has.

        Whoever comes to a boundary posts for it, whatever failed there: rounds of all ranks pair up by their order
        alone.
        """
        return self._last_posted < self.interval.number - self._reads and not self.off and not self.lost

    def round_to_post(
        self, newest: SnapshotId | None, will: Will, wish: Wish, guard: Guard, now_secs: float,
        *, flush: FlushGuard = NO_FLUSH, compute_secs: Callable[[], float] = float,
    ) -> Round:  # fmt: skip
        """This rank's round, when ``owes_round``: what it has sealed, and what it wants of the next snapshot.

        ``compute_secs``: see ``SlowRanks.post``.
        """
        # What was restored is of another lineage, and no snapshot of this one.
        own = newest.iteration if newest is not None and newest.lineage == self.lineage else -1
        if self._gives_up or (self.failures >= self._error_limit and own <= self._newest):
            will = Will.OFF  # unless one was sealed since: that ends the row of failures
        tasks = *self.targets.report(guard, now_secs), *self.flushes.report(flush, now_secs)
        cost = int(min(wish.cost, _MOST_COST) * 1e6)
        number = self._last_posted + 1
        times = self._slow_ranks.post(number, compute_secs) if self._slow_ranks is not None else NO_TIMES
        return Round(number, own, will, wish.stretch, cost, *tasks, self.flushes.wish(wish), times)

    def empty_round(self) -> Round:
        """In the place of ``round_to_post`` where that raises: this rank has nothing and takes nothing."""
        is_last = self._gives_up or self.failures >= self._error_limit
        return Round(self._last_posted + 1, -1, Will.OFF if is_last else Will.SKIP)

    def posted(self, round_: Round) -> None:
        """The round is on its way."""
        self._last_posted = round_.number
        self._said_off = self._said_off or round_.will == Will.OFF
        if round_.newest > self._newest:
            self._newest, self.failures = round_.newest, 0

    def miss(self) -> None:
        """Verdicts were missing at the deadline: this rank takes nothing, and posts that with the next round."""
        self._reads, self._missed = False, True

    def learn(self, verdicts: Sequence[Verdict], now_secs: float) -> list[Action]:
        """All verdicts up to that of the last round were read."""
        self._reads = False
        self._verdicts += verdicts
        actions: list[Action] = []
        marks, whole = self.marks, self.whole
        for verdict in verdicts:
            # Each one counts: the last may name nothing where an earlier one named what must be kept.
            if verdict.whole >= 0 and (self.whole is None or verdict.whole > self.whole.iteration):
                self.whole = SnapshotId(self.lineage, verdict.whole)
            actions += self.targets.learn(verdict, self.lineage, now_secs)
            # Where protection fails for long storage is all the more worth having.
            protects = self.targets.interval and not self.targets.given_up
            # In the place of another's saving it is this very iteration, which need not come to be protected.
            newest = self.targets.protected if protects and not self._is_exact else self.whole
            actions += self.flushes.learn(verdict, newest, now_secs)
            if verdict.will == Will.SKIP:
                self.interval.skipped(verdict.number)
            if self.interval.learn(verdict.number, verdict.stretch):
                actions.append(self._interval_change(verdict))
        if self.whole is not None and self.whole != whole:
            actions.append(WholeMark(self.whole))
            if self._whole_here_secs is None:
                self._whole_here_secs = now_secs
        if self.marks != marks:
            actions.append(self.marks)
        if self._slow_ranks is not None:
            actions += self._slow_ranks.look(verdicts)
        if self._supersedes(now_secs):
            self._old_arenas = False
            actions.append(OldArenaRemoval())
        self._will = verdicts[-1].will if verdicts else Will.GO
        if self._will == Will.OFF:
            # Others may have read it a boundary earlier, and come to nothing collective any more.
            self._last_round = verdicts[-1].number
            actions.append(self.turn_off("a rank had too many failed snapshots in a row, or can take none"))
        return actions

    @property
    def proof_due(self) -> bool:
        """Whether all ranks prove at this boundary.

        One that read late that all turn off does not enter a proof which the others, long off, do not come to.
        """
        others_left = self._last_round is not None and self._last_round < self.interval.number - 1
        if self.lost or others_left:
            return False
        return self._wrong or self.proofs.due(self.iteration, self.interval.number)

    @property
    def late(self) -> bool:
        """Whether this rank may not know what the others know: it must not take its arena for an old one."""
        return self.off or self._will is None

    @property
    def has_stepped(self) -> bool:
        """Whether stepped state of this rank may have changed since the start."""
        return self._stepped

    def proves(self) -> None:
        """A proof begins. Whatever comes of it here, the next one is due on all ranks together."""
        self.proofs.last = self.iteration

    def proved(self, stepped: bool, changed: bool, new_arenas: bool) -> None:
        """A proof has ended; all arguments as all ranks know them, see ``Proof``.

        Where the arenas could not be laid out anew at once, nothing is taken until they are: it would be whole, and
        wrong. In arenas that are laid out anew nothing is protected yet, and older ones hold the only whole snapshot.
        """
        self.proofs.learn(self.interval.number, stepped, not changed)
        self._wrong = changed and not new_arenas
        if new_arenas:
            self._layouts += 1
            self._in_new_arenas()

    def arranged(self) -> None:
        """Who protects what lies in the arenas as they are laid out now is arranged on this rank."""
        self._arranged = self._layouts

    def _in_new_arenas(self) -> None:
        self.targets.forget()
        self.flushes.forget()
        self._old_arenas, self._whole_here_secs = True, None

    def not_protected(self) -> list[Action]:
        """Nothing can be protected in the arenas as they are laid out now."""
        self.targets.stop()
        return [self.marks]

    @property
    def marks(self) -> TargetMarks:
        """What the SMP and readers of the arena are to know."""
        return TargetMarks(self.targets.protected, self.targets.target, self.flushes.current)

    @property
    def keep(self) -> frozenset[SnapshotId]:
        """Snapshots whose slots must not be written."""
        snapshots = self.whole, self.targets.protected, self.targets.target, self.flushes.current
        if snapshots != self._named:  # asked for several times at each boundary
            self._named, self._keep = snapshots, frozenset(one for one in snapshots if one is not None)
        return self._keep

    def take(self, has_room: bool, obstacle: str = "") -> Take | Skip | None:
        """What happens at this boundary; ``has_room``: a slot holds none of ``keep``. ``obstacle``: why this rank
        cannot write to one yet. None: ftckpt is off."""
        if self.off or self.lost or self._will is None:
            return None
        if self._will != Will.GO:
            return Skip("a rank is not ready")
        if self._gives_up:  # behind the round of this boundary: nothing that the others take now becomes whole
            return Skip("this rank takes no more snapshots")
        if self._wrong:
            return Skip("ranks must copy other things than they do, and one was late in laying out anew")
        if obstacle:
            return Skip(obstacle)
        if not has_room:
            return Skip("every slot is kept until the target is protected")
        return Take(SnapshotId(self.lineage, self.iteration), self.keep)

    @property
    def objection(self) -> str:
        """Why no snapshot can be taken where all ranks wait for it, at the end of the job; empty where one can."""
        if self.off:
            return "snapshots were turned off"
        return "a proof has shown that it must copy other things than it does" if self._wrong else ""

    def let_target_go(self) -> TargetMarks:
        """Nothing comes to be protected any more: the slot of the target is free."""
        self.targets.target = None
        return self.marks

    def give_up(self, error: str) -> list[Action]:
        """This rank takes no more snapshots, and all others learn it with its next round."""
        if self._gives_up or self.off:
            return []
        self._gives_up = True
        return [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]

    def fail(self, error: str) -> list[Action]:
        """A snapshot failed."""
        self.failures += 1
        actions: list[Action] = [Announcement("snapshot_error", {"error": error, "in_a_row": self.failures})]
        # What this rank has said binds all, once the others come: it waits for them no longer, and posts no more.
        if self._said_off and self._missed and not self.off:
            actions.append(self.turn_off("too many failed snapshots in a row, and the other ranks do not answer"))
        return actions

    def lose(self, error: str) -> list[Action]:
        """Ranks have lost each other."""
        if self.lost or self.off:
            return []
        self.lost, self._searched_secs, self._seen_secs = True, 0.0, None
        self._num_searched = 0
        return [Announcement("ranks_lost", {"error": error})]

    def search(self, now_secs: float) -> list[Action]:
        """Training is at a boundary, and ranks are lost."""
        if self._seen_secs is not None:
            self._searched_secs += min(now_secs - self._seen_secs, _LONGEST_STEP_SECS)
        self._seen_secs = now_secs
        self._num_searched += 1
        # Others that are not lost notice when they wait for the next round: at a boundary with a snapshot, or the
        # one after.
        may_come = self._num_searched <= 2 * self.interval.spacing
        if may_come or self._searched_secs <= self._config.start_timeout_secs:
            return []
        return [self.turn_off("the ranks have lost each other, and did not find together again")]

    @property
    def standing(self) -> Standing:
        """What this rank knows, for ``reunite`` of all ranks."""
        layouts = self._layouts, self._arranged
        return Standing(self.interval.number, self.proofs.begun, self._wrong, *layouts, tuple(self._verdicts))

    def reunite(self, standings: Sequence[Standing], iteration: int, now_secs: float) -> list[Action]:
        """All ranks have found each other at the boundary of ``iteration``, at which none takes a snapshot.

        What only some had read all learn now: as none writes to a slot before it has read, those that had not still
        have what the others count on. Rounds that nobody has read mean nothing to anybody.
        """
        fewest = min(standing.read for standing in standings)
        if any(len(s.verdicts) == _REMEMBERED and s.verdicts[0].number > fewest + 1 for s in standings):
            return [self.turn_off("ranks that have found each other again have been apart for too long")]
        read = self.standing.read
        known = {verdict.number: verdict for standing in standings for verdict in standing.verdicts}
        self.lost = self._said_off = False
        self.interval.number = max(standing.number for standing in standings)
        self._last_posted = self.interval.number - 1
        self.proofs.restart(iteration, self.interval.number, any(standing.begun for standing in standings))
        self._wrong = any(standing.wrong for standing in standings)
        searched = Announcement("ranks_reunited", {"iteration": iteration, "secs": self._searched_secs})
        actions = self._end_layout(standings)
        missed = [known[number] for number in sorted(known) if number > read]
        return [searched, *actions, *self.learn(missed, now_secs)]

    def _end_layout(self, standings: Sequence[Standing]) -> list[Action]:
        """Where ranks lost each other behind the last step to new arenas some have not learnt of them, and nothing is
        protected there. Once one rank has, all have made theirs."""
        self._layouts = max(standing.layouts for standing in standings)
        if all(standing.arranged == self._layouts for standing in standings):
            return []
        self._in_new_arenas()
        return [Arrange(), *([WholeMark(self.whole)] if self.whole is not None else [])]

    def turn_off(self, reason: str) -> TurnOff:
        """This rank takes, posts and reads nothing from now on."""
        self.off = True
        return TurnOff(reason)

    def _interval_change(self, verdict: Verdict) -> Announcement:
        config, cost = self._config, verdict.cost / 1e6
        interval, what = verdict.stretch * config.least_interval, "all in all"
        if config.interval != "auto":
            what = "in the fence"
        fields = {"of": "memory", "interval": interval, "cost": cost, "overhead_budget": config.overhead_budget}
        text = (
            f"soon a snapshot every {interval} iteration(s): {what} it costs {cost:.2%} of one, and the budget is "
            f"{config.overhead_budget:.2%}"
        )
        return Announcement("interval_changed", fields, text)

    def _supersedes(self, now_secs: float) -> bool:
        """Whether older arenas can go: a snapshot is whole in the new ones, and as safe as those were.

        That is protected, unless nothing is, or that fails or takes too long.
        """
        if not self._old_arenas or self._whole_here_secs is None:
            return False
        targets, waited_secs = self.targets, now_secs - self._whole_here_secs
        is_safe = not targets.interval or targets.protected is not None or targets.degraded
        return is_safe or waited_secs > self._config.protect_timeout_secs
