"""Warnings of an SMP, as those who watch its log see them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ftckpt.memory.directory import SMP_LOG_NAME
from ftckpt.smp.client import LogTail
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


def test_each_attempt_is_told_what_none_before_it_was(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path)
    warn(log, "before the first trainer")
    assert LogTail(tmp_path).new_warnings() == ["before the first trainer"]
    warn(log, "while no trainer lives")
    tail = LogTail(tmp_path)
    assert tail.new_warnings() == ["while no trainer lives"] and tail.new_warnings() == []
    assert LogTail(tmp_path).new_warnings() == []
    log.close()


def test_what_was_told_lies_before_a_log_that_was_cut(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path)
    warn(log, "told")
    LogTail(tmp_path).new_warnings()
    numbers = [f"number {number:03d}" for number in range(80)]
    for number in numbers:
        warn(log, f"{number} {'x' * 3900}")
    warnings = [line[:10] for line in LogTail(tmp_path).new_warnings()]
    assert len(warnings) > 20 and warnings == numbers[-len(warnings) :]
    log.close()


def test_a_log_whose_older_half_goes_repeats_nothing(tmp_path: Path) -> None:
    tail, log, told = LogTail(tmp_path), BoundedLog(tmp_path), list[str]()
    for number in range(120):  # each of 4 KB: the file is cut in the middle of them
        warn(log, f"number {number:03d} {'x' * 3900}")
        told += [line[:10] for line in tail.new_warnings()]
    assert told == [f"number {number:03d}" for number in range(120)]
    log.close()


def test_who_looks_while_the_older_half_goes_is_told_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail, log, told, cut = LogTail(tmp_path), BoundedLog(tmp_path), list[str](), list[int]()
    ftruncate = os.ftruncate

    def looked_at(fd: int, size: int) -> None:
        ftruncate(fd, size)
        told.extend(line[:10] for line in tail.new_warnings())
        cut.append(size)

    monkeypatch.setattr(os, "ftruncate", looked_at)
    for number in range(120):
        warn(log, f"number {number:03d} {'x' * 3900}")
        told += [line[:10] for line in tail.new_warnings()]
    assert cut and told == [f"number {number:03d}" for number in range(120)]
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
