"""Flushes that name chunks of older checkpoints: files that both need stay, and nothing chains."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import numpy as np
import pytest
import xxhash

from ftckpt.cli.main import main
from ftckpt.errors import ConvertError, DamagedError
from ftckpt.model import objects
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit, retention
from ftckpt.persist.commit import CheckpointName, read_manifest
from ftckpt.persist.files import FileStorage
from ftckpt.persist.shard_file import open_shard
from ftckpt.persist.shards import BaseFile, StoredShard, StoredSnapshot
from ftckpt.universal.snapshots import SnapshotReader
from tests.support.errors import lacks, raises
from tests.support.flips import flip
from tests.support.flush_jobs import Job, leftovers
from tests.support.killing import killed_at
from tests.support.smp_nodes import CHUNK
from tests.support.snapshots import LINEAGE, Bytes, seal, store
from tests.support.storages import committed


@pytest.fixture
def job(arena_root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    where = tmp_path / "storage"
    where.mkdir()
    made = Job(arena_root, str(where), **{"persist_keep": 2, **getattr(request, "param", {})})
    made.start()
    yield made
    made.close()


compressed_or_not = pytest.mark.parametrize(
    "job", [{}, {"persist_compress": "zstd"}], ids=["", "zstd"], indirect=True
)


def persist(job: Job, iteration: int, changed: Collection[int] = ()) -> StoredSnapshot:
    """Flushes a snapshot in which the counter, the objects and these chunks of the weights are its own."""
    for arena in job.arenas:
        rank = arena.manifest.coords["dp"]
        own = np.random.default_rng(rank).integers(0, 256, arena.manifest.stepped[0].nbytes, np.uint8)
        for chunk in changed:
            part: Bytes = own[chunk * CHUNK : (chunk + 1) * CHUNK]
            part += np.uint8(iteration)
        counter = np.full(arena.manifest.volatile[0].nbytes, iteration, np.uint8)
        store(arena, iteration % 3, [own.tobytes(), counter.tobytes()], objects.encode({"at": iteration}))
        seal(arena, iteration % 3, iteration)
    job.flush(iteration)
    job.settled(iteration)
    return read_manifest(FileStorage(job.where), CheckpointName(iteration))


def folders(stored: StoredSnapshot) -> set[int | None]:
    """The iterations whose files it names."""
    return {commit.iteration_of(base.partition("/")[0]) for base in stored.bases}


@compressed_or_not
def test_what_did_not_change_is_named_and_stays(job: Job) -> None:
    storage = FileStorage(job.where)
    there = [persist(job, iteration) for iteration in range(1, 8)]
    assert [folders(one) for one in there] == [set(), set(), {1}, {2}, {1}, {2}, {1}], "no chain, and two in turns"
    assert [one.encode().count(b'"version": 3') for one in there] == [0, 0, 1, 1, 1, 1, 1]
    assert all(one.nbytes < 0.5 * there[0].nbytes for one in there[2:])
    for one in there[-2:]:
        job.check(storage, one.snapshot.iteration)
        with closing(SnapshotReader(Path(job.where, f"iter_{one.snapshot.iteration:07d}"))) as reader:
            wanted = {f"own{rank}" for rank in range(4)} | {f"counter{rank}" for rank in range(4)}
            assert {reader.catalog.fragments[index].key for index in range(8)} == wanted
            assert all(len(reader.read(index)) == reader.catalog.fragments[index].nbytes for index in range(8))
    assert committed(storage) == [7, 6] and leftovers(job.where) == []
    for one, other in pairwise(there):
        files = [{f"{commit.folder_of(each.snapshot.iteration)}/{s.file}" for s in each.shards.values()} | each.bases
                 for each in (one, other)]  # fmt: skip
        assert not files[0] & files[1], "the two newest have no file in common"


def test_what_changed_is_written_and_what_changed_much_is_complete(job: Job) -> None:
    for iteration in range(1, 4):
        persist(job, iteration)
    stored = persist(job, 4, changed=[1])
    assert folders(stored) == {2} and all(entry.shared == [0, 2, 3, 4] for entry in stored.shards.values())
    job.check(FileStorage(job.where), 4)
    for iteration in (5, 6):
        stored = persist(job, iteration, changed=[0, 1, 2])
        assert not stored.bases and all(entry.frames is None for entry in stored.shards.values())
    assert leftovers(job.where) == [], "files that no checkpoint needs any more are gone"
    assert {path.name for path in Path(job.where).glob("iter_*") if any(path.iterdir())} == {
        "iter_0000005", "iter_0000006",
    }  # fmt: skip
    persist(job, 7, changed=[0, 1, 2])
    job.check(FileStorage(job.where), 7)


@pytest.mark.parametrize("job", [{"persist_keep": 1}], indirect=True)
def test_of_one_checkpoint_that_is_kept_nothing_is_named(job: Job) -> None:
    for iteration in range(1, 5):
        assert not persist(job, iteration).bases
    assert committed(FileStorage(job.where)) == [4] and leftovers(job.where) == []


def test_a_base_that_is_gone_is_named_and_the_other_checkpoint_stays_good(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = FileStorage(job.where)
    for iteration in range(1, 7):
        persist(job, iteration)
    for path in Path(job.where, "iter_0000002").iterdir():
        path.unlink()
    (shard, entry), *_ = read_manifest(storage, CheckpointName(6)).shards.items()
    assert entry.base is not None
    with raises(DamagedError, entry.base.file, f"iter_0000006/{entry.file}"):
        open_shard(storage, "iter_0000006", shard, entry)
    with raises(ConvertError, entry.base.file.partition("/")[2]):
        SnapshotReader(Path(job.where, "iter_0000006"))
    assert main(["list", job.where, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["snapshots"]
    assert [one["refers_to"] for one in listed] == [["iter_0000002"], ["iter_0000001"]]
    assert main(["verify", job.where, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["restart"] == "iter_0000005"
    assert folders(persist(job, 7)) == {1}
    assert not persist(job, 8).bases, "without the file all is written"
    job.check(storage, 8)


def test_a_bad_byte_of_a_base_is_found(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in range(1, 5):
        persist(job, iteration)
    flip(next(Path(job.where, "iter_0000001").glob("*-dp1.*")), 3 * CHUNK)
    assert main(["verify", job.where]) == 1
    out = capsys.readouterr().out
    assert out.count(": bad:") == 1 and not lacks(out, "iter_0000003", "dp1", "iter_0000004")


def entry_of(file: str, base: str = "") -> StoredShard:
    entry = StoredShard(file, 100, "", "ff", 10, 1, np.array([1], np.uint64))
    if not base:
        return entry
    return replace(entry, frames=np.array([90, 0, 10], np.uint64), base=BaseFile(base, 100))


def write(storage: FileStorage, iteration: int, base: str = "") -> str:
    """A checkpoint of one file of 100 bytes, which it returns; it needs the file ``base``."""
    folder, file = commit.folder_of(iteration), f"{LINEAGE.hex()}-dp0.{'part' if base else 'safetensors'}"
    storage.put(f"{folder}/{file}", bytes(100))
    shards = {"dp0": entry_of(file, base)}
    storage.put(f"{folder}/manifest.json", StoredSnapshot(SnapshotId(LINEAGE, iteration), "", {}, shards).encode())
    return f"{folder}/{file}"


def test_a_kill_while_the_named_one_is_removed_leaves_its_file(tmp_path: Path) -> None:
    """And no file that nobody needs."""
    storage, steps = FileStorage(str(tmp_path)), 0
    for step in count():
        first = write(storage, 1)
        write(storage, 2)
        last = write(storage, 3, first)
        doomed = {CheckpointName(n): SnapshotId(LINEAGE, n) for n in (1, 2)}
        killed = killed_at(step, lambda: retention.retire(storage, doomed, 3, lambda: True) and None)  # noqa: B023
        commit.sweep(storage, None)
        assert storage.size(first) == storage.size(last) == 100
        there = {entry.name for entry in storage.list() if entry.name.endswith((".safetensors", ".part"))}
        assert there == {first, last} | {f"iter_{n:07d}/{Path(first).name}" for n in committed(storage) if n == 2}
        if not killed:
            break
        steps += 1
    assert steps > 5 and committed(storage) == [3]


@pytest.mark.parametrize("change", [(b'"version": 3', b'"version": 9'), (b"100", b"101")], ids=["version", "damaged"])
def test_what_an_unreadable_manifest_may_name_stays(change: tuple[bytes, bytes], tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    first, _ = write(storage, 1), write(storage, 2)
    write(storage, 3, first)
    storage.put("iter_0000003/manifest.json", storage.read("iter_0000003/manifest.json").replace(*change))
    retention.remove(storage, CheckpointName(1), SnapshotId(LINEAGE, 1))
    assert commit.sweep(storage, None) == [] and storage.size(first) == 100
    storage.remove(["iter_0000003/manifest.json"])
    assert first in commit.sweep(storage, None)


@pytest.mark.parametrize(
    "base",
    [{"file": "../x"}, {"file": "iter_0000001/../../x.zst"}, {"file": "iter_0000001/ab-dp0.part"}, {"nbytes": 0}],
)
def test_a_base_that_is_no_complete_file_is_refused(base: dict[str, object]) -> None:
    value = entry_of("ab-dp0.part", "iter_0000001/ab-dp0.safetensors").to_json()
    assert StoredShard.from_json(value).to_json() == value
    with pytest.raises(ValueError, match="complete"):
        StoredShard.from_json({**value, "base": {**value["base"], **base}})


def test_the_lower_half_is_the_checksum_of_memory() -> None:
    data = np.random.default_rng(1).bytes(1 << 16)
    for nbytes in (4096, 4097, 1 << 16):
        lower = xxhash.xxh3_128_intdigest(data[:nbytes]) & ((1 << 64) - 1)
        assert lower == xxhash.xxh3_64_intdigest(data[:nbytes])
