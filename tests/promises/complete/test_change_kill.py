"""All ranks are killed at each step of a change of manifests: the job resumes from the committed snapshot."""

from __future__ import annotations

import itertools
import shutil
from itertools import product
from pathlib import Path

import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import list_arenas
from ftckpt.model.snapshot import SnapshotId
from tests.support import arenas
from tests.support.killing import killed_at
from tests.support.snapshots import LINEAGE, fill, seal, write
from tests.support.tiers import by_default

pytestmark = pytest.mark.faults


def set_up(root: Path, whole: bool) -> list[arenas.Rank]:
    """Two ranks have sealed 4; rank 0 alone has sealed 5."""

    def begin(member: arenas.Rank) -> None:
        member.arenas.entry.enter()
        member.arena = member.arenas.open(member.manifest(), None)
        arenas.settle(member)
        if whole:
            fill(member.have, 0, 4, hashed=True)
            member.have.control.mark_whole(SnapshotId(LINEAGE, 4))
        write(member.have, 1, 5)
        if member.rank == 0:
            seal(member.have, 1, 5, hashed=True)

    members = arenas.ranks(root, 2)
    arenas.on_all(members, begin)
    return members


def change_manifests(root: Path, keep: SnapshotId | None, first_too: bool) -> None:
    """Shares change (for rank 1 only unless ``first_too``); snapshots 6 and 7 are committed in the new arenas."""

    def change(member: arenas.Rank) -> None:
        grown = arenas.SHARE + (8192 if first_too or member.rank else 0)
        arena = member.arena = member.arenas.replace(member.have, keep, member.manifest(grown))
        arenas.settle(member)
        free = next(s for s in range(2) if arena.allocated(s) and not arena.control.record(s).sealed)
        fill(arena, free, 6, hashed=True)
        member.group.barrier()
        arena.control.mark_whole(SnapshotId(LINEAGE, 6))
        member.arenas.remove_old()
        arenas.complete(member)
        fill(arena, 1 - free, 7, hashed=True)

    members = set_up(root, keep is not None)
    (root / "begun").touch()  # steps before this one are those of the set-up
    arenas.on_all(members, change)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keep", "first_too"),
    by_default(product([SnapshotId(LINEAGE, 4), None], [True, False]), [(SnapshotId(LINEAGE, 4), False)]),
    ids=["4 is whole-all ranks", "4 is whole-one rank", "nothing is whole-all ranks", "nothing is whole-one rank"],
)
def test_killed_at_each_step_of_a_change_of_manifests(
    arena_root: Path, keep: SnapshotId | None, first_too: bool
) -> None:
    """Every rank dies at once; a start of the same job finds the newest committed snapshot and has slots for more."""
    found = set()
    for step in itertools.count(first_step(arena_root, keep, first_too)):
        killed = killed_at(step, lambda: change_manifests(arena_root, keep, first_too))
        decision = arenas.choose(arena_root, 2)
        chosen = None if decision is None else decision.snapshot
        found.add(chosen and chosen.iteration)
        start_again(arena_root, chosen)
        for left in arena_root.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        if not killed:
            break
    assert found == {keep and 4, 6, 7}


def first_step(root: Path, keep: SnapshotId | None, first_too: bool) -> int:
    """How many steps the set-up takes."""
    low, high = 0, 4096
    while low < high:
        middle = (low + high) // 2
        killed_at(middle, lambda: change_manifests(root, keep, first_too))
        begun = (root / "begun").exists()
        for left in root.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        low, high = (low, middle) if begun else (middle + 1, high)
    return low


def start_again(root: Path, chosen: SnapshotId | None) -> None:
    """The restart: whatever the killed attempt left, each rank gets a slot to write and no slot too many."""

    def begin(member: arenas.Rank) -> None:
        member.arenas.entry.enter()
        if chosen is None:
            for path in list_arenas(member.arenas.path) if member.rank == 0 else []:
                arena = Arena.open(path, writable=True)
                for slot in range(2):
                    arena.control.void(slot)
                arena.close()
            member.group.barrier()
        grown = member.manifest(arenas.SHARE + 8192)
        member.arena = member.arenas.open(grown, chosen)
        arenas.settle(member)
        member.group.barrier()
        mine = [path for path in list_arenas(member.arenas.path) if path.name.startswith(member.shard)]
        assert sum(len(list(path.glob("slot*"))) for path in mine) <= 2
        free = [s for s in range(2) if member.have.allocated(s) and _is_free(member.have, s, chosen)]
        member.group.barrier()
        fill(member.have, free[0], 9, hashed=True)
        member.arenas.remove_old()
        arenas.complete(member)
        assert all(member.have.allocated(slot) for slot in range(2))

    members = arenas.ranks(root, 2)
    arenas.on_all(members, begin)
    decision = arenas.choose(root, 2)
    assert decision is not None and decision.snapshot.iteration == 9
    arenas.on_all(members, lambda member: member.arenas.leave(member.arena, lambda: None, lambda: None))
    arenas.on_all(members, lambda member: member.arenas.release())
    left = [path.name for path in root.rglob("*") if path.name != "begun"]
    assert left == [], "something was left behind"


def _is_free(arena: Arena, slot: int, keep: SnapshotId | None) -> bool:
    record = arena.control.record(slot)
    return not record.sealed or record.snapshot != keep
