"""``ftckpt save``: flushes the newest snapshot of a job without ranks from memory to storage."""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.cli.answers import Answer, Lines, ProgressLine, alarming
from ftckpt.cli.targets import add_job, job_at, job_directory, unknown_job
from ftckpt.config import Config
from ftckpt.errors import ConfigError, SmpError, StorageError
from ftckpt.memory.directory import SMP_LOCK_NAME, SMP_STATE_NAME, list_directories
from ftckpt.memory.locks import holder_of
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import checkpoints
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place, locate
from ftckpt.persist_setting import PERSIST_FORMATS
from ftckpt.smp.client import SmpClient, find_or_start
from ftckpt.smp.requests import PersistRequest

_POLL_SECS = 0.5
_ENDING_SECS = 10.0
"""Time for ranks to exit after a signal."""


class _NodeSave(NamedTuple):
    """The outcome on one node; ``iteration`` -1: nothing was to be saved. ``text`` says so."""

    node: str
    iteration: int
    text: str


def add_save(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_job(parser)
    parser.add_argument("where", nargs="?", default="", metavar="STORAGE", help="default: the job's --ftckpt-persist")
    text = "also export it to this format, in STORAGE, a directory; default: no export"
    parser.add_argument("--to", choices=PERSIST_FORMATS, help=text)
    parser.add_argument("--at-end", action="store_true", help="do nothing if the job has --ftckpt-persist-at-end off")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECS", help="default: %(default)s")


def run_save(arguments: argparse.Namespace) -> Lines:
    """Waits until the snapshot is persisted.

    Raises:
        ArenaError, SmpError: the job has no memory on this machine, or no SMP answers.
        StorageError: the flush failed; names the cause and the missing nodes.
    """
    root, job = job_at(arguments.job, arguments.arena)
    node_dirs = list_directories(job_directory(root, job))
    where = arguments.where if "://" in arguments.where or not arguments.where else os.path.abspath(arguments.where)
    form = arguments.to or PERSIST_FORMATS[0]
    if arguments.to and not where:
        raise ConfigError("--to: name STORAGE; the format of the job's own storage is its --ftckpt-persist-format")
    Config(persist=where, persist_format=form)  # refuses what it refuses for a job
    prepare(Place.of(where, form))
    if not node_dirs:
        raise unknown_job(root, job)
    request, saved = PersistRequest(where, arguments.timeout, anew=True, form=form), list[_NodeSave]()
    with ThreadPoolExecutor(len(node_dirs)) as threads, ProgressLine(f"saving job {job}") as progress:
        for one in threads.map(lambda node_dir: _save(node_dir, job, request, arguments.at_end, progress), node_dirs):
            saved.append(one)
            yield f"node {one.node}: {one.text}"
    newest = max(one.iteration for one in saved)
    if where and newest >= 0:
        with suppress(StorageError):  # the save itself has succeeded
            # Perhaps of another job: a start from there would restore it.
            newer = max(name.iteration for name in checkpoints(open_storage(locate(where).where, "save")))
            if newer > newest:
                yield alarming(
                    f"{where} also has iteration {newer}, and a start from there restores that: "
                    f"save to another place, or start with --ftckpt-rollback-before {newer}"
                )
    yield Answer({"job": job, "nodes": [{"node": one.node, "iteration": one.iteration} for one in saved]})


def _save(node_dir: Path, job: str, request: PersistRequest, at_end: bool, progress: ProgressLine) -> _NodeSave:
    """Saves a node's part."""
    client = _smp_of(node_dir, job)
    if at_end:
        storage = client.status()["tasks"]["storage"]
        if not storage["where"] or not storage["at_end"]:
            why = "the job has --ftckpt-persist-at-end off" if storage["where"] else "the job has no --ftckpt-persist"
            return _NodeSave(client.node, -1, f"nothing is saved: {why}")
    begun = time.monotonic()
    _require_no_ranks(client, begun + min(_ENDING_SECS, request.timeout_secs))
    status = _wait(client, request, progress)
    if status["flush"] == "cannot":
        raise StorageError(f"node {client.node}: {status['reason']}", lasting=True)
    iteration, secs = int(status["iteration"]), time.monotonic() - begun
    return _NodeSave(client.node, iteration, f"iteration {iteration} is at {status['where']}, after {secs:.1f} s")


def _smp_of(node_dir: Path, job: str) -> SmpClient:
    """Connects to the node's SMP, or starts one from the state that an earlier one has stored."""
    runs = holder_of(node_dir / SMP_LOCK_NAME) is not None
    if runs or (node_dir / SMP_STATE_NAME).exists():
        client = find_or_start(node_dir, node_dir.parent.parent, job, node_dir.name)
        if client.status()["configured"]:
            return client
    raise SmpError(
        f"node {node_dir.name}: no SMP has a description of the arenas: job {job!r} was killed during startup, or "
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


def _wait(client: SmpClient, request: PersistRequest, progress: ProgressLine) -> dict[str, Any]:
    """Sends the request and returns the SMP's final status."""
    # The SMP enforces the timeout; 10 s more are for its final answer.
    deadline = time.monotonic() + request.timeout_secs + 10
    status, before = client.persist(request), {"bytes": 0, "total_bytes": 0}
    while status["flush"] not in ("done", "cannot"):
        if time.monotonic() >= deadline:
            raise SmpError(f"the SMP of node {client.node} did not finish within --timeout: see 'ftckpt status'")
        progress(*(status[name] - before[name] for name in before))
        before = {name: status[name] for name in before}
        time.sleep(_POLL_SECS)
        status = client.persist(replace(request, anew=False))
    return status
