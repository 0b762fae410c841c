"""The newest snapshot that is whole, of one lineage, or an error that names what is missing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import LostError, MismatchError
from ftckpt.restore.decide import Decision, Source, decide
from ftckpt.restore.inventory import ArenaReport, SlotReport

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


def choose(*reports: ArenaReport, bad: Collection[Source] = ()) -> Decision | None:
    return decide(reports, HOMES, LAYOUT, bad)


def test_the_newest_whole_snapshot_is_taken() -> None:
    decision = choose(report("tp0", (A, 4), (A, 5)), report("tp1", (A, 5), (A, 4)))
    assert decision == Decision(A, 5, {"tp0": Source("n0", "tp0.0011", 1), "tp1": Source("n1", "tp1.0011", 0)}, ())


def test_a_shard_missing_in_the_newest_gives_the_one_before_and_says_why() -> None:
    decision = choose(report("tp0", (A, 4), (A, 5)), report("tp1", (A, 4)))
    assert decision is not None and decision.iteration == 4
    assert decision.passed_over == ("iteration 5: not sealed by tp1",)


def test_iterations_of_two_lineages_are_never_one_snapshot() -> None:
    reports = report("tp0", (A, 5), (A, 4)), report("tp1", (B, 5), (A, 4))
    decision = choose(*reports)
    assert decision is not None and (decision.lineage, decision.iteration) == (A, 4)
    assert choose(report("tp0", (A, 5)), report("tp1", (B, 5))) is None


def test_bad_slots_are_left_out() -> None:
    reports = report("tp0", (A, 4), (A, 5)), report("tp1", (A, 4), (A, 5))
    decision = choose(*reports, bad={Source("n1", "tp1.0011", 1)})
    assert decision is not None and decision.iteration == 4
    assert decision.passed_over == ("iteration 5: corrupt in tp1",)


@pytest.mark.parametrize("home", ["n0", "n1", "n2"])
def test_a_copy_on_the_home_node_is_preferred_in_any_order_of_reports(home: str) -> None:
    copies = [report("tp0", (A, 5), node=node) for node in ("n0", "n1", "n2")]
    for order in itertools.permutations(copies):
        decision = decide(order, {"tp0": home}, LAYOUT)
        assert decision is not None and decision.sources["tp0"].node == home


def test_another_node_gives_what_home_does_not_have() -> None:
    decision = choose(report("tp0", (A, 5), node="n7"), report("tp0", (A, 4)), report("tp1", (A, 5), (A, 4)))
    assert decision is not None and decision.iteration == 5
    assert decision.sources["tp0"].node == "n7"


def test_a_bad_copy_at_home_is_replaced_by_another_nodes() -> None:
    reports = report("tp0", (A, 5)), report("tp0", (A, 5), node="n7"), report("tp1", (A, 5))
    decision = choose(*reports, bad=[Source("n0", "tp0.0011", 0)])
    assert decision is not None and decision.sources["tp0"].node == "n7"


def test_shards_that_nobody_needs_do_not_matter() -> None:
    decision = choose(report("tp0", (A, 5)), report("tp1", (A, 5)), report("tp9", (A, 6)))
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
    decision = choose(stale, report("tp0", (A, 5)), report("tp1", (A, 5)))
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
    decision = choose(*reports, bad=bad)
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
