"""Dealing: each byte to exactly one member, where there is room, the same on all ranks, and equal if in doubt."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_replicas import in_lockstep

from ftckpt.capture.assignment import Assignment, assign
from ftckpt.errors import CaptureError, ConfigError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import arena_path
from ftckpt.memory.locations import OpenArenas, SlotAt
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import CUT_BYTES, Gather
from ftckpt.model.shares import Run, bounded_capacities, choose, deal, loads, spill
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import Decision
from ftckpt.restore.search import SearchResult
from ftckpt.restore.selected_shards import SelectedShards
from tests.support.errors import raises

SIZE = 6
GB = 1_000_000_000
sizes = st.integers(0, 10**12)
capacities_of_ranks = st.lists(st.integers(0, 10**12), min_size=SIZE, max_size=SIZE)
private_bytes = st.lists(sizes, min_size=SIZE, max_size=SIZE).map(lambda values: np.array(values, np.int64))
job_runs = st.lists(
    st.builds(
        lambda ranks, nbytes, equal: Run(np.array(sorted(ranks), np.int32), nbytes, equal),
        st.sets(st.integers(0, SIZE - 1), min_size=1),
        sizes,
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda run: tuple(run.members.tolist()),
)


def run_of(*members: int, nbytes: int, equal: bool = False) -> Run:
    return Run(np.array(members, np.int32), nbytes, equal)


def dealt(runs: Sequence[Run], private: Sequence[int], capacities: Sequence[int]) -> list[list[int]]:
    """Bytes per member of each run."""
    return [np.diff(cut).tolist() for cut in deal(runs, np.array(private, np.int64), bounded_capacities(capacities))]


@given(job_runs, private_bytes, capacities_of_ranks)
def test_every_byte_goes_to_exactly_one_member(runs: list[Run], private: np.ndarray, capacities: list[int]) -> None:
    cuts = deal(runs, private, bounded_capacities(capacities))
    for run, cut in zip(runs, cuts, strict=True):
        assert len(cut) == len(run.members) + 1
        assert (cut[0], cut[-1]) == (0, run.nbytes)
        assert (np.diff(cut) >= 0).all()
    assert loads(runs, cuts, private).sum() == private.sum() + sum(run.nbytes for run in runs)


def test_tied_embeddings_go_to_the_stage_with_windows() -> None:
    # Two stages of two data-parallel ranks; the first stage has no windows to speak of, the last has many.
    stages = [run_of(0, 1, nbytes=4 * GB), run_of(2, 3, nbytes=4 * GB)]
    tied = run_of(0, 1, 2, 3, nbytes=3 * GB)
    chosen = choose([*stages, tied], np.zeros(4, np.int64), bounded_capacities([GB, GB, 4 * GB, 4 * GB]))
    assert chosen.weighted
    assert np.diff(chosen.cuts[2]).tolist() == [0, 0, 3 * GB // 2, 3 * GB // 2]
    assert chosen.spill == (2 * (2 * GB + 3 * GB // 4 - GB), 2 * GB)


@pytest.mark.parametrize("capacities", [[0, 0, 0], [0, 0, 10**6], [0, 10**6, 10**6]])
def test_a_rank_without_room_gets_next_to_nothing_unless_none_has(capacities: list[int]) -> None:
    (taken,) = dealt([run_of(0, 1, 2, nbytes=300_000)], [0, 0, 0], capacities)
    with_windows = [rank for rank, capacity in enumerate(capacities) if capacity] or [0, 1, 2]
    for rank in range(3):
        due = 300_000 / len(with_windows) if rank in with_windows else 0
        assert abs(taken[rank] - due) <= 2


@pytest.mark.parametrize(
    ("capacities", "weighted"),
    [
        ([1000, 1000], False),  # nothing spills
        ([500, 600], False),  # nothing spills
        ([490, 600], False),  # 10 of 1000 bytes spill: not more than 1 %
        ([489, 600], True),  # 11 of 1000
        ([0, 0], False),  # all spills either way
        ([300, 300], False),
    ],
)
def test_shares_stay_equal_unless_it_pays(capacities: list[int], weighted: bool) -> None:
    run = run_of(0, 1, nbytes=1000)
    chosen = choose([run], np.zeros(2, np.int64), bounded_capacities(capacities))
    assert chosen.weighted == weighted
    assert chosen.spill is not None
    if not weighted:
        assert chosen.cuts[0].tolist() == [0, 500, 1000]
        assert chosen.spill[0] == chosen.spill[1]
    else:
        assert chosen.spill == (11, 0)


@given(job_runs, private_bytes, capacities_of_ranks)
def test_chosen_shares_never_spill_more_than_equal_ones(
    runs: list[Run], private: np.ndarray, capacities: list[int]
) -> None:
    weights = bounded_capacities(capacities)
    chosen = choose(runs, private, weights)
    equal = spill(loads(runs, deal(runs, private, None), private), weights)
    assert chosen.spill == (equal, spill(loads(runs, chosen.cuts, private), weights))
    total = int(private.sum()) + sum(run.nbytes for run in runs)
    assert chosen.weighted == (100 * (chosen.spill[0] - chosen.spill[1]) > total) or not chosen.weighted
    assert chosen.spill[1] <= chosen.spill[0]


class LoneGroup:
    """A group of which only one rank runs at a time; see ``in_lockstep``."""

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def gather(self, data: bytes) -> list[bytes]:
        return self._gather(lambda: data)


MEMBERS = tuple(RankPlace({"pp": pp, "dp": dp}, "node") for pp in range(2) for dp in range(2))
NUMEL = 50_000


def described(rank: int) -> Description:
    """A layer of the stage, replicated over two ranks, and an embedding that both stages tie."""
    keys = [f"layer{rank // 2}", "embedding"]
    wholes = [Fragment.whole(key, "F32", (NUMEL,), Box((0,), (NUMEL,))) for key in keys]
    return Description(tuple(Piece(f, torch.arange(NUMEL, dtype=torch.float32)) for f in wholes), ())


def assigned(capacities: Sequence[Sequence[int] | None]) -> list[Assignment]:
    """The assignments of four ranks; ``capacities[rank]`` is what that rank was told of all."""

    def run(rank: int, gather: Gather) -> Assignment:
        group = cast(Group, LoneGroup(rank, 4, gather))
        topology = Topology(rank, MEMBERS, {"pp": 2, "dp": 2})
        return assign(group, topology, described(rank), 1 << 12, 1 << 16, capacities[rank])

    return in_lockstep(run, 4)


def test_ranks_copy_the_tied_embedding_where_there_is_room_and_say_so() -> None:
    told = [100_000, 100_000, 300_000, 300_000]
    found = assigned([told] * 4)
    assert [a.manifest.capacity for a in found] == told
    assert [a.copied_bytes for a in found] == [sum(f.nbytes for f in a.manifest.stepped) for a in found]
    for assignment, due in zip(found, (100_000, 100_000, 200_000, 200_000), strict=True):
        assert abs(assignment.copied_bytes - due) <= 2 * CUT_BYTES
    assert sum(a.copied_bytes for a in found) == 3 * 4 * NUMEL
    assert {a.spill_bytes for a in found} == {(100_000, 0)}
    again = assigned([[a.manifest.capacity for a in found]] * 4)
    assert [a.manifest.digest for a in again] == [a.manifest.digest for a in found]


def looks(found: Sequence[Assignment]) -> tuple[list[bool], bool]:
    """What a proof sees: of each rank whether what it derives follows, and whether replicas agree."""
    seen = [assignment.belief.look() for assignment in found]
    agree = {assignment.belief.agree([digests for _, digests in seen]) for assignment in found}
    assert len(agree) == 1, "ranks come to different conclusions"
    return [follows for follows, _ in seen], agree.pop()


def test_replicas_that_differ_are_seen_without_a_plan() -> None:
    found = assigned([None] * 4)
    assert all(assignment.belief.needed for assignment in found)
    assert looks(found) == ([True] * 4, True)
    tensor = found[3].pieces[1].tensor
    tensor[7] += 1
    assert looks(found) == ([True] * 4, False)
    tensor[7] -= 1
    assert looks(found) == ([True] * 4, True)
    tensor[0] = -0.0  # the same number, and other bits
    assert looks(found) == ([True] * 4, False)


def test_replicas_that_differed_from_the_start_are_looked_at_by_a_whole_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    original = described

    def spoiled(rank: int) -> Description:
        made = original(rank)
        made.stepped[1].tensor[7] += rank
        return made

    monkeypatch.setitem(globals(), "described", spoiled)
    found = assigned([None] * 4)
    assert all(assignment.differing for assignment in found)
    for rank, assignment in enumerate(found):  # and from here on they agree: what each copies can be shared again
        next(piece for piece in assignment.pieces if piece.fragment.key == "embedding").tensor[7] -= rank
    assert looks(found) == ([True] * 4, False)


def private(rank: int, derives: bool, small: int = 5) -> Description:
    """Many small tensors of this rank's own; ``derives``: with weights that follow from masters."""
    pieces: list[Piece] = []
    for number in range(small):
        shape = Fragment.whole(f"master/{number}", "F32", (4, 8), Box((rank, 0), (1, 8)))
        master = torch.randn(8)
        pieces.append(Piece(shape, master))
        if derives:
            weight = Fragment.whole(f"weight/{number}", "BF16", (4, 8), Box((rank, 0), (1, 8)))
            pieces.append(Piece(weight, master.bfloat16(), derived_from=master))
    return Description(tuple(pieces), ())


