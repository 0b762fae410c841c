"""Captures: who copies what, writes without a fence, samples."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_replicas import in_lockstep

from ftckpt.capture import copier
from ftckpt.capture.assignment import Assignment, assign
from ftckpt.capture.boundary import Counts, WriteCounts
from ftckpt.capture.capture import Capture
from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.copier import Flight, HostCopier
from ftckpt.capture.sample import SAMPLE_BYTES, ends_of, num_positions, reduced, slices
from ftckpt.errors import CaptureError
from ftckpt.frameworks.optimizers import ParameterRange, stepped_pieces
from ftckpt.frameworks.tensors import LogicalBox, frozen_pieces
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import ControlBlock
from ftckpt.memory.directory import node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import CUT_BYTES, Gather
from ftckpt.model.sampled import Comparison, SampleOutcome, position_of
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.replica_check import ReplicaTrust
from tests.support.errors import raises
from tests.support.waiting import until

# --- slots until their copies are sealed ---


OLD, NEW = b"o" * 16, b"n" * 16


FRAGMENT = Fragment.whole("w", "F32", (10,), Box((0,), (10,)))


def arena_of(root: Path, *fragments: Fragment, slots: int = 2) -> Arena:
    manifest = Manifest({"dp": 0}, {"dp": 1}, fragments, (), 1 << 16, 4096)
    return Arena.create(node_directory(root, "job", "node"), manifest, slots)


@contextmanager
def captured(arena: Arena, copier: HostCopier, *live: torch.Tensor) -> Iterator[Capture]:
    """The capture of a rank whose state is ``live``, each a ``FRAGMENT``."""
    pieces = [Piece(FRAGMENT, tensor) for tensor in live]
    with closing(arena), closing(Capture(arena, pieces, [CopyPart(0, 0, FRAGMENT)][: len(live)], copier)) as capture:
        yield capture


def seal(arena: Arena, slot: int, snapshot: SnapshotId) -> None:
    arena.control.begin(slot)
    arena.control.seal(slot, snapshot)


def test_who_stands_still_for_copies_does_not_wait_for_an_idle_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_PATIENCE", 10**9)
    monkeypatch.setattr(copier, "has_idle_core", lambda: False)
    arena = arena_of(tmp_path, FRAGMENT)
    with captured(arena, HostCopier(), torch.ones(10)) as capture:
        capture.begin(SnapshotId(NEW, 5), [], {})
        capture.settle(10.0)
        assert capture.newest == SnapshotId(NEW, 5)


def test_a_rank_knows_what_its_slots_hold(tmp_path: Path) -> None:
    """It reads no record at a boundary: what it names is neither what it writes over, nor what was undone."""
    arena = arena_of(tmp_path, slots=3)
    seal(arena, 0, SnapshotId(NEW, 4))
    with captured(arena, HostCopier()) as capture:
        assert capture.newest == SnapshotId(NEW, 4), "of an earlier attempt"
        for iteration in range(5, 9):
            keep = [SnapshotId(NEW, iteration - 1)]
            slot = capture.begin(SnapshotId(NEW, iteration), keep, {"at": iteration})
            assert slot not in (arena.find(name) for name in keep)
            capture.fence(10.0)
            capture.settle(10.0)
            assert capture.newest == next(iter(arena.snapshots())) == SnapshotId(NEW, iteration)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
            patch.setattr(ControlBlock, "set_objects", Mock(side_effect=OSError))
            capture.begin(SnapshotId(NEW, 9), [], {}, slots=[arena.snapshots()[SnapshotId(NEW, 8)]])
        assert capture.newest == next(iter(arena.snapshots())) == SnapshotId(NEW, 7)
        capture.forget(7)
        assert capture.newest == next(iter(arena.snapshots())) == SnapshotId(NEW, 6)


def test_copies_that_have_failed_are_over_behind_the_fence(tmp_path: Path) -> None:
    """A rank whose copies still end asks all others to leave the next snapshot out."""

    class Failing(HostCopier):
        def start(self, tensors: object, flight: Flight, windows: object) -> None:
            flight.error = OSError("copy failed")
            flight.submitted.set()
            threading.Timer(0.3, flight.end).start()

    with captured(arena_of(tmp_path), Failing()) as capture:
        capture.begin(SnapshotId(NEW, 4), [], {})
        with raises(CaptureError, "4"):
            capture.fence(10.0)
        assert not capture.busy


class Waiting(HostCopier):
    """Copies nothing until a test ends the flight."""

    def start(self, tensors: object, flight: Flight, windows: object) -> None:
        self.flight = flight

    def end(self, error: Exception | None = None) -> None:
        self.flight.end(error)


@pytest.mark.parametrize("error", [None, OSError("copy failed")])
def test_a_snapshot_counts_as_sealed_once_its_copies_have_ended_well(tmp_path: Path, error: OSError | None) -> None:
    """Before the fence all ranks receive this; they learn of a failure after the fence that meets it."""
    arena, copier = arena_of(tmp_path), Waiting()
    with captured(arena, copier) as capture:
        assert not capture.sealed
        capture.begin(SnapshotId(NEW, 4), [], {})
        assert not capture.sealed
        copier.end(error)
        assert capture.sealed == (arena.find(SnapshotId(NEW, 4)) is not None) == (error is None)


def test_a_seal_in_the_instant_of_the_fence_goes_by_what_the_fence_has_found(tmp_path: Path) -> None:
    """A write without a fence: the thread that seals checks before the fence arrives, and decides after it."""
    arena, copier, live, looked = arena_of(tmp_path, FRAGMENT), Waiting(), torch.zeros(10), threading.Event()
    sealing = threading.Thread(target=copier.end)
    with captured(arena, copier, live) as capture:
        written = capture._writes.written

        def written_then(before: Counts) -> str:
            key = written(before)
            if threading.current_thread() is sealing:
                looked.set()
                until(lambda: capture._taken.is_fenced)
            else:
                sealing.start()
                assert looked.wait(10.0)
            return key

        capture._writes.written = written_then  # type: ignore[method-assign]
        capture.begin(SnapshotId(NEW, 4), [], {})
        live.fill_(1.0)
        with raises(CaptureError, "4"):
            capture.fence(10.0)
        sealing.join(10.0)
        assert arena.find(SnapshotId(NEW, 4)) is None and capture.newest is None


# --- a write to stepped state is counted, whichever of its views it goes through ---


def boxes(*parameters: torch.nn.Parameter) -> dict[Any, list[LogicalBox]]:
    return {
        one: [LogicalBox(f"w{index}", tuple(one.shape), Box((0,) * one.dim(), tuple(one.shape)), 0)]
        for index, one in enumerate(parameters)
    }


def stepped() -> tuple[dict[str, torch.Tensor], list[Piece]]:
    """Two parameters in a flat master, as ZeRO has it, one that is its own master, and one that is frozen."""
    first, second = (torch.nn.Parameter(torch.ones(2, 2).bfloat16()) for _ in range(2))
    alone, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    master, moment, step = torch.ones(8), torch.ones(8), torch.ones(1)
    ranges = [
        ParameterRange(first, 0, first.detach().view(-1), master),
        ParameterRange(second, 0, second.detach().view(-1), master, 4),
        ParameterRange(alone, 0, alone, alone),
    ]
    states: dict[int, dict[str, Any]] = {
        id(master): {"exp_avg": moment}, id(alone): {"exp_avg": torch.ones(3), "step": step},
    }  # fmt: skip
    places = boxes(first, second, alone, frozen)
    found = list(stepped_pieces(places, ranges, lambda part: states[id(part.owner)]))
    found += frozen_pieces(places, {first, second, alone}, lambda one: (0, one))
    live = {
        "weight/w0": first, "weight/w1": second, "weight/w2": alone, "weight/w3": frozen, "master/w0": master,
        "exp_avg/w0": moment, "exp_avg/w2": states[id(alone)]["exp_avg"], "step/w2": step,
    }  # fmt: skip
    return live, found


@pytest.mark.parametrize("key", stepped()[0])
@pytest.mark.parametrize("view", [False, True], ids=["the tensor", "a view of it"])
def test_a_write_to_any_piece_is_told_by_its_key(key: str, view: bool) -> None:
    live, pieces = stepped()
    counts = WriteCounts(pieces)
    before = counts.read()
    assert counts.written(before) == ""
    with torch.no_grad():
        (live[key].view(-1)[:1] if view else live[key]).add_(1)
    assert counts.written(before) == key
    assert counts.written(counts.read()) == ""


def test_what_is_one_tensor_is_looked_at_once() -> None:
    _, pieces = stepped()
    counts = WriteCounts(pieces)
    assert len(pieces) == 10 and len(counts.read()) == 8
    counts.forget()
    assert len(counts.read()) == 0


# --- who copies what ---


MEMBERS = tuple(RankPlace({"pp": pp, "dp": dp}, "node") for pp in range(2) for dp in range(2))
NUMEL = 50_000


class LoneGroup:
    """A group of which only one rank runs at a time; see ``in_lockstep``."""

    def __init__(self, rank: int, size: int, gather: Gather) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def gather(self, data: bytes) -> list[bytes]:
        return self._gather(lambda: data)


def tied(rank: int) -> Description:
    """A layer of the stage, replicated over two ranks, and an embedding that both stages tie."""
    keys = [f"layer{rank // 2}", "embedding"]
    wholes = [Fragment.whole(key, "F32", (NUMEL,), Box((0,), (NUMEL,))) for key in keys]
    return Description(tuple(Piece(f, torch.arange(NUMEL, dtype=torch.float32)) for f in wholes), ())


def assigned(states: Sequence[Description]) -> list[Assignment]:
    def run(rank: int, gather: Gather) -> Assignment:
        group = cast(Group, LoneGroup(rank, 4, gather))
        return assign(group, Topology(rank, MEMBERS, {"pp": 2, "dp": 2}), states[rank], 1 << 12, 1 << 16)

    return in_lockstep(run, 4)


def test_members_of_a_replica_set_copy_equal_shares() -> None:
    found = assigned([tied(rank) for rank in range(4)])
    copied = [sum(f.nbytes for f in assignment.manifest.stepped) for assignment in found]
    assert all(abs(nbytes - 3 * NUMEL) <= 2 * CUT_BYTES for nbytes in copied) and sum(copied) == 3 * 4 * NUMEL


@pytest.mark.parametrize("change", [lambda tensor: tensor[7].add_(1), lambda tensor: tensor[0].fill_(-0.0)])
def test_replicas_that_have_come_to_differ_are_copied_by_each_until_they_agree(
    change: Callable[[torch.Tensor], object],
) -> None:
    """Also by another zero: the bits count."""
    states = [tied(rank) for rank in range(4)]
    first = [assignment.manifest for assignment in assigned(states)]
    embedding = states[3].stepped[1].tensor
    before = embedding.clone()
    change(embedding)
    found = assigned(states)
    name = states[3].stepped[1].fragment.name
    assert [assignment.differing for assignment in found] == [{name: (3,)}] * 4
    assert all(one.manifest != manifest for one, manifest in zip(found, first, strict=True))
    assert {f.key for f in found[3].manifest.stepped} >= {"embedding@pp1-dp1"}
    embedding.copy_(before)
    assert [assignment.manifest for assignment in assigned(states)] == first


def private(rank: int, derives: bool) -> Description:
    """Small tensors of this rank's own; ``derives``: with weights that follow from masters."""
    pieces: list[Piece] = []
    for number in range(5):
        shape = Fragment.whole(f"master/{number}", "F32", (4, 8), Box((rank, 0), (1, 8)))
        master = torch.randn(8)
        pieces.append(Piece(shape, master))
        if derives:
            weight = Fragment.whole(f"weight/{number}", "BF16", (4, 8), Box((rank, 0), (1, 8)))
            pieces.append(Piece(weight, master.bfloat16(), derived_from=master))
    return Description(tuple(pieces), ())


