"""Snapshots of several layouts in memory at once: the newest that is complete in its own layout, and its place."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import LostError, MismatchError
from ftckpt.memory.inventory import ArenaReport, Inventory, Layout, PackageReport, SlotReport
from ftckpt.memory.locations import PackageAt, SlotAt
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology, shard_names
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes
from ftckpt.restore.decide import Decision, Findings, Query, decide, readers_of
from tests.support.choosing import decided, job, shield_of
from tests.support.errors import lacks, raises

WIDE: Layout = {"tp": 2, "dp": 2, "zero": True}
"""The earlier layout of the job; two of its shards have the names of those of NARROW."""
NARROW: Layout = {"tp": 1, "dp": 2, "zero": True}
AXES = ("tp", "dp")
SHARDS = {0: shard_names(WIDE, AXES), 1: shard_names(NARROW, AXES)}
HOMES = {"tp0-dp0": "n0", "tp0-dp1": "n1"}
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
Named = tuple[bytes, int]
"""Lineage and iteration, as a test writes a snapshot."""


def report(
    layout: Layout, shard: str, *snapshots: Named, node: str = "n0", whole: Named | None = None
) -> ArenaReport:
    slots = tuple(SlotReport(index, SnapshotId(*named)) for index, named in enumerate(snapshots))
    name = f"{shard}.{zlib.crc32(str(layout).encode()):08x}"
    return ArenaReport(node, name, shard, layout, slots, whole and SnapshotId(*whole))


def wide(*snapshots: Named, without: Collection[str] = (), whole: Named | None = None) -> list[ArenaReport]:
    """The old layout's arenas, two on each of two nodes."""
    nodes = {shard: f"n{index // 2}" for index, shard in enumerate(SHARDS[0])}
    return [report(WIDE, s, *snapshots, node=nodes[s], whole=whole) for s in SHARDS[0] if s not in without]


def narrow(*snapshots: Named, without: Collection[str] = ()) -> list[ArenaReport]:
    return [report(NARROW, s, *snapshots, node=HOMES[s]) for s in SHARDS[1] if s not in without]


JOB = job(HOMES, NARROW)


def choose(reports: Sequence[ArenaReport], bad: Collection[SlotAt] = ()) -> Decision | None:
    answer = decided(reports, JOB, bad)
    assert decided(list(reversed(reports)), JOB, bad) == answer
    return answer


def chosen(reports: Sequence[ArenaReport], bad: Collection[SlotAt] = ()) -> Decision:
    answer = choose(reports, bad)
    assert isinstance(answer, Decision)
    return answer


def places(decision: Decision) -> dict[str, SlotAt]:
    """The place from which each shard is read, once it is reconstructed."""
    fixes = decision.rebuild.fixes if decision.rebuild is not None else {}
    return {**decision.sources, **{shard: fix.at for shard, fix in fixes.items()}}


def test_killed_before_the_first_snapshot_of_the_new_layout_is_whole() -> None:
    """One rank of the new layout has sealed 6, the other has its arena: 5 is still the newest, in either layout."""
    reports = [*wide((A, 5), whole=(A, 5)), *narrow((B, 6), without=["tp0-dp1"]), *narrow(without=["tp0-dp0"])]
    decision = chosen(reports)
    assert (decision.snapshot.iteration, decision.layout) == (5, WIDE)
    assert [lacks(why, "6", "tp0-dp1") for why in decision.passed_over] == [[]]
    homes = dict.fromkeys(SHARDS[0], "n0")
    again = decided(reports, job(homes, WIDE))
    assert isinstance(again, Decision) and (again.snapshot.iteration, again.layout) == (5, WIDE)
    assert set(again.sources) == set(homes)
    assert [lacks(why, "6", "tp1dp2", "tp0-dp1") for why in again.passed_over] == [[]]


def test_a_lineage_of_two_layouts_is_an_error_that_names_both_arenas() -> None:
    reports = [*wide((A, 5)), *narrow((A, 6))]
    with raises(MismatchError, "tp0-dp0", "node n0", "lineage"):
        choose(reports)


SNAPSHOTS = [(0, A, 1), (0, A, 2), (1, B, 2), (1, B, 3), (0, C, 3)]
"""Layout, lineage, iteration."""
ARENAS = st.lists(
    st.tuples(
        st.sampled_from([(layout, shard) for layout in (0, 1) for shard in SHARDS[layout]]),
        st.sampled_from(["n0", "n1"]),
        st.sets(st.sampled_from(SNAPSHOTS)),
    ),
    max_size=9,
    unique_by=lambda arena: arena[:2],
)


