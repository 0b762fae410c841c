"""The interval that keeps the overhead budget, as measured by one attempt for the next: stored as the target of a
dangling link in the node's directory, because a file needs a page of a tmpfs that may be full."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ftckpt.memory.directory import INTERVAL_NAME, fresh_name


def write_interval(node_dir: Path, interval: int, budget: float) -> None:
    """Replace the node's interval. If that fails, the next attempt measures again."""
    path = node_dir / INTERVAL_NAME
    with suppress(OSError), fresh_name(path) as fresh:
        fresh.symlink_to(f"{interval} at {budget!r}")
        os.replace(fresh, path)


def read_interval(node_dir: Path, budget: float) -> int:
    """The node's interval for this ``budget``; 0 if there is none."""
    try:
        interval, _, found_for = os.readlink(node_dir / INTERVAL_NAME).partition(" at ")
        return int(interval) if float(found_for) == budget else 0
    except (OSError, ValueError):
        return 0
