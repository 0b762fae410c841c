"""The division of replica sets into shares: equal, or by the capacity of each rank's windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ftckpt.array_types import Array

MOST_BYTES = 1 << 48
"""The maximum of a capacity, so that sums over all ranks of a job stay below 2**63."""

WORTH = 100
"""Weighted shares are used if they reduce the predicted spill by more than 1/100 of all bytes."""


@dataclass(frozen=True, eq=False)
class Run:
    """All fragments of one replica set, concatenated.

    ``members``: the ranks of the set, ascending. ``nbytes``: the bytes to divide among them. ``equal``: shares must
    be equal regardless of capacities, as the protection of these bytes relies on it.
    """

    members: Array
    nbytes: int
    equal: bool = False


@dataclass(frozen=True, eq=False)
class Shares:
    """The shares of all runs: member ``k`` of run ``i`` copies its bytes ``cuts[i][k]`` to ``cuts[i][k + 1]``.

    ``weighted``: capacities were used. ``spill``: predicted bytes per snapshot of the job that do not fit in windows,
    with equal shares and with these; None if no capacity is known.
    """

    cuts: tuple[Array, ...]
    weighted: bool
    spill: tuple[int, int] | None


def choose(runs: Sequence[Run], private: Array, capacities: Array | None) -> Shares:
    """Weighted shares if they reduce the spill by more than 1 % of all bytes, otherwise equal ones.

    The threshold exists because a new division means new arenas. ``private[rank]``: the bytes that only this rank
    copies, int64; ``capacities``: from ``bounded_capacities``. Deterministic: equal arguments give equal cuts on
    every rank.
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
    """The cuts of every run: int64, from 0 to the run's bytes, one more than it has members.

    Fixed loads come first: private bytes, runs with one member, runs with equal shares. Then, from runs with few
    members to runs with many, each run's bytes go to the ranks of lowest load (water-filling): up to a level of load
    over capacity that is equal for all members that get any; members above it get nothing. Without capacities, and if
    capacities and loads are equal, ``nbytes * k // members`` is member ``k``'s first byte.
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
    """The bytes that each rank copies per snapshot, int64."""
    total = private.astype(np.int64)
    for run, cut in zip(runs, cuts, strict=True):
        total[run.members] += cut[1:] - cut[:-1]
    return total


def spill(load: Array, capacities: Array) -> int:
    """The bytes above the capacity of their rank, summed over all ranks."""
    return int(np.maximum(load - capacities, 0).sum())


def bounded_capacities(capacities: Sequence[int]) -> Array:
    """Capacities by rank, in bytes per snapshot, as int64 between 1 and ``MOST_BYTES``.

    A rank without windows has a capacity of 1 byte: it gets almost nothing if others have windows, and an equal share
    if none has.
    """
    return np.array([min(max(int(capacity), 1), MOST_BYTES) for capacity in capacities], np.int64)


def _turn(run: Run) -> tuple[bool, int, list[int]]:
    # Equal runs first, then by number of members; ties are broken by the members, so that all ranks have one order.
    return not run.equal, len(run.members), run.members.tolist()


def _fill(nbytes: int, load: Array, capacity: Array) -> Array:
    """Cuts that raise the members of lowest load to one level of ``load / capacity``.

    The result must be bit-identical on all ranks and processors: it uses only element-wise operations, comparisons
    and running sums, whose order of additions is defined.
    """
    if (load == load[0]).all() and (capacity == capacity[0]).all():
        return equal_cuts(nbytes, len(load))
    full = load / capacity
    order = full.argsort(kind="stable")
    # levels[k]: the level if the k + 1 members of lowest load share the bytes.
    levels = (nbytes + load[order].cumsum()) / capacity[order].cumsum()
    # At the first level that does not reach the next member's load, that member and all above it get nothing.
    (dry,) = (levels[:-1] <= full[order][1:]).nonzero()
    level = levels[dry[0]] if len(dry) else levels[-1]
    taken = np.maximum(level * capacity - load, 0.0).cumsum()
    cuts = np.zeros(len(load) + 1, np.int64)
    # Running sums are rounded, not shares: so shares add up exactly.
    cuts[1:] = np.minimum(np.rint(taken), nbytes)
    cuts[-1] = nbytes
    return cuts
