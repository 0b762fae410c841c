"""Groups: nobody fails with another member, names follow from contents, modes fit the layout."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import ConfigError
from ftckpt.model import codec
from ftckpt.parity.groups import (
    Member,
    ParityGroup,
    mirror_nodes,
    mirrors,
    node_groups,
    peer_groups,
    replica_partition,
    slot_group_name,
    spread,
)
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes, possible_modes, resolve_modes
from tests.support.errors import lacks, raises

CHUNK = 4096


def holding(
    shard: str, node: str, *sections: HoldingSection, rack: str = "", volatile: tuple[int, ...] = ()
) -> ArenaLayout:
    behind = sum(len(section.lengths) for section in sections)
    return ArenaLayout(shard, node, rack, f"{shard}.x", "00", CHUNK, sections, (behind, volatile))


def private(*lengths: int) -> HoldingSection:
    return HoldingSection("private", "", "", 0, lengths)


def members(*nodes: str) -> list[Member]:
    return [Member(f"s{i}", node, f"a{i}", 0, (CHUNK, 100)) for i, node in enumerate(nodes)]


@given(st.lists(st.integers(0, 5), max_size=40), st.sampled_from([0, 2, 3, 8]), st.integers(2, 4))
def test_spread_never_puts_two_of_a_domain_together(domains: list[int], most: int, least: int) -> None:
    people = list(enumerate(domains))
    groups = spread(people, lambda person: str(person[1]), most, least)
    assert sorted(person for group in groups for person in group) == people
    for group in groups:
        assert len({domain for _, domain in group}) == len(group)
        assert not most or len(group) <= max(most, 2 * least)
    largest = max(Counter(domains).values(), default=0)
    if any(len(group) < least for group in groups):
        assert largest > len(domains) // least  # one domain outnumbers all others: it cannot be helped
    assert max(map(len, groups), default=0) - min(map(len, groups), default=0) <= 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=30), st.booleans())
def test_a_replica_set_is_split_over_nodes_and_racks(places: list[tuple[int, int]], labels: bool) -> None:
    nodes = [node for node, _ in places]
    racks = [f"r{node % 3}" if labels else "" for node in nodes]
    groups = replica_partition(range(len(places)), lambda r: f"n{nodes[r]}", racks.__getitem__)
    assert sorted(rank for group in groups for rank in group) == list(range(len(places)))
    for group in groups:
        assert len({nodes[rank] for rank in group}) == len(group)
    counts = Counter(racks)
    if labels and len(counts) > 1 and max(counts.values()) <= len(places) - max(counts.values()):
        for group in groups:  # no rack outnumbers the others: each group can do without sharing one
            assert len({racks[rank] for rank in group}) == len(group) > 1


def test_a_groups_name_follows_from_everything_in_it() -> None:
    base = ParityGroup.of("peer", 1, CHUNK, members("a", "b"))
    others = [
        ParityGroup.of("node", 1, CHUNK, members("a", "b")),
        ParityGroup.of("peer", 1, CHUNK, members("a", "b", "c")),
        ParityGroup.of("peer", 1, CHUNK + 1, members("a", "b")),
        ParityGroup.of("peer", 1, CHUNK, members("a", "c")),
        ParityGroup.of("peer", 1, CHUNK, members("a", "b")[::-1]),
    ]
    assert len({group.name for group in [base, *others]}) == 6
    told = json.loads(json.dumps(base.to_json()))
    assert ParityGroup.from_json(told) == base
    with pytest.raises(ValueError, match="digest"):
        ParityGroup.from_json({**told, "losses": 1, "chunk_bytes": CHUNK + 1})


def test_node_groups_take_all_chunks_of_all_arenas_of_a_node() -> None:
    holdings = [holding(f"s{i}", f"n{i // 3}", private(CHUNK, i + 1), volatile=(7,)) for i in range(7)]
    groups = node_groups(holdings[::-1])
    assert [[m.shard for m in g.members] for g in groups] == [["s0", "s1", "s2"], ["s3", "s4", "s5"]]  # s6 is alone
    assert groups[0].members[1].lengths == (CHUNK, 2, 7) and groups[0].code == "xor" and groups[0].losses == 1
    assert groups == node_groups(holdings)


def test_peer_groups_take_what_no_slot_group_covers_of_arenas_on_different_nodes() -> None:
    name = slot_group_name("replica", ["s0", "s1"], ["s0", "s1"])
    holdings = [
        holding(f"s{i}", f"n{i // 2}", private(CHUNK, 9), HoldingSection("shared", name, "", 2, (5,)), volatile=(7,))
        for i in range(8)
    ]
    groups = peer_groups(holdings, Modes(peer=True))
    assert len(groups) == 2
    for group in groups:
        assert [member.node for member in group.members] == ["n0", "n1", "n2", "n3"]
        assert {member.lengths for member in group.members} == {(CHUNK, 9)}
    assert peer_groups(holdings, Modes()) == []
    two = peer_groups(holdings, Modes(peer=True, peer_group=2))
    assert sorted(tuple(m.node for m in g.members) for g in two) == [("n0", "n2")] * 2 + [("n1", "n3")] * 2
    assert peer_groups(holdings[::-1], Modes(peer=True)) == groups


def test_a_small_group_spares_what_it_can() -> None:
    holdings = [holding(f"s{n}{r}", f"n{n}", private(CHUNK)) for n in range(3) for r in range(3 if n else 1)]
    groups = peer_groups(holdings, Modes(peer=True, peer_losses=2))
    assert sorted((len(group.members), group.losses) for group in groups) == [(2, 1), (2, 1), (3, 2)]


def test_packages_go_to_the_next_nodes_other_racks_first() -> None:
    nodes = [f"n{i}" for i in range(6)]
    assert mirror_nodes(nodes, 2)["n4"] == ("n5", "n0")
    assert mirror_nodes(nodes, 9)["n4"] == ("n5", "n0", "n1", "n2", "n3")
    assert mirror_nodes(["n"], 2) == {"n": ()}
    racks = {node: f"r{place // 3}" for place, node in enumerate(nodes)}
    kept = list(mirror_nodes(nodes, 2, racks).values())
    assert all(racks[other] != racks[node] for node, others in zip(nodes, kept, strict=True) for other in others)
    assert set(Counter(other for others in kept for other in others).values()) == {2}  # nobody keeps all
    assert mirror_nodes(nodes, 4, racks)["n0"][3] in ("n1", "n2")
    holdings = [holding(f"s{node}", node, private(5)) for node in nodes]
    assert mirrors(holdings, Modes(node=True))["sn3"] == ("n3",)
    assert mirrors(holdings, Modes(peer=True, peer_losses=3))["sn3"] == ("n3", "n4", "n5", "n0")


def nodes_of(ranks: int, per_node: int) -> list[str]:
    return [f"n{rank // per_node}" for rank in range(ranks)]


@pytest.mark.parametrize(
    ("protect", "ranks", "per_node", "spans", "expected"),
    [
        ("auto", 16, 8, True, "node,replica,peer"),
        ("auto", 16, 8, False, "node,peer"),
        ("auto", 4, 2, False, "peer"),
        ("auto", 5, 4, False, "peer"),
        ("auto", 2, 2, False, ""),
        ("copy,peer", 16, 8, True, "copy,peer"),
    ],
)
def test_modes_fit_the_layout(protect: str, ranks: int, per_node: int, spans: bool, expected: str) -> None:
    assert ",".join(resolve_modes(protect, nodes_of(ranks, per_node), spans).names) == expected


@pytest.mark.parametrize(
    ("protect", "per_node", "settings", "text"),
    [
        ("node", 1, {}, "protect node"),
        ("peer", 8, {}, "protect peer"),
        ("replica", 2, {}, "protect replica"),
        ("node,copy", 2, {}, "protect copy"),
        ("peer", 2, {"peer_losses": 4}, "peer_losses 4"),
        ("peer", 1, {"peer_losses": 2, "peer_group": 2}, "peer_group="),
        ("peer", 2, {"peer_losses": 0}, "peer_losses 0"),
        ("peer", 2, {"peer_group": 1}, "peer_group 1"),
    ],
)
def test_modes_that_cannot_work_are_named(protect: str, per_node: int, settings: dict[str, Any], text: str) -> None:
    with raises(ConfigError, *text.split()):
        resolve_modes(protect, nodes_of(8, per_node), False, **settings)


RS2 = {"peer_losses": 2}


@pytest.mark.parametrize(
    ("protect", "nodes", "options", "expected", "told"),
    [
        ("peer", (2, 2, False), {}, "", ["peer"]),
        ("node,peer", (4, 4, False), {}, "node", ["peer"]),
        ("node,peer", (2, 1, False), {}, "peer", ["node"]),
        ("auto", (4, 2, False), RS2, "peer", ["2"]),
        ("auto", (4, 4, False), RS2, "node", []),
        ("none", (2, 2, False), RS2, "", []),
    ],
)
def test_what_fewer_nodes_cannot_have_is_left_out_and_told(
    protect: str, nodes: tuple[int, int, bool], options: dict[str, Any], expected: str, told: list[str]
) -> None:
    ranks, per_node, spans = nodes
    modes, left_out = possible_modes(protect, nodes_of(ranks, per_node), spans, **options)
    assert ",".join(modes.names) == expected
    assert len(left_out) == len(told) and not any(
        lacks(text, part) for part, text in zip(told, left_out, strict=True)
    )


@pytest.mark.parametrize(
    "value", [{}, {"members": 3}, {"members": [["s"]]}, {"members": [["s", "n", "a", 0, [[1 << 40, 4]], -1]] * 2}, []]
)
def test_foreign_json_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError):
        ParityGroup.from_json(value)
    with pytest.raises(ValueError):
        codec.from_json(value, ArenaLayout)


def test_peers_are_in_different_racks_and_large_arenas_stand_together() -> None:
    holdings = [
        holding(f"s{n}{r}", f"n{n}", private(*[CHUNK] * (9 if (n + r) % 2 else 2)), rack=f"r{n // 2}")
        for n in range(4)
        for r in range(2)
    ]
    groups = peer_groups(holdings, Modes(peer=True))
    racks = {h.node: h.rack for h in holdings}
    for group in groups:
        assert len({racks[member.node] for member in group.members}) == len(group.members) == 2
        assert len({len(member.lengths) for member in group.members}) == 1
