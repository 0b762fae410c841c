"""What is read of storage before a restart asks for it: which files, how much, and when nothing is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import ftckpt.plain
from benchmarks.slow_storage import cached_bytes, drop
from ftckpt.config import Config
from ftckpt.deepspeed import section
from ftckpt.errors import ConfigError
from ftckpt.frameworks import doors, launcher, rendezvous
from ftckpt.job import compile_locks
from ftckpt.megatron import callbacks
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.loaded import Checkpoint
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import in_rank_order
from ftckpt.persist import retention
from ftckpt.persist.commit import folder_of, manifest_of
from ftckpt.persist.files import FileStorage
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore import prefetch
from ftckpt.restore.prefetch import Prefetch, Prefetched, Seat, newest_whole, share_of, wanted
from ftckpt.store.arena import Arena
from ftckpt.store.directory import job_node_path
from tests.support.errors import raises
from tests.support.waiting import until

LINEAGE = b"p" * 16
SIZES = {"tp0-pp0-dp0": 5 << 20, "tp0-pp1-dp0": 3 << 20, "tp1-pp0-dp0": 33 << 20, "tp1-pp1-dp0": 2 << 20}
SPARE_BYTES = 1 << 20
"""At the end of the last shard."""
SEAT = Seat(0, 4, 4)


def snapshot(iteration: int, origin: Checkpoint | None = None) -> StoredSnapshot:
    def shard(name: str) -> StoredShard:
        spare_bytes = SPARE_BYTES if name == "tp1-pp1-dp0" else 0
        return StoredShard(name, SIZES[name], "0" * 16, "0", 0, 0, np.zeros(1, np.uint64), None, spare_bytes)

    return StoredSnapshot(
        SnapshotId(LINEAGE, iteration), "job", {"tp": 2, "pp": 2}, {name: shard(name) for name in SIZES},
        origin or Checkpoint(),
    )  # fmt: skip


def commit(storage: Storage, iteration: int, origin: Checkpoint | None = None) -> StoredSnapshot:
    stored = snapshot(iteration, origin)
    storage.put(manifest_of(iteration), stored.encode())
    return stored


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    (tmp_path / "storage").mkdir()
    return FileStorage(str(tmp_path / "storage"))


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    (node_dir := job_node_path(arena_root, "job", "node")).mkdir(parents=True)
    return node_dir


@pytest.fixture
def out_of_memory(storage: FileStorage) -> FileStorage:
    """Iteration 7, whose files the page cache does not have."""
    stored = commit(storage, 7)
    for shard in stored.shards.values():
        storage.put(f"{folder_of(7)}/{shard.file}", os.urandom(shard.nbytes))
    try:
        drop(Path(storage.where))
    except RuntimeError as error:
        pytest.skip(f"no disk: {error}")
    return storage


def cached(storage: FileStorage) -> dict[str, int]:
    """Of iteration 7, bytes of each file that the page cache has."""
    found = dict[str, int]()
    for name in SIZES:
        mapped = Path(storage.where, "look")
        mapped.mkdir(exist_ok=True)
        (mapped / name).unlink(missing_ok=True)
        os.link(Path(storage.where, folder_of(7), name), mapped / name)
        found[name] = cached_bytes(mapped)
        (mapped / name).unlink()
    return found


def read(storage: FileStorage, node_dir: Path, seat: Seat) -> Prefetched | None:
    reading = Prefetch(storage.where, node_dir, seat)
    assert reading.join(30.0)
    return reading.end()


# --- which files ---


def test_shards_are_dealt_as_frameworks_number_ranks() -> None:
    assert in_rank_order(list(SIZES)) == ("tp0-pp0-dp0", "tp1-pp0-dp0", "tp0-pp1-dp0", "tp1-pp1-dp0")
    assert in_rank_order(["dp10", "dp9", "dp1"]) == ("dp1", "dp9", "dp10")
    assert in_rank_order(["tp0-pp0-cp1-dp0", "tp0-pp0-cp0-dp1"]) == ("tp0-pp0-cp1-dp0", "tp0-pp0-cp0-dp1")
    assert in_rank_order(["replica1-shard0", "replica0-shard1"]) == ("replica0-shard1", "replica1-shard0")


def test_a_rank_reads_what_it_had_or_its_part_of_all() -> None:
    stored = snapshot(7)
    as_before = [[shard.file for shard in share_of(stored, Seat(rank, 4, 4))] for rank in range(4)]
    assert as_before == [["tp0-pp0-dp0"], ["tp1-pp0-dp0"], ["tp0-pp1-dp0"], ["tp1-pp1-dp0"]]
    fewer = [[shard.file for shard in share_of(stored, Seat(rank, 3, 3))] for rank in range(3)]
    assert fewer == [["tp0-pp0-dp0", "tp1-pp1-dp0"], ["tp0-pp1-dp0"], ["tp1-pp0-dp0"]]
    assert share_of(stored, Seat(5, 8, 8)) == []


def test_only_who_knows_its_number_reads() -> None:
    assert Seat.of({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == (3, 8, 4)
    assert Seat.of({"RANK": "3", "WORLD_SIZE": "8"}) == (3, 8, 8)
    assert Seat.of({"RANK": "8", "WORLD_SIZE": "8"}) is None
    assert Seat.of({"WORLD_SIZE": "8"}) is Seat.of({"RANK": "x", "WORLD_SIZE": "8"}) is Seat.of({}) is None


# --- which snapshot ---


def test_the_newest_that_counts_is_read(storage: FileStorage) -> None:
    assert wanted(storage, -1) is None
    stored = {iteration: commit(storage, iteration) for iteration in (2, 5, 9)}
    assert wanted(storage, -1) == stored[9]
    retention.void(storage, [stored[9].snapshot])
    assert wanted(storage, -1) == stored[5], "9 is of a past that the job has left"
    storage.put(manifest_of(7), b"{}")
    assert wanted(storage, -1) == stored[5], "7 is damaged"
    assert wanted(storage, 4) == stored[5] and wanted(storage, 5) is None and wanted(storage, 8) is None


def test_what_is_to_be_undone_is_not_read(storage: FileStorage) -> None:
    stored = {iteration: commit(storage, iteration) for iteration in (2, 5)}
    assert wanted(storage, -1, before=5) == stored[2] and wanted(storage, -1, before=2) is None
    since = commit(storage, 6, Checkpoint(before=5))
    assert wanted(storage, -1, before=5) == since, "an earlier start has gone back already"
    assert wanted(storage, -1, before=6) == stored[5]


def whole_in_memory(node_dir: Path, iteration: int) -> None:
    weights = Fragment("w", "U8", (4096,), Box((0,), (4096,)), 0, 4096)
    manifest = Manifest({"dp": 0}, {"dp": 1}, (weights,), (), 100, 4096)
    with closing(Arena.create(node_dir, manifest, slots=2)) as arena:
        arena.control.mark_whole(SnapshotId(LINEAGE, iteration))


@pytest.mark.parametrize(("in_memory", "reads"), [(6, True), (7, False), (8, False)])
def test_nothing_is_read_where_memory_is_as_new(
    in_memory: int, reads: bool, out_of_memory: FileStorage, node_dir: Path
) -> None:
    assert newest_whole(node_dir) == newest_whole(node_dir / "missing") == -1
    whole_in_memory(node_dir, in_memory)
    assert newest_whole(node_dir) == in_memory
    assert (read(out_of_memory, node_dir, SEAT) is not None) == reads
    assert (cached(out_of_memory)["tp0-pp0-dp0"] > 0) == reads


# --- how ---


def test_the_page_cache_has_all_of_the_shard_and_nothing_else(out_of_memory: FileStorage, node_dir: Path) -> None:
    begin, files = time.monotonic(), sorted(Path(out_of_memory.where).rglob("*"))
    done = read(out_of_memory, node_dir, Seat(1, 4, 1))
    assert done is not None and done[:2] == (7, SIZES["tp1-pp0-dp0"])
    assert 0 < done.secs < time.monotonic() - begin
    assert sorted(Path(out_of_memory.where).rglob("*")) == files, "nothing is written there"
    there = cached(out_of_memory)
    # Not each page: the system takes some back whenever it likes.
    assert there.pop("tp1-pp0-dp0") >= 0.9 * done.bytes
    assert not any(there.values())


def test_room_that_objects_do_not_use_is_not_read(out_of_memory: FileStorage, node_dir: Path) -> None:
    done = read(out_of_memory, node_dir, Seat(3, 4, 1))
    assert done is not None and done.bytes == SIZES["tp1-pp1-dp0"] - SPARE_BYTES


@pytest.mark.parametrize("case", [(80 << 20, 2, 20 << 20), (1 << 40, 2, 33 << 20), (0, 1, 0)])
def test_the_memory_of_the_node_is_not_filled(
    case: tuple[int, int, int], out_of_memory: FileStorage, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half of what there is, divided among the ranks of the node."""
    room, local, expected = case
    monkeypatch.setattr(prefetch, "available_bytes", lambda: room)
    done = read(out_of_memory, node_dir, Seat(1, 4, local))
    assert (done.bytes if done is not None else 0) == expected
    there = cached(out_of_memory)["tp1-pp0-dp0"]  # more where the system reads ahead of what it was asked for
    assert there >= expected and bool(there) == bool(expected)


