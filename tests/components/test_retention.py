"""Retention on storage: the newest, some of the older ones, pinned ones, and those that a restart reads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_commit import NEW, OLD, Unconditional, write

from ftckpt.errors import StorageError
from ftckpt.model.lineage import FIRST, NO_REQUEST
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import retention
from ftckpt.persist.commit import CheckpointName, checkpoints, claim, claimed_lineage, folder_of, read_manifest
from ftckpt.persist.files import FileStorage
from ftckpt.persist.objects import ObjectStorage
from ftckpt.persist.retention import hold, kept, let_go, pin, pinned, readers, retire, surplus, unpin, voided
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.storage_catalog import _hold, _read
from tests.support.errors import lacks, raises
from tests.support.smp_nodes import Seen
from tests.support.storages import BUCKET, committed, swift
from tests.support.tiers import by_default


def old(iteration: int) -> SnapshotId:
    return SnapshotId(OLD, iteration)


@pytest.fixture(params=["files", "memory", pytest.param("swift", marks=pytest.mark.slow)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """With checkpoints of iterations 1 to 4."""
    with ExitStack() as stack:
        made: Storage
        if request.param == "swift":
            (tmp_path / "server").mkdir()
            server = stack.enter_context(swift(tmp_path / "server", False))
            made = ObjectStorage(f"s3://{BUCKET}/run", **server.options())
        else:
            made = FileStorage(str(tmp_path)) if request.param == "files" else Unconditional("memory:///")
        for iteration in range(1, 5):
            write(made, iteration, OLD)
        yield made


def names(storage: Storage) -> set[str]:
    return {entry.name for entry in storage.list()}


@pytest.mark.parametrize(("keep", "stay"), [(2, {15, 20}), (0, {5, 10, 15, 20}), (9, {5, 10, 15, 20})])
def test_what_is_kept(keep: int, stay: set[int]) -> None:
    assert kept([5, 20, 10, 15], keep) == stay


def name(iteration: int, generation: int = 0) -> CheckpointName:
    return CheckpointName(iteration, generation)


def doomed(*iterations: int) -> dict[CheckpointName, SnapshotId]:
    return {name(iteration): old(iteration) for iteration in iterations}


def test_pinned_ones_stay_until_they_are_not(storage: Storage) -> None:
    assert not pin(storage, name(1)) and not pin(storage, name(1)) and pinned(storage) == {name(1)}
    with raises(StorageError, "iter_0000009"):
        pin(storage, name(9))
    assert pinned(storage) == {name(1)}
    assert retire(storage, doomed(1, 2), 4, lambda: True) == [name(2)]
    assert committed(storage) == [4, 3, 1] and voided(storage) == set()
    assert unpin(storage, name(1)) and not unpin(storage, name(1))
    assert retire(storage, doomed(1), 4, lambda: True) == [name(1)]
    left = [one for one in names(storage) if one.startswith(("void", "pin"))]
    assert committed(storage) == [4, 3] and not left


@pytest.mark.parametrize("was_pinned", [False, True])
def test_one_whose_manifest_cannot_be_read_is_not_pinned(storage: Storage, was_pinned: bool) -> None:
    if was_pinned:
        pin(storage, name(1))
    storage.put(name(1).manifest, b"damaged")
    with raises(StorageError, "stays pinned" if was_pinned else "is not pinned", name(1).manifest):
        pin(storage, name(1))
    assert pinned(storage) == ({name(1)} if was_pinned else set())


def test_nothing_goes_while_a_restart_reads(storage: Storage) -> None:
    hold(storage, "a")
    assert retire(storage, doomed(1, 4), 3, lambda: True) == []
    assert committed(storage) == [4, 3, 2, 1] and voided(storage) == set()
    let_go(storage, "a")
    hold(storage, "killed")
    claim(storage, "next", "job", lineage=FIRST)
    assert readers(storage) == [], "what a killed restart has left goes with the next run"
    assert claimed_lineage(storage) == FIRST


def test_who_loses_the_place_removes_no_more(storage: Storage) -> None:
    answers = iter([True, False])
    assert retire(storage, doomed(1, 2, 3), 4, lambda: next(answers)) == [name(1)]
    assert committed(storage) == [4, 3, 2]


def test_a_second_lineage_of_the_iteration_keeps_its_files(storage: Storage) -> None:
    """Another run has started with the same iteration: its files are not part of the checkpoint that is deleted."""
    storage.put(f"iter_0000001/{NEW.hex()}-n0.safetensors", b"new")
    retire(storage, doomed(1), 4, lambda: True)
    assert [name for name in names(storage) if "iter_0000001" in name] == [f"iter_0000001/{NEW.hex()}-n0.safetensors"]


def test_what_is_set_aside_keeps_its_files_and_goes_under_its_new_name(storage: Storage) -> None:
    """A kill before the newer one is there leaves one checkpoint with two names, which go together."""
    before = names(storage)
    for _ in range(2):
        retention.set_aside(storage, SnapshotId(NEW, 2))
    assert names(storage) - before == {"iter_0000002/manifest-g1.json"}
    assert checkpoints(storage) == [name(4), name(3), name(2), name(2, 1), name(1)]
    assert retire(storage, {name(2, 1): old(2)}, 4, lambda: True) == [name(2, 1)]
    assert checkpoints(storage) == [name(4), name(3), name(1)]
    assert not [one for one in names(storage) if one.startswith("iter_0000002/")]


@pytest.mark.parametrize(
    ("keep", "gone"), [(1, {20, 40, 60, 70, 80, 90}), (2, {20, 40, 60, 70, 80}), (3, {20}), (4, set()), (0, set())]
)
def test_abandoned_ones_go_when_as_many_of_the_branch_are_there_as_stay(keep: int, gone: set[int]) -> None:
    back = FIRST.branch(50)
    lineages = {name(iteration): FIRST for iteration in (20, 40, 60, 70, 80)}
    lineages |= {name(iteration): back for iteration in (90, 100)}
    assert surplus(lineages, back, keep) == {name(iteration) for iteration in gone}


def test_of_a_storage_whose_head_cannot_be_read_nothing_is_taken(storage: Storage) -> None:
    """Abandoned and doubtful ones would count again."""
    storage.put("owner.json", b"{")
    found = _read(storage, Seen(), NO_REQUEST, FIRST)
    assert not found.manifests and not lacks(found.problem, "owner.json") and not found.is_away


def test_doubtful_ones_take_the_place_of_none_that_a_restart_reads_about(storage: Storage) -> None:
    for iteration in range(5, 16):
        write(storage, iteration, OLD)
        stored = read_manifest(storage, name(iteration))
        storage.put(name(iteration).manifest, replace(stored, lineage=FIRST).encode())
    found = _read(storage, Seen(), NO_REQUEST, FIRST.doubt(4, 15))
    assert {name for name, _ in found.manifests} == {str(name(iteration)) for iteration in range(1, 16)}


@pytest.mark.parametrize(("newest", "gone"), [(80, {20}), (90, {20, 40}), (100, {20, 40, 60, 70, 80})])
def test_doubtful_ones_count_for_nothing_and_go_when_as_many_as_stay_came_after(newest: int, gone: set[int]) -> None:
    lineages = {name(iteration): FIRST for iteration in range(20, newest + 1, 10) if iteration not in (30, 50)}
    assert surplus(lineages, FIRST.doubt(60, 80), 2) == {name(iteration) for iteration in gone}


# --- at the same moment ---


class Stepped:
    """Storage whose every call waits for its turn."""

    def __init__(self, of: Storage, turn: Callable[[], None]) -> None:
        self.where, self._of, self._turn = of.where, of, turn

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._turn()
            found = getattr(self._of, name)(*args)
            return iter(list(found)) if name == "list" else found

        return call


def in_order(order: tuple[int, ...], storage: Storage, *actions: Callable[[Any], Any]) -> list[Any]:
    """Each action on a thread; ``order`` lists whose call comes next, the others follow when those are done."""
    turns, running, changed = list(order), set(range(len(actions))), threading.Condition()
    results: list[Any] = [None] * len(actions)

    def turn(who: int) -> None:
        with changed:
            changed.wait_for(lambda: turns[:1] in ([], [who]) or turns[0] not in running, 20)
            while turns and (turns[0] == who or turns[0] not in running):
                if turns.pop(0) == who:
                    break
            changed.notify_all()

    def run(who: int) -> None:
        try:
            results[who] = actions[who](Stepped(storage, lambda: turn(who)))
        except Exception as error:  # noqa: BLE001 - what no action may raise is raised below
            results[who] = error
        finally:
            with changed:
                running.discard(who)
                changed.notify_all()

    threads = [threading.Thread(target=run, args=(who,)) for who in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, StorageError):
            raise result
    return results


def orders(steps: int, among: int) -> Iterator[tuple[int, ...]]:
    """All ways in which ``steps`` calls of the first may lie among so many of the second."""
    for places in itertools.combinations(range(steps + among), steps):
        yield tuple(int(place not in places) for place in range(steps + among))


def removing(storage: Storage) -> Any:
    return retire(storage, doomed(1), 4, lambda: True)


def pinning(storage: Storage) -> Any:
    return pin(storage, name(1))


def reading(storage: Storage) -> Any:
    """The calls of a restart on its rank 0."""
    _hold(storage, "a", Seen())
    found = _read(storage, Seen(), NO_REQUEST, FIRST)
    return old(1) in [StoredSnapshot.decode(text.encode(), "there").snapshot for _, text in found.manifests]


@pytest.mark.parametrize(
    ("other", "steps", "among"), by_default([(pinning, 4, 14), (reading, 5, 10)], [(pinning, 4, 14)])
)
def test_whatever_comes_first_nobody_loses_what_he_was_promised(
    other: Callable[[Storage], Any], steps: int, among: int
) -> None:
    """``among`` the calls of ``retire``, which are no more."""
    seen = set()
    for order in orders(steps, among):
        storage = Unconditional("memory:///")
        for iteration in (1, 4):
            manifest = StoredSnapshot(old(iteration), "job", {}, {}, FIRST).encode()
            storage.put(f"{folder_of(iteration)}/manifest.json", manifest)
        promise, _ = in_order(order, storage, other, removing)
        is_there = 1 in committed(storage)
        if other is reading:
            assert is_there or promise is False, f"{order}: what is read is gone"
        else:
            assert is_there or isinstance(promise, StorageError) or promise, f"{order}: what is pinned is gone"
        seen.add(is_there)
    assert seen == {False, True}
