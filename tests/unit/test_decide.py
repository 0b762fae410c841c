"""The newest snapshot that is whole, of one lineage, or an error that names what is missing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import LostError, MismatchError
from ftckpt.protect.groups import node_groups, peer_groups
from ftckpt.protect.holding import HeldSection, Holding
from ftckpt.protect.modes import Modes
from ftckpt.restore.decide import Ask, Decision, Known, Source, decide
from ftckpt.restore.inventory import ArenaReport, SlotReport
from ftckpt.restore.protection import (
    Kept,
    PackageReport,
    ParityReport,
    ProtectionReport,
    Shield,
    holding_json,
    holding_of_json,
    join,
)
from ftckpt.restore.rebuild import NEW_SLOT, Fix
from ftckpt.restore.source import Damage

LAYOUT: dict[str, int | str | bool] = {"tp": 2, "pp": 1}
HOMES = {"tp0": "n0", "tp1": "n1"}
A, B = "aa" * 16, "bb" * 16


def report(
    shard: str,
    *snapshots: tuple[str, int],
    node: str = "",
    whole: tuple[str, int] | None = None,
    layout: Mapping[str, int | str | bool] = LAYOUT,
    problems: tuple[str, ...] = (),
) -> ArenaReport:
    slots = tuple(SlotReport(index, lineage, iteration) for index, (lineage, iteration) in enumerate(snapshots))
    home = HOMES.get(shard, "n0")
    return ArenaReport(node or home, f"{shard}.0011", shard, layout, slots, whole, problems)


def choose(*reports: ArenaReport, bad: Collection[Source] = ()) -> Decision | Ask | None:
    return decide(reports, HOMES, LAYOUT, dict.fromkeys(bad, Damage()))


def chosen(*reports: ArenaReport, bad: Collection[Source] = ()) -> Decision | None:
    """Without parity nothing is asked."""
    decision = choose(*reports, bad=bad)
    assert not isinstance(decision, Ask)
    return decision


def test_the_newest_whole_snapshot_is_taken() -> None:
    decision = chosen(report("tp0", (A, 4), (A, 5)), report("tp1", (A, 5), (A, 4)))
    sources = {"tp0": Source("n0", "tp0.0011", 1), "tp1": Source("n1", "tp1.0011", 0)}
    assert decision == Decision(A, 5, sources, (), None, LAYOUT, HOMES)


def test_a_shard_missing_in_the_newest_gives_the_one_before_and_says_why() -> None:
    decision = chosen(report("tp0", (A, 4), (A, 5)), report("tp1", (A, 4)))
    assert decision is not None and decision.iteration == 4
    assert decision.passed_over == ("iteration 5: not sealed by tp1",)


def test_iterations_of_two_lineages_are_never_one_snapshot() -> None:
    reports = report("tp0", (A, 5), (A, 4)), report("tp1", (B, 5), (A, 4))
    decision = chosen(*reports)
    assert decision is not None and (decision.lineage, decision.iteration) == (A, 4)
    assert choose(report("tp0", (A, 5)), report("tp1", (B, 5))) is None


def test_bad_slots_are_left_out() -> None:
    reports = report("tp0", (A, 4), (A, 5)), report("tp1", (A, 4), (A, 5))
    decision = chosen(*reports, bad={Source("n1", "tp1.0011", 1)})
    assert decision is not None and decision.iteration == 4
    assert decision.passed_over == ("iteration 5: corrupt in tp1",)


@pytest.mark.parametrize("home", ["n0", "n1", "n2"])
def test_a_copy_on_the_home_node_is_preferred_in_any_order_of_reports(home: str) -> None:
    copies = [report("tp0", (A, 5), node=node) for node in ("n0", "n1", "n2")]
    for order in itertools.permutations(copies):
        decision = decide(order, {"tp0": home}, LAYOUT)
        assert isinstance(decision, Decision) and decision.sources["tp0"].node == home


def test_another_node_gives_what_home_does_not_have() -> None:
    decision = chosen(report("tp0", (A, 5), node="n7"), report("tp0", (A, 4)), report("tp1", (A, 5), (A, 4)))
    assert decision is not None and decision.iteration == 5
    assert decision.sources["tp0"].node == "n7"


def test_a_bad_copy_at_home_is_replaced_by_another_nodes() -> None:
    reports = report("tp0", (A, 5)), report("tp0", (A, 5), node="n7"), report("tp1", (A, 5))
    decision = chosen(*reports, bad=[Source("n0", "tp0.0011", 0)])
    assert decision is not None and decision.sources["tp0"].node == "n7"


def test_shards_that_nobody_needs_do_not_matter() -> None:
    decision = chosen(report("tp0", (A, 5)), report("tp1", (A, 5)), report("tp9", (A, 6)))
    assert decision is not None and decision.iteration == 5


def test_nothing_was_ever_whole_is_a_start_from_the_beginning() -> None:
    assert choose() is None
    assert choose(report("tp0"), report("tp1")) is None
    assert choose(report("tp0", (A, 1)), report("tp1")) is None


@pytest.mark.parametrize(
    ("reports", "bad", "message"),
    [
        ([report("tp0", (A, 4), whole=(A, 4))], (), "iteration 4 was whole.*no arena of tp1"),
        ([report("tp0", whole=(A, 4)), report("tp1")], (), "iteration 4 was whole.*no arena of tp0, tp1"),
        (
            [report("tp0", (A, 5), whole=(A, 4)), report("tp1", (A, 6))],
            (),
            "iteration 6: not sealed by tp0; iteration 5: not sealed by tp1",
        ),
        (
            [report("tp0", (A, 4)), report("tp1", (A, 4), whole=(A, 4))],
            [Source("n0", "tp0.0011", 0)],
            "iteration 4: corrupt in tp0",
        ),
        (
            [report("tp0", whole=(A, 4), problems=("slot 1: torn",)), report("tp1", (A, 4))],
            (),
            "no arena of tp0; tp0: slot 1: torn",
        ),
    ],
)
def test_what_was_whole_and_is_lost_names_the_missing_shard(
    reports: list[ArenaReport], bad: Collection[Source], message: str
) -> None:
    with pytest.raises(LostError, match=message) as lost:
        choose(*reports, bad=bad)
    assert "--ftckpt-on-lost fresh" in str(lost.value)


def test_an_unreadable_arena_may_have_held_the_last_snapshot() -> None:
    with pytest.raises(LostError, match="tp0: control block: bad magic"):
        choose(report("tp0", layout={}, problems=("control block: bad magic",)), report("tp1", (A, 4)))


def test_another_layout_names_the_axis() -> None:
    reports = [report("tp0", (A, 5), layout={"tp": 4, "pp": 1}, whole=(A, 5))]
    with pytest.raises(MismatchError, match=r"tp 4 → 2"):
        choose(*reports)


def test_an_empty_arena_of_another_layout_is_no_hindrance() -> None:
    stale = report("tp3", layout={"tp": 4, "pp": 1})
    decision = chosen(stale, report("tp0", (A, 5)), report("tp1", (A, 5)))
    assert decision is not None and decision.iteration == 5


SNAPSHOTS = list(itertools.product((A, B), (1, 2)))


def whole_snapshots(reports: Sequence[ArenaReport], bad: Collection[Source]) -> list[tuple[int, str]]:
    """By definition: an iteration of a lineage is whole if some good slot has it for every shard."""
    return [
        (iteration, lineage)
        for lineage, iteration in SNAPSHOTS
        if all(
            any(
                (slot.lineage, slot.iteration) == (lineage, iteration)
                and Source(r.node, r.name, slot.index) not in bad
                for r in reports
                if r.shard == shard
                for slot in r.slots
            )
            for shard in HOMES
        )
    ]


def was_more(reports: Sequence[ArenaReport], bad: Collection[Source]) -> bool:
    """By definition: something was whole or may have been, since it is marked so, or a shard that sealed cannot be
    read, or a shard has no arena though others sealed (all arenas are there before any slot is sealed)."""
    sealed = [(r, slot) for r in reports for slot in r.slots]
    good = {(r.shard, s.lineage, s.iteration) for r, s in sealed if Source(r.node, r.name, s.index) not in bad}
    spoilt = any(r.shard in HOMES and (r.shard, s.lineage, s.iteration) not in good for r, s in sealed)
    absent = bool(sealed) and not set(HOMES) <= {r.shard for r in reports}
    return any(r.whole for r in reports) or spoilt or absent


def check(reports: Sequence[ArenaReport], bad: Collection[Source]) -> None:
    """Compare a decision with its definition."""
    expected = max(whole_snapshots(reports, bad), default=None)
    if expected is None and was_more(reports, bad):
        with pytest.raises(LostError):
            choose(*reports, bad=bad)
        return
    decision = chosen(*reports, bad=bad)
    assert (None if decision is None else (decision.iteration, decision.lineage)) == expected
    if decision is None:
        return
    assert set(decision.sources) == set(HOMES)
    for shard, source in decision.sources.items():
        copies = [
            Source(r.node, r.name, slot.index)
            for r in reports
            if r.shard == shard
            for slot in r.slots
            if (slot.iteration, slot.lineage) == expected and Source(r.node, r.name, slot.index) not in bad
        ]
        assert source in copies
        assert source.node == HOMES[shard] or all(copy.node != HOMES[shard] for copy in copies)
    assert choose(*reversed(reports), bad=bad) == decision


def test_every_small_case_is_as_defined() -> None:
    contents = [c for n in range(3) for c in itertools.combinations(SNAPSHOTS, n)]
    for first, second, whole in itertools.product(contents, contents, (None, (A, 1))):
        reports = [report("tp0", *first, whole=whole), report("tp1", *second)]
        for bad in ((), [Source("n0", "tp0.0011", 0)]):
            check(reports, bad)


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


@settings(max_examples=300, deadline=None)
@given(REPORTS, st.data())
def test_any_reports_give_the_decision_by_definition(reports: list[ArenaReport], data: st.DataObject) -> None:
    sources = [Source(r.node, r.name, slot.index) for r in reports for slot in r.slots]
    check(reports, set(data.draw(st.lists(st.sampled_from(sources), max_size=4))) if sources else ())


@given(REPORTS)
def test_a_report_survives_json(reports: list[ArenaReport]) -> None:
    for value in reports:
        assert ArenaReport.from_json(json.loads(json.dumps(value.to_json()))) == value


# --- with parity: three ranks on node n0, three on n1 ---

RANKS = [f"tp{rank}" for rank in range(6)]
NODES = {shard: f"n{index // 3}" for index, shard in enumerate(RANKS)}


def holding(shard: str, chunks: int = 4) -> Holding:
    sections = (HeldSection("private", "", "", 0, (64,) * (chunks - 1) + (40,)),)
    return Holding(shard, NODES[shard], "", f"{shard}.0011", "00" * 16, 64, sections, (chunks, (24,)))


def shielded(
    snapshot: tuple[str, int] = (A, 5),
    modes: Modes = Modes(node=True),  # noqa: B008 - frozen
    packages_of: Collection[str] = RANKS,
    without_parity_of: Collection[str] = (),
) -> Known:
    """All that protects one snapshot, but the parity files in the arenas of some shards."""
    lineage, iteration = snapshot
    held = [holding(shard) for shard in RANKS]
    groups = (node_groups(held) if modes.node else []) + peer_groups(held, modes)
    parity = [
        ParityReport(member.node, member.arena, f"parity.{group.mode}.0", group.name, index)
        for group in groups
        for index, member in enumerate(group.members)
        if member.shard not in without_parity_of
    ]
    packages = [
        PackageReport(NODES[s], f"{s}.{lineage[:8]}.{iteration}", s, lineage[:8], iteration) for s in packages_of
    ]
    kept = {p.shard: (Kept(p.node, p.file, 100, holding(p.shard)),) for p in packages}
    shield = Shield({g.name: g for g in groups}, {(p.group, p.holder): p for p in parity}, kept)
    return Known(ProtectionReport(tuple(packages)), {(iteration, lineage): shield})


def six(
    *snapshots: tuple[str, int], without: Collection[str] = (), whole: tuple[str, int] | None = None
) -> list[ArenaReport]:
    return [report(s, *snapshots, node=NODES[s], whole=whole) for s in RANKS if s not in without]


def outcome(
    reports: list[ArenaReport], known: Known, bad: Mapping[Source, Damage] | None = None
) -> Decision | Ask | None:
    answer = decide(reports, NODES, LAYOUT, bad, known)
    assert decide(list(reversed(reports)), NODES, LAYOUT, bad, known) == answer
    return answer


def rebuilt(decision: Decision | Ask | None) -> dict[str, Fix]:
    assert isinstance(decision, Decision) and decision.rebuild is not None
    assert set(decision.sources) | set(decision.rebuild.fixes) == set(RANKS)
    return dict(decision.rebuild.fixes)


def test_a_snapshot_that_is_protected_is_asked_for_before_an_older_one_is_taken() -> None:
    known = shielded()
    reports = [*six((A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    assert outcome(reports, Known(known.protection)) == Ask((5, A), LAYOUT, tuple(RANKS))
    fixes = rebuilt(outcome(reports, known))
    assert fixes == {"tp1": Fix("tp1", Source("n0", "tp1.0011", NEW_SLOT), (0, 1, 2, 3), fixes["tp1"].kept)}


def test_nothing_is_asked_where_all_is_there_or_nothing_protects() -> None:
    direct = outcome(six((A, 4), (A, 5)), Known(shielded().protection))
    assert isinstance(direct, Decision) and direct.iteration == 5 and direct.rebuild is None
    reports = [*six((A, 4), (A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    older = outcome(reports, Known(shielded((A, 4)).protection))
    assert isinstance(older, Decision) and older.iteration == 4


def test_a_newer_snapshot_that_can_be_rebuilt_goes_before_an_older_that_is_there() -> None:
    reports = [*six((A, 4), (A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    decision = outcome(reports, shielded())
    assert isinstance(decision, Decision) and decision.iteration == 5
    assert set(rebuilt(decision)) == {"tp1"}


def test_of_two_snapshots_of_one_iteration_the_one_that_is_there_is_taken() -> None:
    """The other one's lineage sorts higher."""
    known = shielded((B, 5))
    decision = outcome([*six((A, 5), (B, 5), without=["tp1"]), report("tp1", (A, 5), node="n0")], known)
    assert isinstance(decision, Decision) and decision.lineage == A and decision.rebuild is None


