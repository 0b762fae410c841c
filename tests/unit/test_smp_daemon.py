"""The loop of an SMP, in this process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.smp import daemon, living
from ftckpt.smp.daemon import Daemon


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

    monkeypatch.setattr(living, "list_arenas", list_failing)
    monkeypatch.setattr(daemon, "_LOOK_SECS", 0.0)
    with caplog.at_level(logging.WARNING, "ftckpt"):
        Daemon(arena_root, "test", "node", idle_secs=0.3).run()
    assert len(looks) > 5, "it ended for want of trainers, which a look that did not fail found"
    warnings = [record for record in caplog.records if "smp_error" in record.getMessage()]
    assert len(warnings) == 2 and all("vanished" in record.getMessage() for record in warnings), (
        "again after a good one"
    )
