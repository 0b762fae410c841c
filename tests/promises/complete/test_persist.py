"""Snapshots on their way to storage, as a job sees it: real ranks, a real SMP on each node, and files."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ftckpt.cli.main import main
from ftckpt.errors import CorruptError, LostError, StorageError
from ftckpt.events import Events
from ftckpt.memory.arena import Arena
from ftckpt.memory.destinations import TargetParts
from ftckpt.memory.directory import clean_job, end_smp
from ftckpt.persist import retention
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import CheckpointName, checkpoints, claim, iteration_of
from ftckpt.persist.files import FileStorage
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore import restart, selected_shards, storage_catalog
from ftckpt.restore.shard_reconstruction import ShardReconstruction
from ftckpt.session.checkpointer import Checkpointer
from tests.support import jobs, plain
from tests.support.errors import a_rank_raises
from tests.support.event_logs import read_events
from tests.support.mounting import leave_free, tmpfs
from tests.support.pool import RankFailure, run_ranks
from tests.support.repository import is_golden
from tests.support.smps import start_smps
from tests.support.storages import BUCKET, S3Server, committed, swift
from tests.support.waiting import meet, until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

NODES = ["n0", "n0", "n1", "n1"]
ITERATION_SECS = 0.03
"""A pause of training that waits for storage: without it ranks would take the cores of the flush."""


@pytest.fixture
def persisting(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "storage").mkdir()
    settings |= {
        "protect": "peer", "chunk_size": "64KiB", "objects_size": "1MiB", "on_error": "raise", "network_rate": "0",
        "persist": str(tmp_path / "storage"), "persist_interval": 4, "persist_keep": 2,
    }  # fmt: skip
    yield settings
    clean_job(arena_root, "test")


@pytest.fixture(scope="module")
def left(module_root: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The storage of a job of four ranks: three snapshots or more. Its memory is lost."""
    folder = tmp_path_factory.mktemp("left")
    settings = {"job": "test", "arena": str(module_root), "persist": str(folder), "persist_interval": 4}
    settings |= {"protect": "none", "chunk_size": "64KiB", "objects_size": "1MiB", "persist_keep": 0}
    settings |= {"persist_compress": getattr(request, "param", "none")}
    run_ranks(train_until_persisted, 4, settings, 3)
    clean_job(module_root, "test")
    return folder


@pytest.fixture
def going_on(persisting: dict[str, Any], left: Path) -> dict[str, Any]:
    """The settings of a job that finds on storage what another one has left."""
    shutil.copytree(left, persisting["persist"], dirs_exist_ok=True)
    return persisting


compressed_or_not = pytest.mark.parametrize("left", ["none", "zstd"], indirect=True)


def train_until_persisted(rank: int, world_size: int, settings: dict[str, Any], times: int) -> list[int]:
    """Train until so many snapshots are on storage; returns their iterations."""
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    persisted = persisted_by(checkpointer, state, times)
    checkpointer.close(remove=False)
    return persisted


def persisted_by(checkpointer: Checkpointer, state: plain.PlainState, times: int) -> list[int]:
    """Restore and train until so many snapshots are on storage; returns their iterations."""
    number, persisted = checkpointer.restore() or 0, list[int]()
    while len(persisted) < times:
        number += 1
        assert number < 5000, "nothing came to storage"
        plain.iterate(checkpointer, state, number)
        if checkpointer.persisted is not None and checkpointer.persisted.iteration not in persisted:
            persisted.append(checkpointer.persisted.iteration)
        time.sleep(ITERATION_SECS)
    return persisted


