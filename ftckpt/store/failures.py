"""What an attempt leaves in a node's memory of the failures that its job has had, for the next one to count.

The file is written when training begins. As training goes on nothing is written but the time in its inode: memory may
be full, and a boundary has microseconds.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ftckpt.model import codec
from ftckpt.model.failures import FailureRecord, LastAttempt
from ftckpt.store.directory import FAILURES_NAME, fresh_name, list_arenas, remove_half_made


def read_failures(node_dir: Path) -> LastAttempt | None:
    """What the last attempt that trained on this node has left beside its arenas; None where it is not there, or no
    arena is.

    Raises:
        OSError, ValueError: it cannot be read, or is damaged.
    """
    path = node_dir / FAILURES_NAME
    if not list_arenas(node_dir) or not path.exists():
        return None
    return LastAttempt(codec.decode(path.read_bytes(), FailureRecord), path.stat().st_mtime)


def write_failures(node_dir: Path, record: FailureRecord) -> None:
    """Leave ``record`` for the next attempt; one process of a node does. Raises OSError."""
    path = node_dir / FAILURES_NAME
    remove_half_made(node_dir, f"{path.name}*")
    with fresh_name(path) as fresh:
        fresh.write_bytes(codec.encode(record))
        fresh.rename(path)


def still_trains(node_dir: Path) -> None:
    """The attempt trains at this moment. Takes microseconds."""
    with suppress(OSError):
        os.utime(node_dir / FAILURES_NAME)


def note_end(node_dir: Path, record: FailureRecord) -> None:
    """The attempt of ``record`` has ended as it was to. Raises OSError."""
    if (node_dir / FAILURES_NAME).exists():  # another node's leader may have removed the directory
        write_failures(node_dir, record.as_ended())
