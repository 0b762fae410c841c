"""Recoverable losses are reconstructed from real bytes; others cannot be, by the rank of their equations."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.parity.codecs import MISSING, decode, encode
from ftckpt.parity.groups import (
    Member,
    ParityGroup,
    mirrors,
    node_groups,
    peer_groups,
    replica_partition,
    slot_group,
    slot_group_name,
    slot_groups,
)
from ftckpt.parity.holding import ArenaLayout, HoldingSection
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import Stripe, blocks_bytes, stripes
from ftckpt.parity.survive import BlockId, ChunkId, Forecast, LossUnits, Repair, block_chunk, solve

CHUNK = 8


def cut(nbytes: int) -> tuple[int, ...]:
    return (CHUNK,) * (nbytes // CHUNK) + ((nbytes % CHUNK,) if nbytes % CHUNK else ())


@dataclass
class Job:
    """A small job: its groups, and every chunk and block with real bytes."""

    holdings: list[ArenaLayout]
    modes: Modes
    groups: list[ParityGroup]
    chunks: dict[ChunkId, np.ndarray]
    blocks: dict[BlockId, np.ndarray]

    def stepped(self, shard: str) -> set[ChunkId]:
        held = next(h for h in self.holdings if h.shard == shard)
        return {(shard, chunk) for chunk in range(held.volatile[0])}

    def blocks_of(self, shards: Iterable[str]) -> set[BlockId]:
        gone = set(shards)
        names = {g.name: g for g in self.groups}
        return {block for block in self.blocks if names[block[0]].members[block[1]].shard in gone}

    def on(self, nodes: Iterable[str]) -> list[str]:
        return [h.shard for h in self.holdings if h.node in set(nodes)]


def build(  # noqa: PLR0917 - a helper of this file
    modes: Modes, nodes: int, per_node: int, private: Sequence[int], shared: Sequence[int], seed: int = 0
) -> Job:
    """Rank r has ``private[r]`` bytes of its own and a share of ``shared[r]`` bytes of what its replicas hold, too.

    Rank i of every node is in replica set i.
    """
    rng = np.random.default_rng(seed)
    ranks = range(nodes * per_node)
    node = [f"n{rank // per_node}" for rank in ranks]
    sections = {rank: [("private", "", private[rank])] for rank in ranks}
    behind: dict[int, list[tuple[str, str, int]]] = {rank: [] for rank in ranks}
    if modes.replica:
        for own in range(per_node):
            replicas = list(ranks)[own::per_node]
            for part in replica_partition(replicas, node.__getitem__, lambda rank: ""):
                if len(part) < 2 or not all(shared[rank] for rank in part):
                    continue
                name = slot_group_name(modes.replica, [f"s{r}" for r in part], [f"s{r}" for r in replicas])
                members = [Member(f"s{r}", "", "", 0, cut(shared[r])) for r in part]
                group = slot_group(name, modes.replica, CHUNK, members)
                for holder, member in enumerate(group.members):
                    rank = int(member.shard[1:])
                    sections[rank].append(("shared", name, shared[rank]))
                    kind = "parity" if modes.replica == "replica" else "copy"
                    behind[rank].append((kind, name, blocks_bytes(group, holder)))
    holdings = []
    for rank in ranks:
        found, first = [], 0
        for kind, name, nbytes in sections[rank] + behind[rank]:
            found.append(HoldingSection(kind, name, "", first, cut(nbytes)))
            first += len(cut(nbytes))
        volatile = (first, (3,))
        holdings.append(ArenaLayout(f"s{rank}", node[rank], "", f"a{rank}", "", CHUNK, tuple(found), volatile))
    groups = [*(node_groups(holdings) if modes.node else []), *peer_groups(holdings, modes), *slot_groups(holdings)]
    chunks = {
        (h.shard, c): rng.integers(0, 256, nbytes, np.uint8) for h in holdings for c, nbytes in enumerate(h.lengths)
    }
    job = Job(holdings, modes, groups, chunks, {})
    for group in sorted(groups, key=lambda g: not g.in_slots):  # parity in slots is data of the node's parity
        for found_stripe in stripes(group):
            for row, (holder, block) in enumerate(found_stripe.blocks):
                made = encode(data_of(job, group, found_stripe), found_stripe.length, row, group.losses)
                kept = block_chunk(group, holder, block)
                if kept is None:
                    job.blocks[group.name, holder, block] = made
                elif kept in chunks:
                    chunks[kept] = np.pad(made, (0, len(chunks[kept]) - len(made)))
                else:
                    assert len(made) == 0
    return job


def data_of(job: Job, group: ParityGroup, found: Stripe) -> list[np.ndarray | None]:
    members = group.members
    return [job.chunks[members[m].shard, members[m].first + c] if c >= 0 else None for m, c in found.data]


def carry_out(job: Job, repairs: Sequence[Repair], lost: set[ChunkId], lost_blocks: set[BlockId]) -> None:
    """Do the repairs from what is there alone, and compare every byte with what was lost."""
    there = {chunk: data for chunk, data in job.chunks.items() if chunk not in lost}
    for repair in repairs:
        group, found = repair.group, repair.stripe
        ids = [(group.members[m].shard, group.members[m].first + c) if c >= 0 else None for m, c in found.data]
        if repair.use:
            blocks = {}
            for row, (holder, block) in enumerate(found.blocks):
                if (group.name, holder, block) in repair.use:
                    kept = block_chunk(group, holder, block)
                    if kept is None:
                        assert (group.name, holder, block) not in lost_blocks
                        blocks[row] = job.blocks[group.name, holder, block]
                    else:
                        blocks[row] = there[kept][: found.length]
            data = [None if i is None else MISSING if i in repair.lost else there[i] for i in ids]
            solved = decode(data, blocks, found.length, group.losses)
            made = {ids[index]: array for index, array in solved.items()}
        else:
            data = [None if i is None else there[i] for i in ids]
            rows = {block_chunk(group, *block): row for row, block in enumerate(found.blocks)}
            made = {c: encode(data, found.length, rows[c], group.losses) for c in repair.lost}
        assert set(made) == set(repair.lost)
        for chunk, array in made.items():
            assert chunk is not None and chunk not in there, "repaired twice, or never lost"
            size = len(job.chunks[chunk])
            assert not array[size:].any()
            there[chunk] = np.pad(array[:size], (0, max(0, size - len(array))))
            assert np.array_equal(there[chunk], job.chunks[chunk]), chunk


def undetermined(job: Job, lost: set[ChunkId], lost_blocks: set[BlockId]) -> set[ChunkId]:
    """Lost chunks whose first byte no XOR of all surviving equations determines (codes xor and mirror)."""
    column = {chunk: place for place, chunk in enumerate(sorted(lost))}
    rows: list[int] = []
    for group in job.groups:
        for found in stripes(group):
            data = 0
            for (m, c), array in zip(found.data, data_of(job, group, found), strict=True):
                chunk = (group.members[m].shard, group.members[m].first + c)
                if array is not None and chunk in column:
                    data ^= 1 << column[chunk]
            for holder, block in found.blocks:
                kept = block_chunk(group, holder, block)
                if (found.length or kept in column) and (group.name, holder, block) not in lost_blocks:
                    rows.append(data ^ (1 << column[kept] if kept in column else 0))
    pivots: dict[int, int] = {}
    for equation in rows:
        left = equation
        while left and left.bit_length() - 1 in pivots:
            left ^= pivots[left.bit_length() - 1]
        if left:
            pivots[left.bit_length() - 1] = left
    for high in sorted(pivots):  # reduce fully: a determined unknown then stands alone
        for other, row in pivots.items():
            if other > high and row >> high & 1:
                pivots[other] = row ^ pivots[high]
    single = {high for high, row in pivots.items() if row == 1 << high}
    return {chunk for chunk, place in column.items() if place not in single}


def check(job: Job, lost: set[ChunkId], lost_blocks: set[BlockId]) -> set[ChunkId]:
    before = set(lost)
    repairs, unsolved = solve(job.groups, lost, lost_blocks)
    assert lost == before  # the caller's sets are left alone
    carry_out(job, repairs, lost, lost_blocks)
    assert {chunk for repair in repairs for chunk in repair.lost} == lost - unsolved
    if all(group.code != "rs" or group.losses == 1 for group in job.groups):
        cannot = undetermined(job, lost, lost_blocks)
        assert cannot <= unsolved
        assert bool(cannot) == bool(unsolved)
    return unsolved


ALL_MODES = [
    Modes(node=True),
    Modes(replica="replica"),
    Modes(replica="copy"),
    Modes(peer=True),
    Modes(peer=True, peer_losses=2, peer_group=3),
    Modes(node=True, peer=True),
    Modes(node=True, replica="replica"),
    Modes(node=True, replica="replica", peer=True),
    Modes(node=True, replica="replica", peer=True, peer_losses=2),
]


def small(modes: Modes, nodes: int = 3, per_node: int = 3, seed: int = 0) -> Job:
    draw = random.Random(seed)
    ranks = nodes * per_node
    return build(
        modes, nodes, per_node, [draw.randrange(20, 60) for _ in range(ranks)],
        [draw.randrange(20, 60) for _ in range(ranks)], seed,
    )  # fmt: skip


@pytest.mark.parametrize("modes", ALL_MODES, ids=lambda m: f"{m.names}{m.peer_losses}{m.peer_group}")
def test_every_loss_of_up_to_three_arenas(modes: Modes) -> None:
    """The forecast for arenas agrees with the chunks, whatever is lost."""
    job = small(modes)
    packages = mirrors(job.holdings, modes)
    shards = [h.shard for h in job.holdings]
    forecast = Forecast(job.groups, packages, job.holdings)
    for lost in chain.from_iterable(combinations(shards, count) for count in (1, 2, 3)):
        chunks = set().union(*map(job.stepped, lost))
        unsolved = check(job, chunks, job.blocks_of(lost))
        told = Forecast(job.groups, packages, job.holdings).unrecoverable(set(lost), set())
        assert told == sorted({shard for shard, _ in unsolved}), lost
        assert forecast.survived(set(lost), set()) == (not told)


@pytest.mark.parametrize("modes", ALL_MODES, ids=lambda m: f"{m.names}{m.peer_losses}{m.peer_group}")
def test_every_loss_of_nodes(modes: Modes) -> None:
    job = small(modes, nodes=4, per_node=2)
    packages = mirrors(job.holdings, modes)
    forecast = Forecast(job.groups, packages, job.holdings)
    for lost in chain.from_iterable(combinations([f"n{i}" for i in range(4)], count) for count in (1, 2, 3)):
        shards = job.on(lost)
        unsolved = check(job, set().union(*map(job.stepped, shards)), job.blocks_of(shards))
        bare = {s for s in shards if set(packages[s]) <= set(lost)}
        told = Forecast(job.groups, packages, job.holdings).unrecoverable(set(), set(lost))
        assert told == sorted(bare | {shard for shard, _ in unsolved}), lost
        assert forecast.survived(set(), set(lost)) == (not told)


@pytest.mark.parametrize("modes", [m for m in ALL_MODES if m.node], ids=lambda m: "-".join(m.names))
@pytest.mark.parametrize("seed", range(2))
def test_one_bad_chunk_in_every_stripe_of_all_arenas_at_once(modes: Modes, seed: int) -> None:
    job = small(modes, seed=seed)
    draw = random.Random(seed)
    bad: set[ChunkId] = set()
    for group in job.groups:
        if group.mode == "node":
            for found in stripes(group):
                there = [(group.members[m].shard, group.members[m].first + c) for m, c in found.data if c >= 0]
                bad.update(there and [draw.choice(there)])
    assert len(bad) > 15
    assert not check(job, bad, set())


def test_the_cheapest_mode_goes_first() -> None:
    job = build(Modes(node=True, replica="replica", peer=True), 3, 3, [40] * 9, [40] * 9)
    chunks = job.stepped("s4")
    repairs, unsolved = solve(job.groups, chunks, job.blocks_of(["s4"]))
    assert not unsolved and {repair.group.mode for repair in repairs} == {"node"}
    repairs, unsolved = solve([g for g in job.groups if g.mode != "node"], chunks, job.blocks_of(["s4"]))
    assert not unsolved and {repair.group.mode for repair in repairs} == {"replica", "peer"}


@st.composite
def damaged_jobs(draw: st.DrawFn) -> tuple[Job, set[ChunkId], set[BlockId]]:
    nodes, per_node = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    replica = draw(st.sampled_from(["", "replica", "copy"]))
    losses, group = draw(st.sampled_from([(1, 0), (1, 2), (2, 3), (2, 0)]))
    modes = Modes(draw(st.booleans()), replica, draw(st.booleans()), losses, group)
    sizes = st.lists(st.integers(0, 50), min_size=nodes * per_node, max_size=nodes * per_node)
    job = build(modes, nodes, per_node, draw(sizes), draw(sizes))
    arenas = draw(st.sets(st.sampled_from([h.shard for h in job.holdings]), max_size=3))
    share = draw(st.sampled_from([0.0, 0.1, 0.4]))
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    chunks = {chunk for shard in arenas for chunk in job.stepped(shard)}
    chunks |= {chunk for chunk in sorted(job.chunks) if chance.random() < share}
    blocks = job.blocks_of(arenas) | {block for block in sorted(job.blocks) if chance.random() < share}
    return job, chunks, blocks


@given(damaged_jobs())
def test_any_damage_is_mended_with_the_right_bytes_or_cannot_be(
    damage: tuple[Job, set[ChunkId], set[BlockId]],
) -> None:
    check(*damage)


@given(st.data())
@settings(max_examples=60)
def test_the_forecast_of_whole_arenas_is_what_their_chunks_say(data: st.DataObject) -> None:
    job, _, _ = data.draw(damaged_jobs())
    packages = mirrors(job.holdings, job.modes)
    forecast = Forecast(job.groups, packages, job.holdings)
    for count in (1, 2, 3):
        for lost in combinations([h.shard for h in job.holdings], count):
            _, unsolved = solve(job.groups, set().union(*map(job.stepped, lost)), job.blocks_of(lost))
            assert forecast.survived(set(lost), set()) == (not unsolved)
            assert forecast.unrecoverable(set(lost), set()) == sorted({shard for shard, _ in unsolved})


@pytest.mark.parametrize("nodes", [False, True])
def test_two_of_one_group_do_not_look_like_two_of_groups_of_that_shape(nodes: bool) -> None:
    job = build(Modes(node=nodes, peer=True, peer_group=2), 6, 2, [40 * CHUNK] * 12, [0] * 12)
    forecast = Forecast(job.groups, mirrors(job.holdings, job.modes), job.holdings)
    units, told = LossUnits(forecast, nodes=nodes), set()
    for lost in combinations(units.names, 2):
        each = (set[str](), set(lost)) if nodes else (set(lost), set[str]())
        told.add(units.survived(*lost))
        assert units.survived(*lost) == forecast.survived(*each), lost
    assert told == {False, True}


def test_a_lost_node_takes_its_packages_along() -> None:
    job = small(Modes(peer=True), nodes=4, per_node=1)
    own_only: Mapping[str, Sequence[str]] = {h.shard: (h.node,) for h in job.holdings}
    told = Forecast(job.groups, own_only, job.holdings).unrecoverable(set(), {"n1"})
    assert told == ["s1"]  # its chunks could be rebuilt, but nothing could verify them
    # The node, and its package, are there.
    assert Forecast(job.groups, own_only, job.holdings).unrecoverable({"s1"}, set()) == []
    assert Forecast(job.groups, {}, job.holdings).unrecoverable({"s1"}, set()) == ["s1"]
    mirrored = mirrors(job.holdings, job.modes)
    assert Forecast(job.groups, mirrored, job.holdings).unrecoverable(set(), {"n1"}) == []
    assert not Forecast(job.groups, own_only, job.holdings).survived(set(), {"n1"})
