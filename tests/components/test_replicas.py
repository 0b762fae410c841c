"""Shares: the ranks of a replica set take their bytes exactly once and evenly, and all agree on the cut."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.capture.redundancy import SharePlan, lay_out
from ftckpt.errors import ConfigError
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.replica_groups import DIFFERING, PRIVATE
from ftckpt.model.replicas import (
    WHOLE_SHARE,
    Gather,
    ReplicaSets,
    identity,
    own_parts,
    private_key,
    run_indices,
    run_share,
    without_small,
)
from ftckpt.model.topology import RankPlace, Topology, layouts_differ
from tests.support.choosing import replica_sets
from tests.support.errors import raises

Ranks = tuple[int, ...]
Job = tuple[dict[int, list[Fragment]], dict[bytes, Ranks], set[bytes]]
Parts = list[tuple[int, Fragment]]
T = TypeVar("T")


@st.composite
def fragments(draw: st.DrawFn, key: str) -> Fragment:
    dtype = draw(st.sampled_from(["U8", "BF16", "F32", "F64"]))
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(0, 400))
    shape = (rows, columns)
    if not draw(st.booleans()):
        return Fragment.whole(key, dtype, (8, columns), Box((draw(st.integers(0, 4)), 0), shape))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, rows * columns)] * 2)))
    return Fragment(key, dtype, (rows, columns), Box((0, 0), shape), start, stop)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """The fragments of each rank (in an order of its own), their holders, and their differences."""
    size = draw(st.integers(1, 6))
    held: dict[int, list[Fragment]] = {rank: [] for rank in range(size)}
    holders: dict[bytes, Ranks] = {}
    differing: set[bytes] = set()
    sets = draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))
    for index in range(draw(st.integers(1, 8))):
        fragment = draw(fragments(f"w{index}"))
        ranks = tuple(sorted(draw(st.sampled_from(sets))))
        for rank in ranks:
            held[rank].insert(draw(st.integers(0, len(held[rank]))), fragment)
        holders[identity(fragment)] = ranks
        if len(ranks) > 1 and draw(st.integers(0, 4)) == 0:
            differing.add(identity(fragment))
    return held, holders, differing


class Asked(Exception):
    """A rank's message to which not all ranks have answered yet."""


def in_lockstep(run: Callable[[int, Gather], T], num_ranks: int) -> list[T]:
    """The result of ``run`` on each rank, run repeatedly, one collective further each time."""
    rounds: list[list[bytes]] = []
    while True:
        values, asked = [], []
        for rank in range(num_ranks):
            known = iter(rounds)

            def gather(action: Callable[[], bytes], known: Iterator[list[bytes]] = known) -> list[bytes]:
                data = action()
                for told in known:
                    return told
                raise Asked(data)

            try:
                values.append(run(rank, gather))
                assert next(known, None) is None, "a rank took part in fewer collectives than others"
            except Asked as message:
                asked.append(message.args[0])
        if not asked:
            return values
        assert len(asked) == num_ranks, "a collective that not all ranks take part in"
        rounds.append(asked)


def sets_of(held: Mapping[int, list[Fragment]], differing: Collection[bytes] = ()) -> dict[int, ReplicaSets]:
    """The expected sets, from the messages of the ranks: the bits of each holder differ where they drifted."""
    ranks = sorted(held)

    def run(place: int, gather: Gather) -> ReplicaSets:
        def contents(indices: Sequence[int]) -> list[int]:
            return [place if identity(mine[index]) in differing else 7 for index in indices]

        mine = held[ranks[place]]
        return replica_sets(gather, place, len(ranks), mine, contents)

    return dict(zip(ranks, in_lockstep(run, len(ranks)), strict=True))


def share(fragments: Sequence[Fragment], sets: ReplicaSets, rank: int, shard: str) -> list[tuple[int, Fragment]]:
    """The parts of ``fragments`` that ``rank`` copies: pairs of index into ``fragments`` and the part.

    Each fragment of its own whole, and of each run its share; in the order of ``fragments``.
    """
    parts = own_parts(fragments, sets, shard)
    for group, indices in run_indices(fragments, sets).items():
        place = int(np.searchsorted(sets.runs[group].members, rank))
        parts += run_share(fragments, indices, sets.runs[group].cuts, place)
    return sorted(parts, key=lambda part: part[0])


def shares(held: Mapping[int, list[Fragment]], sets: Mapping[int, ReplicaSets]) -> dict[int, Parts]:
    """The parts of each rank; every rank deals by itself."""
    return {rank: share(held[rank], sets[rank], rank, f"dp{rank}") for rank in held}


@settings(deadline=None)
@given(jobs())
def test_replica_sets_are_who_holds_what(job: Job) -> None:
    held, holders, differing = job
    views = sets_of(held, differing)
    private = [
        sum(f.nbytes for f in held[rank] if len(holders[identity(f)]) == 1 or identity(f) in differing)
        for rank in sorted(held)
    ]
    common: Counter[Ranks] = Counter()
    for key, ranks in holders.items():
        if len(ranks) > 1:
            common[ranks] += 0 if key in differing else next(f for f in held[ranks[0]] if identity(f) == key).nbytes
    for rank, sets in views.items():
        assert sets.private.tolist() == private
        assert Counter({tuple(run.members.tolist()): run.nbytes for run in sets.runs}) == common
        assert [run.members.tolist() for run in sets.runs] == [run.members.tolist() for run in views[0].runs]
        for fragment, group in zip(held[rank], sets.group_of.tolist(), strict=True):
            key = identity(fragment)
            if key in differing:
                assert group == DIFFERING
            elif len(holders[key]) == 1:
                assert group == PRIVATE
            else:
                assert tuple(sets.runs[group].members.tolist()) == holders[key]


