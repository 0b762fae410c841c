"""Event logs on disk, as ``--ftckpt-events`` leaves them: which directories hold some, and their whole lines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ftckpt.errors import EventLogError
from ftckpt.event_file import with_older
from ftckpt.model.text import listed

_RANK_FILE = re.compile(r"rank(\d+)\.jsonl")
MOST_LINE_BYTES = 16 << 20
"""What is longer is no event's: whatever has no ends of lines is read in such parts."""


class LinePlace(NamedTuple):
    """The file that a line stands in, and where."""

    path: Path
    offset: int


class EventLog:
    """The event files of one directory. ``num_broken`` counts lines that could not be read, ``num_lost`` lines
    that were never written; ``is_cut``: the first lines of some file are gone."""

    def __init__(self, directory: Path) -> None:
        names = sorted(path.name for path in directory.iterdir() if path.suffix == ".jsonl" and is_log(path))
        numbers = {name: int(match[1]) for name in names if (match := _RANK_FILE.fullmatch(name))}
        self.directory = directory
        self.rank_files = [directory / name for name in sorted(numbers, key=numbers.__getitem__)]
        self.other_files = [directory / name for name in names if name not in numbers]
        self.num_broken = self.num_lost = 0
        self.is_cut = False

    def lines(self, path: Path) -> Iterator[tuple[LinePlace, Mapping[str, Any]]]:
        """Place and fields of every complete line, those of the older half first; the last may still be written."""
        with ExitStack() as stack:
            # Opened together: a file that is rotated meanwhile is read as what it was.
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
            # In bytes, as ``seek`` takes them: tracks are read again by their offsets.
            offset += len(line)

    @property
    def notes(self) -> list[str]:
        """That lines were left out, if any were."""
        notes = [f"{count(self.num_broken, 'broken line')} of the event logs left out"] if self.num_broken else []
        if self.num_lost:
            notes.append(f"{count(self.num_lost, 'event')} lost: the file system of the logs did not answer")
        if self.is_cut:
            notes.append("the oldest events are gone: their logs have come to their limit")
        return notes


def is_log(path: Path) -> bool:
    """Whether it can be read to its end: in a directory that holds anything a link may lead to a device, or a FIFO to
    nobody."""
    return path.is_file()


def event_logs(run: Path, remedy: str) -> list[EventLog]:
    """The logs at or below ``run``; ``remedy`` is how to get some, for errors.

    Raises:
        EventLogError: no such directory, or no event logs in it.
    """
    if not run.is_dir():
        raise EventLogError(f"{run}: no such directory; {remedy}, and give that DIR here")
    found = {Path(directory): filter(_RANK_FILE.fullmatch, names) for directory, _, names in os.walk(run)}
    directories = [directory for directory, names in found.items() if any(is_log(directory / name) for name in names)]
    if not directories:
        raise EventLogError(f"{run}: no event logs (rank0.jsonl and so on) here; {remedy}")
    return [EventLog(directory) for directory in directories]


def note_of_choice(chosen: EventLog, others: set[str]) -> list[str]:
    """That other directories have events too, if there are any."""
    names = sorted(others - {str(chosen.directory)})
    return [f"taken from {chosen.directory}, the newest; there are also {listed(names)}"] if names else []


_MAX_NUMBER = 1e15
"""No time, size or duration of a run is larger, and a page of one that is would have no end."""


def _float(text: str) -> float | None:
    value = float(text)
    return value if abs(value) < _MAX_NUMBER else None


def _int(digits: str) -> int | None:
    return int(digits) if len(digits) < 16 else None


def parse_line(line: bytes) -> Mapping[str, Any] | None:
    """The fields of a line of JSON, with null for numbers that no run has; None where it is none."""
    try:
        fields = json.loads(line, parse_int=_int, parse_float=_float, parse_constant=lambda name: None)
    except (ValueError, RecursionError):  # deep nesting is broken too
        return None
    return fields if isinstance(fields, dict) else None


def whole_number(value: Any) -> int:
    """``value`` of a line as a count. Raises ValueError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def count(num: int, noun: str, nouns: str = "") -> str:
    """``1 fault``, ``2 faults``; ``nouns`` is a plural of another kind."""
    return f"{num} {noun if num == 1 else nouns or noun + 's'}"
