"""The newest complete snapshot, of one lineage, or an error that names what is missing."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import LostError
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.inventory import ArenaReport, Inventory, NodeProtection, PackageReport, Problem, SlotReport
from ftckpt.memory.locations import PackageAt, SlotAt
from ftckpt.model.codec import decode, encode
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.restore.candidates import SnapshotProtection
from ftckpt.restore.decide import Decision, Findings, Query, decide, newest_whole
from ftckpt.restore.reconstruction_plan import NEW_SLOT, ShardRepair
from ftckpt.restore.search import is_of_one_layout
from tests.support.choosing import decided, job, shield_of
from tests.support.errors import lacks, raises

LAYOUT: dict[str, int | str | bool] = {"tp": 2, "pp": 1}
HOMES = {"tp0": "n0", "tp1": "n1"}
A, B = b"a" * 16, b"b" * 16
Named = tuple[bytes, int]
"""Lineage and iteration, as a test writes a snapshot."""


def report(
    shard: str,
    *snapshots: Named,
    node: str = "",
    whole: Named | None = None,
    layout: Mapping[str, int | str | bool] = LAYOUT,
    problems: tuple[str, ...] = (),
) -> ArenaReport:
    slots = tuple(SlotReport(index, SnapshotId(*named)) for index, named in enumerate(snapshots))
    home = HOMES.get(shard, "n0")
    return ArenaReport(node or home, f"{shard}.0011", shard, layout, slots, whole and SnapshotId(*whole), problems)


JOB = job(HOMES, LAYOUT)


def chosen(*reports: ArenaReport, bad: Collection[SlotAt] = ()) -> Decision | None:
    return decided(reports, JOB, bad)


def test_a_shard_missing_in_the_newest_gives_the_one_before_and_says_why() -> None:
    decision = chosen(report("tp0", (A, 4), (A, 5)), report("tp1", (A, 4)))
    assert decision is not None and decision.snapshot.iteration == 4
    (why,) = decision.passed_over
    assert not lacks(why, "5", "tp1")


def test_iterations_of_two_lineages_are_never_one_snapshot() -> None:
    reports = report("tp0", (A, 5), (A, 4)), report("tp1", (B, 5), (A, 4))
    decision = chosen(*reports)
    assert decision is not None and decision.snapshot == SnapshotId(A, 4)
    assert chosen(report("tp0", (A, 5)), report("tp1", (B, 5))) is None


@pytest.mark.parametrize(
    ("reports", "bad", "message"),
    [
        ([report("tp0", (A, 4), whole=(A, 4))], (), "4 tp1"),
        ([report("tp0", whole=(A, 4)), report("tp1")], (), "4 tp0 tp1"),
        (
            [report("tp0", (A, 5), whole=(A, 4)), report("tp1", (A, 6))],
            (),
            "6 tp0 5 tp1",
        ),
        (
            [report("tp0", (A, 4)), report("tp1", (A, 4), whole=(A, 4))],
            [SlotAt("n0", "tp0.0011", 0)],
            "4 tp0",
        ),
        (
            [report("tp0", whole=(A, 4), problems=("slot 1: torn",)), report("tp1", (A, 4))],
            (),
            "tp0 1",
        ),
    ],
)
def test_what_was_whole_and_is_lost_names_the_missing_shard(
    reports: list[ArenaReport], bad: Collection[SlotAt], message: str
) -> None:
    with raises(LostError, *message.split()):
        chosen(*reports, bad=bad)


def test_an_unreadable_arena_may_have_held_the_last_snapshot() -> None:
    with raises(LostError, "tp0"):
        chosen(report("tp0", layout={}, problems=("control block: bad magic",)), report("tp1", (A, 4)))


SNAPSHOTS = list(itertools.product((A, B), (1, 2)))


def whole_snapshots(reports: Sequence[ArenaReport], bad: Collection[SlotAt]) -> list[SnapshotId]:
    """The definition: an iteration of a lineage is complete if some good slot has it for every shard."""
    return [
        SnapshotId(lineage, iteration)
        for lineage, iteration in SNAPSHOTS
        if all(
            any(
                slot.snapshot == SnapshotId(lineage, iteration) and SlotAt(r.node, r.name, slot.index) not in bad
                for r in reports
                if r.shard == shard
                for slot in r.slots
            )
            for shard in HOMES
        )
    ]


def was_more(reports: Sequence[ArenaReport], bad: Collection[SlotAt]) -> bool:
    """The definition: something was committed or may have been, since it is marked so, or a shard that sealed cannot
    be read, or a shard has no arena though others sealed (all arenas are there before any slot is sealed)."""
    sealed = [(r, slot) for r in reports for slot in r.slots]
    good = {(r.shard, s.snapshot) for r, s in sealed if SlotAt(r.node, r.name, s.index) not in bad}
    spoilt = any(r.shard in HOMES and (r.shard, s.snapshot) not in good for r, s in sealed)
    absent = bool(sealed) and not set(HOMES) <= {r.shard for r in reports}
    return any(r.whole for r in reports) or spoilt or absent


def check(reports: Sequence[ArenaReport], bad: Collection[SlotAt]) -> None:
    """Compare a decision with its definition."""
    expected = max(whole_snapshots(reports, bad), default=None)
    if expected is None and was_more(reports, bad):
        with pytest.raises(LostError):
            chosen(*reports, bad=bad)
        return
    decision = chosen(*reports, bad=bad)
    assert (None if decision is None else decision.snapshot) == expected
    if decision is None:
        return
    assert set(decision.sources) == set(HOMES)
    for shard, source in decision.sources.items():
        copies = [
            SlotAt(r.node, r.name, slot.index)
            for r in reports
            if r.shard == shard
            for slot in r.slots
            if slot.snapshot == expected and SlotAt(r.node, r.name, slot.index) not in bad
        ]
        assert source in copies
        assert source.node == HOMES[shard] or all(copy.node != HOMES[shard] for copy in copies)
    assert chosen(*reversed(reports), bad=bad) == decision


REPORTS = st.lists(
    st.builds(
        lambda shard, node, snapshots, whole: report(shard, *snapshots, node=node, whole=whole),
        st.sampled_from(["tp0", "tp1", "tp2"]),
        st.sampled_from(["n0", "n1", "n2"]),
        st.lists(st.sampled_from(SNAPSHOTS), max_size=3, unique=True),
        st.none() | st.sampled_from(SNAPSHOTS),
    ),
    max_size=6,
    unique_by=lambda r: (r.node, r.name),
)


@given(REPORTS, st.data())
def test_any_reports_give_the_decision_by_definition(reports: list[ArenaReport], data: st.DataObject) -> None:
    sources = [SlotAt(r.node, r.name, slot.index) for r in reports for slot in r.slots]
    check(reports, set(data.draw(st.lists(st.sampled_from(sources), max_size=4))) if sources else ())


# --- with parity: three ranks on node n0, three on n1 ---

RANKS = [f"tp{rank}" for rank in range(6)]
NODES = {shard: f"n{index // 3}" for index, shard in enumerate(RANKS)}


def holding(shard: str, chunks: int = 4) -> ArenaLayout:
    sections = (HoldingSection("private", "", "", 0, (64,) * (chunks - 1) + (40,)),)
    return ArenaLayout(shard, NODES[shard], "", f"{shard}.0011", "00" * 16, 64, sections, (chunks, (24,)))


Known = tuple[Inventory, Findings]
"""The packages of all nodes, and the findings."""


def shielded(
    named: Named = (A, 5),
    modes: Modes = Modes(node=True),  # noqa: B008 - frozen
    packages_of: Collection[str] = RANKS,
    without_parity_of: Collection[str] = (),
) -> Known:
    """All that protects one snapshot, but the parity files in the arenas of some shards."""
    snapshot, holdings = SnapshotId(*named), [holding(shard) for shard in RANKS]
    packages = [PackageReport(NODES[s], f"{s}.{snapshot}", s, snapshot) for s in packages_of]
    places = {p.shard: PackageAt(p.node, p.file) for p in packages}
    shield = shield_of(holdings, modes, places, lambda member: member.shard not in without_parity_of)
    return Inventory(packages=tuple(packages)), Findings(protections={snapshot: shield})


def six(*snapshots: Named, without: Collection[str] = (), whole: Named | None = None) -> list[ArenaReport]:
    return [report(s, *snapshots, node=NODES[s], whole=whole) for s in RANKS if s not in without]


SIX = job(NODES, LAYOUT)


def outcome(
    reports: list[ArenaReport], known: Known, bad: Mapping[SlotAt, Corruption] | None = None
) -> Decision | Query | None:
    findings = replace(known[1], damage=dict(bad or {}))
    answer = decide(Inventory(tuple(reports), known[0].packages), SIX, findings)
    assert decide(Inventory(tuple(reversed(reports)), known[0].packages), SIX, findings) == answer
    return answer


def unasked(known: Known) -> Known:
    """Before any shield was asked for."""
    return known[0], Findings()


def rebuilt(decision: Decision | Query | None) -> dict[str, ShardRepair]:
    assert isinstance(decision, Decision) and decision.rebuild is not None
    assert set(decision.sources) | set(decision.rebuild.fixes) == set(RANKS)
    return dict(decision.rebuild.fixes)


def test_a_snapshot_that_is_protected_is_asked_for_before_an_older_one_is_taken() -> None:
    known = shielded()
    reports = [*six((A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    assert outcome(reports, unasked(known)) == Query(SnapshotId(A, 5), LAYOUT, tuple(RANKS))
    fixes = rebuilt(outcome(reports, known))
    assert fixes == {
        "tp1": ShardRepair("tp1", SlotAt("n0", "tp1.0011", NEW_SLOT), (0, 1, 2, 3), fixes["tp1"].package)
    }


def test_nothing_is_asked_where_all_is_there_or_nothing_protects() -> None:
    direct = outcome(six((A, 4), (A, 5)), unasked(shielded()))
    assert isinstance(direct, Decision) and direct.snapshot.iteration == 5 and direct.rebuild is None
    reports = [*six((A, 4), (A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    older = outcome(reports, unasked(shielded((A, 4))))
    assert isinstance(older, Decision) and older.snapshot.iteration == 4


def test_of_two_snapshots_of_one_iteration_the_one_that_is_there_is_taken() -> None:
    """The other one's lineage sorts higher."""
    known = shielded((B, 5))
    decision = outcome([*six((A, 5), (B, 5), without=["tp1"]), report("tp1", (A, 5), node="n0")], known)
    assert isinstance(decision, Decision) and decision.snapshot.lineage == A and decision.rebuild is None


