"""The snapshots that a restart can still use, and that only others are evicted."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_load import run_ranks

from ftckpt.errors import FtckptError, MemoryBudgetError
from ftckpt.memory import ledger
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.image import SlotImage
from ftckpt.memory.inventory import ArenaReport, Inventory, PackageReport, SlotReport
from ftckpt.memory.ledger import give_up, in_use
from ftckpt.memory.locations import OpenArenas, SlotAt
from ftckpt.memory.package import package_path
from ftckpt.memory.parity_file import ParityFile, list_parity, parity_path
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.modes import Modes
from ftckpt.restore.candidates import SnapshotProtection
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import Decision, Findings, Query, decide, worth_keeping
from ftckpt.restore.room import Need, make_room
from tests.support import choosing, protected
from tests.support.errors import raises
from tests.support.protected import Job, build, contents
from tests.support.smp_nodes import Seen
from tests.support.snapshots import LINEAGE

PEER = Modes(peer=True)


def keys(*iterations: int) -> frozenset[SnapshotId]:
    return frozenset(SnapshotId(LINEAGE, iteration) for iteration in iterations)


# --- which snapshots ---

LAYOUTS = ({"dp": 2}, {"dp": 3})
_lineage_of = {"aa": 0, "bb": 1, "cc": 1}
_ARENAS = [("aa", 0), ("aa", 1), ("bb", 0), ("bb", 1), ("bb", 2), ("cc", 0), ("cc", 1), ("cc", 2)]
"""Lineage and rank: of the second layout there are two lineages."""
_slots = st.dictionaries(st.sampled_from(_ARENAS), st.sets(st.integers(1, 4), max_size=4))


def lineage_bytes(name: str) -> bytes:
    return name.encode() * 8


def reports_of(slots: dict[tuple[str, int], set[int]]) -> list[ArenaReport]:
    found = []
    for (lineage, rank), iterations in sorted(slots.items()):
        named = [SnapshotId(lineage_bytes(lineage), iteration) for iteration in sorted(iterations)]
        held = tuple(SlotReport(index, snapshot) for index, snapshot in enumerate(named))
        layout = LAYOUTS[_lineage_of[lineage]]
        found.append(ArenaReport(f"n{rank % 2}", f"dp{rank}.{lineage}", f"dp{rank}", layout, held, None, (), 4))
    return found


@given(_slots, st.sets(st.tuples(st.integers(1, 4), st.sampled_from(["aa", "bb", "cc"]))), st.data())
def test_no_decision_that_follows_uses_what_is_not_needed(
    slots: dict[tuple[str, int], set[int]], packaged: set[tuple[int, str]], data: st.DataObject
) -> None:
    """Whatever proves to be bad afterwards: what is decided on then was called needed."""
    reports = reports_of(slots)
    topology = choosing.job({"dp0": "n0", "dp1": "n1"}, LAYOUTS[0])
    named = [SnapshotId(lineage_bytes(name), iteration) for iteration, name in sorted(packaged)]
    packages = tuple(PackageReport("n0", f"dp0.{snapshot}", "dp0", snapshot) for snapshot in named)
    inventory, findings = Inventory(tuple(reports), packages), Findings()
    kept = None
    slots_there = [SlotAt(r.node, r.name, slot.index) for r in reports for slot in r.slots]
    while True:
        try:
            decision = decide(inventory, topology, findings)
        except FtckptError:
            return
        if decision is None:
            return
        chosen = decision.snapshot
        if isinstance(decision, Query):  # it may be rebuilt, or not
            findings.given_up[chosen] = "no"
            findings.protections[chosen] = SnapshotProtection()
        if kept is None:
            with_newer, kept = worth_keeping(inventory, topology, chosen)
            assert kept <= with_newer and all(snapshot.iteration > chosen.iteration for snapshot in with_newer - kept)
        assert chosen in kept
        if isinstance(decision, Decision):
            worse = data.draw(st.sets(st.sampled_from(sorted(set(slots_there) - set(findings.damage))), min_size=1))
            findings.damage.update(dict.fromkeys(worse, Corruption(reason="corrupt")))


# --- what is freed ---


@pytest.fixture
def job(arena_root: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(protected, "SLOTS", 4)
    found = Job(arena_root, ("a", "a", "b", "b"), PEER)
    build(found, (2, 3, 4, 5), (4, 5))
    return found


def held(job: Job, *nodes: str) -> list[list[int]]:
    """The reports of all arenas of the nodes, whether their slots can be read or not."""
    return [held_in(path) for node in nodes or ("a",) for path in list_arenas(job.node_dir(node))]


def held_in(path: Path) -> list[int]:
    with closing(Arena.open(path)) as arena:
        records = [arena.control.record(slot) for slot in range(arena.control.slots) if arena.allocated(slot)]
        return sorted(record.snapshot.iteration for record in records if record.snapshot is not None)


def used(node_dir: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in node_dir.rglob("*") if path.is_file())


def freed(job: Job, wanted: frozenset[SnapshotId], leave: tuple[str, ...] = ()) -> int:
    """The evicted snapshots, which are the announced ones and the missing ones."""
    node_dir = job.node_dir("a")
    before, arenas = used(node_dir), [path for path in list_arenas(node_dir) if path.name not in leave]
    announced = in_use(arenas).spare(wanted).free_bytes
    assert used(node_dir) == before, "looking changes nothing"
    given = give_up(arenas, wanted)
    assert given == announced == before - used(node_dir)
    return given


def test_slots_and_parity_of_others_go(job: Job) -> None:
    wanted = [contents(job, rank, 5) for rank in range(2)]
    parity = parity_path(job.path(0), "peer", 0).stat().st_blocks * 512
    assert freed(job, keys(5)) > 6 * job.stepped + parity
    assert held(job) == [[5], [5]] and [contents(job, rank, 5) for rank in range(2)] == wanted
    assert [name.index for name in list_parity(job.node_dir("a"))] == [1, 1]
    assert freed(job, keys(5)) == 0


def test_parity_that_is_needed_keeps_its_arena(job: Job) -> None:
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        for slot in range(4):
            arena.control.begin(slot)
    freed(job, keys(5))
    assert held(job) == [[], [5]]
    with closing(ParityFile.open(parity_path(job.path(0), "peer", 1))) as file:
        assert file.snapshot() == SnapshotId(LINEAGE, 5) and all(map(file.verify, range(file.num_blocks)))
    with closing(Arena.open(job.path(0))) as arena:
        assert sum(arena.slot_error(slot) is None for slot in range(4)) == 1, "a slot tells what the arena holds"


def test_what_is_written_or_unreadable_or_to_be_left_stays(job: Job) -> None:
    with closing(ParityFile.open(parity_path(job.path(0), "peer", 0), writable=True)) as file:
        file.begin(SnapshotId(LINEAGE, 6))
    os.truncate(job.path(1) / "control", 100)
    freed(job, keys(5))
    assert held_in(job.path(0)) == [5] and parity_path(job.path(0), "peer", 0).exists()
    assert len(list(job.path(1).glob("slot*"))) == 4
    with closing(Arena.open(job.path(0), writable=True)) as arena:
        arena.lock(0)
        assert give_up(list_arenas(job.node_dir("a")), keys(9)) == 0
    freed(job, keys(9), (job.path(0).name,))
    assert held_in(job.path(0)) == [5]
    freed(job, keys(9))
    assert not job.path(0).exists() and job.path(1).exists()


def test_only_snapshots_that_can_be_whole_are_needed(job: Job) -> None:
    topology = choosing.job({f"dp{rank}": "a" for rank in range(2)}, {"dp": 2})
    inventory = choosing.inventory_of(job.node_dir("a"))
    assert worth_keeping(inventory, topology, SnapshotId(LINEAGE, 5)) == (keys(4, 5), keys(4, 5))
    assert worth_keeping(inventory, topology, SnapshotId(LINEAGE, 4)) == (keys(4, 5), keys(4))
    for rank in range(4):
        package_path(job.node_dir("a"), f"dp{rank}", SnapshotId(LINEAGE, 4)).unlink(missing_ok=True)
    inventory = choosing.inventory_of(job.node_dir("a"))
    assert worth_keeping(inventory, topology, SnapshotId(LINEAGE, 5))[1] == keys(5)
    there = choosing.inventory_of(job.node_dir("a"), job.node_dir("b")).arenas
    whole = worth_keeping(Inventory(there, inventory.packages), topology, SnapshotId(LINEAGE, 5))[1]
    assert whole == keys(2, 3, 4, 5), "whole as they lie there"


# --- room for a rebuild ---

CHOSEN = SnapshotId(LINEAGE, 5)


def make_room_everywhere(job: Job, need_bytes: int) -> list[list[str]]:
    """Each rank of two nodes needs so much; the events of each."""
    events = [Seen() for _ in range(4)]
    keep = worth_keeping(choosing.inventory_of(job.node_dir("a"), job.node_dir("b")), job.topology, CHOSEN)

    def run(group: Any) -> None:
        topology, node = replace(job.topology, rank=group.rank), job.nodes[group.rank]
        need = Need(need_bytes, (SlotAt(node, "dp9.00000000", 0),))
        context = RestoreContext(group, topology, events[group.rank], OpenArenas(job.node_dir(node)))
        make_room(context, CHOSEN, lambda: need, keep)

    run_ranks(4, run)
    return [[f"{name} {fields['newer']}" for name, fields in one.all] for one in events]


@pytest.mark.parametrize(
    ("iterations", "packaged", "free_slots", "left", "events"),
    [
        ((2, 3, 4, 5), (4, 5), (3, 3), [[2, 3, 4, 5]] * 3, [[], [], [], []]),
        ((2, 3, 4, 5), (4, 5), (0, 3), [[4, 5]] * 2 + [[2, 3, 4, 5]], [["spare_given_up False"], [], [], []]),
        ((3, 4, 5, 6), (4, 5), (0, 3), [[4, 5]] * 2 + [[3, 4, 5, 6]], [["spare_given_up True"], [], [], []]),
        ((4, 5), (4, 5), (0, 3), None, None),
        ((3, 4, 5), (4, 5), (0, 0), None, None),
    ],
    ids=["there is room", "older ones go", "newer ones go last", "it does not suffice", "not on another node"],
)
def test_what_is_given_up_for_a_rebuild(  # noqa: PLR0917
    arena_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    iterations: tuple[int, ...],
    packaged: tuple[int, ...],
    free_slots: tuple[int, int],
    left: list[list[int]] | None,
    events: list[list[str]] | None,
) -> None:
    monkeypatch.setattr(protected, "SLOTS", len(iterations))
    job = Job(arena_root, ("a", "a", "b", "b"), PEER)
    build(job, iterations, packaged)
    shutil.rmtree(job.path(3))  # what is neither packaged nor newer cannot be whole any more
    slot_bytes = SlotImage.of(job.manifest(3)).file_bytes
    nodes = zip(map(job.node_dir, "ab"), free_slots, strict=True)
    limits = {node_dir: used(node_dir) + number * slot_bytes for node_dir, number in nodes}

    def check(path: Path, need_bytes: int) -> None:
        if used(path) + need_bytes > limits[path]:
            raise MemoryBudgetError(f"need {need_bytes} bytes")

    monkeypatch.setattr(ledger, "check_budget", check)
    before = held(job, "a", "b")
    if left is None:
        with raises(MemoryBudgetError, "reconstruct"):
            make_room_everywhere(job, slot_bytes)
        assert held(job, "a", "b") == before, "nothing is given up where that does not suffice on every node"
    else:
        assert make_room_everywhere(job, slot_bytes) == events
        assert held(job, "a", "b") == left
