"""``ftckpt save``: the newest snapshot of a job that trains no more comes to storage, from memory."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from ftckpt.errors import ArenaError, SmpError, StorageError
from ftckpt.smp.client import SmpClient
from ftckpt.store.directory import job_node_path, list_arenas

_POLL_SECS = 0.5
_TELL_SECS = 5.0


def add_save(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "save", help="bring the newest snapshot of a job to storage, without its ranks; run it on every node at once"
    )
    parser.add_argument("job", help="name of the job")
    parser.add_argument("where", nargs="?", default="", metavar="STORAGE", help="default: the job's --ftckpt-persist")
    parser.add_argument("--arena", type=Path, default=Path(Config().arena), help="tmpfs (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECS", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait until it is there, and return the exit status.

    Raises:
        ArenaError, SmpError: no memory of the job is here, or no SMP that answers.
        StorageError: it did not come there; says why.
    """
    nodes = [path.name for path in list_arenas(job_node_path(arguments.arena, arguments.job, "node").parent)]
    if not nodes:
        raise ArenaError(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    with ThreadPoolExecutor(len(nodes)) as threads:
        for line in threads.map(lambda node: _save(arguments, node), nodes):
            print(line, flush=True)
    return 0


def _save(arguments: argparse.Namespace, node: str) -> str:
    node_dir = job_node_path(arguments.arena, arguments.job, node)
    client = SmpClient(node_dir, arguments.arena, arguments.job, node, {})
    begun = told = time.monotonic()
    # The SMP ends by itself what takes too long; the rest is for its last answer.
    deadline = begun + arguments.timeout + 10
    status = client.persist(str(arguments.where), arguments.timeout, anew=True)
    while True:
        now = time.monotonic()
        if status["flush"] == "done":
            return f"node {node}: iteration {status['iteration']} is at {status['where']}, after {now - begun:.1f} s"
        if status["flush"] == "cannot":
            raise StorageError(f"node {node}: {status['reason']}", lasting=True)
        if now >= deadline:
            raise SmpError(f"the SMP of node {node} does not come to an end")
        if now - told > _TELL_SECS:
            told = now
            print(f"node {node}: iteration {status['iteration']}: {now - begun:.0f} s", flush=True)
        time.sleep(_POLL_SECS)
        status = client.persist(str(arguments.where), arguments.timeout)