@pytest.mark.filterwarnings("error")  # of a thread that ends by an error
def test_what_is_wrong_with_storage_is_for_the_restart_to_say(
    out_of_memory: FileStorage, node_dir: Path, tmp_path: Path
) -> None:
    gone = Prefetch(str(tmp_path / "gone"), node_dir, SEAT)
    assert gone.join(30.0) and gone.end() is None
    path = Path(out_of_memory.where, folder_of(7), "tp0-pp0-dp0")
    os.truncate(path, 1 << 20)
    done = read(out_of_memory, node_dir, SEAT)
    assert done is not None and done.bytes == 1 << 20, "shorter than its manifest says"
    path.unlink()
    assert read(out_of_memory, node_dir, SEAT) is None


class Held(FileStorage):
    """Gives no piece before it is let."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.asked: list[int] = []
        self.let = threading.Event()

    def bring_near(self, name: str, begin: int, nbytes: int) -> int:
        self.asked.append(begin)
        assert self.let.wait(30.0)
        return nbytes


def held_at_four(storage: FileStorage, node_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Held, Prefetch]:
    """A reading of 33 pieces, four of which are on their way until ``let``."""
    held = Held(storage.where)
    monkeypatch.setattr(prefetch, "open_storage", lambda where: held)
    monkeypatch.setattr(prefetch, "_PIECE_BYTES", 1 << 20)
    reading = Prefetch(storage.where, node_dir, Seat(1, 4, 4))
    until(lambda: len(held.asked) == 4, "four pieces are on their way", 30.0)
    return held, reading


def test_the_end_of_the_restart_ends_it_and_waits_for_nobody(
    out_of_memory: FileStorage, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, reading = held_at_four(out_of_memory, node_dir, monkeypatch)
    assert reading.end() is None, "nothing has come yet"
    held.let.set()
    assert reading.join(30.0)
    assert sorted(held.asked) == [0, 1 << 20, 2 << 20, 3 << 20], "and none of the other 29"


def test_it_waits_while_the_restart_looks(
    out_of_memory: FileStorage, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, reading = held_at_four(out_of_memory, node_dir, monkeypatch)
    reading.pause()
    held.let.set()
    assert not reading.join(0.5) and len(held.asked) == 4, "no piece is begun"
    reading.go_on()
    assert reading.join(30.0) and len(held.asked) == 33


ENDS = """
import sys, time
from pathlib import Path
from ftckpt.persist.files import FileStorage
from ftckpt.restore import prefetch