@pytest.mark.parametrize("derives", [(), (2,), (0, 1, 2, 3)], ids=["none", "one rank", "all"])
def test_what_no_longer_follows_its_master_is_copied(derives: tuple[int, ...]) -> None:
    """Where no rank derives anything or has replicas, there is nothing to check."""
    states = [private(rank, rank in derives) for rank in range(4)]
    found = assigned(states)
    assert {assignment.assumption.needed for assignment in found} == {bool(derives)}
    if derives:
        found[2].derived[3].tensor[0] += 1
        again = assigned(states)
        copied = [any(f.key == "weight/3" for f in one.manifest.stepped) for one in again]
        assert copied == [rank in derives for rank in range(4)], "on all ranks alike"


# --- the rotating sample of replicas ---


@given(st.lists(st.integers(0, 1 << 24), max_size=12), st.integers(1, 40))
def test_the_positions_cover_every_byte_exactly_once(sizes: list[int], positions: int) -> None:
    covered = [0] * len(sizes)
    for position in range(positions):
        for one in slices(ends_of(sizes), position, positions):
            assert one.begin == covered[one.piece]
            assert one.begin % CUT_BYTES == 0 and (one.end % CUT_BYTES == 0 or one.end == sizes[one.piece])
            covered[one.piece] = one.end
    assert covered == sizes


