"""When no rank of a node moves any more: what counts as that, and who waits where.

A rank that evaluates, saves or loads gives no sign of life for longer than one that trains, and that is no hang. So
each section has a limit of its own. ``hang_secs`` is that of an iteration; that of any other section is three times
``hang_secs``, or three times the longest silence that was seen in it, whichever is more. A section that nobody has
seen to its end is told at three times ``hang_secs``, and not ended: nothing says yet how long it may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.store.page import pid_of
from ftckpt.store.pulse import PulseSection, RankPulse

FACTOR = 3.0
"""By how much a section may take longer than it ever did: storage that is shared is slow at times."""
_NOTABLE = 1.25
"""By how much a silence must be longer than what was known for it to be stored."""
_STOPPED_NS = 2_000_000_000
"""Between two looks, which come twice a second: who watches did not run, and so perhaps nobody on this node did."""


@dataclass(frozen=True)
class HangPlace:
    """Where a job hung: of the rank that was silent the longest, in the launcher run ``run``.

    ``iteration`` is that of its last boundary; -1 where it has come to none since it was started. ``owner`` names its
    process.
    """

    run: str
    iteration: int
    section: str
    phase: str
    owner: int = 0

    def __str__(self) -> str:
        return f"{self.section}, {self.phase or 'before its first phase'}, after iteration {self.iteration}"

    def repeats(self, before: HangPlace | None) -> bool:
        """Whether a restart has come no further than to where the job hung ``before``."""
        # The same process was not restarted: it has moved since, or is looked at by another SMP.
        if before is None or before.run != self.run or before.owner == self.owner:
            return False
        # An attempt's first iteration, in which a restart may hang where the attempt before had trained on.
        trains = (PulseSection.SETUP.label, PulseSection.STEP.label)
        is_alike = self.section == before.section or {self.section, before.section} == set(trains)
        return is_alike and self.iteration <= before.iteration


class Limits:
    """How long a rank may be silent in each section, as far as it is known.

    Args:
        hang_secs: the setting; 0: as long as it likes.
        longest_secs: of each section, by label, the longest silence that came to an end, as far as it is known.
    """

    def __init__(self, hang_secs: float = 0.0, longest_secs: Mapping[str, float] | None = None) -> None:
        self.hang_secs = hang_secs
        self.longest_secs = dict(longest_secs or {})

    def learn(self, pulses: Iterable[RankPulse], now_ns: int) -> bool:
        """Take in what ranks that live have come out of; whether it is worth storing."""
        is_notable = False
        for pulse in pulses:
            for section in PulseSection if pulse.lives is not False else ():
                secs, known = pulse.longest_ns[section] / 1e9, self.longest_secs.get(section.label, 0.0)
                # The rest of a page that others have written: nothing has lasted since before the machine started.
                if known < secs <= now_ns / 1e9:
                    self.longest_secs[section.label] = secs
                    is_notable |= secs > _NOTABLE * known
        return is_notable

    def of(self, section: PulseSection) -> float:
        """Seconds of silence from which on a rank in ``section`` hangs."""
        if section is PulseSection.STEP:
            return self.hang_secs
        return FACTOR * max(self.hang_secs, self.longest_secs.get(section.label, 0.0))

    def is_known(self, section: PulseSection) -> bool:
        """Whether a rank that is silent for longer may be ended."""
        return section is PulseSection.STEP or section.label in self.longest_secs


@dataclass(frozen=True)
class Hang:
    """No rank of the node moved for ``secs``; ``ranks`` are all that did not leave, dead ones included.

    ``is_known`` is False where a rank is in a section that nobody has seen to its end yet.
    """

    secs: float
    ranks: tuple[RankPulse, ...]
    now_ns: int
    limits: Limits
    is_known: bool

    @property
    def elsewhere(self) -> list[RankPulse]:
        """Those of other containers: nobody here can look into their processes, or end them."""
        return [pulse for pulse in self.ranks if pulse.lives is not False and not pulse.is_here]

    def fields(self) -> dict[str, Any]:
        """For the event: who waits where, and for how long."""
        ranks = [describe(pulse, self.now_ns, self.limits) for pulse in self.ranks]
        return {"secs": round(self.secs, 3), "ranks": ranks}

    def place(self, run: str) -> HangPlace:
        """Where it is, in the launcher run ``run``."""
        first = min(_moving(self.ranks, self.now_ns), key=lambda pulse: pulse.beat_ns)
        return HangPlace(run, first.iteration, first.section.label, first.phase, first.owner)

    def lasts(self, pulses: Sequence[RankPulse]) -> bool:
        """Whether nobody has moved since."""
        newest_ns = max(pulse.beat_ns for pulse in _moving(self.ranks, self.now_ns))
        return all(pulse.beat_ns <= newest_ns for pulse in pulses if pulse.lives is not False)


def describe(pulse: RankPulse, now_ns: int, limits: Limits) -> dict[str, Any]:
    """Where a rank is: ``iteration`` counts from its last boundary; ``secs`` since its last sign of life.

    ``limit_secs`` is how long it may be silent there.
    """
    return {
        "rank": pulse.rank if pulse.rank >= 0 else None,
        "place": pulse.place,
        "pid": pid_of(pulse.owner),
        "iteration": pulse.iteration,
        "section": pulse.section.label,
        "phase": pulse.phase,
        "secs": round(max(0, now_ns - pulse.beat_ns) / 1e9, 3),
        "limit_secs": round(limits.of(pulse.section), 3),
        "lives": pulse.lives,
    }


class HangWatch:
    """Reports each hang once. The first move of any rank ends a hang."""

    def __init__(self) -> None:
        # The newest beat of the last hang that was reported: as long as none is newer it is the same hang.
        self._reported_ns = -1
        self._looked_ns: int | None = None
        self._resumed_ns = -1

    def look(self, pulses: Iterable[RankPulse], limits: Limits, now_ns: int) -> Hang | None:
        """A hang that was not reported yet.

        Args:
            pulses: of the ranks of the node.
            limits: what of live ranks counts as a hang.
            now_ns: CLOCK_MONOTONIC, read after them.
        """
        # A node that is suspended, or a container that is paused: ranks are silent since they could speak again.
        if self._looked_ns is not None and now_ns - self._looked_ns > _STOPPED_NS:
            self._resumed_ns = now_ns
        self._looked_ns = now_ns
        ranks = tuple(pulses)
        living = _moving(ranks, now_ns)
        if limits.hang_secs <= 0 or not living:
            return None
        newest_ns = max(pulse.beat_ns for pulse in living)
        # One rank within its limit is enough: the others wait for it, in a collective or in the pipeline.
        if newest_ns <= self._reported_ns or any(
            (now_ns - max(pulse.beat_ns, self._resumed_ns)) / 1e9 < limits.of(pulse.section) for pulse in living
        ):
            return None
        self._reported_ns = newest_ns
        is_known = all(limits.is_known(pulse.section) for pulse in living)
        return Hang((now_ns - newest_ns) / 1e9, ranks, now_ns, limits, is_known)


def _moving(ranks: Iterable[RankPulse], now_ns: int) -> list[RankPulse]:
    """Those that a hang is about."""
    return [pulse for pulse in ranks if pulse.lives is not False and pulse.beat_ns <= now_ns]
