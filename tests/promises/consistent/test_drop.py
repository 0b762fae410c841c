"""A snapshot that cannot be finished is dropped on all ranks and never tears; training continues."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftckpt.capture.capture import Capture
from ftckpt.errors import CaptureError
from ftckpt.model.training_state import Description, Piece
from tests.support import jobs, plain
from tests.support.errors import a_rank_raises
from tests.support.faults import Fault
from tests.support.pool import run_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 2
UNTIL = 10


@cache
def reference() -> list[jobs.Outcome]:
    return jobs.outcomes(RANKS, jobs.Run([], UNTIL))


def resume(settings: dict[str, Any]) -> int:
    return jobs.assert_continues(reference(), jobs.outcomes(RANKS, jobs.Run([], UNTIL, settings)))


def test_a_slow_copy_makes_the_optimizer_wait(settings: dict[str, Any], tmp_path: Path) -> None:
    slow = Fault("all", 5, "copy", tmp_path / "slow", "stall", secs=1.0)
    dead = Fault("all", 6, "boundary", tmp_path / "dead", "kill", secs=20)
    results = jobs.broken(RANKS, jobs.Run([], UNTIL, settings, faults=[slow, dead]))
    assert all(map(jobs.killed, results)) and all(slow.fired(rank) for rank in range(RANKS))
    waited = [event["blocked_secs"] for event in jobs.events(settings, "fence")]
    assert max(waited) > 0.5, "nobody waited, so this test showed nothing"
    assert resume(settings) == 5


def test_a_stuck_copy_drops_the_snapshot_on_all_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "fence_secs": 1.0, "error_limit": 100}
    stuck = Fault(1, 5, "copy", tmp_path / "stuck", "stall", secs=8.0)
    dead = Fault("all", 7, "boundary", tmp_path / "dead", "kill", secs=20)
    jobs.broken(RANKS, jobs.Run([], UNTIL, settings, faults=[stuck, dead]))
    assert stuck.fired(1) and dead.fired(0)
    assert {event["rank"] for event in jobs.events(settings, "snapshot_error")} == {1}
    assert jobs.events(settings, "skipped"), "the stuck rank could not write, so nobody should have"
    assert resume(settings) == 4


def outlasts(rank: int, world_size: int, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """The started and the committed snapshot at each boundary; copies of 3 end on rank 1 after boundary 5."""
    checkpointer, state = plain.restarted(rank, world_size, settings)
    capture, seal, goes_on, begun = checkpointer.capture, Capture._seal, threading.Event(), []
    assert capture is not None

    def seal_late(self: Capture, taken: Any) -> None:
        assert (rank, taken.snapshot.iteration) != (1, 3) or goes_on.wait(20)
        seal(self, taken)

    Capture._seal = seal_late  # type: ignore[method-assign]
    for iteration in range(1, 8):
        plain.iterate(checkpointer, state, iteration)
        whole = checkpointer.committed
        begun.append((checkpointer.begun, whole.iteration if whole is not None else -1))
        if iteration == 5:
            threading.Timer(0.3, goes_on.set).start()
            assert goes_on.wait(20)
        if rank == 0 or checkpointer.begun != 3 or goes_on.is_set():
            checkpointer.fence()
            until(lambda: not capture.flying)
    checkpointer.close()
    return begun


def test_copies_that_last_longer_than_an_iteration_keep_no_boundary_waiting(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Both ranks skip the snapshots due meanwhile; the slow one is committed once it is sealed."""
    settings |= {"earlier_secs": 0.0, "objects_size": "1MiB", "chunk_size": "64KiB"}
    for result in run_ranks(outlasts, RANKS, settings):
        assert result.value == [(1, -1), (2, 1), (3, 2), (3, 2), (3, 2), (6, 3), (7, 6)]
    assert {(event["rank"], event["iteration"]) for event in jobs.events(settings, "skipped")} == {
        (rank, iteration) for rank in range(RANKS) for iteration in (4, 5)
    }


def test_too_many_errors_turn_it_off_on_all_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "error_limit": 2}
    faults = [Fault(1, at, "copy", tmp_path / f"raise{at}", "raise") for at in (3, 4)]
    resumed = jobs.outcomes(RANKS, jobs.Run([], UNTIL, settings, faults=faults))
    assert jobs.assert_continues(reference(), resumed) == 0
    assert {event["rank"] for event in jobs.events(settings, "turned_off")} == {0, 1}
    assert max(event["iteration"] for event in jobs.events(settings, "snapshot")) <= 6
    assert not list(Path(settings["arena"]).iterdir())


