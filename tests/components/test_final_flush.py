"""The flush without ranks: nothing newer is lost for it, and no lost node counts."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import SmpError, StorageError
from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import FlushState
from ftckpt.memory.lineage_file import write_lineage
from ftckpt.model.lineage import FIRST
from ftckpt.parity.modes import Modes
from ftckpt.persist.commit import claim
from ftckpt.persist.files import FileStorage
from ftckpt.persist.membership import Membership
from ftckpt.persist.shards import ShardImage
from ftckpt.smp import final_flush
from ftckpt.smp import flush as flushing
from ftckpt.smp.requests import PersistRequest
from tests.support.errors import lacks, raises
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


def goes_on_as(job: Job, owner: str) -> None:
    """The run ``owner`` begins."""
    claim(FileStorage(job.where), owner, "job")
    for smp, node in zip(job.smps, job.nodes, strict=True):
        smp.pause()
        smp.configure({**describe(node, job.nodes, Modes(), {}, **job.settings), "owner": owner})
        smp.start()


def test_a_save_that_hangs_in_storage_touches_nothing_of_the_next_run(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which writes the same snapshot, that it has restored, under the same names."""
    standing, go_on, pieces_of = threading.Event(), threading.Event(), flushing.contents

    def stand(shard: ShardImage, *rest: Any) -> Iterator[memoryview]:
        for piece in pieces_of(shard, *rest):
            if shard.image.manifest.shard == "dp3" and not standing.is_set():
                standing.set()
                go_on.wait(20)
            yield piece

    monkeypatch.setattr(flushing, "contents", stand)
    monkeypatch.setattr(flushing, "_FILES", 1)
    job.snapshot(0, 7)
    job.start()
    job.wait_checked(7)
    goes_on_as(job, "save")
    for smp in range(2):
        asked(job, smp, PersistRequest("", 20.0, True))
    until(standing.is_set)
    goes_on_as(job, "the next run")
    job.flush(7)
    until(lambda: job.smps[0].events.of("flushed"))
    with pytest.raises(AssertionError):
        until(lambda: committed(FileStorage(job.where)), secs=1.0)
    go_on.set()
    job.settled(7)
    job.check(FileStorage(job.where), 7)


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


@pytest.mark.parametrize("claimed", [False, True])
def test_another_training_of_this_name_leaves_nothing_unsaved(claimed: bool, job: Job, tmp_path: Path) -> None:
    """It has saved more iterations to the same place; its memory was cleaned, and the job started from scratch."""
    place, storage = tmp_path / "final", FileStorage(job.where)
    place.mkdir()
    final = FileStorage(str(place))
    job.snapshot(0, 100)
    job.start()
    job.wait_checked(100)
    request = PersistRequest(str(place), 20.0, True)
    assert saved_by_both(job, request) == 100
    for arena in job.arenas:
        arena.control.void(0)
        fill(arena, 1, 60, lineage=b"anew" + bytes(12))
    job.wait_checked(60)
    if claimed:
        claim(final, "the training before", "job")
        asked(job, 1, request)
        assert saved(job, 0, request)["flush"] == "cannot"
        told = [one["reason"] for smp in job.smps for one in smp.events.of("flush_failed")]
        assert any(not lacks(reason, "job") for reason in told), told
        return
    for _ in range(2):
        assert saved_by_both(job, request) == 60
        assert committed(final) == [100, 60] and committed(storage) == []


def saved_by_both(job: Job, request: PersistRequest) -> int:
    """The iteration that both nodes have saved."""
    asked(job, 1, request)
    for smp in (0, 1):
        status = saved(job, smp, replace(request, anew=not smp))
        assert status["flush"] == "done", status
    return int(status["iteration"])


def test_what_was_saved_before_of_this_training_is_not_given_up_for_less(job: Job, tmp_path: Path) -> None:
    """Memory has lost its newest snapshot since."""
    (tmp_path / "final").mkdir()
    job.snapshot(0, 7)
    job.snapshot(1, 8)
    job.start()
    job.wait_checked(8)
    request = PersistRequest(str(tmp_path / "final"), 20.0, True)
    assert saved_by_both(job, request) == 8
    for arena in job.arenas:
        arena.control.void(1)
    assert saved_by_both(job, request) == 8
    assert committed(FileStorage(str(tmp_path / "final"))) == [8]


@pytest.mark.parametrize(("after", "brought"), [(7, 7), (6, 8)], ids=["newest in doubt", "all in doubt"])
def test_a_doubtful_snapshot_is_brought_where_nothing_else_is_there(job: Job, after: int, brought: int) -> None:
    for node in job.nodes:
        write_lineage(node.dir, FIRST.doubt(after, 8))
    job.snapshot(0, 7)
    job.snapshot(1, 8)
    job.start()
    job.wait_checked(8)
    assert saved_by_both(job, PersistRequest("", 20.0, True)) == brought


def test_what_a_lost_node_has_said_before_does_not_count(job: Job) -> None:
    job.snapshot(0, 7)
    job.start()
    job.wait_checked(7)
    Membership(FileStorage(job.where), "b", ("a", "b"), "", job.nodes[1].arenas[0].snapshots()).beat()
    for _ in range(2):
        status = saved(job, 0, PersistRequest("", 12.0, True))
        assert status["flush"] == "cannot" and status["reason"], status
    assert not (Path(job.where) / "holdings" / "a.json").exists(), "what it had said counts no more"


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


def test_a_node_that_has_no_more_than_storage_keeps_nobody_waiting(job: Job) -> None:
    """Another was a snapshot further when the job ended."""
    job.request(0, 7)
    job.start()
    job.settled(7)
    _, b = job.nodes
    b.snapshot(1, 8)
    until(lambda: b.checked(8))
    request = PersistRequest("", 20.0, True)
    for number in (0, 1):
        status = saved(job, number, request)
        assert (status["flush"], status["iteration"]) == ("done", 7), status["reason"] or status


def test_what_cannot_be_read_for_a_moment_may_be_the_newest(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that fails in the middle of a look gives nothing older away for it."""
    job.request(0, 7)
    job.start()
    job.settled(7)
    read, failed = FileStorage.read, list[str]()

    def read_at_second_try(storage: FileStorage, name: str, *span: Any) -> bytes:
        if name.endswith("manifest.json") and not failed:
            failed.append(name)
            raise StorageError("away for a moment")
        return read(storage, name, *span)

    monkeypatch.setattr(FileStorage, "read", read_at_second_try)
    status = saved(job, 0, PersistRequest("", 20.0, True))
    assert failed and (status["flush"], status["iteration"]) == ("done", 7), status["reason"] or status
