"""Background work leaves cores to training, and waits for one no longer than it may."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ftckpt import idle_cores
from ftckpt.capture import copier as copier_module
from ftckpt.capture.copier import HostCopier
from ftckpt.idle_cores import has_idle_core
from tests.unit.test_copier import LONG_SECS, Watched


@pytest.mark.parametrize(
    ("load", "own_cores", "expected"),
    [
        ("0.5 0.5 0.5 4/300 77", 4, True),  # three and the caller
        ("0.5 0.5 0.5 5/300 77", 4, False),
        ("0.5 0.5 0.5 50/300 77", 3, True),  # how its own cores are doing is not known
        ("nothing of the kind", 4, True),
        (None, 4, True),
    ],
)
def test_a_core_is_idle_where_fewer_threads_run_than_there_are_cores(
    load: str | None, own_cores: int, expected: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "loadavg"
    if load is not None:
        path.write_text(load)
    monkeypatch.setattr(idle_cores, "_LOAD", path)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(own_cores)))
    assert has_idle_core() == expected


def test_where_no_core_is_idle_the_fence_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Semaphore(0)
    monkeypatch.setattr(copier_module, "_PATIENCE", 10**9)
    monkeypatch.setattr(copier_module, "has_idle_core", lambda: bool(looked.release()))
    with closing(HostCopier()) as copier:
        watched = Watched()
        flight = watched.start(copier)
        for _ in range(3):
            assert looked.acquire(timeout=LONG_SECS)
        assert not watched.slot.any()
        assert copier.fence(flight, LONG_SECS)
        assert watched.copied


def test_copies_wait_for_a_core_no_longer_than_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []
    monkeypatch.setattr(copier_module, "has_idle_core", lambda: bool(looks.append(None)))
    with closing(HostCopier()) as copier:
        flight = Watched().start(copier)
        assert flight.wait(LONG_SECS)
    # The patience is one for all of a snapshot's copies.
    assert len(looks) == copier_module._PATIENCE
