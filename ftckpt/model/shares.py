"""How many bytes of each replica set every one of its ranks copies: evenly, or by the capacity of its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ftckpt.array_types import Array

MOST_BYTES = 1 << 48
"""Capacities above this count as this: sums over all ranks of a job stay below 2**63."""

WORTH = 100
"""Weighted shares are used where they take more than one byte in this many out of the predicted spill."""


@dataclass(frozen=True, eq=False)
class Run:
    """All fragments that the same ranks hold, end to end.

    ``members`` are these ranks, ascending, and ``nbytes`` the bytes to be dealt among them. ``equal``: shares
    stay equal whatever the capacities, as protection of these bytes relies on it.
    """

    members: Array
    nbytes: int
    equal: bool = False


@dataclass(frozen=True, eq=False)
class Shares:
    """``cuts[i]`` of run ``i``: member ``k`` copies bytes ``cuts[i][k]`` to ``cuts[i][k + 1]`` of it.

    ``weighted``: any capacities were used. ``spill`` is what is predicted not to fit in windows,
    in bytes per snapshot of the whole job: with equal shares and with these. None where no capacity is known.
    """

    cuts: tuple[Array, ...]
    weighted: bool
    spill: tuple[int, int] | None


def choose(runs: Sequence[Run], private: Array, capacities: Array | None) -> Shares:
    """Weighted shares where they make noticeably less of the job's state spill, otherwise equal ones.

    Noticeably is more than 1 % of all bytes: a new cut means new arenas. ``private[rank]`` are the bytes that
    only this rank copies, int64; ``capacities`` as ``bounded_capacities`` gives them. Deterministic: the same
    arguments give the same cuts on every rank.
    """
    equal = deal(runs, private, None)
    if capacities is None:
        return Shares(equal, False, None)
    spilt = spill(loads(runs, equal, private), capacities)
    total = int(private.sum()) + sum(run.nbytes for run in runs)
    if WORTH * spilt > total:
        weighted = deal(runs, private, capacities)
        less = spill(loads(runs, weighted, private), capacities)
        if WORTH * (spilt - less) > total:
            return Shares(weighted, True, (spilt, less))
    return Shares(equal, False, (spilt, spilt))


def deal(runs: Sequence[Run], private: Array, capacities: Array | None) -> tuple[Array, ...]:
    """The cuts of every run, each int64, from 0 to the run's bytes, one more than it has members.

    What cannot be moved is loaded first: private bytes, runs with one member, runs that stay equal. Then, from
    runs with few members to runs with many, each run's bytes go where the ranks are emptiest (water-filling):
    up to a level of load over capacity that is the same for all members that take part; fuller ones get
    nothing. Without capacities, and where capacities and loads are equal, ``nbytes * k // members`` is
    member ``k``'s first byte.
    """
    if capacities is None:
        return tuple(equal_cuts(run.nbytes, len(run.members)) for run in runs)
    load = private.astype(np.int64)
    cuts: list[Array] = [np.empty(0, np.int64)] * len(runs)
    for index in sorted(range(len(runs)), key=lambda i: _turn(runs[i])):
        run = runs[index]
        if run.equal or len(run.members) == 1:
            cuts[index] = equal_cuts(run.nbytes, len(run.members))
        else:
            cuts[index] = _fill(run.nbytes, load[run.members], capacities[run.members])
        load[run.members] += cuts[index][1:] - cuts[index][:-1]
    return tuple(cuts)


def equal_cuts(nbytes: int, places: int) -> Array:
    """``nbytes * k // places`` for each ``k`` from 0 to ``places``, int64."""
    each, rest = divmod(nbytes, places)  # the product itself could exceed 64 bits
    place = np.arange(places + 1, dtype=np.int64)
    return place * each + place * rest // places


def loads(runs: Sequence[Run], cuts: Sequence[Array], private: Array) -> Array:
    """Bytes that each rank copies per snapshot, int64."""
    total = private.astype(np.int64)
    for run, cut in zip(runs, cuts, strict=True):
        total[run.members] += cut[1:] - cut[:-1]
    return total


def spill(load: Array, capacities: Array) -> int:
    """Bytes beyond the capacity of their rank, summed over all ranks."""
    return int(np.maximum(load - capacities, 0).sum())


def bounded_capacities(capacities: Sequence[int]) -> Array:
    """Capacities by rank, in bytes per snapshot, as int64 between 1 and ``MOST_BYTES``.

    A rank without any window counts as one that can take one byte: it gets next to nothing where others have
    windows, and as much as others where none has.
    """
    return np.array([min(max(int(capacity), 1), MOST_BYTES) for capacity in capacities], np.int64)


def _turn(run: Run) -> tuple[bool, int, list[int]]:
    # What cannot be moved first, then runs with the least choice; members decide between equals, on all ranks alike.
    return not run.equal, len(run.members), run.members.tolist()


def _fill(nbytes: int, load: Array, capacity: Array) -> Array:
    """Cuts that bring the emptiest members to one level of ``load / capacity``.

    All ranks must come to the same bits on whatever processor: only element-wise operations, comparisons and
    running sums are used, whose order of additions is defined.
    """
    if (load == load[0]).all() and (capacity == capacity[0]).all():
        return equal_cuts(nbytes, len(load))
    full = load / capacity
    order = full.argsort(kind="stable")
    # levels[k]: where the water stands if the k + 1 emptiest members share it.
    levels = (nbytes + load[order].cumsum()) / capacity[order].cumsum()
    # The first level that does not reach the next member's load: that member and all fuller ones get nothing.
    (dry,) = (levels[:-1] <= full[order][1:]).nonzero()
    level = levels[dry[0]] if len(dry) else levels[-1]
    taken = np.maximum(level * capacity - load, 0.0).cumsum()
    cuts = np.zeros(len(load) + 1, np.int64)
    # Rounded running sums: shares add up to the bytes exactly, whatever the rounding of each.
    cuts[1:] = np.minimum(np.rint(taken), nbytes)
    cuts[-1] = nbytes
    return cuts
