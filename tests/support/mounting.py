"""Small file systems in memory, which take root to mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(path: Path) -> Iterator[Path]:
    """A tmpfs of 256 MiB at ``path``; the test is skipped where none can be mounted."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    path.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "ftckpt-test", str(path)], check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def used(path: Path) -> int:
    """Bytes that are used on a file system."""
    status = os.statvfs(path)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def leave_free(path: Path, nbytes: int) -> None:
    """Make the tmpfs at ``path`` so small that ``nbytes`` are free, rounded to pages."""
    size = (used(path) + nbytes) // 4096 * 4096
    subprocess.run(["mount", "-o", f"remount,size={size}", str(path)], check=True)
