"""Small file systems in memory and processes in namespaces of their own; both take root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftckpt.memory.locks import holder_of
from tests.support.repository import ROOT
from tests.support.waiting import until

_SHM = Path("/dev/shm")
_CLONE_NEWNS = 0x20000  # of unshare(2): mounts of its own
_SOURCE = "ftckpt-test-"
"""With the pid of the test run the name that /proc/mounts gives to what it has mounted."""


@contextmanager
def tmpfs(path: Path, size: str = "256m") -> Iterator[Path]:
    """A tmpfs of ``size`` at ``path``; the test is skipped where none can be mounted."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    _remove_leftovers()
    path.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", f"{_SOURCE}{os.getpid()}", str(path)]
    if subprocess.run(mount, check=False).returncode:
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
    """Unmount what tests have mounted at ``path`` or below it; what is mounted cannot be deleted."""
    for _, place in _mounts():
        if place.is_relative_to(path):
            subprocess.run(["umount", "-l", str(place)], check=True)


def _remove_leftovers() -> None:
    """Unmount what test runs that were killed have left mounted."""
    for pid, place in _mounts():
        if not Path(f"/proc/{pid}").exists():
            subprocess.run(["umount", "-l", str(place)], check=False)  # another run may be at it, too
            if place.is_relative_to(_SHM):
                shutil.rmtree(_SHM / place.relative_to(_SHM).parts[0], ignore_errors=True)


def _mounts() -> list[tuple[str, Path]]:
    """Owner and place of all mounts of tests, the last and topmost first."""
    rows = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return [(source.removeprefix(_SOURCE), Path(at)) for source, at, *_ in rows if source.startswith(_SOURCE)][::-1]


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


def used(path: Path) -> int:
    """Bytes that are used on a file system."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def leave_free(path: Path, nbytes: int) -> None:
    """Make the tmpfs at ``path`` so small that ``nbytes`` are free, rounded to pages."""
    size = (used(path) + nbytes) // 4096 * 4096
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)


RANK = """
import sys, time
from pathlib import Path
from ftckpt.memory.locks import FileLock
from ftckpt.memory.heartbeat import Heartbeat
pulse = Heartbeat.open(Path(sys.argv[1]), 0, 5)
locks = [FileLock(Path(path), 0, "it", "") for path in sys.argv[2:]]
pulse.beat(7, "forward")
print("up", flush=True)
time.sleep(60)
"""
"""Rank 5, in the first place of a node, after iteration 7: the node's directory, and the locks that it holds."""


@contextmanager
def rank_elsewhere(node_dir: Path, *locks: Path) -> Iterator[subprocess.Popen[str]]:
    """Rank 5 in a pid namespace of its own, which holds these locks, until the end of the block."""
    spaces = ["unshare", "--pid", "--fork", "--kill-child"]
    if os.geteuid() or subprocess.run([*spaces, "true"], check=False).returncode:
        pytest.skip("a pid namespace of one's own needs root")
    command = [*spaces, sys.executable, "-c", RANK, str(node_dir), *map(str, locks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        try:
            yield process
        finally:
            process.kill()
            # Its child is ended by the kernel, a moment later.
            until(lambda: all(holder_of(lock) is None for lock in locks))
