"""Small file systems in memory, which take root to mount."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SHM = Path("/dev/shm")
_CLONE_NEWNS = 0x20000  # of unshare(2): mounts of its own
_SOURCE = re.compile(r"ftckpt-test-(\d+)-(\d+)")
"""What is mounted, as /proc/mounts calls it: the pid that has mounted it and when that process began."""


@contextmanager
def tmpfs(path: Path, size: str = "256m") -> Iterator[Path]:
    """A tmpfs of ``size`` at ``path``; the test is skipped where none can be mounted."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    remove_leftovers()
    path.mkdir(parents=True, exist_ok=True)
    source = f"ftckpt-test-{os.getpid()}-{_began(os.getpid())}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", source, str(path)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        unmount_below(path)


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory of its own on a tmpfs, until the end of the block."""
    root = _SHM / f"ftckpt-test-{uuid.uuid4().hex[:8]}"
    root.mkdir()
    try:
        yield root
    finally:
        unmount_below(root)
        shutil.rmtree(root, ignore_errors=True)


def unmount_below(path: Path) -> None:
    """Unmount what is mounted at ``path`` or below it; what is mounted cannot be deleted."""
    for _, place in reversed(_mounts()):  # what was mounted last lies on top
        if place.is_relative_to(path):
            subprocess.run(["umount", "-l", str(place)], check=True)


def may_mount() -> bool:
    """Whether a process may have mounts of its own, which take root."""
    return subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode == 0


def move_into_a_container(arena: Path, shares_memory: bool) -> None:
    """This process gets mounts of its own, with a tmpfs at ``arena`` that nobody else has, or that of the machine.

    Raises:
        OSError: it may not.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    if not shares_memory:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(arena)], check=True)


def remove_leftovers() -> None:
    """Unmount what test runs that were killed have left mounted, then delete their directories."""
    for owner, place in reversed(_mounts()):
        pid, began = map(int, owner)
        # A pid alone may have gone to another process since.
        if _began(pid) != began:
            subprocess.run(["umount", "-l", str(place)], check=False)  # another run may be at it, too
            if place.is_relative_to(_SHM):
                shutil.rmtree(_SHM / place.relative_to(_SHM).parts[0], ignore_errors=True)


def _mounts() -> list[tuple[tuple[str, str], Path]]:
    """Owner and place of all that tests have mounted, in the order of mounting."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [(_SOURCE.fullmatch(source), Path(place)) for source, place, *_ in rows]
    return [((match[1], match[2]), place) for match, place in found if match]


def _began(pid: int) -> int:
    """When the process began, in ticks since the boot; -1 where there is none."""
    try:
        # The name of the program comes second, in parentheses, and may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return -1


def used(path: Path) -> int:
    """Bytes that are used on a file system."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def leave_free(path: Path, nbytes: int) -> None:
    """Make the tmpfs at ``path`` so small that ``nbytes`` are free, rounded to pages."""
    size = (used(path) + nbytes) // 4096 * 4096
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)