def test_bad_chunks_are_repaired_where_they_are() -> None:
    bad = {Source("n0", "tp1.0011", 0): Damage((1, 4), (), useless=False)}
    fixes = rebuilt(outcome(six((A, 5)), shielded(), bad))
    assert fixes["tp1"].in_place and fixes["tp1"].chunks == (1,), "volatile chunks are in the package"
    without = shielded(packages_of=[s for s in RANKS if s != "tp1"])
    assert rebuilt(outcome(six((A, 5)), without, bad))["tp1"].chunks == (1, 4)


def test_objects_that_are_corrupt_need_a_package() -> None:
    bad = {Source("n0", "tp1.0011", 0): Damage((), ("objects",), useless=False)}
    assert rebuilt(outcome(six((A, 5)), shielded(), bad))["tp1"].chunks == ()
    with pytest.raises(LostError, match="tp1: objects are corrupt and no package of it is left"):
        outcome(six((A, 5)), shielded(packages_of=[]), bad)


LOST = {
    "two of a node": (["tp0", "tp2"], shielded(without_parity_of=["tp0", "tp2"]),
                      r"tp0: its arena does not hold it and group node-[0-9a-f]{4} has lost 2 of 3 members"),
    "a node": (["tp0", "tp1", "tp2"], shielded(without_parity_of=["tp0", "tp1", "tp2"]),
               r"tp0: its node's arenas are gone and group node-[0-9a-f]{4} has lost 3 of 3 members"),
    "no package": (["tp4"], shielded(packages_of=["tp0"]), "tp4: its arena does not hold it and no package"),
    "parity of others": (["tp4"], shielded(without_parity_of=["tp3"]), r"has lost 2 of 3 members"),
    "no parity": (["tp4"], shielded(modes=Modes()), r"tp4: its arena does not hold it and no parity covers it"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_what_cannot_be_rebuilt_is_named_with_the_failure(case: str) -> None:
    lost, known, message = LOST[case]
    with pytest.raises(LostError, match=message):
        outcome(six((A, 5), without=lost, whole=(A, 5)), known)


def test_the_snapshot_before_is_taken_where_the_newest_cannot_be_rebuilt() -> None:
    known = shielded(without_parity_of=["tp0"])
    reports = [*six((A, 4), (A, 5), without=["tp1"]), report("tp1", (A, 4), node="n0")]
    decision = outcome(reports, known)
    assert isinstance(decision, Decision) and decision.iteration == 4
    assert "tp1: its arena does not hold it and group node-" in decision.passed_over[0]


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
        Known(known.protection, known.shields, {(5, A): {used}}),
        Known(known.protection, known.shields, given_up={(5, A): "tp1: wrong bytes"}),
    ):
        with pytest.raises(LostError, match="tp1: "):
            outcome(reports, worse)
    other = Known(known.protection, known.shields, {(4, A): {used}})
    assert outcome(reports, other) == decision


def test_a_group_of_other_arenas_is_not_used() -> None:
    """Its chunks are cut otherwise."""
    reports = [report(s, (A, 5), node=NODES[s], whole=(A, 5)) for s in RANKS if s != "tp1"]
    reports[0] = ArenaReport("n0", "tp0.0022", "tp0", LAYOUT, reports[0].slots, (A, 5))
    with pytest.raises(LostError, match=r"tp1: .*no parity covers it"):
        outcome(reports, shielded())


def test_packages_alone_tell_that_there_was_a_snapshot() -> None:
    with pytest.raises(LostError, match="no arena of tp0, tp1, tp2 and 3 more"):
        outcome(six(), Known(shielded().protection))
    assert outcome(six(), Known()) is None


def test_damage_is_what_verify_says() -> None:
    assert Damage.of(["header", "chunk 3", "chunk 12", "objects"]) == Damage((3, 12), ("header", "objects"), False)
    for text in ("record", "/x/slot0: has 5 bytes", "chunk x"):
        assert Damage.of(["chunk 1", text]).useless


def test_reports_of_protection_survive_json_and_foreign_shards_are_problems() -> None:
    known = shielded(modes=Modes(node=True, peer=True))
    whole = known.protection
    assert ProtectionReport.from_json(json.loads(json.dumps(whole.to_json()))) == whole
    joined = join([whole, ProtectionReport(problems=(("x", "bad"),))], RANKS[:5])
    assert {package.shard for package in joined.packages} == set(RANKS[:5])
    assert ("x", "bad") in joined.problems and any("tp5 is no shard" in text for _, text in joined.problems)
    assert joined.protects((5, A)) and not joined.protects((5, B)) and not joined.protects((4, A))
    held = holding("tp3")
    assert holding_of_json(json.loads(json.dumps(holding_json(held)))) == held
