"""What the first iterations with a release that was not tested must show, and when that is over."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ftckpt.capture import examination
from ftckpt.capture.examination import Examination
from ftckpt.errors import UnsupportedError
from ftckpt.model.snapshot import SnapshotId

LINEAGE = b"l" * 16


class Slots:
    """Stands for a Capture: of each snapshot that is held what was stepped then, as one number."""

    def __init__(self) -> None:
        self.live, self.held = 0, dict[SnapshotId, int]()
        self.newest: SnapshotId | None = None

    def take(self, iteration: int, spoils: bool = False) -> None:
        self.newest = SnapshotId(LINEAGE, iteration)
        self.held[self.newest] = self.live + 100 * spoils

    def fence(self, timeout_secs: float) -> None: ...

    def settle(self, timeout_secs: float) -> None: ...

    def holds(self, snapshot: SnapshotId) -> bool:
        return snapshot in self.held

    def differing(self, snapshot: SnapshotId, stepped: bool = False) -> str:
        return "" if self.held[snapshot] == self.live else "w"

    def forget(self, iteration: int) -> None:
        self.held = {snapshot: value for snapshot, value in self.held.items() if snapshot.iteration < iteration}


class Job:
    """Boundaries and steps of one rank."""

    def __init__(self) -> None:
        self.slots: Any = Slots()
        self.examination = Examination("Framework 9.9.9")
        self.iteration = 0

    def step(self, fenced: bool = True, changes: bool = True) -> None:
        if fenced:
            self.examination.fenced(self.slots)
        self.slots.live += changes

    def boundary(self, takes: bool = True, spoils: bool = False) -> None:
        self.iteration += 1
        self.examination.at_boundary()
        if takes:
            self.slots.take(self.iteration, spoils)
            self.examination.look(self.slots, 1.0)


def test_a_change_behind_a_fence_ends_it() -> None:
    job = Job()
    job.boundary()
    assert not job.examination.over, "nothing is known of the fence yet"
    job.step()
    job.boundary()
    assert job.examination.over and job.examination.fits


def test_a_step_that_a_loss_scaler_skips_says_nothing() -> None:
    job = Job()
    job.boundary()
    job.step(fenced=False, changes=False)
    job.boundary()
    assert not job.examination.over
    job.step()
    job.boundary()
    assert job.examination.fits


@pytest.mark.parametrize("interval", [1, 3])
def test_a_change_without_a_fence_is_refused(interval: int) -> None:
    job = Job()
    job.boundary()
    for _ in range(interval - 1):
        job.step(fenced=False)
        job.boundary(takes=False)
    job.step(fenced=False)
    with pytest.raises(UnsupportedError, match="w was changed, and the hook on the optimizer's step was not called"):
        job.boundary()


def test_a_fence_behind_the_change_is_refused_at_once() -> None:
    job = Job()
    job.boundary()
    job.step(fenced=False)
    with pytest.raises(UnsupportedError, match="w was changed before the hook on the optimizer's step was called"):
        job.examination.fenced(job.slots)


def test_a_later_fence_of_an_iteration_stands_behind_changes_of_the_first() -> None:
    """One for each optimizer inside; and iterations between two snapshots."""
    job = Job()
    job.boundary()
    job.step()
    job.step()
    job.boundary(takes=False)
    job.step()
    job.boundary()
    assert job.examination.fits


def test_other_bytes_are_refused_and_void() -> None:
    job = Job()
    job.boundary()
    job.step()
    with pytest.raises(UnsupportedError, match="w in the snapshot of iteration 2 is not what training has"):
        job.boundary(spoils=True)
    assert [snapshot.iteration for snapshot in job.slots.held] == [1]


def test_a_snapshot_that_is_gone_is_compared_with_nothing() -> None:
    """It was dropped, training went back, or the arenas were laid out anew."""
    job = Job()
    job.boundary()
    job.slots.forget(0)
    job.step(fenced=False)
    job.boundary()
    assert not job.examination.over
    job.step()
    job.boundary()
    assert job.examination.fits


def test_it_ends_where_nothing_changes_and_claims_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(examination, "_MOST_LOOKS", 3)
    job = Job()
    with caplog.at_level(logging.WARNING, "ftckpt"):
        for _ in range(3):
            assert not job.examination.over
            job.boundary()
    assert job.examination.over and not job.examination.fits
    assert "has changed in 3 snapshots of Framework 9.9.9: whether it is fenced is not known" in caplog.text


def test_steps_without_a_boundary_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_MOST_STEPS", 3)
    job = Job()
    for _ in range(2):
        for _ in range(3):
            job.step()
        job.boundary(takes=False)
    for _ in range(3):
        job.step()
    with pytest.raises(UnsupportedError, match="3 steps of the optimizer were seen and no end of an iteration"):
        job.step()
