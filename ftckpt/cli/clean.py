"""``ftckpt clean``: deletes this node's arenas of a job that does not run, and stops its SMP."""

from __future__ import annotations

import argparse

from ftckpt.cli.answers import Answer, Lines, warn
from ftckpt.cli.targets import add_job, job_at, job_directory, unknown_job
from ftckpt.memory.directory import clean_job


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_job(parser)


def run_clean(arguments: argparse.Namespace) -> Lines:
    """Deletes the arenas; status 1: the job is unknown. Raises ArenaError if it runs."""
    root, job = job_at(arguments.job, arguments.arena)
    is_there = job_directory(root, job).exists()
    removed = list(map(str, clean_job(root, job, lambda line: warn(line.removeprefix("ftckpt: ")))))
    yield from (f"removed {path}" for path in removed)
    if not is_there:
        warn(str(unknown_job(root, job)))
    elif not removed:
        yield f"no arenas of job {job!r} under {root}"
    yield Answer({"job": job, "removed": removed}, int(not is_there))
