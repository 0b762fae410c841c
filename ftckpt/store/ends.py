"""How an attempt has ended, as far as its node has seen it: lines beside the arenas, for the next attempt to read.

Each process that knows something appends a line; whoever is killed while it does loses its own.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.store.directory import ENDS_NAME

_MOST_BYTES = 16 << 10
_MOST_CHARS = 300
"""Of a line: an exception may quote a whole tensor."""


class EndNote(NamedTuple):
    """``text`` says what was seen at ``time``, seconds since the epoch."""

    time: float
    text: str


def tell(node_dir: Path, end: EndNote) -> None:
    """Append it; what has no room is lost. Nothing raises: it comes from processes that end."""
    path, line = node_dir / ENDS_NAME, f"{end.time:.3f} {' '.join(end.text.split())[:_MOST_CHARS]}\n"
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, line.encode())  # one call: lines of several processes do not mix
        finally:
            os.close(fd)


def are_told_in(node_dir: Path) -> None:
    """This process trains with the memory of that node: ``tell_here`` tells there."""
    _here[:] = [node_dir]


_here: list[Path] = []


def tell_here(text: str) -> None:
    """This process ends, for the reason ``text``."""
    for node_dir in _here:
        tell(node_dir, EndNote(time.time(), text))


def read(node_dir: Path) -> list[EndNote]:
    """What was told since ``forget``, the oldest first. Raises OSError."""
    path = node_dir / ENDS_NAME
    if not path.exists():
        return []
    ends = []
    for line in path.read_bytes()[: 2 * _MOST_BYTES].decode("utf-8", "replace").splitlines():
        at, _, text = line.partition(" ")
        with suppress(ValueError):
            ends.append(EndNote(float(at), text))
    return sorted(ends)


def forget(node_dir: Path) -> None:
    """A new attempt trains. Raises OSError."""
    (node_dir / ENDS_NAME).unlink(missing_ok=True)
