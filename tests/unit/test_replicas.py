"""Shares: the ranks of a replica set cover their bytes exactly once and evenly, and all agree on the cut."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Collection, Mapping
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftckpt.errors import ConfigError
from ftckpt.layout.replicas import CUT_BYTES, Holding, ReplicaSets, identity, private_key, replica_sets, share
from ftckpt.layout.topology import Member, Topology, layouts_differ
from ftckpt.state.fragment import Box, Fragment

Ranks = tuple[int, ...]
Job = tuple[dict[int, list[Fragment]], dict[bytes, Ranks], set[bytes]]
Parts = list[tuple[int, Fragment]]


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
    """What each rank holds (in an order of its own), who holds what, and what differs."""
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


def sets_of(held: Mapping[int, list[Fragment]], differing: Collection[bytes] = ()) -> ReplicaSets:
    """By what the ranks would tell each other: the last holder's bits are others where they differ."""
    return replica_sets(
        [[Holding(identity(f), rank if identity(f) in differing else 7) for f in held[rank]] for rank in sorted(held)]
    )


def shares(held: Mapping[int, list[Fragment]], sets: ReplicaSets) -> dict[int, Parts]:
    return {rank: share(held[rank], sets, rank, f"dp{rank}") for rank in held}


@settings(deadline=None)
@given(jobs())
def test_replica_sets_are_who_holds_what(job: Job) -> None:
    held, holders, differing = job
    assert sets_of(held, differing) == ReplicaSets(holders, frozenset(differing))


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_every_element_is_copied_exactly_once(job: Job) -> None:
    held, holders, differing = job
    copied: dict[bytes, list[tuple[int, int]]] = {key: [] for key in holders if key not in differing}
    for rank, parts in shares(held, sets_of(held, differing)).items():
        assert [index for index, _ in parts] == sorted(index for index, _ in parts)
        for index, part in parts:
            whole = held[rank][index]
            if identity(whole) in differing:
                assert part == whole.with_key(private_key(whole.key, f"dp{rank}"))
            else:
                assert dataclasses.replace(part, start=whole.start, stop=whole.stop) == whole
                assert part.numel > 0
                copied[identity(whole)].append((part.start, part.stop))
    wholes = {identity(fragment): fragment for fragments in held.values() for fragment in fragments}
    for key, runs in copied.items():
        edges = [wholes[key].start, *itertools.chain(*sorted(runs)), wholes[key].stop]
        assert edges[0::2] == edges[1::2]


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_differing_replicas_are_captured_whole_by_each_holder(job: Job) -> None:
    held, holders, differing = job
    parts = shares(held, sets_of(held, differing))
    for key in differing:
        for rank in holders[key]:
            (whole,) = [f for f in held[rank] if identity(f) == key]
            assert whole.with_key(f"{whole.key}@dp{rank}") in [part for _, part in parts[rank]]


@settings(max_examples=200, deadline=None)
@given(jobs())
def test_the_work_of_a_set_is_even_and_cut_at_whole_lines(job: Job) -> None:
    held, holders, _ = job
    sets = sets_of(held)
    for members in set(holders.values()):
        total = sum(f.nbytes for f in held[members[0]] if holders[identity(f)] == members)
        for rank in members:
            taken = [(held[rank][index], part) for index, part in share(held[rank], sets, rank, "")]
            mine = [(whole, part) for whole, part in taken if holders[identity(whole)] == members]
            assert abs(sum(part.nbytes for _, part in mine) - total / len(members)) <= CUT_BYTES
            for whole, part in mine:
                assert (part.start - whole.start) * part.item_bytes % CUT_BYTES == 0
                assert part.stop == whole.stop or (part.stop - whole.start) * part.item_bytes % CUT_BYTES == 0


@settings(deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_who_computes_it_or_in_which_order(job: Job, random: Random) -> None:
    held, _, differing = job
    sets = sets_of(held, differing)
    first = shares(held, sets)
    shuffled = {rank: fragments.copy() for rank, fragments in held.items()}
    for fragments_ in shuffled.values():
        random.shuffle(fragments_)
    turned = ReplicaSets(dict(reversed(list(sets.members.items()))), sets.differing)
    second = shares(shuffled, turned)
    for rank in held:
        assert {part for _, part in first[rank]} == {part for _, part in second[rank]}
        assert len(first[rank]) == len(second[rank])


@given(fragments("a"), fragments("b"))
def test_identity_tells_key_type_and_geometry(a: Fragment, b: Fragment) -> None:
    assert identity(a) != identity(b)
    assert identity(a) == identity(dataclasses.replace(a))
    assert identity(a) != identity(dataclasses.replace(a, dtype="I16"))
    wider = dataclasses.replace(a, global_shape=(a.global_shape[0], a.global_shape[1] + 1))
    assert identity(a) != identity(wider)
    assume(a.numel > 0)
    assert identity(a) != identity(a.part(1, a.numel))


def test_one_rank_alone_copies_everything() -> None:
    whole = Fragment.whole("w", "F32", (1000,), Box((0,), (1000,)))
    assert share([whole], sets_of({0: [whole]}), 0, "dp0") == [(0, whole)]


def test_fewer_lines_than_ranks_still_cover_all() -> None:
    tiny = Fragment.whole("w", "F32", (3,), Box((0,), (3,)))
    held = {rank: [tiny] for rank in range(8)}
    assert [part for parts in shares(held, sets_of(held)).values() for part in parts] == [(0, tiny)]


MEMBERS = tuple(Member({"tp": tp, "dp": dp}, f"node{dp}") for dp in range(2) for tp in range(2))


def test_a_topology_knows_places_nodes_and_leaders() -> None:
    views = [Topology(rank, MEMBERS, {"tp": 2, "dp": 2}) for rank in range(4)]
    assert [view.me.shard for view in views] == ["tp0-dp0", "tp1-dp0", "tp0-dp1", "tp1-dp1"]
    assert views[0].rank_of == {"tp0-dp0": 0, "tp1-dp0": 1, "tp0-dp1": 2, "tp1-dp1": 3}
    assert [views[0].ranks_on(node) for node in ("node0", "node1", "node2")] == [[0, 1], [2, 3], []]
    assert [view.is_node_leader for view in views] == [True, False, True, False]


def test_two_ranks_in_one_place_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ranks 1 and 4 both claim the place tp1-dp0"):
        Topology(0, (*MEMBERS, MEMBERS[1]), {})


def test_a_member_survives_json_in_the_order_of_its_coordinates() -> None:
    for member in MEMBERS:
        back = Member.from_json(json.loads(json.dumps(member.to_json())))
        assert (back, back.shard) == (member, member.shard)


def test_differing_layouts_name_each_axis() -> None:
    assert layouts_differ({"tp": 4, "pp": 1}, {"tp": 2, "pp": 1}) == ["tp 2 → 4"]
    assert layouts_differ({"tp": 4, "cp": 2}, {"tp": 4, "zero": True}) == ["cp None → 2", "zero True → None"]
    assert layouts_differ({"tp": 4}, {"tp": 4}) == []
