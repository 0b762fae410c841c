"""Flushes from nodes to storage: complete there or absent, whatever dies, fills up or goes away."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import StorageError
from ftckpt.memory.heartbeat import FlushState
from ftckpt.memory.lineage_file import write_lineage
from ftckpt.model.lineage import FIRST, Lineage, Selection
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit, retention
from ftckpt.persist.commit import CheckpointName, CheckpointTransaction, claim, folder_of, require_own
from ftckpt.persist.files import FileStorage
from ftckpt.persist.paths import locate
from ftckpt.persist.shards import ShardImage
from ftckpt.restore.storage_catalog import StorageCatalog
from ftckpt.smp import flush as flushing
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.flush import Flush, FlushOrders
from ftckpt.smp.requests import PersistRequest
from ftckpt.smp.work import Throttle
from tests.support.errors import lacks, raises
from tests.support.flips import flip_slot
from tests.support.flush_jobs import NODES, Job, leftovers
from tests.support.killing import killed_at
from tests.support.mounting import tmpfs
from tests.support.smp_nodes import Node, Seen
from tests.support.snapshots import LINEAGE, fill
from tests.support.storages import committed
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.fixture
def where(tmp_path: Path) -> str:
    (tmp_path / "storage").mkdir()
    return str(tmp_path / "storage")


@pytest.fixture
def job(arena_root: Path, where: str, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(arena_root, where, persist_keep=2, persist_compress=getattr(request, "param", "none"))
    yield made
    made.close()


compressed_or_not = pytest.mark.parametrize("job", ["none", "zstd"], indirect=True)


@compressed_or_not
def test_a_snapshot_of_two_nodes_becomes_one_checkpoint(job: Job) -> None:
    compresses = job.settings["persist_compress"] == "zstd"
    job.start()
    for slot, iteration in enumerate((7, 8, 9)):
        job.persist(slot, iteration)
        stored = job.check(FileStorage(job.where), iteration)
        assert all(smp.tasks.status()["flushing"] is None for smp in job.smps), "it is there, and not on its way"
        assert stored.snapshot.lineage == LINEAGE and stored.job == "job" and len(stored.shards) == 4
        for entry in stored.shards.values():
            assert entry.file.endswith(".zst" if compresses else ".safetensors")
            assert (entry.frames is not None) == compresses
    assert committed(FileStorage(job.where)) == [9, 8] and leftovers(job.where) == []
    job.flush(-1)
    until(lambda: all(smp.tasks.flushes.current == (None, FlushState.NONE) for smp in job.smps))


def test_nothing_counts_before_all_nodes_are_done(job: Job) -> None:
    job.request(0, 7)
    job.smps[0].start()
    until(lambda: job.smps[0].events.of("flushed"))
    job.smps[0].settle()
    assert committed(FileStorage(job.where)) == [] and job.states(7) == [FlushState.WORKING]
    assert job.smps[0].tasks.status()["flushing"]["iteration"] == 7
    job.smps[1].start()
    job.settled(7)
    job.check(FileStorage(job.where), 7)


@compressed_or_not
def test_bytes_that_went_bad_come_to_no_storage(job: Job) -> None:
    job.start()
    job.snapshot(0, 7)
    job.wait_checked(7)
    arena = job.nodes[1].arenas[0]
    flip_slot(arena, 0, arena.image.chunks[-2].end - 1)
    job.flush(7)
    until(lambda: FlushState.CANNOT in job.states(7), lambda: str(job.told()))
    (refused,) = job.smps[1].events.of("flush_failed")
    assert refused["reason"]
    assert committed(FileStorage(job.where)) == []
    until(lambda: job.smps[0].events.of("flushed"))
    # Of the node that was done: it waits for the other as long as it is to.
    until(lambda: {name.rpartition("-")[2][:3] for name in leftovers(job.where)} == {"dp0", "dp1", "don"})
    job.persist(1, 8)
    assert leftovers(job.where) == [], "what came to nothing is swept"


def test_a_slot_that_is_needed_is_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.snapshot(0, 7)
    taken = threading.Event()

    def take(node: str) -> None:
        if node == "a" and not taken.is_set():
            taken.set()
            job.nodes[0].arenas[0].control.begin(0)

    pieces_before(monkeypatch, take)
    job.start()
    job.flush(7)
    until(lambda: job.smps[0].events.of("flush_failed"))
    assert job.smps[0].events.of("flush_failed")[0]["reason"]


def pieces_before(monkeypatch: pytest.MonkeyPatch, action: Callable[[str], None]) -> None:
    """Call ``action`` with the node before each piece that goes to storage."""
    pieces_of = flushing.contents

    def slow(shard: ShardImage, *rest: Any) -> Iterator[memoryview]:
        for piece in pieces_of(shard, *rest):
            action("a" if shard.image.manifest.shard in ("dp0", "dp1") else "b")
            yield piece

    monkeypatch.setattr(flushing, "contents", slow)


def stand_at_second_file(
    monkeypatch: pytest.MonkeyPatch, where: str, reached: threading.Event, go_on: threading.Event
) -> None:
    """Wait for ``go_on`` once a file is there."""

    def stand(node: str) -> None:
        if [name for name in leftovers(where) if not name.rpartition("/")[2].startswith(".")]:
            reached.set()
            go_on.wait(20)

    monkeypatch.setattr(flushing, "_FILES", 1)
    pieces_before(monkeypatch, stand)


def test_what_is_not_wanted_any_more_is_removed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    stand_at_second_file(monkeypatch, job.where, reached, go_on)
    job.request(0, 7)
    job.smps[0].start()
    assert reached.wait(20)
    job.nodes[0].flush(-1)
    until(lambda: job.smps[0].tasks.flushes.current[0] is None)
    go_on.set()
    until(lambda: leftovers(job.where) == [], "gone")
    assert not job.smps[0].events.of("flush_failed")


def begun_by_b(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each piece that node b writes from now on."""
    found: list[int] = []
    pieces_before(monkeypatch, lambda node: found.append(1) if node == "b" else None)
    return found


