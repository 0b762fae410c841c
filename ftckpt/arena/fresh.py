"""Temporary names for files that are built whole and then renamed: each writer has its own, none is left behind."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_writing: set[str] = set()  # names under which threads of this process build something now
_guard = threading.Lock()


@contextmanager
def fresh_name(path: Path) -> Iterator[Path]:
    """A name beside ``path`` that nobody else builds under; what still lies there at the end is deleted."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    with _guard:
        _writing.add(fresh.name)
    try:
        yield fresh
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        with _guard:
            _writing.discard(fresh.name)


def remove_half_made(directory: Path, name: str = "*") -> list[Path]:
    """Delete what killed processes left of files called ``name`` (a pattern); returns what that was.

    Only the process that builds such files may call this: others' names are not known to it.
    """
    with _guard:
        doomed = [path for path in sorted(directory.glob(f".{name}.new")) if path.name not in _writing]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed
