"""Files that workers write for their agent, in its own directory: imported modules, and failures."""

from __future__ import annotations

import fcntl
import importlib.abc
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_IMPORTS, _FAILURES, _LEFT_OUT, _LOCK = "imports", "failures", "left-out", "lock"
OVER = "over"
"""A failure that every further attempt would repeat."""


def make_directory() -> tuple[Path, IO[bytes]]:
    """Creates a directory and its locked file; removes directories of this user's agents that have died."""
    root = Path(tempfile.gettempdir())
    for path in root.glob("ftckpt-run-*"):
        with suppress(OSError):
            about = path.lstat()
            if about.st_uid == os.geteuid() and stat.S_ISDIR(about.st_mode):
                with open(path / _LOCK, "rb") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(path)
    hidden = Path(tempfile.mkdtemp(prefix=".ftckpt-run-"))
    kept = open(hidden / _LOCK, "wb")
    fcntl.flock(kept, fcntl.LOCK_EX)
    # Renamed after locking: another starting agent removes directories that nobody has locked.
    return hidden.rename(root / hidden.name[1:]), kept


def remove(directory: Path) -> None:
    """Removes the files, and the directory, which must have no others."""
    for name in (_IMPORTS, _FAILURES, _LEFT_OUT, _LOCK):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


class Recorder(importlib.abc.MetaPathFinder):
    """Records each imported module with its file, and the script's changes of the environment and ``sys.path`` before
    it. Finds no modules itself."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _IMPORTS
        self._sought: list[str] = []
        self._env, self._places = dict(os.environ), list(sys.path)

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        sought, self._sought = self._sought, [fullname]
        lines: list[object] = []
        for name in sought:
            spec = getattr(sys.modules.get(name), "__spec__", None)
            if getattr(spec, "_initializing", False):
                self._sought.append(name)
            elif spec is not None:  # otherwise it was not found, or its import failed
                lines.append([name, spec.origin])
        env, places = dict(os.environ), list(sys.path)
        if env != self._env:
            lines.append({"env": {name: env[name] for name in env if env[name] != self._env.get(name)}})
        if places != self._places:
            lines.append({"path": places})
        self._env, self._places = env, places
        if lines:
            _append(self._path, [json.dumps(line) for line in lines])


def imports(directory: Path) -> list[Any]:
    """Recorded imports in order: ``[name, origin]``, ``{"env": changes}`` or ``{"path": places}``."""
    return [json.loads(line) for line in _lines(directory / _IMPORTS)]


def imports_as_text(directory: Path) -> bytes:
    """The encoded imports, for another node."""
    return (directory / _IMPORTS).read_bytes()


def adopt_imports(directory: Path, text: bytes) -> None:
    """Adopts the imports of another node."""
    (directory / _IMPORTS).write_bytes(text)


def size_of_imports(directory: Path) -> int:
    """The size of the recorded imports in bytes; grows with each record."""
    path = directory / _IMPORTS
    return path.stat().st_size if path.exists() else 0


def write_left_out(directory: Path, modules: Mapping[str, str]) -> Path:
    """Writes a list of modules that are not preloaded, with reasons; the file exists as long as the agent."""
    path = directory / _LEFT_OUT
    with suppress(OSError):  # a full disk must not end the job
        path.write_text("".join(f"{name}: {why or 'imports one of the others'}\n" for name, why in modules.items()))
    return path


def leave_failure(directory: Path, text: str) -> None:
    """Records a failure of this worker that further attempts may repeat."""
    _append(directory / _FAILURES, [text])


def take_failures(directory: Path) -> set[str]:
    """Returns the failures recorded since the last call."""
    failures = set(_lines(directory / _FAILURES))
    (directory / _FAILURES).unlink(missing_ok=True)
    return failures


def _append(path: Path, lines: Sequence[str]) -> None:
    """Appends lines with one ``write``, so that lines of several processes do not mix."""
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _lines(path: Path) -> list[str]:
    """The complete lines of a file; the last one may be incomplete if a worker was killed."""
    return path.read_text().split("\n")[:-1] if path.exists() else []
