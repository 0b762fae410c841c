"""The history that a snapshot belongs to, similar to timelines of databases. Pure.

A lineage is a list of branches, oldest first. Each has a generation, and the last iteration of its parent, the branch
before it, that belongs to the history; -1 for the first, which has no parent. A rollback creates a branch:

    event                                             lineage of the following snapshots
    training starts                                   1
    restart from memory or storage                    1
    --ftckpt-rollback-before 41                       1, 2 branched at 40
    a script loads a checkpoint of its own            3, without a parent: its history is unknown
    --ftckpt-restore-from iteration 60 of branch 1    1, 4 branched at 60

A snapshot is in the past of a head up to the last iteration that both histories share. Other snapshots are abandoned,
not deleted: a later start can name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ftckpt.model.snapshot import SnapshotId

NO_LIMIT = (1 << 63) - 1
"""The last shared iteration of two histories of which one continues the other."""


@dataclass(frozen=True)
class Branch:
    """A part of a history: the snapshots of ``generation`` after ``iteration``, the last one of the branch before."""

    generation: int
    iteration: int = -1


@dataclass(frozen=True)
class Doubtful:
    """The snapshots of ``generation`` above ``after`` up to ``until``, whose replicas may have differed."""

    generation: int
    after: int
    until: int


@dataclass(frozen=True)
class Lineage:
    """The branches of one history, oldest first; empty if unknown.

    ``requests``: the explicit requests of the newest start, such as ``rollback-before 41``; a restart with the same
    ones does not repeat them. ``found``: the iteration of the newest checkpoint of the framework that a start of this
    history has found. ``doubtful`` snapshots are restored only if the user names them.
    """

    branches: tuple[Branch, ...] = ()
    requests: tuple[str, ...] = field(default=(), compare=False)
    found: int = field(default=-1, compare=False)
    doubtful: tuple[Doubtful, ...] = field(default=(), compare=False)

    @property
    def generation(self) -> int:
        """The generation of the newest branch; 0 if there is none."""
        return self.branches[-1].generation if self.branches else 0

    def generation_at(self, iteration: int) -> int:
        """The generation of the branch that a snapshot of ``iteration`` belongs to; 0 if there is none."""
        return max((one.generation for one in self.branches if one.iteration < iteration), default=0)

    def doubt(self, after: int, until: int) -> Lineage:
        """This lineage, with snapshots of the newest branch above ``after`` up to ``until`` in doubt."""
        return replace(self, doubtful=(*self.doubtful, Doubtful(self.generation, after, until)))

    def branch(self, iteration: int, after: int = 0) -> Lineage:
        """The lineage of a branch after ``iteration`` of this one; -1: a history without a past.

        ``after``: the highest known generation; the new one is above it.
        """
        # A branch that started at this iteration or later does not belong to the history before it.
        past = tuple(one for one in self.branches if one.iteration < iteration)
        generation = 1 + max(after, self.generation)
        return replace(self, branches=(*past, Branch(generation, iteration if past else -1)))


UNKNOWN = Lineage()
FIRST = UNKNOWN.branch(-1)
"""The lineage of a new job."""


def last_shared(one: Lineage, other: Lineage) -> int:
    """The last iteration that belongs to both histories; ``NO_LIMIT`` if one continues the other. A snapshot of an
    unknown history counts, so also ``NO_LIMIT`` if one is unknown."""
    if not one.branches or not other.branches:
        return NO_LIMIT
    pairs = zip(one.branches, other.branches, strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    ends = [history.branches[shared].iteration for history in (one, other) if shared < len(history.branches)]
    return min(ends, default=NO_LIMIT)


def is_past(lineage: Lineage, iteration: int, head: Lineage) -> bool:
    """Whether the snapshot of ``iteration``, taken under ``lineage``, is in the history of ``head``."""
    return iteration <= last_shared(lineage, head)


def is_doubtful(lineage: Lineage, iteration: int, head: Lineage) -> bool:
    """Whether the snapshot of ``iteration``, taken under ``lineage``, is doubtful in the history of ``head``."""
    generation = lineage.generation_at(iteration)
    return any(one.generation == generation and one.after < iteration <= one.until for one in head.doubtful)


@dataclass(frozen=True)
class Request:
    """The explicit requests in the settings of a start: ``rollback_before`` an iteration, ``restore_from`` a
    checkpoint on storage. Each is executed once: a lineage records it, and later starts resume."""

    before: int = 0
    name: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """The requests as recorded in a lineage."""
        before = (f"rollback-before {self.before}",) if self.before else ()
        return (*before, f"restore-from {self.name}") if self.name else before

    def since(self, head: Lineage) -> Request:
        """The requests that ``head`` has not recorded yet."""
        return Request(
            0 if f"rollback-before {self.before}" in head.requests else self.before,
            "" if f"restore-from {self.name}" in head.requests else self.name,
        )


NO_REQUEST = Request()


@dataclass(frozen=True)
class Selection:
    """The snapshots that a restart may restore: those in the past of ``head`` that are not doubtful, or ``only`` the
    one that the user names.

    ``assumed``: the head before this start, taken as the lineage of snapshots without a recorded one.
    """

    head: Lineage = UNKNOWN
    only: SnapshotId | None = None
    assumed: Lineage = UNKNOWN

    def takes(self, lineage: Lineage, snapshot: SnapshotId) -> bool:
        """Whether ``snapshot``, taken under ``lineage``, is among them."""
        if self.only is not None:
            return snapshot == self.only
        taken_under, iteration = lineage if lineage.branches else self.assumed, snapshot.iteration
        return is_past(taken_under, iteration, self.head) and not is_doubtful(taken_under, iteration, self.head)


ANY = Selection()


def newest(lineages: Iterable[Lineage]) -> Lineage:
    """The head of a job from the lineages that nodes know: the newest counts, as other nodes may have missed it."""
    known = [one for one in lineages if one.branches]
    head = max(known, key=lambda one: one.branches[-1].generation, default=UNKNOWN)
    same = [one for one in known if one == head]
    doubtful = dict.fromkeys(doubt for one in same for doubt in one.doubtful)
    return replace(head, found=max((one.found for one in same), default=-1), doubtful=tuple(doubtful))


_LOAD_OF = "load of iteration "


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The framework's checkpoint that a script has loaded, by iteration; 0 or less: none to compare.

    ``named``: the user has named it; otherwise it is the newest that the script has found. ``lasting``: later starts
    find it again, unless somebody removes it on purpose. ``in_training``: it was loaded during training.
    ``may_follow``: the script may load one after this start.
    """

    iteration: int = -1
    named: bool = False
    lasting: bool = True
    in_training: bool = False
    may_follow: bool = False

    @property
    def is_one(self) -> bool:
        """Whether a checkpoint was loaded that can be compared with snapshots."""
        return self.iteration > 0

    @property
    def request(self) -> str:
        """The load as an explicit request; empty if the user has not named the checkpoint."""
        return f"{_LOAD_OF}{self.iteration}" if self.named else ""

    def requests(self, request: Request, head: Lineage) -> tuple[str, ...]:
        """The explicit requests of this start, and recorded loads that the script may still repeat."""
        repeats = self.may_follow and not self.is_one
        kept = [one for one in head.requests if repeats and one.startswith(_LOAD_OF)]
        return tuple(filter(None, (*request.texts, self.request, *kept)))

    def beside(self, job: str) -> str:
        """The end of a message about a restored snapshot: the script's load, which it replaces."""
        if self.named:
            again = f"('ftckpt clean {job}' to load that again)"
            return f", which continues iteration {self.iteration} of the script {again}"
        return f", the script had loaded {self.iteration}" if self.is_one else ""

    def as_start(self, why: str) -> str:
        """A message about a start that restores no snapshot, and ``why``."""
        if self.is_one:
            start = f"iteration {self.iteration} as loaded by the script"
        else:
            start = "from the beginning" if why else "nothing to restore, from the beginning"
        return f"{start} ({why})" if why else start


