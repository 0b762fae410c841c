"""Files that are replaced as a whole: a kill leaves the old or the new one."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

UNFINISHED = f"{'[0-9a-f]' * 8}.new"
"""The pattern of the end of a ``fresh_name``."""

_writing: set[str] = set()  # names in use by threads of this process
_guard = threading.Lock()


@contextmanager
def fresh_name(path: Path) -> Iterator[Path]:
    """Yield a unique temporary name in the directory of ``path``; a file that still has it at the end is deleted."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    with _guard:
        _writing.add(fresh.name)
    try:
        yield fresh
    finally:
        # In this order: while the file exists, no other thread takes it for one that a killed process left.
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        with _guard:
            _writing.discard(fresh.name)


def remove_unfinished(directory: Path, name: str = "*") -> list[Path]:
    """Delete unfinished files that killed processes left for ``name`` (a pattern); returns them.

    Only the process that creates such files may call this: it cannot tell which names other processes use.
    """
    with _guard:
        there = sorted(directory.glob(f".{name}.{UNFINISHED}"))
        doomed = [path for path in there if path.name not in _writing and (path.is_symlink() or not path.is_dir())]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file (0600), replacing an older one. Raises OSError; no unfinished file is left."""
    with fresh_name(path) as fresh:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        fresh.rename(path)  # no fsync: a tmpfs loses all or nothing


def replace_link(path: Path, text: str) -> None:
    """Store ``text`` as the target of a dangling link: a file needs a page, and the tmpfs may be full. Raises
    OSError."""
    with fresh_name(path) as fresh:
        fresh.symlink_to(text)
        fresh.rename(path)


def read_link(path: Path) -> str:
    """The text of the last ``replace_link``; empty if there is none."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
