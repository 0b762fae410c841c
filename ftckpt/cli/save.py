"""``ftckpt save``: flushes the newest snapshot of a job without ranks from memory to storage."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftckpt.cli.options import add_arena
from ftckpt.config import Config
from ftckpt.errors import ArenaError, ConfigError, SmpError, StorageError
from ftckpt.memory.directory import SMP_LOCK_NAME, SMP_STATE_NAME, job_node_path, list_directories
from ftckpt.memory.locks import holder_of
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import checkpoints
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place, locate
from ftckpt.persist_setting import PERSIST_FORMATS
from ftckpt.smp.client import SmpClient, find_or_start
from ftckpt.smp.requests import PersistRequest

_POLL_SECS = 0.5
_REPORT_SECS = 5.0
_ENDING_SECS = 10.0
"""Time for ranks to exit after a signal."""


def add_save(commands: Any) -> None:
    """Adds the command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "save", help="flush the newest snapshot of a job whose ranks have ended; run it on all nodes at the same time"
    )
    parser.add_argument("job", help="name of the job")
    parser.add_argument("where", nargs="?", default="", metavar="STORAGE", help="default: the job's --ftckpt-persist")
    parser.add_argument(
        "--to",
        choices=PERSIST_FORMATS,
        help="also export it to this format, in STORAGE, a directory; default: no export",
    )
    add_arena(parser)
    parser.add_argument("--at-end", action="store_true", help="do nothing if the job has --ftckpt-persist-at-end off")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECS", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Waits until the snapshot is persisted, and returns the exit status.

    Raises:
        ArenaError, SmpError: the job has no memory on this machine, or no SMP answers.
        StorageError: the flush failed; names the cause and the missing nodes.
    """
    nodes = [path.name for path in list_directories(job_node_path(arguments.arena, arguments.job, "node").parent)]
    where = arguments.where if "://" in arguments.where or not arguments.where else os.path.abspath(arguments.where)
    form = arguments.to or PERSIST_FORMATS[0]
    if arguments.to and not where:
        raise ConfigError("--to: name STORAGE; the format of the job's own storage is its --ftckpt-persist-format")
    Config(persist=where, persist_format=form)  # refuses what it refuses for a job
    prepare(Place.of(where, form))
    if not nodes:
        raise ArenaError(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    with ThreadPoolExecutor(len(nodes)) as threads:
        saved = []
        for iteration, line in threads.map(lambda node: _save(arguments, node, where, form), nodes):
            saved.append(iteration)
            print(line, flush=True)
    if where and max(saved) >= 0:
        with suppress(StorageError):  # the save itself has succeeded
            _warn_of_newer(where, max(saved))
    return 0


def _warn_of_newer(where: str, iteration: int) -> None:
    """Warns if ``where`` has a newer checkpoint, perhaps of another job: a start from there would restore that."""
    newest = max(
        (name.iteration for name in checkpoints(open_storage(locate(where).where, "save"))), default=iteration
    )
    if newest > iteration:
        print(
            f"{where} also has iteration {newest}, and a start from there restores that: "
            f"save to another place, or start with --ftckpt-rollback-before {newest}",
            flush=True,
        )


def _save(arguments: argparse.Namespace, node: str, where: str, form: str) -> tuple[int, str]:
    """Saves a node's part. The iteration, -1 for none, and the line to print."""
    node_dir = job_node_path(arguments.arena, arguments.job, node)
    client = _smp_of(arguments, node, node_dir)
    if arguments.at_end:
        storage = client.status()["tasks"]["storage"]
        if not storage["where"] or not storage["at_end"]:
            why = "the job has --ftckpt-persist-at-end off" if storage["where"] else "the job has no --ftckpt-persist"
            return -1, f"node {node}: nothing is saved: {why}"
    begun = time.monotonic()
    _require_no_ranks(client, begun + min(_ENDING_SECS, arguments.timeout))
    request = PersistRequest(where, arguments.timeout, anew=True, form=form)
    status = _wait(client, request, begun)
    if status["flush"] == "cannot":
        raise StorageError(f"node {node}: {status['reason']}", lasting=True)
    secs = time.monotonic() - begun
    iteration = int(status["iteration"])
    return iteration, f"node {node}: iteration {iteration} is at {status['where']}, after {secs:.1f} s"


def _smp_of(arguments: argparse.Namespace, node: str, node_dir: Path) -> SmpClient:
    """Connects to the node's SMP, or starts one from the state that an earlier one has stored."""
    runs = holder_of(node_dir / SMP_LOCK_NAME) is not None
    if runs or (node_dir / SMP_STATE_NAME).exists():
        client = find_or_start(node_dir, Path(arguments.arena), arguments.job, node)
        if client.status()["configured"]:
            return client
    raise SmpError(
        f"node {node}: no SMP has a description of the arenas: job {arguments.job!r} was killed during startup, or "
        "uses another version of ftckpt; the arenas stay: start the job to resume from them"
    )


def _require_no_ranks(client: SmpClient, deadline: float) -> None:
    """Waits until no rank lives: it would overwrite the slots. Raises SmpError if some live at ``deadline``."""
    while living := [one["rank"] for one in client.status()["trainers"] if one["lives"] is not False]:
        if time.monotonic() >= deadline:
            raise SmpError(
                f"node {client.node}: ranks {', '.join(map(str, living))} of job {client.job!r} are running: stop "
                "them first, or let the job save (--ftckpt-persist)"
            )
        time.sleep(_POLL_SECS)


def _wait(client: SmpClient, request: PersistRequest, begun: float) -> dict[str, Any]:
    """Sends the request, reports progress, and returns the SMP's final status."""
    reported = time.monotonic()
    # The SMP enforces the timeout; 10 s more are for its final answer.
    deadline = reported + request.timeout_secs + 10
    status = client.persist(request)
    while status["flush"] not in ("done", "cannot"):
        now = time.monotonic()
        if now >= deadline:
            raise SmpError(f"the SMP of node {client.node} did not finish within --timeout: see 'ftckpt status'")
        if now - reported > _REPORT_SECS:
            reported = now
            print(f"node {client.node}: iteration {status['iteration']}: {now - begun:.0f} s", flush=True)
        time.sleep(_POLL_SECS)
        status = client.persist(replace(request, anew=False))
    return status