def turned_off(rank: int, world_size: int, settings: dict[str, Any]) -> list[int]:
    """For each boundary from the last before it is off, the number of described views that are still referenced."""
    checkpointer, state = plain.make(rank, world_size, settings)
    views: list[Any] = []
    described = state.description

    def describe() -> Description:
        # The training state holds them no longer: what does is ftckpt.
        pieces = tuple(
            Piece(piece.fragment, piece.tensor.view(-1), piece.derived_from) for piece in described.stepped
        )
        views.extend(weakref.ref(piece.tensor) for piece in pieces)
        return Description(pieces, ())

    state.describe = describe  # type: ignore[method-assign]
    checkpointer.restore()
    alive = []
    for iteration in range(1, 9):
        if iteration == 3:
            state.failing = {at: OSError("no more") for at in range(3, 9)}
        plain.iterate(checkpointer, state, iteration)
        gc.collect()
        alive.append(sum(view() is not None for view in views))
    assert checkpointer.off and len(views) == 3 and alive[0] == 3
    checkpointer.close()
    return alive


def test_once_off_nothing_of_trainings_memory_is_held(settings: dict[str, Any]) -> None:
    settings = {**settings, "error_limit": 2}
    for result in run_ranks(turned_off, RANKS, settings):
        assert result.value[-1] == 0, result.value


def test_on_error_raise_reverses_it(settings: dict[str, Any], tmp_path: Path) -> None:
    settings = {**settings, "on_error": "raise"}
    fault = Fault(1, 3, "copy", tmp_path / "raise", "raise")
    with a_rank_raises(CaptureError, "iteration 3"):
        jobs.outcomes(RANKS, jobs.Run([], UNTIL, settings, faults=[fault]))


def grown(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings)
    state.save_objects = lambda: {"blob": bytes(2 << 20)}  # type: ignore[method-assign]
    plain.iterate(checkpointer, state, 1)


def test_objects_that_grow_beyond_their_room_are_an_error_that_names_the_field(settings: dict[str, Any]) -> None:
    with a_rank_raises(CaptureError, "bytes, only 1048576 are reserved: raise"):
        run_ranks(grown, RANKS, {**settings, "on_error": "raise", "objects_size": "1MiB"})


def written_early(rank: int, world_size: int, settings: dict[str, Any], when: str) -> None:
    """After the boundary of iteration 3 the script writes to its row, while it is copied or when it has been."""
    hold = threading.Event()
    hold.set()
    plain.before_each_copy(lambda: hold.wait(20) and None)
    checkpointer, state = plain.restarted(rank, world_size, settings)
    plain.iterate(checkpointer, state, 1)
    plain.iterate(checkpointer, state, 2)
    checkpointer.fence()
    if when == "while copied":
        hold.clear()
    plain.iterate(checkpointer, state, 3)
    assert checkpointer.capture is not None and checkpointer.capture.flight is not None
    if when == "when copied":
        assert checkpointer.capture.flight.wait(20)
    state.row.fill_(-1)
    hold.set()
    assert checkpointer.capture.flight.wait(20)  # time to be sealed, wrongly
    checkpointer.fence()
    plain.die()


@pytest.mark.parametrize(("when", "restored"), [("while copied", 2), ("when copied", 3)])
def test_what_the_script_writes_before_the_fence_is_in_no_snapshot(
    settings: dict[str, Any], when: str, restored: int
) -> None:
    """A teacher's weights, which no optimizer steps: the snapshot that they may have torn is dropped, and named."""
    settings = {**settings, "schedule": "stream"}
    run_ranks(written_early, 2, settings, when, expect_failures=True)
    errors = [event["error"] for event in jobs.events(settings, "snapshot_error")]
    assert all("row was written before the fence" in error for error in errors)
    assert bool(errors) == (restored == 2)
    for result in run_ranks(plain.restored, 2, settings):
        assert result.value[:3] == (restored, restored, [float(restored)])


def captured(rank: int, world_size: int, settings: dict[str, Any], computes: bool) -> list[tuple[bool, int]]:
    """Whether it is off, and the last snapshot, after each boundary; rank 1 captures its third step. Where it
    ``computes`` its snapshot was posted before."""
    checkpointer, state = plain.restarted(rank, world_size, settings)
    found = []
    for iteration in range(1, 6):
        if computes and iteration == 3:
            until(lambda: checkpointer.capture.sealed)
            checkpointer.phase("forward")
        checkpointer.capture._copier.in_graph = rank == 1 and iteration == 3
        plain.iterate(checkpointer, state, iteration)
        found.append((checkpointer.off, checkpointer.begun))
    checkpointer.close()
    return found


@pytest.mark.parametrize("computes", [False, True])
def test_a_step_that_is_captured_turns_it_off_on_all_ranks(computes: bool, settings: dict[str, Any]) -> None:
    """Its replays call nothing, so that they would write below copies, unseen."""
    for rank, result in enumerate(run_ranks(captured, RANKS, settings, computes)):
        # What was complete when the capture began stays; that rank takes none any more.
        last = 3 if computes and rank != 1 else 2
        ends = [(not computes, last), (True, last), (True, last)]
        assert result.value == [(False, 1), (False, 2), *ends], result.value
    assert {event["rank"] for event in jobs.events(settings, "turned_off")} == {0, 1}
    (why,) = jobs.events(settings, "snapshot_error")
    assert why["rank"] == 1 and "step outside of it" in why["error"]
