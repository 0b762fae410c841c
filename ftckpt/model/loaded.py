"""What a script has loaded from storage, and whether that undoes what is in memory: a rollback by the operator.

Snapshots carry the origin of their history. A job's origins, and up to which iteration snapshots count of a node that
was away since then:

    what happens                             origin of what follows      away since 1     2        3
    nothing is there: training begins        generation 1, undone 1
    a start finds 50 on storage, 60 in       generation 2, iteration 50           all
      memory: 60 counts, it is newer
    the script goes back to 40               generation 3, returned 3,            40      40
                                               limit 41
    an operator names 20 on storage          generation 4, undone 4,              none    none     none
                                               iteration 20
    restarts with the same command line      the same: memory counts              none    none     none
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on storage by its iteration; 0 or less: nothing was loaded, or nothing that says its iteration.

    ``named``: the operator has named this one; otherwise it is the newest that the script has found. ``lasting``:
    that it is gone at a later start is somebody's will, and not the loss of a node that had it. ``generation``
    tells the origin of what is in memory from older ones, which a node may have that was away for a while: from 1 on
    where there is any. ``undone``: storage has counted since, so that what is of an older generation never happened.
    ``before``: the iteration before which the operator has had the job go back (``restore_before``), 0 for none.
    ``returned``: the generation that began when the job last went back, whoever made it, to before the iteration
    ``limit``: of older generations nothing from there on ever happened; 0 where it never has.

    One that was loaded in training, over what the job had, tells the ``generation`` of that.
    """

    iteration: int = -1
    named: bool = False
    generation: int = field(default=0, compare=False)
    undone: int = field(default=0, compare=False)
    before: int = field(default=0, compare=False)
    returned: int = field(default=0, compare=False)
    limit: int = field(default=0, compare=False)
    lasting: bool = field(default=True, compare=False)

    @property
    def is_one(self) -> bool:
        """Whether a checkpoint was loaded that can be compared with what is in memory."""
        return self.iteration > 0

    def beside(self, job: str) -> str:
        """What storage had where memory counts: for people."""
        if self.named:
            return f", which went on from {self.iteration} of storage ('ftckpt clean {job}' to begin there once more)"
        return f", storage had {self.iteration}" if self.is_one else ""

    def as_begin(self, why: str) -> str:
        """What training begins with where it is no snapshot, and ``why``, if there was one: for people."""
        if self.is_one:
            begin = f"iteration {self.iteration} as loaded from storage"
        else:
            begin = "from the beginning" if why else "nothing to restore, from the beginning"
        return f"{begin} ({why})" if why else begin


NOTHING = Checkpoint()


def rollback(loaded: Checkpoint, origin: Checkpoint) -> str:
    """Why what was loaded counts, whatever is in memory; empty where the newer of the two does.

    Args:
        origin: of the snapshots in memory, see ``next_origin``.
    """
    if loaded.generation:
        return "it was loaded in training"
    # A storage that was not mounted, or is empty, undoes nothing.
    if not loaded.is_one:
        return ""
    if loaded.named:
        # The same command line at each restart: training has gone on from there already.
        return "" if loaded == origin else "it was asked for by name"
    if loaded.lasting and loaded.iteration < origin.iteration:
        return f"storage went back on purpose: its newest was iteration {origin.iteration} at an earlier start"
    return ""


def next_origin(loaded: Checkpoint, origin: Checkpoint, storage_counts: bool, before: int = 0) -> Checkpoint:
    """The origin of the snapshots that a start with ``before`` is going to take.

    That is what was loaded from storage when their history began, or the newest that a later start has found there:
    what is older than it, or is named and is not it, is a rollback.
    """
    found = loaded if loaded.is_one and loaded.lasting else NOTHING
    # A number that an earlier start has gone back before is no going back, and none takes the last one back.
    back = went_back(origin, before) if before not in (0, origin.before) else origin
    returned, limit = back.returned, back.limit
    # What was loaded in training undoes snapshots that may lie nowhere any more, but are on their way to storage.
    following = max(origin.generation, loaded.generation) + 1
    if storage_counts:
        return replace(
            found, generation=following, undone=following, before=before, returned=returned, limit=limit
        )  # fmt: skip
    newest = origin if found == origin or found.iteration <= origin.iteration else found
    if newest is origin and before == origin.before and origin.generation:
        return origin
    return replace(
        newest, generation=following, undone=origin.undone, before=before, returned=returned, limit=limit
    )  # fmt: skip


def went_back(origin: Checkpoint, iteration: int) -> Checkpoint:
    """The origin of what is left, and of what follows, where a job goes back to before ``iteration``."""
    following = origin.generation + 1
    return replace(origin, generation=following, returned=following, limit=max(0, iteration))


def counts_until(origin: Checkpoint, newest: Checkpoint) -> int | None:
    """The last iteration of which a snapshot of ``origin`` counts where others have the ``newest`` origin; -1: of
    none, None: of all.

    Where no origin was marked nobody can tell: what is there counts.
    """
    if 0 < origin.generation < newest.undone:
        return -1
    return newest.limit - 1 if 0 < origin.generation < newest.returned else None


def is_undone(origin: Checkpoint, newest: Checkpoint, iteration: int) -> bool:
    """Whether the snapshot of ``iteration`` with this ``origin`` never happened: see ``counts_until``."""
    last = counts_until(origin, newest)
    return last is not None and iteration > last


def newest_of(origins: Iterable[Checkpoint]) -> Checkpoint:
    """What one node knows counts for all: others were away, or were killed before they had marked it."""
    return max(origins, key=lambda one: one.generation, default=NOTHING)


def earliest_of(origins: Iterable[Checkpoint]) -> Checkpoint:
    """The origin of a snapshot whose parts have these: it is no newer than any of them."""
    return min((one for one in origins if one.generation), key=lambda one: one.generation, default=NOTHING)
