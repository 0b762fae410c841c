"""``ftckpt clean``: deletes this node's arenas of a job that does not run."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ftckpt.cli.job_nodes import job_directory, jobs_in
from ftckpt.cli.options import add_arena
from ftckpt.memory.directory import clean_job


def add_clean(commands: Any) -> None:
    """Adds the command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "clean", help="delete this node's arenas of a job that does not run, and stop its SMP"
    )
    parser.add_argument("job", help="name of the job")
    add_arena(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Deletes the arenas and returns the exit status, 1 if the job is unknown. Raises ArenaError if it runs."""
    is_there = job_directory(arguments.arena, arguments.job).exists()
    removed = clean_job(arguments.arena, arguments.job, lambda line: print(line, file=sys.stderr))
    for path in removed:
        print(f"removed {path}")
    if not is_there:
        jobs = ", ".join(jobs_in(arguments.arena)) or "none"
        text = f"no memory of job {arguments.job!r} under {arguments.arena}; jobs there: {jobs}"
        print(f"ftckpt: {text}", file=sys.stderr)
    elif not removed:
        print(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    return int(not is_there)
