"""Logs of SMPs that outlive the memory of their jobs: which, where, how many, and that nobody waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.memory import log_archive
from ftckpt.memory.directory import SMP_LOG_NAME, clean_job, node_directory
from ftckpt.memory.log_archive import SmpLog, keep_logs, take_log
from tests.support.errors import lacks

QUIET = b"2026-01-01 00:00:00,000 INFO SMP of job train\n"
LOUD = QUIET + b"2026-01-01 00:00:01,000 WARNING ftckpt smp-n0: corrupt {}\n"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of saved logs, which does not exist yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "ftckpt"


def names(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir()) if state.exists() else []


def test_those_that_warned_are_kept_and_it_is_told_where(state: Path) -> None:
    told: list[str] = []
    keep_logs([SmpLog("train", "n0", LOUD), SmpLog("train", "n1", QUIET), SmpLog("train", "n2", b"")], told.append)
    assert names(state) == ["train@n0.log"] and (state / "train@n0.log").read_bytes() == LOUD
    assert [lacks(line, "n0", str(state / "train@n0.log")) for line in told] == [[]]
    assert (state / "train@n0.log").stat().st_mode & 0o777 == 0o600 and state.stat().st_mode & 0o777 == 0o700
    assert SmpLog("train", "n0", QUIET + b"Traceback (most recent call last):\n").is_loud, "it ended by an error"


def test_a_rerun_overwrites_nothing_and_the_oldest_go(state: Path) -> None:
    for run in range(6):
        keep_logs([SmpLog("train", "n0", LOUD + b"run %d" % run)])
    assert names(state) == ["train@n0.log", *(f"train@n0.log.{number}" for number in (1, 2, 3))]
    kept = [(state / f"train@n0.log{suffix}").read_bytes()[-1:] for suffix in ("", ".1", ".2", ".3")]
    assert kept == [b"5", b"4", b"3", b"2"]


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Home is on storage that hangs."""
    answers = threading.Event()
    monkeypatch.setattr(log_archive, "kept_path", lambda job, node: answers.wait() and tmp_path / "late")
    monkeypatch.setattr(log_archive, "_WAIT_SECS", 0.2)
    yield
    answers.set()


@pytest.mark.usefixtures("hanging")
def test_nobody_waits_for_storage_that_hangs(arena_root: Path) -> None:
    told: list[str] = []
    node_dir = node_directory(arena_root, "train", "n0")
    (node_dir / SMP_LOG_NAME).write_bytes(LOUD)
    begin = time.monotonic()
    clean_job(arena_root, "train", told.append)
    assert time.monotonic() - begin < 5 and not list(arena_root.iterdir())
    assert [lacks(line, "n0", "0.2 s") for line in told] == [[]]


def test_of_those_that_take_it_at_once_one_has_it(tmp_path: Path) -> None:
    (tmp_path / SMP_LOG_NAME).write_bytes(LOUD)
    first, second = (take_log(tmp_path / SMP_LOG_NAME, "train", "n0") for _ in range(2))
    assert (first.text, second.text) == (LOUD, b"") and not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / SMP_LOG_NAME)
    assert take_log(tmp_path / SMP_LOG_NAME, "train", "n0").text == b"", "nobody waits for who would write into it"