@given(jobs())
def test_every_element_is_copied_exactly_once(job: Job) -> None:
    held, holders, differing = job
    copied: dict[bytes, list[tuple[int, int]]] = {key: [] for key in holders if key not in differing}
    for rank, parts in shares(held, sets_of(held, differing)).items():
        indices = [index for index, _ in parts]
        assert indices == sorted(indices)
        assert all(indices.count(n) == 1 for n, one in enumerate(held[rank]) if identity(one) in differing)
        for index, part in parts:
            whole = held[rank][index]
            if identity(whole) in differing:  # whole, by each holder
                assert part == whole.with_key(private_key(whole.key, f"dp{rank}"))
            else:
                assert part._replace(start=whole.start, stop=whole.stop) == whole
                assert part.numel > 0
                copied[identity(whole)].append((part.start, part.stop))
    wholes = {identity(fragment): fragment for fragments in held.values() for fragment in fragments}
    for key, runs in copied.items():
        edges = [wholes[key].start, *itertools.chain(*sorted(runs)), wholes[key].stop]
        assert edges[0::2] == edges[1::2]


@given(jobs())
def test_what_is_next_to_nothing_is_copied_by_each_holder(job: Job) -> None:
    """Alone or with others: all bytes are copied, each part of its name by a rank once, and all ranks know alike."""
    held, _, differing = job
    views = {rank: without_small(sets) for rank, sets in sets_of(held, differing).items()}
    known = sum(run.nbytes for run in views[0].runs) + int(views[0].private.sum())
    copied = 0
    for rank, parts in shares(held, views).items():
        assert views[rank].private.tolist() == views[0].private.tolist()
        assert [run.nbytes for run in views[rank].runs] == [run.nbytes for run in views[0].runs]
        assert len({part.name for _, part in parts}) == len(parts)
        copied += sum(part.nbytes for _, part in parts)
    assert copied == known


@pytest.mark.parametrize(("alone", "dealt"), [(WHOLE_SHARE * 8, False), (WHOLE_SHARE * 8 - 4, True), (0, True)])
def test_a_run_is_dealt_where_it_spares_a_rank_something(alone: int, dealt: bool) -> None:
    """Decided by the rank with the least private state; bytes that differ belong to their rank alone."""
    step, own = whole("step/w", 2), [whole(f"own/{rank}", n // 4) for rank, n in enumerate((1 << 20, alone))]
    held = {rank: [step, own[rank]] for rank in (0, 1)}
    views = {rank: without_small(sets) for rank, sets in sets_of(held).items()}
    parts = shares(held, views)
    assert all(step in [part for _, part in parts[rank]] for rank in (0, 1)) != dealt


def test_what_each_holder_copies_lies_side_by_side_behind_what_is_its_own() -> None:
    """Amid the rank's own, one of them in each chunk, whoever wants those of another shard would read all of it."""
    step = [whole(f"step/{number}", 1) for number in range(2)]
    own = [whole(f"own/{number}", 1 << 10) for number in range(4)]
    held = {rank: [own[2 * rank], step[0], own[2 * rank + 1], step[1]] for rank in (0, 1)}
    views = {rank: without_small(sets) for rank, sets in sets_of(held).items()}
    for rank, view in views.items():
        laid = lay_out(held[rank], view, rank, SharePlan(["dp0", "dp1"], 4096))
        assert [part.fragment for part in laid.parts] == [own[2 * rank], own[2 * rank + 1], *step]


@pytest.mark.parametrize(("bits", "odd"), [("aab", (2,)), ("ab", ()), ("aabb", ()), ("baaac", (0, 4))])
def test_a_rank_that_differs_from_more_than_half_is_named(bits: str, odd: Ranks) -> None:
    """With two replicas it is unknown which is right, and where all differ the script lets them drift."""
    whole = [Fragment.whole(key, "F32", (4, 4), Box((0, 0), (4, 4))) for key in ("v", "w")]

    def run(rank: int, gather: Gather) -> ReplicaSets:
        return replica_sets(gather, rank, len(bits), whole, lambda indices: [7, ord(bits[rank])])

    told = [sets.odd for sets in in_lockstep(run, len(bits))]
    assert told == [{1: odd}] * len(bits) if len({*bits}) > 1 else told == [{}] * len(bits)


@settings(deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_who_computes_it_or_in_which_order(job: Job, random: Random) -> None:
    held, _, differing = job
    first = shares(held, sets_of(held, differing))
    shuffled = {rank: fragments.copy() for rank, fragments in held.items()}
    for fragments_ in shuffled.values():
        random.shuffle(fragments_)
    second = shares(shuffled, sets_of(shuffled, differing))
    for rank in held:
        assert {part for _, part in first[rank]} == {part for _, part in second[rank]}
        assert len(first[rank]) == len(second[rank])


def whole(key: str, numel: int) -> Fragment:
    return Fragment.whole(key, "F32", (numel,), Box((0,), (numel,)))


MEMBERS = tuple(RankPlace({"tp": tp, "dp": dp}, f"node{dp}") for dp in range(2) for tp in range(2))


def test_two_ranks_in_one_place_are_refused_by_name() -> None:
    with raises(ConfigError, "1", "4", "tp1-dp0"):
        Topology(0, (*MEMBERS, MEMBERS[1]), {})


def test_differing_layouts_name_each_axis() -> None:
    assert layouts_differ({"tp": 4, "pp": 1}, {"tp": 2, "pp": 1}) == ["tp 2 → 4"]
    assert layouts_differ({"tp": 4, "cp": 2}, {"tp": 4, "zero": True}) == ["cp None → 2", "zero True → None"]
    assert layouts_differ({"tp": 4}, {"tp": 4}) == []
