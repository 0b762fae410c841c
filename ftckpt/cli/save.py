"""``ftckpt save``: the newest snapshot of a job that trains no more comes to storage, from memory."""

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
_TELL_SECS = 5.0
_ENDING_SECS = 10.0
"""For ranks that were just told to end."""


def add_save(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "save", help="bring the newest snapshot of a job to storage, without its ranks; run it on every node at once"
    )
    parser.add_argument("job", help="name of the job")
    parser.add_argument("where", nargs="?", default="", metavar="STORAGE", help="default: the job's --ftckpt-persist")
    parser.add_argument(
        "--to",
        choices=PERSIST_FORMATS,
        help="what others load is made of it in STORAGE, a directory; default: nothing",
    )
    add_arena(parser)
    parser.add_argument(
        "--at-end", action="store_true", help="only where the job wants that at its end (--ftckpt-persist-at-end)"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECS", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Wait until it is there, and return the exit status.

    Raises:
        ArenaError, SmpError: no memory of the job is here, or no SMP that answers.
        StorageError: it did not come there; says why, and which nodes are missing.
    """
    nodes = [path.name for path in list_directories(job_node_path(arguments.arena, arguments.job, "node").parent)]
    where = arguments.where if "://" in arguments.where or not arguments.where else os.path.abspath(arguments.where)
    form = arguments.to or PERSIST_FORMATS[0]
    if arguments.to and not where:
        raise ConfigError(
            "--to: name STORAGE, too; where the job itself writes, its --ftckpt-persist-format says what lies there"
        )
    Config(persist=where, persist_format=form)  # as the job itself would be refused
    prepare(Place.of(where, form))
    if not nodes:
        raise ArenaError(f"no arenas of job {arguments.job!r} under {arguments.arena}")
    with ThreadPoolExecutor(len(nodes)) as threads:
        saved = []
        for iteration, line in threads.map(lambda node: _save(arguments, node, where, form), nodes):
            saved.append(iteration)
            print(line, flush=True)
    if where and max(saved) >= 0:
        with suppress(StorageError):  # what is saved is saved
            _tell_newer(where, max(saved))
    return 0


def _tell_newer(where: str, iteration: int) -> None:
    """What lies there is of another job, perhaps: who names ``where`` for the next start must know."""
    newest = max(
        (name.iteration for name in checkpoints(open_storage(locate(where).where, "save"))), default=iteration
    )
    if newest > iteration:
        print(
            f"{where} has iteration {newest}, too, and a start that takes what lies there goes on from that: "
            f"save to another place, or start with --ftckpt-rollback-before {newest}",
            flush=True,
        )


def _save(arguments: argparse.Namespace, node: str, where: str, form: str) -> tuple[int, str]:
    """The iteration that a node has saved, -1 for none, and what is to be said of it."""
    node_dir = job_node_path(arguments.arena, arguments.job, node)
    client = _smp_of(arguments, node, node_dir)
    if arguments.at_end:
        storage = client.status()["duties"]["storage"]
        if not storage["where"] or not storage["at_end"]:
            why = "the job has --ftckpt-persist-at-end off" if storage["where"] else "the job names no storage"
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
    """The one that runs, or another: what it goes on with lies there before it starts, and stays if it is killed."""
    runs = holder_of(node_dir / SMP_LOCK_NAME) is not None
    if runs or (node_dir / SMP_STATE_NAME).exists():
        client = find_or_start(node_dir, Path(arguments.arena), arguments.job, node)
        if client.status()["configured"]:
            return client
    raise SmpError(
        f"node {node}: no SMP has been told what lies there: job {arguments.job!r} was killed as it "
        "began, or another version of ftckpt has written it; its memory stays, and the next start goes on from it"
    )


def _require_no_ranks(client: SmpClient, deadline: float) -> None:
    """What trains would write over what is saved. Raises SmpError where ranks do not end."""
    while living := [one["rank"] for one in client.status()["trainers"] if one["lives"] is not False]:
        if time.monotonic() >= deadline:
            raise SmpError(
                f"node {client.node}: ranks {', '.join(map(str, living))} of job {client.job!r} train: end them "
                "first, or let the job itself save (--ftckpt-persist)"
            )
        time.sleep(_POLL_SECS)


def _wait(client: SmpClient, request: PersistRequest, begun: float) -> dict[str, Any]:
    """How the request came out."""
    told = time.monotonic()
    # The SMP ends by itself what takes too long; the rest is for its last answer.
    deadline = told + request.timeout_secs + 10
    status = client.persist(request)
    while status["flush"] not in ("done", "cannot"):
        now = time.monotonic()
        if now >= deadline:
            raise SmpError(f"the SMP of node {client.node} does not come to an end")
        if now - told > _TELL_SECS:
            told = now
            print(f"node {client.node}: iteration {status['iteration']}: {now - begun:.0f} s", flush=True)
        time.sleep(_POLL_SECS)
        status = client.persist(replace(request, anew=False))
    return status
