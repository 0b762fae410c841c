"""A checkpoint on storage is complete or absent, whoever dies when, on stores that honor conditions and on others."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import (
    CheckpointName,
    CheckpointTransaction,
    NodeCommitMarker,
    claim,
    folder_of,
    read_manifest,
    readers,
    require_owner,
    sweep,
)
from ftckpt.persist.files import FileStorage
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.retention import remove
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage
from tests.support.errors import raises
from tests.support.killing import killed_at
from tests.support.storages import SERVERS, S3Server, committed, in_bucket, servers
from tests.support.tiers import by_default

OLD, NEW, LATER = (bytes([number] * 16) for number in (10, 11, 12))
NODES = ("n0", "n1")


class Unconditional(ObjectStorage):
    """A store that claims to know conditions, and lets everybody create everything."""

    def create(self, name: str, data: bytes | memoryview) -> bool:
        self.put(name, data)
        return True


@pytest.fixture(scope="module")
def server_that(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], S3Server]]:
    with servers(tmp_path_factory) as start:
        yield start


PLAIN = ["files", "memory", "unconditional"]


@pytest.fixture(params=by_default([*PLAIN, *SERVERS], PLAIN))
def storage(request: pytest.FixtureRequest, tmp_path: Path, server_that: Callable[[str], S3Server]) -> Storage:
    if request.param in SERVERS:
        return in_bucket(server_that(request.param))
    (tmp_path / "storage").mkdir()
    kinds = {"files": FileStorage, "memory": ObjectStorage, "unconditional": Unconditional}
    return kinds[request.param](str(tmp_path / "storage") if request.param == "files" else "memory:///")


def content(lineage: bytes, node: str) -> bytes:
    return f"{lineage.hex()} of {node} ".encode() * 100


def write_part(storage: Storage, iteration: int, lineage: bytes, node: str) -> CheckpointTransaction:
    part, data = CheckpointTransaction(storage, SnapshotId(lineage, iteration), node), content(lineage, node)
    part.write(f"{node}.safetensors", [data[:70], data[70:]])
    part.done({"rows": len(node)})
    return part


def write_parts(storage: Storage, iteration: int, lineage: bytes) -> CheckpointTransaction:
    lead, _ = [write_part(storage, iteration, lineage, node) for node in NODES]
    return lead


def manifest_of(lead: CheckpointTransaction, marks: dict[str, NodeCommitMarker]) -> bytes:
    none = np.zeros(0, np.uint64)
    files = [(node, file) for node in NODES for file in marks[node].files]
    shards = {node: StoredShard(file.name, file.nbytes, file.checksum, "", 0, 0, none) for node, file in files}
    return StoredSnapshot(lead.snapshot, "job", {}, shards).encode()


def files_of(manifest: bytes) -> Collection[str]:
    """In the order of nodes."""
    return [shard.file for _, shard in sorted(StoredSnapshot.decode(manifest, "").shards.items())]


def write(storage: Storage, iteration: int, lineage: bytes) -> bool:
    lead = write_parts(storage, iteration, lineage)
    marks = lead.marks()
    assert set(marks) == set(NODES) and marks["n1"].parts == {"rows": 2}
    return lead.commit(manifest_of(lead, marks), marks)


def read(storage: Storage, iteration: int) -> list[bytes]:
    """All that the checkpoint's manifest names."""
    folder = folder_of(iteration)
    return [storage.read(f"{folder}/{name}") for name in files_of(storage.read(f"{folder}/manifest.json"))]


def names(storage: Storage) -> set[str]:
    return {entry.name for entry in storage.list()}


def test_a_checkpoint_of_several_nodes(storage: Storage) -> None:
    assert committed(storage) == []
    assert write(storage, 12, OLD) and write(storage, 8, NEW)
    assert committed(storage) == [12, 8]
    assert read(storage, 12) == [content(OLD, node) for node in NODES]
    assert storage.read("latest") == b"iter_0000012\n", "an older one does not move it back"
    assert names(storage) == {"latest"} | {
        f"{folder_of(iteration)}/{name}"
        for iteration, lineage in ((12, OLD), (8, NEW))
        for name in ("manifest.json", f"{lineage.hex()}-n0.safetensors", f"{lineage.hex()}-n1.safetensors")
    }


