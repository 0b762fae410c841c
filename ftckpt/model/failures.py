"""How a job's attempts have ended, and what failures are to be expected by that: pure, and the same on all ranks.

Failures of a kind are taken as a Poisson process of unknown rate. What is assumed of it before, one failure in
``given_secs``, is a gamma distribution of shape 1 whose rate parameter is that time: as if just that had been seen. A
gamma distribution is conjugate to a Poisson process, so that n failures in t seconds make one of shape 1 + n and rate
parameter ``given_secs + t`` of it, whose mean is ``(1 + n) / (given_secs + t)`` failures a second: A. Gelman et al.,
Bayesian Data Analysis, 3rd edition (2013), section 2.6. A job that has seen nothing goes by what is assumed, one that
has trained for many times as long by what it has seen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ftckpt.model.text import human_secs
from ftckpt.model.tiers import JOB, KINDS, NODE, PROCESS

_MOST_ENDS = 12
"""That a record remembers."""


class FailureRate(NamedTuple):
    """Of one kind: ``seen`` failures in ``secs`` of training, where one in each ``given_secs`` was assumed."""

    given_secs: float
    seen: int = 0
    secs: float = 0.0

    @property
    def mtbf_secs(self) -> float:
        """Mean time between failures, in seconds: the inverse of the expected rate."""
        return (self.given_secs + self.secs) / (1 + self.seen)

    def __str__(self) -> str:
        seen, assumed, expected = map(human_secs, (self.secs, self.given_secs, self.mtbf_secs))
        return f"{self.seen} in {seen} seen, one in {assumed} assumed: one in {expected}"


@dataclass(frozen=True)
class FailureRecord:
    """What one attempt of a job writes down as it begins to train, and what it knows of those before it.

    ``number``: of the attempt, from 1. ``owner``: a word of it alone. ``nodes``: it trains on. ``runs``: launcher
    runs that have started it, as far as they have names. ``began``: the time of day, in seconds. ``secs``: that
    earlier attempts have trained; ``node_secs``: the sum of what each of their nodes has. ``seen``: failures by kind.
    ``ended``: it has ended as it was to, and not by a failure. ``ends``: what nodes have seen of how earlier attempts
    ended, the newest last: all of the last one, and the causes of others.
    """

    job: str
    number: int
    owner: str
    nodes: tuple[str, ...]
    runs: tuple[str, ...]
    began: float
    secs: float = 0.0
    node_secs: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)
    ended: bool = False
    ends: tuple[str, ...] = ()

    def with_ends(self, ends: Sequence[str]) -> FailureRecord:
        """The same, and how the attempt before this one has ended, cause first; of those before the cause stays."""
        causes: dict[str, str] = {}
        for text in self.ends:
            causes.setdefault(text.partition(":")[0], text)
        told = [f"attempt {self.number - 1}: {text}" for text in ends[:_MOST_ENDS]]
        return replace(self, ends=(*causes.values(), *told)[-_MOST_ENDS:])

    def as_ended(self) -> FailureRecord:
        """The same, once the attempt has ended as it was to."""
        return replace(self, ended=True)


class LastAttempt(NamedTuple):
    """``record`` of an attempt, and ``trained``: the time of day when it was last seen to train."""

    record: FailureRecord
    trained: float

    @classmethod
    def newest(cls, found: Sequence[LastAttempt]) -> LastAttempt | None:
        """What the newest has left, wherever that is; None where nothing is."""
        number = max((one.record.number for one in found), default=0)
        last = [one for one in found if one.record.number == number]
        if not last:
            return None
        # Where it was not seen to its end is no proof that it has failed: a node may have gone before.
        ended = any(one.record.ended for one in last)
        longest = max(last, key=lambda one: one.secs)  # each by its own clock
        return longest._replace(record=replace(longest.record, ended=ended))

    def counted(self) -> FailureRecord:
        """The record of an attempt that follows this one, so that what this one has trained counts."""
        return next_record(self, "", self.record)

    @property
    def secs(self) -> float:
        """That it has trained; a clock that went back takes nothing away."""
        return max(0.0, self.trained - self.record.began)


class StartFacts(NamedTuple):
    """What a start finds. ``nodes``: whose memory is there. ``runs``: as in ``FailureRecord``. ``lost``: memory could
    not make whole what it had, or some of that came from storage. ``taken_back``: somebody has gone back to an older
    state."""

    nodes: Collection[str]
    runs: Collection[str]
    lost: bool = False
    taken_back: bool = False


def ended_by(last: FailureRecord | None, start: StartFacts) -> str:
    """The kind of failure that has ended an attempt; "" where it was none, or nothing is known of one.

    Memory that is all there was left by processes that failed; but where each launcher is another one than before,
    the job has ended with its launchers, and somebody has begun it again.
    """
    if last is None or last.ended or start.taken_back:
        return ""
    left = set(last.nodes) & set(start.nodes)
    if start.lost or not left:
        return JOB
    if left < set(last.nodes):
        return NODE
    begun_again = last.runs and start.runs and not set(last.runs) & set(start.runs)
    return "" if begun_again else PROCESS


def next_record(last: LastAttempt | None, kind: str, begins: FailureRecord) -> FailureRecord:
    """``begins``, the record of the first attempt of a job, for one that comes after ``last``, which was ended by
    ``kind``."""
    if last is None:
        return begins
    before = last.record
    return replace(
        begins,
        number=before.number + 1,
        secs=before.secs + last.secs,
        node_secs=before.node_secs + last.secs * len(before.nodes),
        seen={**before.seen, **({kind: before.seen.get(kind, 0) + 1} if kind else {})},
        ends=before.ends,
    )


def expected(given_secs: Mapping[str, float], record: FailureRecord | None, nodes: int) -> dict[str, FailureRate]:
    """Failures of each kind that a job on so many ``nodes`` is to expect.

    ``given_secs``: between two of each kind, of the whole job, as ``tiers.mtbf_secs`` has it. The more nodes, the
    more processes and nodes fail: what was seen on another number of them counts by the time that nodes have trained.
    """
    if record is None:
        return {kind: FailureRate(given_secs[kind]) for kind in KINDS}
    of_nodes = record.node_secs / nodes
    secs = {PROCESS: of_nodes, NODE: of_nodes, JOB: record.secs}
    return {kind: FailureRate(given_secs[kind], record.seen.get(kind, 0), secs[kind]) for kind in KINDS}


def in_words(rates: Mapping[str, FailureRate]) -> str:
    """Of each kind, for people."""
    return "; ".join(f"{kind} {rates[kind]}" for kind in KINDS)
