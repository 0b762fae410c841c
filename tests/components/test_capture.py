"""The name of a snapshot: its forms, its order, and how an arena finds it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from ftckpt.capture import copier
from ftckpt.capture.boundary import Counts
from ftckpt.capture.capture import Capture
from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.copier import Flight, HostCopier
from ftckpt.errors import CaptureError
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import ControlBlock
from ftckpt.memory.directory import node_directory
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.training_state import Piece
from tests.support.errors import raises
from tests.support.waiting import until

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