class Silent(FileStorage):
    def bring_near(self, name, begin, nbytes):
        print("asked", flush=True)
        time.sleep(600)

prefetch.open_storage = Silent
prefetch.Prefetch(sys.argv[1], Path(sys.argv[2]), prefetch.Seat(0, 4, 4))
time.sleep(1.0)
"""


def test_a_process_ends_while_storage_is_silent(out_of_memory: FileStorage, node_dir: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, out_of_memory.where, str(node_dir)],
        check=False,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert (ended.returncode, ended.stderr) == (0, "") and "asked" in ended.stdout


# --- from where it begins ---


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch, arena_root: Path) -> Iterator[Callable[[], tuple[str, str, int] | None]]:
    """What is read since; None for nothing."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("FTCKPT_NODE", "node")):
        monkeypatch.setenv(name, value)

    def running() -> tuple[str, str, int] | None:
        one = prefetch._running
        prefetch.end()
        return (one._where, str(one._node_dir.relative_to(arena_root)), one._before) if one is not None else None

    yield running
    prefetch.end()


@pytest.mark.parametrize(
    ("persist", "persist_format", "place"),
    [
        ("/a", "snapshot", "/a"), ("/a", "universal", "/a/ftckpt"), ("s3://a/b", "snapshot", None),
        ("", "snapshot", None),
    ],
)  # fmt: skip
def test_it_is_read_where_snapshots_lie(
    persist: str, persist_format: str, place: str | None, begun: Callable[[], object], arena_root: Path
) -> None:
    config = Config(
        enabled=True, job="j", arena=str(arena_root), persist=persist, persist_format=persist_format, restore_before=9
    )
    doors.read_ahead(config)
    assert begun() == (None if place is None else (place, "ftckpt-j/node", 9))
    doors.read_ahead(Config(job="j", arena=str(arena_root), persist=persist))
    assert begun() is None, "ftckpt is not switched on"