def test_bad_chunks_are_repaired_where_they_are() -> None:
    bad = {SlotAt("n0", "tp1.0011", 0): Corruption((1, 4))}
    fixes = rebuilt(outcome(six((A, 5)), shielded(), bad))
    assert fixes["tp1"].in_place and fixes["tp1"].chunks == (1,), "volatile chunks are in the package"
    without = shielded(packages_of=[s for s in RANKS if s != "tp1"])
    assert rebuilt(outcome(six((A, 5)), without, bad))["tp1"].chunks == (1, 4)


def test_objects_that_are_corrupt_need_a_package() -> None:
    bad = {SlotAt("n0", "tp1.0011", 0): Corruption(parts=("objects",))}
    assert rebuilt(outcome(six((A, 5)), shielded(), bad))["tp1"].chunks == ()
    with raises(LostError, "tp1", "objects", "package"):
        outcome(six((A, 5)), shielded(packages_of=[]), bad)


LOST = {
    "two of a node": (["tp0", "tp2"], shielded(without_parity_of=["tp0", "tp2"]),
                      r"tp0: its arena does not have it and group node-[0-9a-f]{4} has lost 2 of 3 members"),
    "a node": (["tp0", "tp1", "tp2"], shielded(without_parity_of=["tp0", "tp1", "tp2"]),
               r"tp0: its node's arenas are lost and group node-[0-9a-f]{4} has lost 3 of 3 members"),
    "no package": (["tp4"], shielded(packages_of=["tp0"]), "tp4: its arena does not have it and no package"),
    "parity of others": (["tp4"], shielded(without_parity_of=["tp3"]), r"has lost 2 of 3 members"),
    "no parity": (["tp4"], shielded(modes=Modes()), r"tp4: its arena does not have it and no parity covers it"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_what_cannot_be_rebuilt_is_named_with_the_failure(case: str) -> None:
    lost, known, message = LOST[case]
    with pytest.raises(LostError, match=message):
        outcome(six((A, 5), without=lost, whole=(A, 5)), known)


def test_a_whole_node_comes_back_from_its_peers() -> None:
    lost = ["tp3", "tp4", "tp5"]
    known = shielded(modes=Modes(node=True, peer=True), without_parity_of=lost)
    decision = outcome(six((A, 5), without=lost), known)
    assert set(rebuilt(decision)) == set(lost)
    assert isinstance(decision, Decision) and decision.rebuild is not None
    assert {repair.group.mode for repair in decision.rebuild.repairs} == {"peer"}


def test_blocks_that_were_bad_and_snapshots_that_were_given_up_are_not_tried_again() -> None:
    reports = six((A, 5), without=["tp1"], whole=(A, 5))
    known = shielded()
    decision = outcome(reports, known)
    assert isinstance(decision, Decision) and decision.rebuild is not None
    (used,) = decision.rebuild.repairs[0].use
    for worse in (
        replace(known[1], bad_blocks={SnapshotId(A, 5): {used}}),
        replace(known[1], given_up={SnapshotId(A, 5): "tp1: wrong bytes"}),
    ):
        with pytest.raises(LostError, match="tp1: "):
            outcome(reports, (known[0], worse))
    other = replace(known[1], bad_blocks={SnapshotId(A, 4): {used}})
    assert outcome(reports, (known[0], other)) == decision


def test_a_group_of_other_arenas_is_not_used() -> None:
    """Its chunks are cut otherwise."""
    reports = [report(s, (A, 5), node=NODES[s], whole=(A, 5)) for s in RANKS if s != "tp1"]
    reports[0] = ArenaReport("n0", "tp0.0022", "tp0", LAYOUT, reports[0].slots, SnapshotId(A, 5))
    with raises(LostError, "tp1", "parity"):
        outcome(reports, shielded())


def test_packages_alone_tell_of_a_loss_where_no_arena_of_their_node_is_left() -> None:
    """Arenas without a mark were invalidated by a rollback; an SMP stores its unfinished work after that."""
    assert outcome(six(), unasked(shielded())) is None
    gone = [shard for shard in RANKS if NODES[shard] == NODES["tp0"]]
    for there in ([], six(without=gone)):
        with raises(LostError, "tp0", "tp1", "tp2"):
            outcome(there, unasked(shielded(packages_of=gone)))
        assert outcome(there, (Inventory(), Findings())) is None


def test_inventories_survive_json_and_strange_shards_are_problems() -> None:
    packages, findings = shielded(modes=Modes(node=True, peer=True))
    inventory = Inventory(tuple(six((A, 4), (A, 5))), packages.packages)
    assert decode(encode(inventory), Inventory) == inventory
    joined, problems = Inventory.join([inventory, Inventory()]).of_shards(RANKS[:5])
    assert {package.shard for package in joined.packages} == set(RANKS[:5])
    assert [lacks(problem.text, "tp5") for problem in problems] == [[]]
    assert joined.protects(SnapshotId(A, 5))
    assert not joined.protects(SnapshotId(B, 5)) and not joined.protects(SnapshotId(A, 4))
    shield = findings.protections[SnapshotId(A, 5)]
    sound = tuple(package for packages in shield.packages.values() for package in packages)
    groups, parity = tuple(shield.groups.values()), tuple(shield.parity.values())
    node = NodeProtection(groups, parity, sound, (), (Problem("x", "bad"),))
    assert decode(encode(node), NodeProtection) == node
    assert SnapshotProtection.of([node, NodeProtection()], RANKS) == replace(
        shield, holdings={s: holding(s) for s in RANKS}, problems=node.problems
    )
    partly = SnapshotProtection.of([node], RANKS[:5])
    assert len(partly.groups) < len(groups)
    assert any(not lacks(problem.text, "tp5") for problem in partly.problems)


def test_the_newest_whole_one_is_chosen_without_a_job() -> None:
    two = {"tp": 2}
    reports = [report("tp0", (A, 4), layout=two), report("tp1", (A, 4), layout=two)]
    reports.append(report("tp0", (A, 5), layout=two, node="x"))
    of = newest_whole(reports)
    assert of.snapshot == SnapshotId(A, 4) and set(of.sources) == set(HOMES)
    assert [lacks(why, "5", "tp1", "2") for why in of.passed_over] == [[]]
    assert newest_whole(reports, 4).passed_over == ()
    with raises(LostError, "iteration 5", "tp1", "2 shards"):
        newest_whole(reports, 5)
    with raises(LostError, "4, 5"):
        newest_whole(reports, 6)
    with raises(LostError, "none"):
        newest_whole([])


def test_what_comes_unproven_must_be_all_of_one_layout() -> None:
    other = {"tp": 1, "pp": 2}
    here, there = report("tp0", (A, 3)), report("pp0", (A, 2), layout=other)
    empty, unreadable = report("pp1", layout=other), report("pp1", layout={}, problems=("damaged",))

    def stored(layout: Mapping[str, int | str | bool], iteration: int) -> StoredSnapshot:
        return StoredSnapshot(SnapshotId(A, iteration), "job", layout, {})

    def alike(reports: Sequence[ArenaReport], *layouts: Mapping[str, int | str | bool]) -> bool:
        snapshots = [stored(layout, number) for number, layout in enumerate(layouts)]
        return is_of_one_layout(Inventory(tuple(reports)), snapshots)

    assert alike([]) and alike([here]) and alike([], other, other) and alike([here], LAYOUT)
    assert alike([here, empty, unreadable]), "where nothing is sealed nothing is taken"
    assert not alike([here, there]) and not alike([here], other) and not alike([], LAYOUT, LAYOUT, other)
