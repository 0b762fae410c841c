"""The memory that the SMP holds for the arenas of its node (``memory: memfd``)."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftckpt.arena.memfd import label, open_checked, stop_memfds, use_memfds
from ftckpt.errors import ArenaError

_LOOKS = 3
"""An arena's file is renamed twice at most while it is made: a link that three looks miss is not there."""


class HeldMemory:
    """Memfds that live as long as a link under ``node_dir`` names them. Thread-safe; nothing here waits for others.

    The pages are allocated by whoever asks. Memory goes when the link does (``sweep``), and with this process.
    """

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._held: set[int] = set()
        self._guard = threading.Lock()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve ``{"request": "memfd", "link": "ARENA/FILE", "pid", "fd"}`` or ``{"request": "memfd_sweep"}``.

        Raises:
            ArenaError: the request is malformed, or names what is not the memory of that file.
        """
        if request.get("request") == "memfd_sweep":
            return {"closed": self.sweep()}
        link, pid, fd = request.get("link"), request.get("pid"), request.get("fd")
        if not isinstance(link, str) or type(pid) is not int or type(fd) is not int or pid < 1 or fd < 0:
            raise ArenaError(f"memfd: a request needs link, pid and fd, not {link!r}, {pid!r}, {fd!r}")
        self.hold(link, pid, fd)
        return {}

    def hold_own(self, wanted: bool) -> None:
        """Whether parity that this process creates under ``node_dir`` is held here, or is plain files."""
        if wanted:
            use_memfds(self._node_dir, self.answer)
        else:
            stop_memfds(self._node_dir)

    def hold(self, link: str, pid: int, fd: int) -> None:
        """Open descriptor ``fd`` of process ``pid`` and point ``link`` (``ARENA/FILE``) to it.

        Raises:
            ArenaError: not a file of an arena, or the descriptor is not the memfd made for it.
        """
        arena, _, name = link.partition("/")
        path = self._node_dir / arena / name
        if arena in ("", ".", "..") or "/" in name or path.parent.is_symlink():
            raise ArenaError(f"memfd: {link!r} is not a file of an arena")
        with self._guard:
            try:
                held = open_checked(f"/proc/{pid}/fd/{fd}", label(path), writable=True)
            except OSError as error:
                raise ArenaError(
                    f"memfd: process {pid} is not within the SMP's reach: {error.strerror}; start both in one "
                    "container and as one user, or set memory to tmpfs"
                ) from None
            except ArenaError as error:
                raise ArenaError(f"memfd: {link}: descriptor {fd} of process {pid}: {error}") from None
            fresh = path.with_name(f".link-{name.lstrip('.')}")
            try:
                fresh.unlink(missing_ok=True)
                fresh.symlink_to(f"/proc/{os.getpid()}/fd/{held}")
                fresh.rename(path)
            except OSError as error:
                os.close(held)
                with suppress(OSError):
                    fresh.unlink(missing_ok=True)
                raise ArenaError(f"{path}: cannot be linked: {error.strerror}") from None
            self._held.add(held)

    def sweep(self) -> int:
        """Close what no link names any more; how many memfds that were."""
        with self._guard:
            unnamed = set(self._held)
            for _ in range(_LOOKS):
                if unnamed:
                    unnamed -= self._named()
            for fd in unnamed:
                self._held.discard(fd)
                os.close(fd)
        return len(unnamed)

    @property
    def held_bytes(self) -> int:
        """Sum of the sizes of what is held: while it is not 0, the end of this process loses snapshots."""
        with self._guard:
            return sum(os.fstat(fd).st_size for fd in self._held)

    def close(self) -> None:
        """Give all memory up."""
        with self._guard:
            while self._held:
                os.close(self._held.pop())

    def _named(self) -> set[int]:
        """Descriptors of this process that links in arenas name, complete ones and temporary ones."""
        mine = f"/proc/{os.getpid()}/fd/"
        named = set()
        for link in self._links():
            with suppress(OSError, ValueError):
                if (target := os.readlink(link)).startswith(mine):
                    named.add(int(target.removeprefix(mine)))
        return named

    def _links(self) -> list[str]:
        arenas = [entry for entry in _entries(self._node_dir) if entry.is_dir(follow_symlinks=False)]
        return [entry.path for arena in arenas for entry in _entries(Path(arena.path)) if entry.is_symlink()]


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []
