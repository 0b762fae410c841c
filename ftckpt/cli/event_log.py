"""Reads the event logs that ``--ftckpt-events`` writes: finds directories with logs and parses complete lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ftckpt.errors import EventLogError
from ftckpt.event_file import with_older

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
MOST_LINE_BYTES = 16 << 20
"""Longer than any event: bounds the memory for a file without line ends."""


class LinePlace(NamedTuple):
    """The file and byte offset of a line."""

    path: Path
    offset: int


class EventLog:
    """The event files of one directory. ``num_broken`` counts unreadable lines, ``num_lost`` lines that were never
    written; ``is_cut``: rotation has removed the first lines of some file. ``on_bytes`` is called with the size of
    each line that is read."""

    def __init__(self, directory: Path, on_bytes: Callable[[int], object] = int) -> None:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == ".jsonl" and is_log(path))
        numbers = {name: int(match[1]) for name in names if (match := _RANK_FILE.fullmatch(name))}
        self.directory, self._on_bytes = directory, on_bytes
        self.rank_files = [directory / name for name in sorted(numbers, key=numbers.__getitem__)]
        self.other_files = [directory / name for name in names if name not in numbers]
        self.num_broken = self.num_lost = 0
        self.is_cut = False

    def lines(self, path: Path) -> Iterator[tuple[LinePlace, Mapping[str, Any]]]:
        """Place and fields of every complete line, the rotated file's first; the last line may be incomplete."""
        with ExitStack() as stack:
            # Both files are opened first: a rotation while reading does not change what is read.
            files = [(name, stack.enter_context(open(name, "rb"))) for name in with_older(path)]
            for name, file in files:
                is_oldest = name == files[0][0]
                for place, fields in self._lines(name, file):
                    self.is_cut |= is_oldest and "repeated" in fields
                    if is_oldest or "repeated" not in fields:
                        yield place, fields

    def _lines(self, path: Path, file: BinaryIO) -> Iterator[tuple[LinePlace, Mapping[str, Any]]]:
        offset = 0
        while line := file.readline(MOST_LINE_BYTES):
            if line.endswith(b"\n") and line.strip():
                if (fields := parse_line(line)) is None:
                    self.num_broken += 1
                else:
                    num = fields.get("dropped_lines", 0)
                    self.num_lost += num if isinstance(num, int) else 0
                    yield LinePlace(path, offset), fields
            # In bytes, for ``seek``: timelines are read again by their offsets.
            offset += len(line)
            self._on_bytes(len(line))

    @property
    def notes(self) -> list[str]:
        """Notes about broken, lost and removed lines, if any."""
        notes = [f"{count(self.num_broken, 'broken line')} of the event logs left out"] if self.num_broken else []
        if self.num_lost:
            notes.append(f"{count(self.num_lost, 'event')} lost: the file system of the logs did not answer")
        if self.is_cut:
            notes.append("the oldest events are gone: the logs have reached their size limit")
        return notes


def is_log(path: Path) -> bool:
    """Whether it is a regular file: a link to a device, or a FIFO, might never end."""
    return path.is_file()


def event_logs(run: Path, remedy: str, on_bytes: Callable[[int], object] = int) -> list[EventLog]:
    """The logs at or below ``run``; errors name ``remedy``, the way to get logs.

    Raises:
        EventLogError: no such directory, or no event logs in it.
    """
    if not run.is_dir():
        raise EventLogError(f"{run}: no such directory; {remedy}, and name that DIR")
    found = {Path(directory): filter(_RANK_FILE.fullmatch, names) for directory, _, names in os.walk(run)}
    directories = [directory for directory, names in found.items() if any(is_log(directory / name) for name in names)]
    if not directories:
        raise EventLogError(f"{run}: no event logs (rank0.jsonl and so on); {remedy}")
    return [EventLog(directory, on_bytes) for directory in directories]


_MAX_NUMBER = 1e15
"""Larger than any time, size or duration of a run; a figure could not show more."""


def _float(text: str) -> float | None:
    value = float(text)
    return value if abs(value) < _MAX_NUMBER else None


def _int(digits: str) -> int | None:
    return int(digits) if len(digits) < 16 else None


def parse_line(line: bytes) -> Mapping[str, Any] | None:
    """The fields of a line of JSON, with None for impossible numbers; None if the line is not a JSON object."""
    try:
        fields = json.loads(line, parse_int=_int, parse_float=_float, parse_constant=lambda name: None)
    except (ValueError, RecursionError):  # deep nesting counts as broken
        return None
    return fields if isinstance(fields, dict) else None


def whole_number(value: Any) -> int:
    """``value`` of a line as a count. Raises ValueError if it is not an integer of 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def count(num: int, noun: str, nouns: str = "") -> str:
    """``1 fault``, ``2 faults``; ``nouns`` is an irregular plural."""
    return f"{num} {noun if num == 1 else nouns or noun + 's'}"
