"""Warnings of an SMP, as those who watch its log see them."""

from __future__ import annotations

import logging
from pathlib import Path

from ftckpt.smp.footprint import BoundedLog
from ftckpt.smp.watch import LogTail
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
