"""Which nodes ``ftckpt check`` has talk to each other, and when."""

from __future__ import annotations

from itertools import combinations

import pytest

from ftckpt.cli.check_pairs import arranged_pairs, rounds_of
from ftckpt.parity.groups import mirrors, peer_groups
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes

NODES = [2, 3, 8, 9, 10, 17, 64]


def racks_of(nodes: int, per_rack: int) -> dict[str, str]:
    """Names as Slurm gives them, not in the order in which text sorts."""
    return {f"node{number}": f"rack{number // per_rack}" if per_rack else "" for number in range(nodes)}


@pytest.mark.parametrize("per_rack", [0, 4])
@pytest.mark.parametrize("nodes", NODES)
def test_whoever_protection_pairs_talks(nodes: int, per_rack: int) -> None:
    racks, modes = racks_of(nodes, per_rack), Modes(peer=True)
    sections = (HoldingSection("private", "", "", 0, (4096,)),)
    holdings = [
        ArenaLayout(f"{node}/{rank}", node, rack, f"{node}-{rank}.x", "00", 4096, sections, (1, ()))
        for node, rack in racks.items() for rank in range(2)
    ]  # fmt: skip
    wanted = {
        pair for group in peer_groups(holdings, modes) for pair in combinations({m.node for m in group.members}, 2)
    }
    wanted |= {(own, keeper) for own, *keepers in mirrors(holdings, modes).values() for keeper in keepers}
    pairs = arranged_pairs(racks)
    assert {frozenset(pair) for pair in wanted} <= {frozenset(pair) for pair in pairs}
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)


def test_few_nodes_are_all_paired_and_of_many_some_lie_far_apart() -> None:
    assert len(arranged_pairs(racks_of(8, 4))) == 8 * 7 // 2
    pairs = {frozenset(pair) for pair in arranged_pairs(racks_of(9, 0))}
    assert {frozenset((f"node{number}", f"node{(number + 4) % 9}")) for number in range(9)} <= pairs


@pytest.mark.parametrize("nodes", [*NODES, 1000])
def test_a_round_has_each_node_once_and_there_are_few(nodes: int) -> None:
    pairs = arranged_pairs(racks_of(nodes, 0))
    rounds = rounds_of(pairs)
    assert sorted(pair for one in rounds for pair in one) == sorted(pairs)
    for one in rounds:
        talking = [node for pair in one for node in pair]
        assert len(set(talking)) == len(talking)
    assert len(rounds) <= (7 if nodes == 8 else 22)
