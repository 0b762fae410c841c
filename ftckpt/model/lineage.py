"""The history that a snapshot belongs to, as databases keep timelines. Pure.

A lineage is a list of branches, oldest first. Each names its generation, and the last iteration of the branch before
it (its parent) that still belongs to the history; the first has no parent, and says -1. Going back makes a branch:

    what happens                                      lineage of what follows
    training starts                                   1
    restarts go on from memory or storage             1
    --ftckpt-rollback-before 41                       1, 2 branched at 40
    a script goes on from a checkpoint of its own     3, without a parent: its history is not known
    --ftckpt-restore-from a checkpoint of 60 of 1     1, 4 branched at 60

A snapshot is in the past of a head up to the last iteration that both histories share. What is not is abandoned, not
deleted: a later start can name it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from ftckpt.model.snapshot import SnapshotId

NO_LIMIT = (1 << 63) - 1
"""The last iteration that two histories share where one of them continues the other."""


@dataclass(frozen=True)
class Branch:
    """A part of a history: the snapshots of ``generation``, after those up to ``iteration`` of the branch before."""

    generation: int
    iteration: int = -1


@dataclass(frozen=True)
class Doubtful:
    """Snapshots of ``generation`` after one iteration up to another, which may mix states of ranks that differ."""

    generation: int
    after: int
    until: int


@dataclass(frozen=True)
class Lineage:
    """The branches of one history, oldest first; none where it is unknown.

    ``requests`` are the explicit acts of the newest start, such as ``rollback-before 41``: a start with the same ones
    resumes. ``found`` is the newest checkpoint of the framework's own that a start of this history has found.
    ``doubtful`` snapshots are restored only by name.
    """

    branches: tuple[Branch, ...] = ()
    requests: tuple[str, ...] = field(default=(), compare=False)
    found: int = field(default=-1, compare=False)
    doubtful: tuple[Doubtful, ...] = field(default=(), compare=False)

    @property
    def generation(self) -> int:
        """That of the newest branch; 0 where there is none."""
        return self.branches[-1].generation if self.branches else 0

    def generation_at(self, iteration: int) -> int:
        """That of the branch to which a snapshot of ``iteration`` belongs; 0 where there is none."""
        return max((one.generation for one in self.branches if one.iteration < iteration), default=0)

    def doubt(self, after: int, until: int) -> Lineage:
        """With the snapshots of this branch in between in doubt."""
        return replace(self, doubtful=(*self.doubtful, Doubtful(self.generation, after, until)))

    def branch(self, iteration: int, after: int = 0) -> Lineage:
        """The history of what follows ``iteration`` of this one; -1: a history without a past.

        ``after``: the highest generation that is known anywhere; the new one is above it.
        """
        # A branch that started at this iteration, or later, has no part in what was before it.
        past = tuple(one for one in self.branches if one.iteration < iteration)
        generation = 1 + max(after, self.generation)
        return replace(self, branches=(*past, Branch(generation, iteration if past else -1)))


UNKNOWN = Lineage()
FIRST = UNKNOWN.branch(-1)
"""Of a job of which nothing is known."""


def last_shared(one: Lineage, other: Lineage) -> int:
    """The last iteration of which a snapshot belongs to both histories; ``NO_LIMIT`` where one continues the other,
    and where one is unknown: nobody can tell then, and what is there counts."""
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
    """Whether ``head`` has the snapshot of ``iteration``, taken under ``lineage``, in doubt."""
    generation = lineage.generation_at(iteration)
    return any(one.generation == generation and one.after < iteration <= one.until for one in head.doubtful)


@dataclass(frozen=True)
class Request:
    """The explicit acts that the settings of a start name: ``rollback_before`` an iteration, ``restore_from`` a
    checkpoint on storage. Each counts once: a start whose lineage remembers it resumes."""

    before: int = 0
    name: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """As a lineage remembers them."""
        before = (f"rollback-before {self.before}",) if self.before else ()
        return (*before, f"restore-from {self.name}") if self.name else before

    def since(self, head: Lineage) -> Request:
        """Of these what ``head`` does not remember."""
        return Request(
            0 if f"rollback-before {self.before}" in head.requests else self.before,
            "" if f"restore-from {self.name}" in head.requests else self.name,
        )


NO_REQUEST = Request()


@dataclass(frozen=True)
class Selection:
    """The snapshots that a restart may take: those in the past of ``head`` that are in no doubt, or ``only`` one that
    the user names.

    ``assumed`` is the head before this start, and the lineage of what lies where none was recorded.
    """

    head: Lineage = UNKNOWN
    only: SnapshotId | None = None
    assumed: Lineage = UNKNOWN

    def takes(self, lineage: Lineage, snapshot: SnapshotId) -> bool:
        """Whether a snapshot that was taken under ``lineage`` is among them."""
        if self.only is not None:
            return snapshot == self.only
        taken_under, iteration = lineage if lineage.branches else self.assumed, snapshot.iteration
        return is_past(taken_under, iteration, self.head) and not is_doubtful(taken_under, iteration, self.head)


ANY = Selection()


def newest(lineages: Iterable[Lineage]) -> Lineage:
    """The head of a job: one node that knows it counts for all, as others were away or were killed too early."""
    known = [one for one in lineages if one.branches]
    head = max(known, key=lambda one: one.branches[-1].generation, default=UNKNOWN)
    same = [one for one in known if one == head]
    doubtful = dict.fromkeys(doubt for one in same for doubt in one.doubtful)
    return replace(head, found=max((one.found for one in same), default=-1), doubtful=tuple(doubtful))


_LOAD_OF = "load of iteration "


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The checkpoint of its own that a script has loaded at its start, by iteration; 0 or less: none to compare.

    ``named``: the user has named it; otherwise it is the newest that the script has found. ``lasting``: a later start
    finds it again, unless somebody removes it on purpose. ``in_training``: it was loaded over what the job had.
    ``may_follow``: the script may load one behind this start.
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
        """The explicit act that this load is; empty where it is the newest that the script has found."""
        return f"{_LOAD_OF}{self.iteration}" if self.named else ""

    def requests(self, request: Request, head: Lineage) -> tuple[str, ...]:
        """The explicit acts of this start. One that the script may repeat yet is remembered."""
        repeats = self.may_follow and not self.is_one
        kept = [one for one in head.requests if repeats and one.startswith(_LOAD_OF)]
        return tuple(filter(None, (*request.texts, self.request, *kept)))

    def beside(self, job: str) -> str:
        """What the script had loaded where a snapshot counts, as a message part."""
        if self.named:
            again = f"('ftckpt clean {job}' to load that again)"
            return f", which continues iteration {self.iteration} of the script {again}"
        return f", the script had loaded {self.iteration}" if self.is_one else ""

    def as_start(self, why: str) -> str:
        """The start of a training that restores no snapshot, and ``why``, as a message."""
        if self.is_one:
            start = f"iteration {self.iteration} as loaded by the script"
        else:
            start = "from the beginning" if why else "nothing to restore, from the beginning"
        return f"{start} ({why})" if why else start


NO_CHECKPOINT = LoadedCheckpoint()


def rollback_reason(loaded: LoadedCheckpoint, head: Lineage) -> str:
    """Why ``loaded`` counts although a snapshot may be newer; empty where the newer of the two counts."""
    if loaded.in_training:
        return "the script loaded it while it trained"
    if not loaded.is_one:  # a storage that is not mounted, or is empty, rolls nothing back
        return ""
    if loaded.named:
        # The same command line at each restart: training has continued from there already.
        return "" if loaded.request in head.requests else "the script loaded it by name"
    if loaded.lasting and loaded.iteration < head.found:
        return f"the newest checkpoint of the script is older than at an earlier start, which found {head.found}"
    return ""


def lineage_after(
    head: Lineage, loaded: LoadedCheckpoint, resumed: int | None, newer: int, requests: tuple[str, ...]
) -> Lineage:
    """The lineage of the snapshots that a start is going to take.

    Args:
        head: with the branch that was requested, if one was.
        resumed: the iteration that was restored from a snapshot; None: ``loaded`` counts, or training starts.
        newer: the newest iteration in the past of ``head`` that storage has and that was skipped; -1 for none.
        requests: the explicit acts of this start.
    """
    found = loaded.iteration if loaded.is_one and loaded.lasting else -1
    if resumed is None:
        return replace(UNKNOWN.branch(-1, after=head.generation), requests=requests, found=found)
    following = replace(head, requests=requests, found=max(head.found, found))
    # What is skipped now must not count at the next start, and what is taken now is in no doubt.
    doubts = [one.until for one in head.doubtful if one.generation == head.generation]
    return following.branch(resumed) if max(newer, *doubts, -1) > resumed or not head.branches else following