def promised(job: Job) -> None:
    """Node b has written its part of iteration 7 and its mark, and knows nothing of it."""
    job.snapshot(0, 7)
    job.nodes[1].flush(7)
    job.smps[1].start()
    until(lambda: job.smps[1].events.of("flushed"))
    until(lambda: any(name.endswith("-done.b") for name in leftovers(job.where)))
    job.nodes[1].flush(-1)
    until(lambda: job.smps[1].tasks.flushes.current[0] is None)


def test_what_a_node_has_promised_it_never_takes_back(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its SMP is killed after its mark; the next one finds that, and is stopped: the commit may come at any time."""
    promised(job)
    begun, looks, lacking = begun_by_b(monkeypatch), threading.Event(), CheckpointTransaction.lacks

    def look(pending: CheckpointTransaction, *marks: commit.NodeCommitMarker) -> Any:
        looks.set()
        return lacking(pending, *marks)

    monkeypatch.setattr(CheckpointTransaction, "lacks", look)
    job.flush(7)
    assert looks.wait(20)
    job.smps[0].start()
    job.settled(7)
    assert not begun, "what is there is not written again"
    job.check(FileStorage(job.where), 7)


def branched(job: Job, lineage: bytes, *iterations: int) -> None:
    """A new attempt of ``job`` has invalidated the snapshots of its nodes, and flushes others of ``iterations``."""
    for arena in job.arenas:
        for slot in range(2):
            arena.control.void(slot)
        for slot, iteration in enumerate(iterations):
            fill(arena, slot, iteration, lineage=lineage)
    for iteration in iterations:
        for arena in job.arenas:
            arena.control.mark_flush(SnapshotId(lineage, iteration))
        wanted = SnapshotId(lineage, iteration), FlushState.DONE
        until(lambda w=wanted: all(smp.tasks.flushes.current == w for smp in job.smps), lambda: str(job.told()))  # type: ignore[misc]


def on_branch(job: Job, lineage: Lineage) -> None:
    for node in job.nodes:
        write_lineage(node.dir, lineage)


def test_what_a_branch_abandons_stays_until_enough_of_the_branch_is_there(job: Job) -> None:
    """Also where a newer one takes the place of its iteration: it has another name then, and all of its files."""
    storage = FileStorage(job.where)
    on_branch(job, FIRST)
    job.start()
    for slot, iteration in enumerate((20, 30)):
        job.persist(slot, iteration)
    retention.pin(storage, CheckpointName(20))
    on_branch(job, FIRST.branch(10))
    branched(job, b"m" * 16, 20)
    assert [str(name) for name in commit.checkpoints(storage)] == ["iter_0000030", "iter_0000020", "iter_0000020-g1"]
    assert job.check(storage, 20).snapshot.lineage == b"m" * 16 and leftovers(job.where) == ["pins/iter_0000020-g1"]
    aside = commit.read_manifest(storage, CheckpointName(20, 1))
    assert aside.snapshot.lineage == LINEAGE and aside.lineage == FIRST
    assert {storage.size(f"{folder_of(20)}/{one.file}") for one in aside.shards.values()} == {
        one.nbytes for one in aside.shards.values()
    }
    assert retention.pinned(storage) == {CheckpointName(20, 1)}, "the pin goes with what was pinned"
    assert storage.read("latest").decode().strip() == folder_of(20)
    branched(job, b"m" * 16, 20, 21)
    assert [str(name) for name in commit.checkpoints(storage)] == ["iter_0000021", "iter_0000020", "iter_0000020-g1"]
    assert leftovers(job.where) == ["pins/iter_0000020-g1"]


def test_storage_that_fills_up_is_tried_again(
    arena_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tmpfs(tmp_path / "small", "3m") as small, ExitStack() as stack:
        (small / "other").write_bytes(bytes(2 << 20))
        job = Job(arena_root, str(small))
        stack.callback(job.close)
        job.request(0, 7)
        job.start()
        until(lambda: any(smp.events.of("storage_fails") for smp in job.smps))
        assert committed(FileStorage(job.where)) == [] and FlushState.CANNOT not in job.states(7)
        (small / "other").unlink()
        job.settled(7)
        job.check(FileStorage(job.where), 7)
        assert leftovers(job.where) == []


def test_a_run_that_goes_on_elsewhere_is_left_alone(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """SMPs of nodes that it left neither commit nor write nor remove anything."""
    storage, reached, go_on = FileStorage(job.where), threading.Event(), threading.Event()

    def stand(node: str) -> None:
        if node == "b":
            reached.set()
            go_on.wait(20)

    pieces_before(monkeypatch, stand)
    job.request(0, 7)
    job.start()
    until(lambda: job.smps[0].events.of("flushed") and reached.is_set())
    claim(storage, "the new run", "job")
    other = Path(job.where) / folder_of(6)
    other.mkdir()
    (other / f"{'ab' * 16}-dp0.safetensors").write_bytes(b"of the new run")
    go_on.set()
    until(lambda: job.smps[0].events.of("flush_failed"))
    assert not lacks(job.smps[0].events.of("flush_failed")[0]["reason"], "job")
    job.request(1, 8)
    job.settled(8, FlushState.CANNOT)
    assert committed(storage) == [] and (other / f"{'ab' * 16}-dp0.safetensors").exists()
    assert [len(smp.events.of("flushed")) for smp in job.smps] == [1, 1], "and 8 was not begun"
    claim(storage, "", "job")
    job.persist(2, 9)
    assert committed(storage) == [9] and leftovers(job.where) == []


def stop_once(job: Job, reached: threading.Event) -> None:
    """Stop the flush of iteration 7 when it has ``reached`` a place where it waits."""
    job.request(0, 7)
    job.start()
    until(reached.is_set)
    stop(job)


def stop(job: Job) -> None:
    job.flush(-1)
    until(lambda: not job.states(7))


def until_ended() -> None:
    """Until the threads of all flushes have ended."""
    until(lambda: not [one for one in threading.enumerate() if one.name.startswith("smp-flush")])


def test_a_flush_that_was_stopped_commits_nothing_any_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It scans for marks while storage hangs; the next snapshot may be of another lineage."""
    reached, go_on, marks = threading.Event(), threading.Event(), CheckpointTransaction.marks

    def late(pending: CheckpointTransaction) -> dict[str, commit.NodeCommitMarker]:
        found = marks(pending)
        if len(found) == len(NODES):
            reached.set()
            go_on.wait(20)
        return found

    monkeypatch.setattr(CheckpointTransaction, "marks", late)
    stop_once(job, reached)
    go_on.set()
    until_ended()
    assert committed(FileStorage(job.where)) == []


def test_what_a_job_branches_from_while_it_is_on_its_way_is_of_the_history_before(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new attempt rolls back before iteration 7 when all nodes have written their part, before one commits it."""
    go_on, marks = threading.Event(), CheckpointTransaction.marks

    def late(pending: CheckpointTransaction) -> dict[str, commit.NodeCommitMarker]:
        go_on.wait(20)
        return marks(pending)

    monkeypatch.setattr(CheckpointTransaction, "marks", late)
    on_branch(job, FIRST)
    job.request(0, 7)
    job.start()
    until(lambda: all(smp.events.of("flushed") for smp in job.smps))
    for arena in job.arenas:
        arena.control.void(0)
    on_branch(job, FIRST.branch(6))
    go_on.set()
    storage = FileStorage(job.where)
    until(lambda: committed(storage) == [7])
    stored = commit.read_manifest(storage, CheckpointName(7))
    assert stored.lineage == FIRST, "no start of the new branch takes it"
    assert not StorageCatalog(None, (stored,)).selected(Selection(FIRST.branch(6))).snapshots


def guarded(node: Node) -> MonitoredArenas:
    arenas = MonitoredArenas(node.dir)
    arenas.want([arena.path.name for arena in node.arenas])
    arenas.refresh()
    return arenas


def flush_here(nodes: Sequence[Node], where: str, iteration: int) -> None:
    """Both nodes' parts, in this process, to the end."""
    flushes = [
        Flush(
            FlushOrders(where, "job", "", node.name, NODES, keep=1), guarded(node), Throttle(bool, bool), Seen(),
            max(nodes[0].arenas[0].snapshots()),
        )
        for node in nodes
    ]  # fmt: skip
    for flush in flushes:
        flush.join(30)
    assert [flush.state for flush in flushes] == [FlushState.DONE] * 2, iteration


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 13])
def test_killed_at_any_step_one_checkpoint_is_whole_and_the_next_attempt_ends_it(job: Job, stride: int) -> None:
    job.snapshot(0, 7)
    job.start()
    job.flush(7)
    job.settled(7)
    job.snapshot(1, 8)
    job.wait_checked(8)
    for smp in job.smps:
        smp.pause()
    storage, seen, step = FileStorage(job.where), set(), 0
    backup = {path: path.read_bytes() for path in Path(job.where).rglob("*") if path.is_file()}
    while True:
        killed = killed_at(step, lambda: flush_here(job.nodes, job.where, 8))
        there = committed(storage)
        seen.add(tuple(there))
        assert there in ([7], [8, 7], [8])
        for iteration in there:
            job.check(storage, iteration)
        flush_here(job.nodes, job.where, 8)
        job.check(storage, 8)
        if not killed:
            break
        for path in [path for path in Path(job.where).rglob("*") if path.is_file()]:
            os.unlink(path)
        for path, data in backup.items():
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        step += stride
    assert (7,) in seen and (8,) in seen and step > 60
    assert committed(storage) == [8] and leftovers(job.where) == []


