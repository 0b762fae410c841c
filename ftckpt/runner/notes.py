"""Notes that workers leave for their agent, in a directory of its own: modules they import, and how they failed."""

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
"""A failure after which no further attempt is of use."""


def make_directory() -> tuple[Path, IO[bytes]]:
    """A directory for notes, and the open file that keeps it; those of this user's agents that have died go."""
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
    # Only now: another agent that starts would take what nobody has locked for one that has died.
    return hidden.rename(root / hidden.name[1:]), kept


def remove(directory: Path) -> None:
    """Remove notes, and the directory if nothing else lies there."""
    for name in (_IMPORTS, _FAILURES, _LEFT_OUT, _LOCK):
        (directory / name).unlink(missing_ok=True)
    directory.rmdir()


class Recorder(importlib.abc.MetaPathFinder):
    """Notes each module that is imported, with the file that it comes from, and what the script has changed before:
    its environment and the places of imports. Finds nothing itself."""

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
            elif spec is not None:  # else it was not found, or has failed
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
    """All of it, for another node."""
    return (directory / _IMPORTS).read_bytes()


def adopt_imports(directory: Path, text: bytes) -> None:
    """Take what another node has noted for this one's."""
    (directory / _IMPORTS).write_bytes(text)


def size_of_imports(directory: Path) -> int:
    """Grows with them."""
    path = directory / _IMPORTS
    return path.stat().st_size if path.exists() else 0


def write_left_out(directory: Path, modules: Mapping[str, str]) -> Path:
    """List modules that are not preloaded, with the reasons; the file is there as long as the agent."""
    path = directory / _LEFT_OUT
    with suppress(OSError):  # a full disk must not end the job
        path.write_text("".join(f"{name}: {why or 'imports one of the others'}\n" for name, why in modules.items()))
    return path


def leave_failure(directory: Path, text: str) -> None:
    """Note how this worker fails, where each further attempt may fail alike."""
    _append(directory / _FAILURES, [text])


def take_failures(directory: Path) -> set[str]:
    """The failures that were noted since the last call."""
    failures = set(_lines(directory / _FAILURES))
    (directory / _FAILURES).unlink(missing_ok=True)
    return failures


def _append(path: Path, lines: Sequence[str]) -> None:
    """One call of ``write``, so that lines of several processes do not mix."""
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _lines(path: Path) -> list[str]:
    """Complete lines: a worker may be killed while it writes."""
    return path.read_text().split("\n")[:-1] if path.exists() else []