def test_without_the_marks_of_all_nodes_there_is_none(storage: Storage) -> None:
    part = CheckpointTransaction(storage, SnapshotId(NEW, 3), "n0")
    part.write("x", [b"data"])
    assert part.marks() == {} and committed(storage) == []
    part.done({})
    assert set(part.marks()) == {"n0"} and committed(storage) == []


def test_a_second_lineage_at_an_iteration_goes_away(storage: Storage) -> None:
    write(storage, 5, OLD)
    assert write(storage, 5, OLD), "the same again, whose answer was lost"
    won = write(storage, 5, NEW)
    assert won == isinstance(storage, Unconditional)
    assert read(storage, 5) == [content(NEW if won else OLD, node) for node in NODES]
    sweep(storage, None)
    assert len(names(storage)) == 4 and read(storage, 5)


def test_lineages_that_commit_at_once_leave_one_whole_checkpoint(storage: Storage) -> None:
    lineages = [bytes([number] * 16) for number in range(6)]
    leads = [write_part(storage, 7, lineage, "n0") for lineage in lineages]
    for lineage in reversed(lineages):  # in whatever order they write
        write_part(storage, 7, lineage, "n1")
    barrier = threading.Barrier(len(leads))

    def end(lead: CheckpointTransaction) -> None:
        marks = lead.marks()
        barrier.wait()
        lead.commit(manifest_of(lead, marks), marks)

    threads = [threading.Thread(target=end, args=(lead,)) for lead in leads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert committed(storage) == [7]
    assert read(storage, 7) in [[content(lineage, node) for node in NODES] for lineage in lineages]
    sweep(storage, None)
    assert read(storage, 7) and len(names(storage)) == 4


def test_a_file_that_somebody_removed_makes_no_checkpoint(storage: Storage) -> None:
    lead = write_parts(storage, 4, NEW)
    marks = lead.marks()
    storage.remove([f"iter_0000004/{NEW.hex()}-n1.safetensors"])
    with raises(StorageError, "n1.safetensors"):
        lead.commit(manifest_of(lead, marks), marks)
    storage.put(f"iter_0000004/{NEW.hex()}-n1.safetensors", b"short")
    with raises(StorageError, "n1.safetensors"):
        lead.commit(manifest_of(lead, marks), marks)
    assert committed(storage) == []
    lead.abandon()
    assert names(storage) == set()


def test_what_came_to_nothing_is_swept_and_what_is_being_written_is_not(storage: Storage) -> None:
    write(storage, 1, OLD)
    write_parts(storage, 2, OLD)
    write_parts(storage, 2, NEW)
    write_part(storage, 3, NEW, "n1")  # of nodes that know already that the job has gone on
    write_part(storage, 4, LATER, "n1")
    write_part(storage, 5, OLD, "n1")
    storage.put("notes", b"of somebody")
    gone = sweep(storage, SnapshotId(NEW, 2), lineages=[LATER])
    assert sorted(gone) == sorted(
        f"iter_{iteration:07d}/{OLD.hex()}-{name}"
        for iteration, node in ((2, "n0"), (2, "n1"), (5, "n1"))
        for name in (f"{node}.safetensors", f"done.{node}")
    )
    assert read(storage, 1) and storage.size("notes") == 11
    lead = CheckpointTransaction(storage, SnapshotId(NEW, 2), "n0")
    marks = lead.marks()
    assert lead.commit(manifest_of(lead, marks), marks) and committed(storage) == [2, 1]


def test_nothing_is_swept_that_is_not_called_as_what_was_begun(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    write(storage, 1, OLD)
    planted = [
        "iter_0000001/.x.put.new", f"iter_0000001/.{OLD.hex()}-notes-host-1-2.put.new", "iter_0000001/notes",
        f"iter_0000001/{LATER.hex()}-notes.txt", "iter_0000002/.notes-host-1-2.put.new", "readers/notes",
        "holdings/notes.json", "pins/notes", "void/notes", "made/notes",
    ]  # fmt: skip
    for name in planted:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"mine": 1}')
    (tmp_path / "readers" / "note").write_text("mine!\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / f"{LATER.hex()}-n0.safetensors").touch()
    (tmp_path / "iter_0000001" / f"{LATER.hex()}-n0.safetensors").symlink_to(
        tmp_path / "outside" / f"{LATER.hex()}-n0.safetensors"
    )
    (tmp_path / "iter_0000001" / f"{LATER.hex()}-n1.safetensors").symlink_to("nowhere")
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000009", symlinks=True)
    before = sorted(path for path in tmp_path.rglob("*"))
    claim(storage, "run", "job")
    for current in (None, SnapshotId(NEW, 10)):
        sweep(storage, current)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "owner.json") == before
    assert readers(storage) == [], "what is no restart keeps nothing from being removed"


def test_what_a_checkpoint_names_is_what_goes_with_it(storage: Storage) -> None:
    write(storage, 1, OLD)
    write(storage, 2, NEW)
    storage.put(f"iter_0000001/{OLD.hex()}-notes.txt", b"mine")
    remove(storage, CheckpointName(1), SnapshotId(OLD, 1))
    assert {name for name in names(storage) if name.startswith("iter_0000001/")} == {
        f"iter_0000001/{OLD.hex()}-notes.txt"
    }


def test_a_checkpoint_that_was_copied_is_none_and_stays(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    for iteration in (1, 2):
        write(storage, iteration, OLD)
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / "iter_0000009")
    with raises(StorageError, "iter_0000009", "1"):
        read_manifest(storage, CheckpointName(9))
    with raises(StorageError, "iter_0000009"):
        remove(storage, CheckpointName(9), SnapshotId(OLD, 9))
    remove(storage, CheckpointName(1), SnapshotId(OLD, 1))
    assert len(list((tmp_path / "iter_0000009").iterdir())) == 3


def test_leftovers_are_another_run_s_when_it_has_claimed_the_place_meanwhile(storage: Storage) -> None:
    write(storage, 1, OLD)
    write_parts(storage, 2, NEW)  # of the other run, which has claimed before
    before = names(storage)
    assert sweep(storage, SnapshotId(OLD, 3), lambda: False) == [] and names(storage) == before
    assert len(sweep(storage, SnapshotId(OLD, 3), lambda: True)) == 4


def test_the_last_checkpoint_is_not_removed(storage: Storage) -> None:
    write(storage, 1, OLD)
    with raises(StorageError):
        remove(storage, CheckpointName(1), SnapshotId(OLD, 1))
    write(storage, 2, NEW)
    remove(storage, CheckpointName(2), SnapshotId(NEW, 2))
    assert committed(storage) == [1] and storage.read("latest") == b"iter_0000001\n"
    assert len(names(storage)) == 4


def test_killed_at_any_step_the_checkpoint_before_is_there(tmp_path: Path) -> None:
    """At each step of writing, committing, and removing the older one."""
    storage = FileStorage(str(tmp_path))
    write(storage, 1, OLD)

    def go_on() -> None:
        write(storage, 2, NEW)
        remove(storage, CheckpointName(1), SnapshotId(OLD, 1))

    seen, step = set(), 0
    while True:
        killed = killed_at(step, go_on)
        there = committed(storage)
        seen.add(tuple(there))
        for iteration in there:
            assert read(storage, iteration) == [content(NEW if iteration == 2 else OLD, node) for node in NODES]
        latest = storage.read("latest").decode().strip()
        assert latest in {folder_of(iteration) for iteration in there}, "it names one that is whole"
        sweep(storage, None)
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1 + 3 * len(there)
        if not killed:
            break
        if there != [1]:
            if 1 not in there:
                write(storage, 1, OLD)
            remove(storage, CheckpointName(2), SnapshotId(NEW, 2))
        step += 1
    assert seen == {(1,), (2, 1), (2,)} and step > 20


def test_what_an_earlier_run_has_left_is_no_reason_to_give_up(tmp_path: Path) -> None:
    """Storage may be away when this run begins, and be claimed late. A later run has the place to stay."""
    storage, began = open_storage(str(tmp_path)), 1000.0
    claim(storage, "another", "job", began)
    for own_began, lasting in ((began + 1, False), (began - 1, True), (0.0, True)):
        with pytest.raises(StorageError) as caught:
            require_owner(storage, "mine", own_began)
        assert caught.value.lasting == lasting, own_began
    claim(storage, "another", "job")
    with pytest.raises(StorageError) as caught:
        require_owner(storage, "mine", 1.0)
    assert not caught.value.lasting
    claim(storage, "mine", "job", began)
    assert require_owner(storage, "mine", began)