def test_what_is_not_its_own_is_never_removed(job: Job) -> None:
    """Megatron's checkpoints have folders of the same names; a manifest of a later version is no leftover."""
    storage = FileStorage(job.where)
    theirs = ["iter_0000003/mp_rank_00/model.pt", "iter_0000007/metadata.json", "iter_0000005/manifest.json"]
    theirs += [f"iter_0000005/{'ab' * 16}-dp0.safetensors", "latest_of_mine.txt"]
    for name in theirs:
        storage.put(name, b"of others")
    job.start()
    for slot, iteration in enumerate((7, 8, 9)):
        job.persist(slot, iteration)
    assert [storage.read(name) for name in theirs] == [b"of others"] * len(theirs)
    assert committed(storage) == [9, 8, 5]


@pytest.mark.parametrize("copied", [False, True], ids=["of another program", "of another iteration"])
def test_a_manifest_that_was_not_written_there_is_not_written_over(copied: bool, job: Job) -> None:
    storage, manifest = FileStorage(job.where), b'{"of": "others"}'
    job.start()
    if copied:
        job.persist(0, 3)
        manifest = storage.read("iter_0000003/manifest.json")
    storage.put("iter_0000007/manifest.json", manifest)
    job.request(1, 7)
    until(lambda: job.smps[0].events.of("flush_failed"))
    assert storage.read("iter_0000007/manifest.json") == manifest


