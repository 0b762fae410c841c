"""The loop of an SMP, in this process."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftckpt.smp import daemon, liveness
from ftckpt.smp.daemon import Daemon
from ftckpt.smp.server import Server
from ftckpt.smp.task_queue import TaskQueue


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """A daemon takes the process's."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_look_that_fails_is_told_once_and_taken_again(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []

    def list_failing(node_dir: Path) -> list[Path]:
        looks.append(node_dir)
        if len(looks) in (1, 2, 3, 5):
            raise OSError("vanished")
        return []

    monkeypatch.setattr(liveness, "list_arenas", list_failing)
    monkeypatch.setattr(daemon, "_LOOK_SECS", 0.0)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        Daemon(arena_root, "test", "node", idle_secs=1.0).run()
    assert len(looks) > 5, "it ended for want of trainers, which a look that did not fail found"
    warnings = [record for record in caplog.records if "smp_error" in record.getMessage()]
    assert len(warnings) == 2 and all("vanished" in record.getMessage() for record in warnings), (
        "again after a good one"
    )


@pytest.mark.parametrize("busy", [False, True])
def test_a_loop_that_finds_nothing_to_do_looks_less_often(
    arena_root: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """And as often as before once there was something, or while what is under way waits for something."""
    waits: list[float] = []
    monkeypatch.setattr(daemon, "time", SimpleNamespace(monotonic=lambda: 5.0 + sum(waits), time=time.time))
    monkeypatch.setattr(TaskQueue, "step", lambda self, deadline: len(waits) == 20)
    monkeypatch.setattr(TaskQueue, "busy", busy)

    def poll(self: Server, timeout_secs: float) -> None:
        waits.append(timeout_secs)
        if len(waits) == 30:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Server, "poll", poll)
    smp = Daemon(arena_root, "test", "node", idle_secs=60.0)
    smp.run()
    if busy:
        assert waits == [0.02] * 20 + [0.0] + [0.02] * 9
    else:
        assert waits == [*sorted(waits[:20]), 0.0, *sorted(waits[21:])]
        assert waits[0] == waits[21] == 0.02 and waits[19] == waits[29] == 0.1 and sum(waits[:20]) > 1.3
