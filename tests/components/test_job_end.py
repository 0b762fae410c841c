"""The snapshots that all ranks have at a job's end, and what is pinned of the last boundary until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftckpt.capture.boundary import LastBoundary
from ftckpt.config import Config
from ftckpt.events import Events
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.actions import TakeSnapshot
from ftckpt.session.session import SessionState
from ftckpt.session.shutdown import JobEnd, LastFlush, RankShutdown
from tests.support.errors import lacks


def at(iteration: int, lineage: bytes = b"l" * 16) -> SnapshotId:
    return SnapshotId(lineage, iteration)


def have(*iterations: int) -> tuple[SnapshotId, ...]:
    return tuple(at(iteration) for iteration in iterations)


@pytest.mark.parametrize(
    ("ranks", "newest", "lacking"),
    [
        ([RankShutdown(10, sealed=have(7))] * 2, at(7), 10),
        ([RankShutdown(10, sealed=have(10, 7))] * 2, at(10), -1),
        (
            [RankShutdown(10, sealed=have(10, 7)), RankShutdown(10, sealed=have(7))],
            at(7),
            10,
        ),  # on one rank it has failed
        ([RankShutdown(10, sealed=have(8, 7)), RankShutdown(10, sealed=have(9, 7))], at(7), 10),
        ([RankShutdown(10, sealed=have(7)), RankShutdown(10)], None, 10),
        ([RankShutdown(-1, sealed=have(7))] * 2, at(7), -1),  # nothing was trained
        ([RankShutdown()] * 2, None, -1),
    ],
)
def test_what_is_missing_is_what_no_arena_lacks(
    ranks: list[RankShutdown], newest: SnapshotId | None, lacking: int
) -> None:
    ending = JobEnd.of(ranks)
    assert (ending.newest, ending.lacking) == (newest, lacking) and not ending.objection


def test_what_one_rank_calls_whole_all_ranks_keep() -> None:
    """One has read one vote result more than the other; each would overwrite what the other pins."""
    behind = RankShutdown(10, sealed=have(8, 7, 6, 5), protected=at(5), going=at(5))
    ahead = RankShutdown(10, sealed=have(9, 8, 7, 6), protected=at(7), going=at(6))
    ending = JobEnd.of([behind, ahead])
    assert ending.newest == at(8) and ending.keep == {at(8), at(7), at(6)}
    assert JobEnd.of([ahead, behind]) == ending
    assert JobEnd.of([behind, ahead._replace(persisted=at(6))]).keep == {at(8), at(7)}


def test_any_objection_counts_and_so_do_other_iterations() -> None:
    end = RankShutdown(10, sealed=have(7))
    assert not lacks(JobEnd.of([end, end._replace(objection="why not")]).objection, "1")
    apart = JobEnd.of([end, end._replace(boundary=9)])
    assert not lacks(apart.objection, "9", "10") and apart.lacking == 10


def described() -> Description:
    def piece(key: str) -> Piece:
        return Piece(Fragment.whole(key, "F32", (4,), Box((0,), (4,))), torch.zeros(4))

    return Description((piece("master/w"),), (piece("buffer/mean"),))


def test_what_was_at_the_boundary_is_kept_whatever_comes_behind_it() -> None:
    state, drawn = described(), {"data": 3}
    kept, (mean,) = LastBoundary(state), state.volatile
    assert kept.objection(1) and kept.objection(-1), "training has come to no boundary yet"
    mean.tensor.fill_(1.0)
    kept.keep(1, lambda: drawn)
    drawn["data"] = 4
    mean.tensor.fill_(2.0)
    assert objects.decode(kept.encoded) == {"data": 3} and not kept.objection(1)
    (source, other) = kept.in_place_of([mean.tensor, state.stepped[0].tensor])
    assert source.tolist() == [1.0] * 4 and other is state.stepped[0].tensor
    assert kept.objection(2)


def test_stepped_state_that_is_another_by_now_is_told() -> None:
    state = described()
    kept = LastBoundary(state)
    kept.keep(1, dict)
    state.stepped[0].tensor.fill_(1.0)
    assert not lacks(kept.objection(1), "master/w")
    kept.keep(2, dict)
    assert not kept.objection(2)
    kept.pass_by()
    assert kept.objection(2)


class Slots:
    """A capture whose slots hold these snapshots."""

    def __init__(self, *held: SnapshotId) -> None:
        self.arena = SimpleNamespace(find=lambda snapshot: None)
        self.held, self.done = held, list[str]()

    def has_room(self, keep: frozenset[SnapshotId]) -> bool:
        return not set(self.held) <= keep

    def fence(self, timeout_secs: float) -> None:
        self.done.append("fence")

    def settle(self, timeout_secs: float) -> None:
        self.done.append("settle")


@pytest.mark.parametrize("full", [False, True], ids=["a free slot", "all are kept"])
def test_where_all_slots_are_kept_the_target_gives_way_and_never_what_is_whole_or_protected(full: bool) -> None:
    capture, state = Slots(at(5), at(7), at(8), *(() if full else (at(6),))), SessionState(Config(), protects=True)
    state.begin(b"l" * 16, None, 0.0)
    state.committed = at(7)  # it has not read yet of 8, and another rank has
    state.adopt(at(5), at(7))
    marks, taken = [], list[TakeSnapshot]()

    def begin(take: TakeSnapshot) -> int:
        taken.append(take)
        capture.done.append("begin")
        return 3

    rank: Any = SimpleNamespace(
        state=state, events=Events(None, 0), protection=SimpleNamespace(mark=lambda one: marks.append(one.target))
    )
    snapshots: Any = SimpleNamespace(
        capture=capture, shard=SimpleNamespace(complete=lambda keep: None), take=begin, kept=None
    )
    assert not LastFlush(rank, snapshots, 10).take(at(10), frozenset(have(8, 5)))
    assert taken == [TakeSnapshot(at(10), frozenset(have(8, 5) if full else have(8, 7, 5)))]
    assert marks == ([None] if full else []), "the SMP stops before its slot is written"
    assert capture.done == ["begin", "fence", "settle"]
