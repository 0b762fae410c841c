"""Real ranks on simulated nodes store shares, parity and copies; what one of them loses the others give back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from ftckpt.capture.assignment import as_bytes, assign
from ftckpt.capture.capture import Capture
from ftckpt.capture.copier import HostCopier
from ftckpt.capture.redundancy import Redundancy
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.parity.groups import slot_groups
from ftckpt.parity.stripes import stripes
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

CHUNK = 1 << 16
LAST = 4
JOBS = {"tp2dp2": (2, 2, "ab"), "dp4": (1, 4, "abcd"), "dp4-two-nodes": (1, 4, "ab"), "tp2dp4": (2, 4, "abcd")}
"""Tensor and data parallel size, and the nodes, over which the data parallel ranks are dealt in blocks."""


@dataclass(frozen=True)
class Place:
    """Where one rank of a job is."""

    tp: int
    dp: int
    nodes: str
    rank: int

    @property
    def coords(self) -> dict[str, int]:
        return {"tp": self.rank % self.tp, "dp": self.rank // self.tp}

    @property
    def node(self) -> str:
        return self.nodes[self.coords["dp"] * len(self.nodes) // self.dp]


def weights(place: Place) -> list[Any]:
    """Tensors of one TP rank's slice, some that all hold alike, and moments that only this rank holds."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.float64: "F64"}
    found = []
    for layer in range(5):
        for key, numel, dtype in (
            ("w", 50_001, torch.float32),
            ("b", 333 + layer, torch.bfloat16),
            ("s", 7, torch.uint8),
        ):
            torch.manual_seed(100 * layer + numel + place.coords["tp"])
            tensor = torch.randint(0, 200, (numel,)).to(dtype)
            start = place.coords["tp"] * numel
            box = Box((start,), (numel,))
            found.append((Fragment.whole(f"{layer}.{key}", names[dtype], (place.tp * numel,), box), tensor))
        torch.manual_seed(layer)
        whole = Fragment.whole(f"{layer}.norm", "F64", (4000,), Box((0,), (4000,)))
        found.append((whole, torch.rand(4000, dtype=torch.float64)))
    torch.manual_seed(place.rank)
    moments = Fragment.whole(f"moments.{place.rank}", "F32", (30_000,), Box((0,), (30_000,)))
    found.append((moments, torch.rand(30_000)))
    return [Piece(fragment, tensor) for fragment, tensor in found]


def stepped(tensor: Any) -> None:
    """What an optimizer step does to all replicas alike."""
    tensor.add_(1)


def train(rank: int, size: int, root: str, job: str, mode: str) -> dict[str, Any]:
    """Snapshots in turn into two slots, each written to right after the fence; returns hashes of the last one."""
    tp, dp, nodes = JOBS[job]
    places = [Place(tp, dp, nodes, other) for other in range(size)]
    members = tuple(RankPlace(place.coords, place.node) for place in places)
    topology = Topology(rank, members, {"tp": tp, "dp": dp})
    pieces = weights(places[rank])
    redundancy = Redundancy(mode, tuple(place.node for place in places), ("",) * size)
    assignment = assign(Group(60.0), topology, Description(tuple(pieces), ()), 4096, CHUNK, None, redundancy)
    node_dir = Path(root) / places[rank].node
    node_dir.mkdir(exist_ok=True)
    arena = Arena.create(node_dir, assignment.manifest, 2)
    arena.lock(10.0)
    copier = HostCopier()
    capture = Capture(arena, assignment.pieces, assignment.parts, copier)
    expected = {}
    for iteration in range(LAST + 1):
        capture.begin(SnapshotId(b"l" * 16, iteration), (), {"iteration": iteration})
        if iteration == LAST:
            for part in assignment.parts:
                if part.piece >= 0:
                    live = assignment.pieces[part.piece].tensor[part.start : part.start + part.fragment.numel]
                    expected[part.fragment.name] = xxhash.xxh3_64_intdigest(as_bytes(live).numpy().tobytes())
        capture.fence(20.0)
        with torch.no_grad():
            for piece in pieces:
                stepped(piece.tensor)
        capture.settle(20.0)
    capture.close()
    arena.close()
    return expected


