"""The log of an SMP: followed by ranks, kept after the job."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftckpt.memory import log_archive
from ftckpt.memory.directory import SMP_LOG_NAME, clean_job, node_directory
from ftckpt.memory.log_archive import SmpLog, keep_logs, take_log
from ftckpt.smp.footprint import BoundedLog
from ftckpt.smp.watch import LogTail
from tests.support.errors import lacks

# --- logs of SMPs that outlive the memory of their jobs ---


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


# --- warnings of an SMP, as those who watch its log see them ---


def warn(log: BoundedLog, text: str, level: int = logging.WARNING) -> None:
    log.emit(logging.LogRecord("ftckpt", level, "", 0, text, None, None))


def test_each_warning_is_told_once_and_nothing_else(tmp_path: Path) -> None:
    tail = LogTail(tmp_path)
    assert tail.new_warnings() == []
    log = BoundedLog(tmp_path)
    warn(log, "ftckpt smp-n0: peer_lost {}; that node is away")
    warn(log, "of no matter", logging.INFO)
    warn(log, "a first line\n  a second\n  a third", logging.INFO)
    assert tail.new_warnings() == ["peer_lost {}; that node is away"]
    assert tail.new_warnings() == []
    warn(log, "peer n1 does not answer", logging.ERROR)
    assert tail.new_warnings() == ["peer n1 does not answer"]
    assert not lacks(log.warnings[0], "peer_lost") and len(log.warnings) == 2
    log.close()


def test_a_log_whose_older_half_goes_repeats_nothing(tmp_path: Path) -> None:
    tail, log, told = LogTail(tmp_path), BoundedLog(tmp_path), list[str]()
    for number in range(120):  # each of 4 KB: the file is cut in the middle of them
        warn(log, f"number {number:03d} {'x' * 3900}")
        told += [line[:10] for line in tail.new_warnings()]
    assert told == [f"number {number:03d}" for number in range(120)]
    log.close()