def test_who_has_told_nobody_its_settings_reads_from_attach_on(
    begun: Callable[[], object], arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise ConfigError("here ranks meet")

    monkeypatch.setattr(compile_locks, "release_orphans", refused)
    with raises(ConfigError, "here ranks meet"):
        doors.start(Config(enabled=True, job="j", arena=str(arena_root), persist="/a"), lambda: ({}, {}))
    assert begun() == ("/a", "ftckpt-j/node", 0)


def test_plain_torch_reads_before_ranks_wait_for_each_other(
    begun: Callable[[], object], arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise ConfigError("here ranks meet")

    monkeypatch.setattr(rendezvous, "isolate_attempts", refused)
    with raises(ConfigError, "here ranks meet"):
        ftckpt.plain.init_process_group(Config(enabled=True, job="j", arena=str(arena_root), persist="/a"))
    assert begun() == ("/a", "ftckpt-j/node", 0)


def test_megatron_reads_before_it_has_built_anything(
    begun: Callable[[], object], arena_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "isolate", lambda: None)
    monkeypatch.setattr(callbacks.door, "config", Config())
    config = Config(enabled=True, job="j", arena=str(arena_root), persist="/a")
    callbacks.switch_on(config)
    assert callbacks.door.config == config and begun() == ("/a", "ftckpt-j/node", 0)


def test_deepspeeds_own_flag_names_the_json(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"ftckpt": {"enabled": true, "persist": "/a"}}')
    assert section.foreseen(["--deepspeed_config", str(path)]) == Config(enabled=True, persist="/a")
    assert section.foreseen(["--x"]) == section.foreseen(["--deepspeed_config"]) == Config()
    assert section.foreseen([f"--deepspeed_config={tmp_path / 'none'}"]) == Config()
    for wrong in ("{", "[]", '{"ftckpt": 3}', '{"ftckpt": {"persist": "/a"}}'):
        path.write_text(wrong)
        assert section.foreseen(["--deepspeed_config", str(path)]) == Config()
