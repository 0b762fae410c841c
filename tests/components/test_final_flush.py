"""The flush without ranks: nothing newer is lost for it, and no lost node counts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import SmpError
from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import FlushState
from ftckpt.memory.lineage_file import write_lineage
from ftckpt.model.lineage import FIRST
from ftckpt.parity.modes import Modes
from ftckpt.persist.files import FileStorage
from ftckpt.smp import final_flush
from ftckpt.smp.requests import PersistRequest
from tests.support.errors import raises
from tests.support.flush_jobs import Job
from tests.support.smp_nodes import describe
from tests.support.snapshots import fill
from tests.support.storages import committed
from tests.support.waiting import until


@pytest.fixture
def job(arena_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """Two nodes; other nodes are waited for 2 s."""
    monkeypatch.setattr(final_flush, "_NODES_SECS", 2.0)
    (tmp_path / "storage").mkdir()
    made = Job(arena_root, str(tmp_path / "storage"), persist_keep=2)
    yield made
    made.close()


def asked(job: Job, smp: int, request: PersistRequest) -> dict[str, Any]:
    """The report of one node's SMP; its loop, which serves requests, does nothing else meanwhile."""
    job.smps[smp].pause()
    try:
        return job.smps[smp].tasks.flushes.persist(request)
    finally:
        job.smps[smp].start()


def saved(job: Job, smp: int, request: PersistRequest, secs: float = 30.0) -> dict[str, Any]:
    """How one node's SMP ends with it."""
    status, deadline = asked(job, smp, request), time.monotonic() + secs
    while status["flush"] == "working" and time.monotonic() < deadline:
        time.sleep(0.05)
        status = asked(job, smp, replace(request, anew=False))
    return status


def test_what_a_node_has_done_with_fewer_shards_is_not_all_that_is_to_be_done(job: Job) -> None:
    """An attempt on one node flushes the snapshot that it restored and has all shards of."""
    job.request(0, 7)
    job.smps[0].start()
    until(lambda: job.smps[0].events.of("flushed"), "its mark, which waits for the other node's")
    job.smps[0].pause()
    a, b = job.nodes
    for arena in b.arenas:
        shutil.copytree(arena.path, a.dir / arena.path.name)
        a.arenas.append(Arena.open(a.dir / arena.path.name, writable=True))
    job.smps[0].configure(describe(a, [a], Modes(), {}, **job.settings))
    a.flush(7)
    job.smps[0].start()
    until(lambda: job.smps[0].tasks.flushes.current[1] == FlushState.DONE, lambda: str(job.told()))
    assert committed(FileStorage(job.where)) == [7]


def test_what_storage_has_of_a_later_attempt_is_not_given_up_for_less(job: Job) -> None:
    """The newest that parity gives may be of the attempt before."""
    for arena in job.arenas:
        fill(arena, 1, 9, lineage=b"later" + bytes(11))
    job.start()
    for arena in job.arenas:
        snapshot = next(one for one in arena.snapshots() if one.iteration == 9)
        arena.control.mark_flush(snapshot)
    job.settled(9)
    for arena in job.arenas:
        arena.control.mark_flush(None)
        arena.control.void(1)
    job.snapshot(0, 7)
    job.wait_checked(7)
    requests = PersistRequest("", 20.0, True)
    asked(job, 1, requests)
    status = saved(job, 0, requests)
    assert (status["flush"], status["iteration"]) == ("done", 9), status
    assert committed(FileStorage(job.where)) == [9]


def saved_by_both(job: Job, request: PersistRequest) -> int:
    """The iteration that both nodes have saved."""
    asked(job, 1, request)
    for smp in (0, 1):
        status = saved(job, smp, replace(request, anew=not smp))
        assert status["flush"] == "done", status
    return int(status["iteration"])


@pytest.mark.parametrize(("after", "brought"), [(7, 7), (6, 8)], ids=["newest in doubt", "all in doubt"])
def test_a_doubtful_snapshot_is_brought_where_nothing_else_is_there(job: Job, after: int, brought: int) -> None:
    for node in job.nodes:
        write_lineage(node.dir, FIRST.doubt(after, 8))
    job.snapshot(0, 7)
    job.snapshot(1, 8)
    job.start()
    job.wait_checked(8)
    assert saved_by_both(job, PersistRequest("", 20.0, True)) == brought


def test_of_two_who_ask_for_one_save_both_have_it(job: Job, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    job.snapshot(0, 7)
    job.start()
    job.wait_checked(7)
    first = PersistRequest("", 20.0, True)
    with raises(SmpError):
        asked(job, 0, replace(first, anew=False))
    asked(job, 0, first)
    assert asked(job, 0, replace(first, timeout_secs=9.0))["flush"] == "working"
    with raises(SmpError, job.where):
        asked(job, 0, replace(first, where=str(tmp_path / "other")))
    asked(job, 1, first)
    ended = [saved(job, smp, replace(first, anew=False)) for smp in (0, 1)]
    assert [status["flush"] for status in ended] == ["done", "done"]
    files = sum(path.stat().st_size for path in Path(job.where).rglob("*.safetensors"))
    assert [sum(status[name] for status in ended) for name in ("bytes", "total_bytes")] == [files, files], "progress"
