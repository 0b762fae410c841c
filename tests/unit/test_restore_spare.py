"""What a restart can still use, and that nothing else than the rest is given up."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import protected
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protected import LINEAGE, Job, build, contents

from ftckpt.arena.image import SlotImage
from ftckpt.arena.package import package_path
from ftckpt.arena.segment import Arena, list_arenas
from ftckpt.errors import FtckptError
from ftckpt.protect.groups import Modes, mirrors
from ftckpt.protect.parity_file import ParityFile, list_parity, parity_path
from ftckpt.protect.room import room_for
from ftckpt.restore.decide import Ask, Decision, Known, decide
from ftckpt.restore.inventory import ArenaReport, SlotReport, take_inventory
from ftckpt.restore.protection import PackageReport, ProtectionReport, take_protection
from ftckpt.restore.source import Damage, Source
from ftckpt.restore.spare import give_up, needed, spare_bytes

HEX = LINEAGE.hex()
PEER = Modes(peer=True)


def keys(*iterations: int) -> frozenset[tuple[int, str]]:
    return frozenset((iteration, HEX) for iteration in iterations)


# --- which snapshots ---

LAYOUTS = ({"dp": 2}, {"dp": 3})
_lineage_of = {"aa": 0, "bb": 1, "cc": 1}
_ARENAS = [("aa", 0), ("aa", 1), ("bb", 0), ("bb", 1), ("bb", 2), ("cc", 0), ("cc", 1), ("cc", 2)]
"""Lineage and rank: of the second layout there are two lineages."""
_slots = st.dictionaries(st.sampled_from(_ARENAS), st.sets(st.integers(1, 4), max_size=4))


def reports_of(slots: dict[tuple[str, int], set[int]]) -> list[ArenaReport]:
    found = []
    for (lineage, rank), iterations in sorted(slots.items()):
        held = tuple(SlotReport(index, lineage, iteration) for index, iteration in enumerate(sorted(iterations)))
        layout = LAYOUTS[_lineage_of[lineage]]
        found.append(ArenaReport(f"n{rank % 2}", f"dp{rank}.{lineage}", f"dp{rank}", layout, held, None, (), 4))
    return found


@settings(max_examples=300, deadline=None)
@given(
    _slots,
    st.sets(st.tuples(st.integers(1, 4), st.sampled_from(["aa", "bb", "cc"]))),
    st.data(),
)
def test_no_decision_that_follows_uses_what_is_not_needed(
    slots: dict[tuple[str, int], set[int]], packaged: set[tuple[int, str]], data: st.DataObject
) -> None:
    """Whatever proves to be bad afterwards: what is decided on then was called needed."""
    reports = reports_of(slots)
    homes = {"dp0": "n0", "dp1": "n1"}
    packages = tuple(PackageReport("n0", f"p{i}{lineage}", "dp0", lineage, i) for i, lineage in sorted(packaged))
    known = Known(ProtectionReport(packages))
    bad: dict[Source, Damage] = {}
    given_up: dict[tuple[int, str], str] = {}
    kept = None
    sources = [Source(r.node, r.name, slot.index) for r in reports for slot in r.slots]
    while True:
        try:
            now = replace(known, given_up=given_up)
            decision = decide(reports, homes, LAYOUTS[0], bad, now, reshapes=True)
        except FtckptError:
            return
        if decision is None:
            return
        if isinstance(decision, Ask):  # it may be rebuilt, or not
            chosen = decision.snapshot
            given_up[chosen] = "no"
            shields = {**known.shields, chosen: protected_by_nothing()}
            known = replace(known, shields=shields)
        else:
            assert isinstance(decision, Decision)
            chosen = decision.iteration, decision.lineage
        if kept is None:
            with_newer, kept = needed(reports, known.protection, homes, LAYOUTS[0], chosen)
            assert kept <= with_newer and all(snapshot[0] > chosen[0] for snapshot in with_newer - kept)
        assert chosen in kept
        if isinstance(decision, Decision):
            worse = data.draw(st.sets(st.sampled_from(sorted(set(sources) - set(bad))), min_size=1))
            bad |= dict.fromkeys(worse, Damage())


def protected_by_nothing() -> object:
    from ftckpt.restore.protection import Shield

    return Shield()


# --- what is freed ---


@pytest.fixture
def job(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(protected, "SLOTS", 4)
    found = Job(arena_root, ("a", "a", "b", "b"), PEER)
    build(found, (2, 3, 4, 5), (4, 5))
    return found


def held(job: Job) -> list[list[int]]:
    found = []
    for path in list_arenas(job.node_dir("a")):
        with closing(Arena.open(path)) as arena:
            records = [arena.control.record(slot) for slot in range(arena.control.slots) if arena.allocated(slot)]
            found.append(sorted(record.iteration for record in records if record.sealed))
    return found


def used(job: Job) -> int:
    return sum(path.stat().st_blocks * 512 for path in job.node_dir("a").rglob("*") if path.is_file())


def freed(job: Job, wanted: frozenset[tuple[int, str]], leave: tuple[str, ...] = ()) -> int:
    """What was given up; it is what was announced, and what is gone."""
    directory, before = job.node_dir("a"), used(job)
    announced = spare_bytes(directory, wanted, leave)
    assert used(job) == before, "looking changes nothing"
    given = give_up(directory, wanted, leave)
    assert given == announced == before - used(job)
    return given


def test_slots_and_parity_of_others_go(job: Job) -> None:
    wanted = [contents(job, rank, 5) for rank in range(2)]
    parity = parity_path(job.path(0), "peer", 0).stat().st_blocks * 512
    assert freed(job, keys(5)) > 6 * job.stepped + parity
    assert held(job) == [[5], [5]] and [contents(job, rank, 5) for rank in range(2)] == wanted
    assert [name.index for name in list_parity(job.node_dir("a"))] == [1, 1]
    assert freed(job, keys(5)) == 0


def test_slots_that_hold_nothing_go_first_of_all(job: Job) -> None:
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.control.begin(0)
        arena.control.void(1)
    os.truncate(job.path(1) / "slot0.safetensors", 4096)
    assert freed(job, keys(2, 3, 4, 5)) > 2 * job.stepped
    assert held(job) == [[4, 5], [2, 3, 4, 5]], "a damaged slot of a snapshot that is needed stays"
    assert freed(job, keys(3, 4, 5)) > 0
    assert held(job) == [[4, 5], [3, 4, 5]]


def test_an_arena_without_use_goes_with_all_that_lies_in_it(job: Job) -> None:
    freed(job, keys(9))
    assert list_arenas(job.node_dir("a")) == [] and list_parity(job.node_dir("a")) == []


def test_parity_that_is_needed_keeps_its_arena(job: Job) -> None:
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        for slot in range(4):
            arena.control.begin(slot)
    freed(job, keys(5))
    assert held(job) == [[], [5]]
    with closing(ParityFile.open(parity_path(job.path(0), "peer", 1))) as file:
        assert file.snapshot() == (LINEAGE, 5) and all(map(file.verify, range(file.num_blocks)))
    with closing(Arena.open(job.path(0))) as arena:
        assert sum(arena.slot_error(slot) is None for slot in range(4)) == 1, "a slot tells what the arena holds"


def test_what_is_written_or_unreadable_or_to_be_left_stays(job: Job) -> None:
    with closing(ParityFile.open(parity_path(job.path(0), "peer", 0), writable=True)) as file:
        file.begin(LINEAGE, 6)
    os.truncate(job.path(1) / "control", 100)
    freed(job, keys(5))
    assert held_of(job, 0) == [5] and parity_path(job.path(0), "peer", 0).exists()
    assert len(list(job.path(1).glob("slot*"))) == 4
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.lock(0)
        assert give_up(job.node_dir("a"), keys(9), ()) == 0
    freed(job, keys(9), (job.path(0).name,))
    assert held_of(job, 0) == [5]
    freed(job, keys(9))
    assert not job.path(0).exists() and job.path(1).exists()


def held_of(job: Job, rank: int) -> list[int]:
    with closing(Arena.open(job.path(rank))) as arena:
        records = [arena.control.record(slot) for slot in range(4)]
        return sorted(record.iteration for record in records if record.sealed)


def test_only_snapshots_that_can_be_whole_are_needed(job: Job) -> None:
    reports = take_inventory(job.node_dir("a"), "a")
    protection = take_protection(job.node_dir("a"), "a")
    homes = {f"dp{rank}": "a" for rank in range(2)}
    assert needed(reports, protection, homes, {"dp": 2}, (5, HEX)) == (keys(4, 5), keys(4, 5))
    assert needed(reports, protection, homes, {"dp": 2}, (4, HEX)) == (keys(4, 5), keys(4))
    for rank in range(4):
        package_path(job.node_dir("a"), f"dp{rank}", LINEAGE, 4).unlink(missing_ok=True)
    protection = take_protection(job.node_dir("a"), "a")
    assert needed(reports, protection, homes, {"dp": 2}, (5, HEX))[1] == keys(5)
    both = [*reports, *take_inventory(job.node_dir("b"), "b")]
    assert needed(both, protection, homes, {"dp": 2}, (5, HEX))[1] == keys(2, 3, 4, 5), "whole as they lie there"


# --- room for protection ---


def test_parity_of_old_arenas_is_no_room_for_new_parity(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes with them; until then what is new comes on top."""
    new = replace(job, stepped=job.stepped + 50_000)
    monkeypatch.setattr(protected, "SLOTS", 1)
    directory = job.node_dir("a")
    old_bytes = sum(path.stat().st_blocks * 512 for path in directory.glob("dp*/[sp]*"))
    old_packages = sum(path.stat().st_blocks * 512 for path in directory.glob(".mirror/*"))
    assert old_packages > 0 and len(list_parity(directory)) == 4
    holdings, groups = protected.holdings(job), protected.file_groups(job)
    same = dict(holdings=holdings, groups=groups, kept=mirrors(holdings, PEER), slots=4)
    parity = sum(name.path.stat().st_blocks * 512 for name in list_parity(directory))
    found = room_for(directory, "a", 1 << 20, **same)  # type: ignore[arg-type]
    assert found.now_bytes == found.later_bytes == (1 << 20) - parity - old_packages
    for rank in range(2):
        Arena.create(directory, new.manifest(rank), 4, 1).close()
    holdings, groups = protected.holdings(new), protected.file_groups(new)
    anew = dict(holdings=holdings, groups=groups, kept=mirrors(holdings, PEER), slots=4)
    slots = sum(SlotImage.of(new.manifest(rank)).file_bytes for rank in range(2))
    found = room_for(directory, "a", 1 << 20, **anew)  # type: ignore[arg-type]
    assert found.now_bytes == (1 << 20) - old_packages, "the same shards: packages are written over"
    assert found.later_bytes == found.now_bytes + 3 * slots - old_bytes
    kept = {f"dp{rank}": nodes for rank, nodes in enumerate(mirrors(holdings, PEER).values()) if rank}
    found = room_for(directory, "a", 1 << 20, **(anew | {"kept": kept}))  # type: ignore[arg-type]
    assert found.now_bytes == 1 << 20, "packages of a snapshot that has other shards go with the old arenas"
    assert found.later_bytes == (1 << 20) + 3 * slots - old_bytes - old_packages
    modes = room_for(directory, "a", 1 << 20, **(same | {"groups": []}))  # type: ignore[arg-type]
    assert modes.now_bytes == (1 << 20) - old_packages, "parity of a mode that is not used any more stays"