class Stored:
    """What the ranks left behind, read as anybody would who has not been there."""

    def __init__(self, root: Path, job: str, mode: str) -> None:
        tp, dp, _ = JOBS[job]
        results = run_ranks(train, tp * dp, str(root), job, mode)
        self.expected = {name: value for result in results for name, value in result.value.items()}
        paths = sorted(path.parent for path in root.glob("*/*/control"))
        self.arenas = {arena.manifest.shard: arena for arena in (Arena.open(path) for path in paths)}
        assert len(self.arenas) == tp * dp
        self.holdings = [
            arena.image.holding(arena.path.parent.name, "", arena.path.name) for arena in self.arenas.values()
        ]
        self.groups = slot_groups(self.holdings)
        self.node = {holding.shard: holding.node for holding in self.holdings}

    def slot(self, shard: str) -> int:
        (slot,) = [slot for found, slot in self.arenas[shard].snapshots().items() if found.iteration == LAST]
        return slot

    def chunk(self, shard: str, chunk: int) -> np.ndarray:
        arena = self.arenas[shard]
        span = arena.image.chunks[chunk]
        return np.frombuffer(arena.slot(self.slot(shard))[span.begin : span.end], np.uint8).copy()

    def close(self) -> None:
        for arena in self.arenas.values():
            arena.close()


@pytest.fixture(params=[(job, mode) for job in JOBS for mode in ("replica", "copy")], ids="-".join)
def stored(request: pytest.FixtureRequest, arena_root: Path) -> Iterator[Stored]:
    made = Stored(arena_root, *request.param)
    yield made
    made.close()


def test_each_lost_share_is_there_bit_for_bit_in_what_others_store(stored: Stored, request: Any) -> None:
    job, mode = request.node.callspec.params["stored"]
    nodes = JOBS[job][2]
    verify(stored)
    assert stored.groups and {group.mode for group in stored.groups} == {mode}
    for group in stored.groups:
        assert len(group.members) == len(nodes)
        assert len({stored.node[member.shard] for member in group.members}) == len(nodes)
        for lost in range(len(group.members)):
            lose(stored, group, lost)
        costs(stored, group)
    covered = {name for arena in stored.arenas.values() for name in shared_names(arena.manifest)}
    assert {name for name in stored.expected if not name.startswith("moments")} == covered


def verify(stored: Stored) -> None:
    """Every checksum is that of the chunk, and every share is the boundary of the last iteration."""
    for shard, arena in stored.arenas.items():
        slot = stored.slot(shard)
        arena.verify(slot)
        for fragment, offset in zip(arena.manifest.fragments, arena.image.offsets, strict=True):
            if not fragment.key.startswith("__parity__"):
                data = bytes(arena.slot(slot)[offset : offset + fragment.nbytes])
                assert xxhash.xxh3_64_intdigest(data) == stored.expected[fragment.name], fragment.name


def lose(stored: Stored, group: Any, lost: int) -> None:
    """Every chunk of one member's share from the chunks of the others alone."""
    members, rebuilt = group.members, 0
    for stripe in stripes(group):
        ((holder, block),) = stripe.blocks
        chunks = {member: chunk for member, chunk in stripe.data if chunk >= 0}
        if lost not in chunks:
            continue
        sources = [stored.chunk(members[m].shard, members[m].first + c) for m, c in chunks.items() if m != lost]
        sources.append(stored.chunk(members[holder].shard, members[holder].blocks + block))
        padded = [np.concatenate([source, np.zeros(CHUNK - len(source), np.uint8)]) for source in sources]
        wanted = stored.chunk(members[lost].shard, members[lost].first + chunks[lost])
        assert wanted.any()
        assert np.array_equal(reduce(np.bitwise_xor, padded)[: len(wanted)], wanted)
        rebuilt += 1
    assert rebuilt == len(members[lost].lengths) > 0


def costs(stored: Stored, group: Any) -> None:
    """Parity is a share divided among the others, a copy a share; chunks are whole, which rounds up."""
    others = len(group.members) - 1 if group.mode == "replica" else 1
    share = max(sum(member.lengths) for member in group.members)
    for member in group.members:
        sections = stored.arenas[member.shard].image.sections
        kept = sum(s.span.nbytes for s in sections if s.kind in ("parity", "copy") and s.group == group.name)
        assert share / others - CHUNK <= kept <= share / others + CHUNK


def shared_names(manifest: Any) -> set[str]:
    """Names of the fragments in shared sections."""
    found, first = set(), 0
    for section in manifest.sections:
        if section.kind == "shared":
            found |= {fragment.name for fragment in manifest.stepped[first : first + section.fragments]}
        first += section.fragments
    return found