@pytest.mark.parametrize(("name", "text"), [("latest", "global_step12"), ("latest_checkpointed_iteration.txt", "12")])
def test_a_place_of_another_program_is_refused(name: str, text: str, where: str) -> None:
    storage = FileStorage(where)
    require_own(storage)
    storage.put("latest", b"iter_0000012\n")
    require_own(storage)
    storage.put(name, text.encode())
    with raises(StorageError, where, name):
        require_own(storage)


@pytest.mark.parametrize("name", ["owner.json", "latest"])
def test_snapshots_beside_what_others_load_are_found_and_not_taken_for_them(name: str, where: str) -> None:
    """``ftckpt save`` claims no place."""
    assert locate(where).where == where
    FileStorage(where).put(f"ftckpt/{name}", b"iter_0000012\n")
    assert locate(where).where == f"{where}/ftckpt"
    with raises(StorageError, where, "--ftckpt-persist-format"):
        require_own(FileStorage(where))


def test_a_checkpoint_has_all_shards_of_its_layout_or_is_none(job: Job) -> None:
    """A node's report from before it adopted the shards of a lost node does not list all that it will write."""
    storage = FileStorage(job.where)
    CheckpointTransaction(storage, SnapshotId(LINEAGE, 7), "b").done({})
    job.request(0, 7)
    job.smps[0].start()
    until(lambda: job.smps[0].events.of("storage_fails"))
    assert not lacks(job.smps[0].events.of("storage_fails")[0]["error"], "dp2", "dp3")
    job.smps[0].settle()
    assert committed(storage) == [] and not job.smps[0].events.of("flush_failed")
    job.smps[1].start()
    job.settled(7)
    job.check(storage, 7)


def saves(job: Job, where: Path, anew: bool = False) -> list[str]:
    """The reports of both nodes about a flush without ranks."""
    return [smp.tasks.flushes.persist(PersistRequest(str(where), 30.0, anew))["flush"] for smp in job.smps]


def test_a_save_that_failed_is_begun_once_more(job: Job, tmp_path: Path) -> None:
    where = tmp_path / "later"
    job.snapshot(0, 7)
    job.start()
    job.wait_checked(7)
    saves(job, where, anew=True)
    until(lambda: saves(job, where) == ["cannot"] * 2)
    where.mkdir()
    assert saves(job, where) == ["cannot"] * 2, "who asks again is told what came of it"
    saves(job, where, anew=True)
    until(lambda: saves(job, where) == ["done"] * 2)
    assert committed(FileStorage(str(where))) == [7]