@given(st.integers(0, 1 << 40), st.integers(1, 5000))
def test_a_sample_is_small_and_the_positions_no_more_than_the_limit(largest: int, limit: int) -> None:
    positions = num_positions(largest, 0, limit)
    assert 1 <= positions <= max(1, limit - 1)
    assert positions >= limit - 1 or -(-largest // positions) <= SAMPLE_BYTES


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
def test_no_rhythm_of_skipped_snapshots_leaves_a_position_out(positions: int, every: int, begin: int) -> None:
    in_a_row = range(begin, begin + positions + 1)
    assert {position_of(number, positions) for number in in_a_row} == set(range(positions))
    taken = range(begin, begin + 16 * every * positions * positions, every)
    assert {position_of(number, positions) for number in taken} == set(range(positions))


@given(st.data())
def test_the_members_of_each_set_are_compared_and_no_others(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    sets = data.draw(st.lists(ranks, max_size=5))
    members = [np.array(sorted(one), np.int32) for one in sets]
    comparison = Comparison.of(members, num_ranks)
    rows = np.zeros((num_ranks, comparison.width), np.int64)
    digests = data.draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=len(sets), max_size=len(sets)))
    for rank in range(num_ranks):
        own = [digest for one, digest in zip(sets, digests, strict=True) if rank in one]
        rows[rank, 1 : 1 + len(own)] = own
        rows[rank, 1 + len(own) :] = rank  # words of no set
    assert comparison.outcome(rows) == SampleOutcome.MATCHED
    shared = [number for number, one in enumerate(sets) if len(one) > 1]
    if shared:
        number = data.draw(st.sampled_from(shared))
        odd = data.draw(st.sampled_from(sorted(sets[number])))
        wrong = rows.copy()
        wrong[odd, 1 + sum(odd in one for one in sets[:number])] ^= 1 << data.draw(st.integers(0, 62))
        assert comparison.outcome(wrong) == SampleOutcome.DIFFER
    underived = rows.copy()
    underived[data.draw(st.integers(0, num_ranks - 1)), 0] = 3
    assert comparison.outcome(underived) == SampleOutcome.DIFFER
    underived[data.draw(st.integers(0, num_ranks - 1))] = comparison.unsampled()
    assert comparison.outcome(underived) == SampleOutcome.UNKNOWN, "a rank that has not sampled raises no alarm"


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_sum_of_a_device_changes_with_every_element_and_with_their_order(item: int) -> None:
    generator = torch.Generator().manual_seed(item)
    data = torch.randint(0, 256, (64 * item,), dtype=torch.uint8, generator=generator)
    before = data.clone()
    whole = int(reduced({item: [data]}))
    assert torch.equal(data, before), "training's memory is read only"
    assert whole == int(reduced({item: [data[: 32 * item], data[32 * item :]]})), "in pieces as in one"
    for at in range(0, len(data), item):
        other = data.clone()
        other[at + item - 1] ^= 1 << 7  # the first that is lost where a weight is even
        assert int(reduced({item: [other]})) != whole
    swapped = torch.cat([data[item : 2 * item], data[:item], data[2 * item :]])
    assert int(reduced({item: [swapped]})) != whole


@given(st.integers(1, 6), st.lists(st.sampled_from(SampleOutcome), max_size=40))
def test_what_is_trusted_is_the_oldest_of_the_last_matches_of_each_position(
    n: int, outcomes: list[SampleOutcome]
) -> None:
    trust = ReplicaTrust(n, 0)
    matched: list[int] = []
    for number, outcome in enumerate(outcomes, start=1):
        if outcome == SampleOutcome.MATCHED:
            trust.match(number, number)
            matched.append(number)
        last = [max((one for one in matched if position_of(one, n) == position), default=0) for position in range(n)]
        assert trust.iteration == min(last)
    trust.prove(100)
    trust.match(1, 3)
    assert trust.iteration == 100, "a match that is read late takes nothing back"
