"""What a conversion that was broken off has finished, so that the same command goes on with the rest.

A text file beside the partial directory: one line of JSON that says what is converted into what, then one for each
finished file with its size and checksum. It is gone when the destination has its name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.errors import ConvertError
from ftckpt.universal.atomic import Destination, explained
from ftckpt.universal.reader import map_file

SUFFIX = ".jsonl"
_VERSION = 1
_STEP_BYTES = 64 << 20


class Journal:
    """The journal of one destination. ``identity`` is all that decides what is written, as texts by name."""

    def __init__(self, destination: Destination, identity: Mapping[str, str]) -> None:
        self._destination = destination
        self._identity = dict(identity)
        self._path = destination.partial.with_name(destination.partial.name + SUFFIX)

    def already_done(self, names: Iterable[str]) -> bool:
        """Whether the destination is whole and this very conversion made it, but was killed before it said so.

        Then the partial one has become it, with all files ``names`` as they were finished.
        """
        path, lines = self._destination.path, self._lines()
        if not path.is_dir() or self._destination.partial.exists() or lines[:1] != [self._head()]:
            return False
        return set(names) <= {line.get("file") for line in lines[1:] if _unchanged(path, line)}

    def begin(self) -> set[str]:
        """The names of files that are finished and unchanged; the destination has begun, and a journal is there.

        Raises:
            ConvertError: the partial destination was begun for something else.
        """
        lines = self._lines()
        partial = self._destination.partial
        if not lines:
            others = [entry.name for entry in partial.iterdir() if not entry.name.startswith(".")]
            if others:
                raise ConvertError(f"{partial}: was begun by something else ({others[0]} is in it); remove it first")
            with explained(self._path):
                self._path.write_text(json.dumps(self._head()) + "\n")
            return set()
        told = lines[0].get("identity", {})
        differing = sorted(
            name for name in told.keys() | self._identity.keys() if told.get(name) != self._identity.get(name)
        )
        if differing or lines[0] != self._head():
            raise ConvertError(
                f"{partial}: was begun with another {', '.join(differing) or 'version of ftckpt'}; "
                f"use the same again, or remove it and {self._path.name} to start afresh"
            )
        return {line["file"] for line in lines[1:] if _unchanged(partial, line)}

    def add(self, name: str) -> None:
        """The file ``name`` is finished."""
        nbytes, checksum = _measured(self._destination.partial / name)
        line = json.dumps({"file": name, "bytes": nbytes, "xxh3-64": checksum}) + "\n"
        with explained(self._path):
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def end(self) -> None:
        """The destination has its name."""
        self._path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        return {"version": _VERSION, "identity": self._identity}

    def _lines(self) -> list[dict[str, Any]]:
        """All whole lines; a kill can leave half of the last one."""
        lines: list[dict[str, Any]] = []
        try:
            text = self._path.read_text(errors="replace")
        except FileNotFoundError:
            return lines
        for line in text.split("\n")[:-1]:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            lines += [value] if isinstance(value, dict) else []
        return lines


def _unchanged(directory: Path, line: Mapping[str, Any]) -> bool:
    """Whether the file that ``line`` tells of is in ``directory`` as it was when it was finished."""
    path = directory / str(line.get("file"))
    if not path.is_file() or path.stat().st_size != line.get("bytes"):
        return False
    return _measured(path) == (line["bytes"], line.get("xxh3-64"))


def _measured(path: Path) -> tuple[int, str]:
    data = map_file(path)
    checksum = xxhash.xxh3_64()
    for begin in range(0, len(data), _STEP_BYTES):
        checksum.update(data[begin : begin + _STEP_BYTES].data)
    return len(data), checksum.hexdigest()