def restored(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    start = checkpointer.restore()
    checkpointer.close(remove=False)
    return start, state.iteration, state.row.unique().tolist(), state.weight.unique().tolist()


def what_was(iteration: int) -> Any:
    """The result of ``restored`` for an iteration; weights are bfloat16."""
    return iteration, iteration, [float(iteration)], [float(torch.tensor(iteration).bfloat16())]


def comes_back(settings: dict[str, Any], iteration: int) -> None:
    """A start of four ranks restores this iteration."""
    assert [result.value for result in run_ranks(restored, 4, settings)] == [what_was(iteration)] * 4


def stored(settings: dict[str, Any]) -> list[StoredSnapshot]:
    storage = open_storage(settings["persist"])
    names = [f"iter_{iteration:07d}/manifest.json" for iteration in committed(storage)]
    return [StoredSnapshot.decode(storage.read(name), name) for name in names]


def test_snapshots_come_to_storage_while_training_goes_on(persisting: dict[str, Any]) -> None:
    results = [result.value for result in run_ranks(train_until_persisted, 4, persisting, 3)]
    assert all(persisted == results[0] for persisted in results), "all ranks know the same"
    clean_job(Path(persisting["arena"]), "test")  # until here SMPs went on
    there = stored(persisting)
    newest = there[0].snapshot.iteration
    # One more where the SMP was ended between a commit and what follows it.
    assert (
        newest >= results[0][-1]
        and len(there) in (2, 3)
        and results[0][0] not in [i.snapshot.iteration for i in there]
    )
    folder = Path(persisting["persist"])
    assert (folder / "latest").read_text().strip() == f"iter_{newest:07d}"
    for one in there:
        iteration = one.snapshot.iteration
        at = folder / f"iter_{iteration:07d}"
        assert set(one.shards) == {f"dp{rank}" for rank in range(4)}
        assert {path.name for path in at.iterdir()} == {"manifest.json", *(s.file for s in one.shards.values())}
        for rank in range(4):
            with safe_open(at / one.shards[f"dp{rank}"].file, framework="pt") as file:
                rows = [file.get_tensor(key) for key in sorted(file.keys()) if key.startswith("row")]
            assert [row.unique().tolist() for row in rows] == [[float(iteration)]]
    assert json.loads((folder / f"iter_{newest:07d}" / "manifest.json").read_text())["job"] == "test"
    told = read_events(Path(persisting["events"]), of="smp-*")
    assert {event["iteration"] for event in told if event["event"] == "committed"} >= set(results[0])
    assert not [event for event in told if event["event"] in ("flush_failed", "storage_fails")]


def arenas_of(settings: dict[str, Any]) -> Iterator[Arena]:
    for path in Path(settings["arena"]).glob("ftckpt-test/*/dp*"):
        with closing(Arena.open(path)) as arena:
            yield arena


@compressed_or_not
def test_a_job_whose_memory_is_gone_goes_on_from_storage(going_on: dict[str, Any]) -> None:
    newest = stored(going_on)[0].snapshot.iteration
    comes_back(going_on, newest)
    assert {event["source"] for event in jobs.events(going_on, "restored")} == {"storage"}
    for arena in arenas_of(going_on):
        assert arena.control.slots == 4, "as many as the job wants"
        assert not arena.snapshots() and arena.control.whole() is None, "memory has the next snapshot as the first"
    fetched = jobs.events(going_on, "fetched")
    assert [event["shards"] for event in fetched] == [4] * 4


def restored_late(rank: int, world_size: int, settings: dict[str, Any], by_slots: bool) -> Any:
    """Storage answers when all ranks have planned the destinations, and wait for it."""
    scatter = ShardFile.scatter

    def late(file: ShardFile, number: int, parts: TargetParts) -> None:
        time.sleep(0.5)
        scatter(file, number, parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardFile, "scatter", late)
        if by_slots:
            patch.setattr(selected_shards, "reads_little_twice", lambda *_: False)
        return restored(rank, world_size, settings)


@pytest.mark.parametrize("by_slots", [False, True], ids=["straight", "by slots"])
def test_nothing_is_put_in_place_before_it_has_come(by_slots: bool, going_on: dict[str, Any]) -> None:
    one = stored(going_on)[0]
    newest = one.snapshot
    assert all(shard.spare_bytes > 0 for shard in one.shards.values()), "room for objects is not read"
    results = [result.value for result in run_ranks(restored_late, 4, going_on, by_slots)]
    assert results == [what_was(newest.iteration)] * 4
    there = [list(arena.snapshots()) for arena in arenas_of(going_on)]
    assert there == [[newest] if by_slots else []] * 4


def test_memory_counts_where_it_is_newer(persisting: dict[str, Any]) -> None:
    run_ranks(train_until_persisted, 4, persisting, 1)
    results = [result.value for result in run_ranks(restored, 4, persisting)]
    start = results[0][0]
    assert results == [what_was(start)] * 4
    assert start > jobs.events(persisting, "persisted")[0]["iteration"]
    assert {event["source"] for event in jobs.events(persisting, "restored")} == {None, "memory"}
    assert not jobs.events(persisting, "fetched")


def damaged(settings: dict[str, Any], iteration: int, shard: str) -> None:
    """One bit of a shard's file goes bad, where its tensors are."""
    entry = next(one for one in stored(settings) if one.snapshot.iteration == iteration).shards[shard]
    path = Path(settings["persist"]) / f"iter_{iteration:07d}" / entry.file
    data = bytearray(path.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 20] ^= 1
    path.write_bytes(data)


def restored_by_slots(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selected_shards, "reads_little_twice", lambda *_: False)
        return restored(rank, world_size, settings)


@pytest.mark.parametrize("restores", [restored, restored_by_slots], ids=["straight", "by slots"])
@compressed_or_not
def test_what_is_bad_on_storage_is_passed_over(restores: Callable[..., Any], going_on: dict[str, Any]) -> None:
    newest, second, third, *_ = [one.snapshot.iteration for one in stored(going_on)]
    damaged(going_on, newest, "dp2")
    manifest = Path(going_on["persist"]) / f"iter_{second:07d}" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"job": "test"', '"job": "toast"'))
    results = [result.value for result in run_ranks(restores, 4, going_on)]
    assert results == [what_was(third)] * 4
    told = jobs.events(going_on, "storage_damaged")
    assert {event["iteration"] for event in told} == {newest, second}
    texts = "do not match their checksum", "cannot be unpacked"
    assert any(text in event["error"] for event in told for text in texts)
    assert any("damaged or edited" in event["error"] for event in told)


def restored_while_reads_fail(rank: int, world_size: int, settings: dict[str, Any], is_away: bool) -> Any:
    """No part of a file can be read twice in a row, or nothing at all from then on."""
    failing, read = set[str](), FileStorage.read

    def failing_part(storage: FileStorage, name: str, begin: int, memories: Sequence[memoryview]) -> None:
        newest = max(committed(storage))
        if not is_away and iteration_of(name.partition("/")[0]) != newest:
            return read_into(storage, name, begin, memories)
        failing.add(name)
        raise StorageError(f"{name}: Input/output error")

    def failing_read(storage: FileStorage, name: str, *part: Any) -> bytes:
        if is_away and failing:
            raise StorageError(f"{name}: Input/output error")
        return read(storage, name, *part)

    read_into = FileStorage.read_into
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_catalog, "_PATIENCE_SECS", 0.2)
        patch.setattr(FileStorage, "read_into", failing_part)
        patch.setattr(FileStorage, "read", failing_read)
        return restored(rank, world_size, settings)


