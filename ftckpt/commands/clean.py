"""``ftckpt clean``: delete the arenas of a job that no longer runs, on this node."""

from __future__ import annotations

import argparse
from typing import Any

from ftckpt.commands.arena_option import add_arena
from ftckpt.store.directory import clean_job


def add_clean(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser("clean", help="delete the arenas of a job that no longer runs, on this node")
    parser.add_argument("job", help="name of the job")
    add_arena(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Delete and return the exit status. Raises ArenaError where the job is alive."""
    removed = clean_job(arguments.arena, arguments.job)
    for path in removed:
        print(f"removed {path}")
    if not removed:
        print(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    return 0
