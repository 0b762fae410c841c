"""The table counts every case, names a loss that is not survived, and sums what protection costs."""

from __future__ import annotations

from itertools import combinations

import pytest
from test_survive import ALL_MODES, CHUNK, build, small

from ftckpt.memory.parity_file import parity_bytes
from ftckpt.parity.groups import mirrors, node_groups, peer_groups
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import stripes
from ftckpt.parity.survive import Forecast
from ftckpt.parity.table import ProtectionTable, protection_table

ONE_ARENA, TWO_ARENAS = "one rank's arena", "any two arenas"
ONE_NODE, TWO_NODES = "one node", "any two nodes"
ONE_RACK, ONE_SMP = "one rack", "the SMP of a node"

MIB = 1 << 20


def holding(rank: int, node: int, chunks: int = 6, rack: str = "") -> ArenaLayout:
    lengths = (MIB,) * chunks
    sections = (HoldingSection("private", "", "", 0, lengths),)
    size = chunks * MIB + 5000
    return ArenaLayout(f"s{rank}", f"n{node}", rack, f"s{rank}.0", "", MIB, sections, (chunks, ()), size, 300)


def told(holdings: list[ArenaLayout], modes: Modes, slots: int = 3) -> ProtectionTable:
    groups = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes)]
    return protection_table(holdings, groups, mirrors(holdings, modes), slots, parity_bytes)


def row(found: ProtectionTable, lost: str) -> tuple[int, int]:
    (failure,) = [failure for failure in found.failures if failure.lost == lost]
    return failure.cases, failure.survived


@pytest.mark.parametrize("modes", ALL_MODES, ids=lambda m: f"{m.names}{m.peer_losses}{m.peer_group}")
def test_every_number_is_what_trying_all_cases_gives(modes: Modes) -> None:
    job = small(modes, nodes=4, per_node=3, seed=1)
    packages = mirrors(job.holdings, modes)
    found = protection_table(job.holdings, job.groups, packages, 3, parity_bytes)
    forecast = Forecast(job.groups, packages, job.holdings)
    shards, nodes = [h.shard for h in job.holdings], [f"n{i}" for i in range(4)]

    def survived(names: list[str], count: int, are_nodes: bool) -> tuple[int, int]:
        cases = [set(lost) for lost in combinations(names, count)]
        bad = [lost for lost in cases if forecast.unrecoverable(*((set(), lost) if are_nodes else (lost, set())))]
        return len(cases), len(cases) - len(bad)

    assert row(found, ONE_ARENA) == survived(shards, 1, False)
    assert row(found, TWO_ARENAS) == survived(shards, 2, False)
    assert row(found, ONE_NODE) == survived(nodes, 1, True)
    assert row(found, TWO_NODES) == survived(nodes, 2, True)
    assert row(found, ONE_SMP) == (4, 4)
    for failure in found.failures:
        assert bool(failure.example) == (failure.survived < failure.cases)
        if failure.example:
            lost, none = set(failure.example), set[str]()
            args = (none, lost) if "node" in failure.lost else (lost, none)
            assert forecast.unrecoverable(*args)


def test_node_parity_never_claims_to_bring_a_node_back() -> None:
    found = told([holding(r, r // 4) for r in range(8)], Modes(node=True))
    assert row(found, ONE_ARENA) == (8, 8)
    assert row(found, TWO_ARENAS) == (28, 16)  # those on different nodes
    assert row(found, ONE_NODE) == (2, 0)
    assert row(found, TWO_NODES) == (1, 0)


def test_racks_are_a_row_where_they_have_labels() -> None:
    racks = ["a", "a", "b", "b"]
    holdings = [holding(r, r // 2, rack=racks[r // 2]) for r in range(8)]
    found = told(holdings, Modes(peer=True))
    assert row(found, ONE_RACK) == (2, 2) and row(found, ONE_NODE) == (4, 4)
    assert ONE_RACK not in {f.lost for f in told([holding(r, r) for r in range(4)], Modes(peer=True)).failures}
    lone = [holding(r, r, rack="a") for r in range(3)]
    assert row(told(lone, Modes(peer=True)), ONE_RACK) == (1, 0)


def test_memory_counts_slots_two_parity_files_and_three_packages() -> None:
    holdings = [holding(r, r // 2) for r in range(4)]
    modes = Modes(node=True, peer=True)
    found = told(holdings, modes, slots=3)
    groups = [*node_groups(holdings), *peer_groups(holdings, modes)]
    parity = {f"n{n}": 0 for n in range(2)}
    for group in groups:
        for index, member in enumerate(group.members):
            parity[member.node] += 2 * parity_bytes(group, index)
            assert 2 * parity_bytes(group, index) >= 2 * 6 * MIB  # groups of two: as much as the state
    for node, memory in found.memory.items():
        assert memory.slots == 3 * 2 * (6 * MIB + 5000)
        assert memory.parity == parity[node]
        assert memory.packages == 3 * 4 * 300  # its own, and the other node's
        assert memory.sum == memory.slots + memory.parity + memory.packages
        assert found.smp_bytes(node) == memory.parity + memory.packages
    assert found.fullest.sum == max(memory.sum for memory in found.memory.values())


def test_parity_and_copies_in_slots_are_part_of_the_slots() -> None:
    job = build(Modes(replica="copy"), 3, 1, [0] * 3, [5 * CHUNK] * 3)
    memory = protection_table(job.holdings, job.groups, mirrors(job.holdings, job.modes), 2, parity_bytes).fullest
    assert memory.in_slots == 2 * 5 * CHUNK and memory.slots == 2 * (10 * CHUNK + 3) and memory.parity == 0


@pytest.mark.parametrize("losses", [1, 2])
def test_peers_read_the_state_once_for_each_loss_they_survive(losses: int) -> None:
    holdings = [holding(r, r, chunks=12) for r in range(4)]
    modes = Modes(peer=True, peer_losses=losses)
    found = told(holdings, modes)
    packages = sum(len(kept) - 1 for kept in mirrors(holdings, modes).values()) * 300
    assert sum(found.network.values()) == losses * 4 * 12 * MIB + packages
    (group,) = peer_groups(holdings, modes)
    for index, member in enumerate(group.members):
        pulled = sum(
            group.members[m].lengths[c]
            for s in stripes(group)
            if index in [holder for holder, _ in s.blocks]
            for m, c in s.data
            if c >= 0
        )
        assert found.network[member.node] == pulled + 2 * 300
    assert sum(told(holdings, Modes(node=True)).network.values()) == 0