def test_storage_that_goes_away_is_not_bad(going_on: dict[str, Any]) -> None:
    newest, second, *_ = [one.snapshot for one in stored(going_on)]
    with a_rank_raises(StorageError, f"iteration {newest.iteration}", "--ftckpt-rollback-before"):
        run_ranks(restored_while_reads_fail, 4, going_on, True)
    assert not jobs.events(going_on, "storage_damaged")
    results = [result.value for result in run_ranks(restored_while_reads_fail, 4, going_on, False)]
    assert results == [what_was(second.iteration)] * 4, "one file of a storage that answers cannot be read"
    assert names(going_on)[0] == f"iter_{newest.iteration:07d}", "it stays, and can be named"


def announced(rank: int, world_size: int, settings: dict[str, Any]) -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Events, "announce", lambda _events, text: told.append(text))
        restored(rank, world_size, settings)
    return told


@pytest.mark.parametrize(("job", "says"), [("test", "from storage, in"), ("other", "from storage of job test, in")])
def test_whose_snapshot_storage_gave_is_said(job: str, says: str, going_on: dict[str, Any]) -> None:
    going_on["job"] = job
    try:
        told = run_ranks(announced, 4, going_on)[0].value
    finally:
        clean_job(Path(going_on["arena"]), job)
    assert any(says in text for text in told), told


