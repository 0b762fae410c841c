"""Warnings of an SMP, as those who watch its log see them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ftckpt.memory.directory import clean_job, node_directory
from ftckpt.memory.smp_log import SMP_LOG_NAME, LogTail
from ftckpt.smp.footprint import BoundedLog
from tests.support.errors import lacks


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


def test_a_line_that_is_being_written_is_told_once_and_whole(tmp_path: Path) -> None:
    tail, log = LogTail(tmp_path), BoundedLog(tmp_path)
    warn(log, "first")
    with open(tmp_path / SMP_LOG_NAME, "a") as other:
        other.write("2026-01-01 00:00:00,000 ERROR sec")
        other.flush()
        assert tail.new_warnings() == ["first"] and tail.new_warnings() == []
        other.write("ond\n")
    assert tail.new_warnings() == ["second"] and tail.new_warnings() == []
    log.close()


def test_a_log_that_is_cut_while_it_is_read_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, log, read = LogTail(tmp_path), BoundedLog(tmp_path), Path.read_bytes
    warn(log, "first")
    warn(log, "second")

    def cut(path: Path) -> bytes:
        """The first line alone: the writer has emptied the file and begins to write it again."""
        data = read(path)
        path.write_bytes(data)
        return data[: data.find(b"\n") + 1]

    monkeypatch.setattr(Path, "read_bytes", cut)
    assert tail.new_warnings() == []
    monkeypatch.setattr(Path, "read_bytes", read)
    assert tail.new_warnings() == ["first", "second"]
    log.close()


def test_who_removes_a_log_shows_what_nobody_has_shown(arena_root: Path) -> None:
    node_dir, told = node_directory(arena_root, "train", "n0"), list[str]()
    log = BoundedLog(node_dir)
    warn(log, "shown")
    assert LogTail(node_dir).new_warnings() == ["shown"]
    warn(log, "new")
    log.close()
    clean_job(arena_root, "train", told.append)
    assert [lacks(line, "n0", "new") for line in told] == [[]] and not list(arena_root.iterdir())