NO_CHECKPOINT = LoadedCheckpoint()


def rollback_reason(loaded: LoadedCheckpoint, head: Lineage) -> str:
    """The reason why ``loaded`` takes precedence over a newer snapshot; empty if the newer of the two counts."""
    if loaded.in_training:
        return "the script loaded it while it trained"
    if not loaded.is_one:  # an empty or unmounted directory must not cause a rollback
        return ""
    if loaded.named:
        # Restarts repeat the command line: a recorded load has been executed already.
        return "" if loaded.request in head.requests else "the script loaded it by name"
    if loaded.lasting and loaded.iteration < head.found:
        return f"the newest checkpoint of the script is older than at an earlier start, which found {head.found}"
    return ""


def lineage_after(
    head: Lineage, loaded: LoadedCheckpoint, resumed: int | None, newer: int, requests: tuple[str, ...]
) -> Lineage:
    """The lineage of the snapshots after a start.

    Args:
        head: the job's head, with the branch that was requested, if any.
        resumed: the iteration restored from a snapshot; None: ``loaded`` counts, or training starts.
        newer: the newest iteration in the past of ``head`` that storage has and that was skipped; -1: none.
        requests: the explicit requests of this start.
    """
    found = loaded.iteration if loaded.is_one and loaded.lasting else -1
    if resumed is None:
        return replace(UNKNOWN.branch(-1, after=head.generation), requests=requests, found=found)
    following = replace(head, requests=requests, found=max(head.found, found))
    # Skipped snapshots must not count at the next start, and new ones must not fall into a doubtful range.
    doubts = [one.until for one in head.doubtful if one.generation == head.generation]
    return following.branch(resumed) if max(newer, *doubts, -1) > resumed or not head.branches else following