@given(ARENAS, st.booleans(), st.data())
def test_any_reports_give_the_newest_whole_snapshot_of_any_layout(
    arenas: list[tuple[tuple[int, str], str, set[tuple[int, bytes, int]]]], own: bool, data: st.DataObject
) -> None:
    """The definition: complete if some good slot has it for every shard of its layout."""
    layouts = (WIDE, NARROW)
    mine = layouts[int(own)]
    homes = dict.fromkeys(SHARDS[int(own)], "n0")
    reports = [
        report(layouts[layout], shard, *sorted((li, it) for at, li, it in held if at == layout), node=node)
        for (layout, shard), node, held in arenas
    ]
    sources = [
        (r, SlotAt(r.node, r.name, s.index), (s.snapshot.lineage, s.snapshot.iteration))
        for r in reports
        for s in r.slots
    ]
    bad = set(data.draw(st.lists(st.sampled_from([s for _, s, _ in sources]), max_size=3))) if sources else set()
    good = {(layout, lineage, it): set[str]() for layout, lineage, it in SNAPSHOTS}
    for r, source, (lineage, iteration) in sources:
        if source not in bad:
            good[int(r.layout == NARROW), lineage, iteration].add(r.shard)
    whole = [(it, layout == int(own), li) for (layout, li, it), held in good.items() if held == set(SHARDS[layout])]
    try:
        decision = decided(reports, job(homes, mine), bad)
    except LostError:
        decision = None
    if not whole:
        assert decision is None
        return
    iteration, is_own, lineage = max(whole)
    assert isinstance(decision, Decision)
    assert (decision.snapshot, decision.layout == mine) == (SnapshotId(lineage, iteration), is_own)
    for shard, source in decision.sources.items():
        (found,) = [r for r in reports if (r.node, r.name) == (source.node, source.arena)]
        assert found.shard == shard and found.layout == decision.layout and source not in bad
        assert found.slots[source.slot].snapshot == SnapshotId(lineage, iteration)


# --- the old job had four nodes, and some are gone ---

OLD: Layout = {"tp": 2, "dp": 4}
OLD_SHARDS = shard_names(OLD, AXES)
OLD_NODES = {shard: f"n{index // 2}" for index, shard in enumerate(OLD_SHARDS)}
NEW: Layout = {"tp": 1, "dp": 3}
NEW_HOMES = {f"tp0-dp{rank}": f"n{rank}" for rank in range(3)}


def shielded(gone: Collection[str], modes: Modes) -> tuple[Inventory, Findings]:
    """Parity and packages of (A, 5) that the nodes still have which are not ``gone``."""
    held = [
        ArenaLayout(s, OLD_NODES[s], "", f"{s}.0000", "00" * 16, 64,
                    (HoldingSection("private", "", "", 0, (64,) * 3),), (3, (24,)))
        for s in OLD_SHARDS
    ]  # fmt: skip
    packages = [PackageReport("n0", f"{h.shard}.{SnapshotId(A, 5)}", h.shard, SnapshotId(A, 5)) for h in held]
    places = {p.shard: PackageAt(p.node, p.file) for p in packages}
    shield = shield_of(held, modes, places, lambda member: member.node not in gone)
    return Inventory(tuple(survivors(gone)), tuple(packages)), Findings(protections={SnapshotId(A, 5): shield})


def survivors(gone: Collection[str]) -> list[ArenaReport]:
    whole, name = SnapshotId(A, 5), "{}.0000"
    slots = (SlotReport(0, whole),)
    return [ArenaReport(n, name.format(s), s, OLD, slots, whole) for s, n in OLD_NODES.items() if n not in gone]


def test_shards_of_a_node_that_is_gone_are_rebuilt_evenly_by_those_that_are_left() -> None:
    inventory, findings = shielded(["n3"], Modes(peer=True))
    asked = decide(inventory, job(NEW_HOMES, NEW), Findings())
    assert asked == Query(SnapshotId(A, 5), OLD, OLD_SHARDS)
    decision = decide(inventory, job(NEW_HOMES, NEW), findings)
    assert isinstance(decision, Decision) and decision.rebuild is not None
    lost = [shard for shard, node in OLD_NODES.items() if node == "n3"]
    assert {shard: fix.at.node for shard, fix in decision.rebuild.fixes.items()} == dict(
        zip(lost, ["n0", "n1"], strict=True)
    )
    readers = readers_of(Topology(0, tuple(RankPlace({"tp": 0, "dp": r}, f"n{r}") for r in range(3)), NEW), decision)
    assert set(readers) == set(OLD_SHARDS)
    assert all(f"n{readers[shard]}" == at.node for shard, at in places(decision).items())


def test_a_new_node_takes_its_part_of_what_is_rebuilt() -> None:
    inventory, findings = shielded(["n2", "n3"], Modes(peer=True, peer_losses=2))
    homes = {"tp0-dp0": "n0", "tp0-dp1": "n1", "tp0-dp2": "n9"}
    decision = decide(inventory, job(homes, NEW), findings)
    assert isinstance(decision, Decision) and decision.rebuild is not None
    assert Counter(at.node for at in places(decision).values()) == {"n0": 3, "n1": 3, "n9": 2}


def test_shards_of_another_layout_are_read_by_all_ranks_of_their_node_in_turn() -> None:
    """Though a rank's own place has the name of one of them."""
    nodes = dict.fromkeys(OLD_SHARDS, "n0")
    reports = [ArenaReport("n0", f"{s}.0000", s, OLD, (SlotReport(0, SnapshotId(A, 5)),)) for s in nodes]
    topology = Topology(0, tuple(RankPlace({"tp": 0, "dp": rank}, "n0") for rank in range(3)), NEW)
    decision = decided(reports, job(dict.fromkeys(NEW_HOMES, "n0"), NEW))
    assert isinstance(decision, Decision)
    readers = readers_of(topology, decision)
    assert sorted(Counter(readers.values()).values()) == [2, 3, 3]
    same = decided(reports, job(nodes, OLD))
    assert isinstance(same, Decision)
    members = tuple(RankPlace({"tp": i // 4, "dp": i % 4}, "n0") for i in range(8))
    assert readers_of(Topology(0, members, OLD), same) == {member.shard: rank for rank, member in enumerate(members)}