@pytest.mark.parametrize("derives", ["none", "one rank", "all"])
def test_nothing_is_proven_where_no_rank_has_anything_to_prove(derives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        globals(), "described", lambda rank: private(rank, derives == "all" or (derives == "one rank" and rank == 2))
    )
    found = assigned([None] * 4)
    assert {assignment.belief.needed for assignment in found} == {derives != "none"}
    assert looks(found) == ([True] * 4, True)
    if derives != "none":
        found[2].derived[3].tensor[0] += 1
        assert looks(found) == ([True, True, False, True], True)


@pytest.mark.parametrize("told", [[0] * 4, [1 << 40] * 4, [150_000] * 4, [200_000, 150_000, 150_000, 160_000]])
def test_capacities_that_change_nothing_leave_every_manifest_as_it_was(told: list[int]) -> None:
    plain, found = assigned([None] * 4), assigned([told] * 4)
    assert [a.manifest.encode() for a in found] == [a.manifest.encode() for a in plain]
    assert {a.manifest.capacity for a in found} == {0}
    assert {a.spill_bytes for a in plain} == {None}
    assert all(a.spill_bytes is not None and a.spill_bytes[0] == a.spill_bytes[1] for a in found)


def test_ranks_that_were_told_different_capacities_refuse() -> None:
    with pytest.raises(CaptureError):
        assigned([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]])
    with pytest.raises(CaptureError):
        assigned([None, [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    with raises(ConfigError, "rank 2", "capacities", "3", "4 ranks"):
        assigned([None, None, [1, 2, 3], None])


@pytest.mark.parametrize("case", ["all", "one has none", "another layout"])
def test_a_restart_goes_on_with_the_capacities_of_the_arenas(arena_root: Path, case: str) -> None:
    told = [0 if case == "one has none" else 11, 22, 33, 44]
    sources: dict[str, SlotAt] = {}
    # The ranks have changed nodes: what one of them needs, another reads.
    nodes, members = ("a", "a", "b", "b"), [replace(MEMBERS[rank], node="bbaa"[rank]) for rank in range(4)]
    for member, capacity, node in zip(MEMBERS, told, nodes, strict=True):
        manifest = Manifest(member.coords, {}, (), (), 4096, 4096, capacity)
        arena = Arena.create(arena_root, manifest, 2)
        sources[member.shard] = SlotAt(node, arena_path(arena_root, manifest).name, 0)
        arena.close()
    ranks = {} if case == "another layout" else {member.shard: rank for rank, member in enumerate(members)}
    decision = Decision(SnapshotId(bytes(16), 7), sources, ranks=ranks)

    def run(rank: int, gather: Gather) -> list[int] | None:
        group = cast(Group, LoneGroup(rank, 4, gather))
        arenas = OpenArenas(arena_root)
        with closing(arenas):
            context = RestoreContext(group, Topology(rank, tuple(members), {}), Events(None, rank), arenas)
            chosen = SelectedShards(context, SearchResult(decision, arenas.shard))
            chosen.join(group.gather(chosen.describe()))
            return chosen.capacities()

    assert in_lockstep(run, 4) == [told if case == "all" else None] * 4