def restored_while_nothing_is_seen(rank: int, world_size: int, settings: dict[str, Any], loaded: int) -> Any:
    """Storage fails for as long as a start asks it; the script has ``loaded`` a checkpoint of its own; -1: none."""

    def failing(storage: FileStorage, prefix: str = "") -> Any:
        raise StorageError(f"{storage.where}: Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_catalog, "_PATIENCE_SECS", 0.2)
        patch.setattr(FileStorage, "list", failing)
        checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
        start = checkpointer.restore(newer_than=loaded)
        checkpointer.close(remove=False)
        return start, state.iteration


@pytest.mark.parametrize(("on_lost", "loaded"), [("storage", 1), ("fresh", -1), ("fail", -1)])
def test_no_job_goes_back_because_storage_cannot_be_seen_for_a_moment(
    on_lost: str, loaded: int, going_on: dict[str, Any]
) -> None:
    newest, going_on["on_lost"] = max(one.snapshot.iteration for one in stored(going_on)), on_lost
    with a_rank_raises(StorageError, "is unavailable", "Input/output error", "start again when it is back"):
        run_ranks(restored_while_nothing_is_seen, 4, going_on, loaded)
    comes_back(going_on, newest)
    if on_lost == "fresh":  # which has brought it to memory
        results = [result.value for result in run_ranks(restored_while_nothing_is_seen, 4, going_on, -1)]
        assert results == [(newest, newest)] * 4, "memory has all that the job came to"


def die_together(checkpointer: Checkpointer, settings: dict[str, Any], world_size: int) -> None:
    """At a boundary, once what was copied is sealed on each rank."""
    checkpointer.fence()
    checkpointer.capture.settle(20.0)  # type: ignore[union-attr]
    meet(Path(settings["events"]).parent / "trained", world_size)
    plain.die()


def restored_into_bad_memory(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    """A byte of each chunk changes on its way into its slot."""
    put = ShardReconstruction.put

    def flipped(self: ShardReconstruction, chunk: int, begin: int, data: Any) -> None:
        bad = data.copy()
        bad[5] ^= 1
        put(self, chunk, begin, bad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selected_shards, "reads_little_twice", lambda *_: False)
        patch.setattr(ShardReconstruction, "put", flipped)
        return restored(rank, world_size, settings)


def test_what_goes_bad_on_its_way_from_storage_into_a_slot_is_not_restored(going_on: dict[str, Any]) -> None:
    with a_rank_raises(CorruptError, "chunk 0", "memory"):
        run_ranks(restored_into_bad_memory, 4, going_on)
    assert not any(arena.snapshots() for arena in arenas_of(going_on))


def test_slots_without_one_for_storage_are_refused(persisting: dict[str, Any]) -> None:
    persisting["slots"] = 3
    with pytest.raises(RankFailure, match=r"slots: 3 are too few with --ftckpt-persist: .*use 4 or more, or 0"):
        run_ranks(restored, 4, persisting)


@pytest.mark.parametrize("what", ["manifests", "shards"])
def test_a_job_does_not_begin_anew_where_storage_is_bad(what: str, going_on: dict[str, Any]) -> None:
    there = [one.snapshot.iteration for one in stored(going_on)]
    if what == "shards":
        for iteration in there:
            damaged(going_on, iteration, "dp1")
    else:
        for path in Path(going_on["persist"]).glob("iter_*/manifest.json"):
            path.write_text("{}")
    text = "none of the snapshots on storage" if what == "shards" else "storage cannot be read"
    with pytest.raises(RankFailure, match=text):
        run_ranks(restored, 4, going_on)
    assert not Path(going_on["persist"], "readers").exists(), "a start that was refused reads no more"
    if what == "manifests":
        return
    going_on["on_lost"] = "fresh"
    assert [result.value for result in run_ranks(restored, 4, going_on)] == [(None, 0, [0.0], [0.0])] * 4


def test_only_what_memory_lost_comes_from_storage(persisting: dict[str, Any]) -> None:
    """One node is lost, and nothing protects its shards."""
    persisting["protect"] = "none"
    run_ranks(train_until_persisted_then_die, 4, persisting, expect_failures=True)
    shutil.rmtree(Path(persisting["arena"]) / "ftckpt-test" / "n1")
    newest = stored(persisting)[0].snapshot.iteration
    comes_back(persisting, newest)
    (fetched, *_) = jobs.events(persisting, "fetched")
    assert fetched["shards"] == 2, "the other node has its own in memory yet"


def train_until_persisted_then_die(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    """Memory still has the snapshot that was just flushed."""
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    number, storage = checkpointer.restore() or 0, open_storage(settings["persist"])
    while not committed(storage):
        number += 1
        plain.iterate(checkpointer, state, number)
        time.sleep(ITERATION_SECS)
    plain.die()


def train_to_the_end(rank: int, world_size: int, settings: dict[str, Any], last: int) -> None:
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    plain.train(checkpointer, state, range((checkpointer.restore() or 0) + 1, last + 1))
    checkpointer.close()


def test_the_last_snapshot_of_a_job_that_ends_is_on_storage(persisting: dict[str, Any]) -> None:
    persisting["persist_interval"] = 1000
    run_ranks(train_to_the_end, 4, persisting, 6)
    assert not list(Path(persisting["arena"]).iterdir()), "memory is empty"
    assert [one.snapshot.iteration for one in stored(persisting)] == [6]
    assert [event["iteration"] for event in jobs.events(persisting, "persisted")] == [6] * 4
    comes_back(persisting, 6)


@pytest.mark.parametrize("on_error", ["continue", "raise"])
def test_a_job_ends_where_storage_has_gone_and_memory_keeps_its_last_snapshot(
    on_error: str, persisting: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether that is an error or not: nobody asked for it to be lost."""
    persisting |= {"persist_interval": 1000, "flush_secs": 3.0, "on_error": on_error}
    ends: AbstractContextManager[object] = nullcontext()
    if on_error == "raise":
        ends = pytest.raises(RankFailure, match=r"StorageError: .*node n[01]: ")
    with ends:
        run_ranks(train_without_storage, 4, persisting)
    assert [event["iteration"] for event in jobs.events(persisting, "flush_failed")] == [6] * 4
    assert main(["save", "test", "--arena", persisting["arena"]]) == 2
    Path(persisting["persist"]).mkdir()
    assert main(["save", "test", "--arena", persisting["arena"]]) == 0
    is_golden("save", capsys.readouterr().out, storage=persisting["persist"])
    assert committed(open_storage(persisting["persist"])) == [6]


def test_an_end_that_brings_nothing_to_storage(
    persisting: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    persisting |= {"persist_interval": 1000, "persist_at_end": "off"}
    run_ranks(train_to_the_end, 4, persisting, 6)
    run_ranks(train_then_die, 4, persisting, 6, expect_failures=True)
    command = ["save", "test", "--arena", persisting["arena"]]
    assert main([*command, "--at-end"]) == 0 and not stored(persisting)
    assert capsys.readouterr().out.count("nothing is saved: the job has --ftckpt-persist-at-end off") == 2
    assert main(command) == 0 and [one.snapshot.iteration for one in stored(persisting)] == [6]


def names(settings: dict[str, Any]) -> list[str]:
    return [str(name) for name in checkpoints(open_storage(settings["persist"]))]


def abandoned(settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The output of ``ftckpt list``."""
    assert main(["list", settings["persist"]]) == 0
    return [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if "abandoned" in line]


def test_a_rollback_gives_up_nothing_and_can_be_taken_back(
    going_on: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    newest, wanted, *_ = [one.snapshot for one in stored(going_on)]
    before, name = names(going_on), f"iter_{newest.iteration:07d}"
    back = going_on | {"rollback_before": newest.iteration}
    for _ in range(2):  # the flag stays in the script
        comes_back(back, wanted.iteration)
        assert names(going_on) == before and abandoned(going_on, capsys) == [name]
    assert [event["iteration"] for event in jobs.events(going_on, "rolled_back")] == [wanted.iteration] * 4
    clean_job(Path(going_on["arena"]), "test")
    results = [result.value for result in run_ranks(restored, 4, going_on)]
    assert results == [what_was(wanted.iteration)] * 4, "memory is gone, and the flag, too"
    clean_job(Path(going_on["arena"]), "test")
    forth = going_on | {"restore_from": name}
    for _ in range(2):
        comes_back(forth, newest.iteration)
        clean_job(Path(going_on["arena"]), "test")
    assert names(going_on) == before and not abandoned(going_on, capsys)
    run_ranks(train_until_persisted, 4, going_on, 2)
    clean_job(Path(going_on["arena"]), "test")
    assert not {"void", "readers"} & {path.name for path in Path(going_on["persist"]).iterdir()}


def back_by_name(rank: int, world_size: int, settings: dict[str, Any], loaded: int) -> None:
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    assert checkpointer.restore(newer_than=loaded, rollback=True) is None
    plain.iterate(checkpointer, state, loaded + 1)
    checkpointer.close(remove=False)


def test_what_was_rolled_back_from_does_not_come_back_where_memory_is_lost(
    going_on: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The script has loaded a checkpoint of its own by name, and nothing newer is flushed."""
    going_on |= {"persist_interval": 1000, "persist_at_end": "off"}
    run_ranks(back_by_name, 4, going_on, 2)
    assert abandoned(going_on, capsys) == names(going_on)
    clean_job(Path(going_on["arena"]), "test")
    with a_rank_raises(LostError, "abandoned", "--ftckpt-restore-from", names(going_on)[0]):
        run_ranks(restored, 4, going_on)
    going_on["on_lost"] = "fresh"
    assert [result.value[0] for result in run_ranks(restored, 4, going_on)] == [None] * 4


def test_what_a_restart_reads_nobody_removes(going_on: dict[str, Any]) -> None:
    """The SMPs of the attempt before it live yet, and one of them retires what is too old for it."""
    newest, *_ = [one.snapshot for one in stored(going_on)]
    results = [result.value for result in run_ranks(restored_while_it_is_retired, 4, going_on)]
    assert results == [what_was(newest.iteration)] * 4
    assert newest.iteration in committed(open_storage(going_on["persist"]))
    assert not Path(going_on["persist"], "readers").exists()


def restored_while_it_is_retired(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    execute, tried = restart.execute, list[bool]()

    def retire_and_read(*args: Any, **kwargs: Any) -> Any:
        if rank == 0:
            there = [one.snapshot for one in stored(settings)]
            storage = open_storage(settings["persist"])
            doomed = {CheckpointName(there[0].iteration): there[0]}
            retention.retire(storage, doomed, there[-1].iteration, lambda: True)
            tried.append(True)
        return execute(*args, **kwargs)

    restart.execute = retire_and_read
    was = restored(rank, world_size, settings)
    assert tried == [True] * (rank == 0), "the restart reads another way"
    return was


def train_without_storage(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings, NODES[:world_size])
    if rank == 0:
        shutil.rmtree(settings["persist"])
    plain.train(checkpointer, state, range(1, 7))
    checkpointer.close()


def train_then_die(rank: int, world_size: int, settings: dict[str, Any], last: int, protects: bool = False) -> None:
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    number = checkpointer.restore() or 0
    while number < last or (protects and checkpointer.protected is None):
        number += 1
        plain.iterate(checkpointer, state, number)
    die_together(checkpointer, settings, world_size)


def train_guarded_then_die(rank: int, world_size: int, settings: dict[str, Any], last: int) -> None:
    start_smps()
    train_then_die(rank, world_size, settings, last)


@pytest.mark.parametrize(
    "elsewhere", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["its own place", "another"]
)
def test_what_is_left_when_an_allocation_ends_is_saved_without_ranks(
    elsewhere: bool, persisting: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    persisting["persist_interval"] = 1000
    where = tmp_path / "elsewhere" if elsewhere else Path(persisting["persist"])
    where.mkdir(exist_ok=True)
    run_ranks(train_then_die, 4, persisting, 6, expect_failures=True)
    command = [
        "save",
        "test",
        *([str(where)] if elsewhere else []),
        "--arena",
        persisting["arena"],
        "--timeout",
        "60",
    ]
    assert main(command) == 0
    assert capsys.readouterr().out.count(f"iteration 6 is at {where}") == 2, "each node says it"
    clean_job(Path(persisting["arena"]), "test")
    persisting["persist"] = str(where)
    assert [one.snapshot.iteration for one in stored(persisting)] == [6]
    assert {path.name for path in where.iterdir()} <= {"iter_0000006", "latest", "owner.json"}
    comes_back(persisting, 6)


def test_a_node_that_is_missing_is_named_and_nothing_is_saved(
    persisting: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Memory of the others stays for a start, which reconstructs the lost shards."""
    persisting["persist_interval"] = 1 << 30
    run_ranks(train_then_die, 4, persisting, 6, True, expect_failures=True)
    arena = Path(persisting["arena"])
    end_smp(arena / "ftckpt-test" / "n1", 20.0)
    shutil.rmtree(arena / "ftckpt-test" / "n1")
    assert main(["save", "test", "--arena", str(arena), "--timeout", "4"]) == 2
    assert "nodes are missing: n1" in capfd.readouterr().err
    assert not stored(persisting)
    results = [result.value for result in run_ranks(restored, 4, persisting)]
    assert results[0] is not None and results == [results[0]] * 4


def save_beside_training(rank: int, world_size: int, settings: dict[str, Any]) -> int:
    checkpointer, state = plain.make(rank, world_size, settings, NODES[:world_size])
    plain.train(checkpointer, state, range((checkpointer.restore() or 0) + 1, 4))
    code = main(["save", "test", "--arena", settings["arena"], "--timeout", "1"]) if rank == 0 else 0
    checkpointer.close()
    return code


def test_what_trains_is_not_saved_as_if_it_did_not(persisting: dict[str, Any]) -> None:
    """It would write over what is saved."""
    persisting["persist_interval"] = 1 << 30
    assert run_ranks(save_beside_training, 4, persisting)[0].value == 2
    assert [one.snapshot.iteration for one in stored(persisting)] == [3], "at the end, by the job itself"


def test_what_a_job_without_storage_left_is_saved_from_memory(
    persisting: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is protected of one or two ranks of one node, and no checksums are there when they are killed."""
    where = persisting["persist"]
    del persisting["persist_interval"]
    persisting |= {"persist": "", "protect": "auto"}
    run_ranks(train_guarded_then_die, 1, persisting, 6, expect_failures=True)
    command = ["save", "test", "--arena", persisting["arena"], "--timeout", "60"]
    assert main(command) == 2 and "no storage is named" in capsys.readouterr().err
    assert main([*command[:2], where, *command[2:]]) == 0 and f"iteration 6 is at {where}" in capsys.readouterr().out
    # What was asked to save it knows of the next attempt, too.
    run_ranks(train_guarded_then_die, 1, persisting, 9, expect_failures=True)
    assert main([*command[:2], where, *command[2:]]) == 0
    persisting["persist"] = where
    assert [one.snapshot.iteration for one in stored(persisting)] == [9, 6]
    clean_job(Path(persisting["arena"]), "test")
    assert [result.value for result in run_ranks(restored, 1, persisting)] == [what_was(9)]


def test_a_place_that_is_full_at_the_start_is_written_to_when_it_is_not(
    persisting: dict[str, Any], tmp_path: Path
) -> None:
    """Until then it is the earlier run's; that is no failure of training, where failures of storage are errors."""
    with tmpfs(tmp_path / "small", "32m") as small:
        claim(open_storage(str(small)), "an earlier run", "test")
        leave_free(small, 0)
        persisting |= {"persist": str(small), "protect": "none"}

        def empties() -> None:
            told = Path(persisting["events"])
            until(
                lambda: any(
                    "not yet by this one" in one["error"] for one in read_events(told, "storage_fails", of="smp-*")
                ),
                secs=30,
            )
            leave_free(small, 16 << 20)

        freeing = threading.Thread(target=empties)
        freeing.start()
        try:
            results = [result.value for result in run_ranks(train_until_persisted, 2, persisting, 1)]
        finally:
            freeing.join()
        assert results[0] == results[1] and len(results[0]) == 1
        clean_job(Path(persisting["arena"]), "test")


def with_environment(rank: int, world_size: int, variables: dict[str, str], job: Any, *arguments: Any) -> Any:
    os.environ.update(variables)
    return job(rank, world_size, *arguments)


def killed_and_back(server: S3Server, settings: dict[str, Any], stop: threading.Event) -> None:
    """The server dies as soon as it has an object, and is away until a node has logged that."""
    events = Path(settings["events"])
    until(lambda: read_events(events, "committed", of="smp-*") or stop.is_set())
    server.crash()
    until(lambda: read_events(events, "storage_fails", of="smp-*") or stop.is_set(), secs=100)
    server.start()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("conditional", [False, True], ids=["refuses conditions", "takes conditions"])
def test_an_object_store_that_dies_and_comes_back(
    conditional: bool, persisting: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swift").mkdir()
    with swift(tmp_path / "swift", conditional) as server:
        options = server.options()
        variables = {
            "AWS_ENDPOINT_URL": options["endpoint"], "AWS_ACCESS_KEY_ID": options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": options["secret_access_key"], "AWS_REGION": options["region"],
        }  # fmt: skip
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        persisting |= {"persist": f"s3://{BUCKET}/run", "persist_keep": 0, "start_timeout_secs": 120.0}
        persisting |= {"persist_compress": "zstd" if conditional else "none"}  # one of the two is enough
        stop = threading.Event()
        faults = threading.Thread(target=killed_and_back, args=(server, persisting, stop))
        faults.start()
        try:
            job = (variables, train_until_persisted, persisting, 4)
            results = [result.value for result in run_ranks(with_environment, 4, *job, timeout_secs=200)]
        finally:
            stop.set()
            faults.join()
        clean_job(Path(persisting["arena"]), "test")
        newest = stored(persisting)[0].snapshot.iteration
        assert newest >= results[0][-1]
        assert main(["verify", persisting["persist"]]) == 0
        back = run_ranks(with_environment, 4, variables, restored, persisting)
        assert [result.value for result in back] == [what_was(newest)] * 4
