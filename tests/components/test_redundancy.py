"""Sections: what a lost rank stored of replicated state comes back, bit for bit, from what the others store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import cast

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from test_capture import LoneGroup
from test_replicas import Gather, in_lockstep, jobs, sets_of, whole

from ftckpt.capture.assignment import Assignment, assign
from ftckpt.capture.chunks import CopyPart, chunk_copies
from ftckpt.capture.copier import copy_chunk
from ftckpt.capture.redundancy import Redundancy, SharePlan, SlotParts, lay_out
from ftckpt.errors import CaptureError, ConfigError
from ftckpt.group import Group
from ftckpt.memory.image import SlotImage
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import ReplicaSets, identity
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.parity.groups import ParityGroup, slot_groups
from ftckpt.parity.stripes import stripes
from tests.support.errors import raises

TYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
Held = dict[int, list[Fragment]]


def live(fragment: Fragment) -> torch.Tensor:
    """Bytes that follow from what the fragment is: replicas hold the same."""
    seed = xxhash.xxh3_64_intdigest(identity(fragment))
    tensor = torch.empty(fragment.numel, dtype=TYPES[fragment.dtype])
    if fragment.numel:
        data = np.random.default_rng(seed).integers(0, 256, fragment.nbytes, np.uint8)
        tensor.view(torch.uint8).copy_(torch.from_numpy(data))
    return tensor


class World:
    """The layout and the slot of every rank; each rank reads nothing but its own tensors."""

    def __init__(
        self, held: Held, redundancy: Redundancy, chunk_bytes: int, views: dict[int, ReplicaSets] | None = None
    ) -> None:
        views = views or sets_of(held)
        self.redundancy, self.chunk_bytes = redundancy, chunk_bytes
        self.shards = [f"dp{rank}" for rank in held]
        self.laid: list[SlotParts] = []
        self.images: list[SlotImage] = []
        self.slots: list[torch.Tensor] = []
        for rank, fragments in held.items():
            laid = lay_out(fragments, views[rank], rank, SharePlan(self.shards, chunk_bytes, redundancy))
            stepped = tuple(part.fragment for part in laid.parts)
            manifest = Manifest({"dp": rank}, {}, stepped, (), 64, chunk_bytes, sections=laid.sections)
            self.laid.append(laid)
            self.images.append(SlotImage.of(Manifest.decode(manifest.encode())))
            self.slots.append(self._filled(self.images[-1], laid.parts, [live(f) for f in fragments]))
        places = zip(self.images, redundancy.nodes or self.shards, strict=True)
        self.groups = slot_groups([image.holding(node, "", f"arena-{node}") for image, node in places])

    def chunk(self, shard: str, chunk: int) -> np.ndarray:
        rank = self.shards.index(shard)
        span = self.images[rank].chunks[chunk]
        return self.slots[rank].numpy()[span.begin : span.end]

    @staticmethod
    def _filled(image: SlotImage, parts: Sequence[CopyPart], tensors: list[torch.Tensor]) -> torch.Tensor:
        slot = torch.zeros(image.file_bytes, dtype=torch.uint8)
        for copy in chunk_copies(image, parts):
            span = image.chunks[copy.chunk]
            assert not copy.segments or (span.begin <= copy.begin and copy.end <= span.end)
            copy_chunk(tensors, copy, slot)
        return slot

    def rebuilt(self, group: ParityGroup, lost: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each chunk of the group that member ``lost`` stored, and what plain XOR of the others' chunks gives."""
        members = group.members
        for stripe in stripes(group):
            ((holder, block),) = stripe.blocks
            chunks = [(m, members[m].first + c) for m, c in stripe.data if c >= 0]
            if lost in (m for m, _ in chunks):
                ((_, wanted),) = [(m, c) for m, c in chunks if m == lost]
                others = [(m, c) for m, c in chunks if m != lost] + [(holder, members[holder].blocks + block)]
                assert lost not in (m for m, _ in others), "a member guards its own chunk"
                stored = self.chunk(members[lost].shard, wanted)
                sources = [self.chunk(members[m].shard, c) for m, c in others]
                yield stored, reduce(np.bitwise_xor, [wide(s, self.chunk_bytes) for s in sources])[: len(stored)]


def wide(data: np.ndarray, nbytes: int) -> np.ndarray:
    return np.concatenate([data, np.zeros(nbytes - len(data), np.uint8)])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    held = draw(jobs())[0]
    nodes = draw(st.lists(st.sampled_from("abcd"), min_size=len(held), max_size=len(held)))
    racks = draw(st.sampled_from([{}, {"a": "r", "b": "r", "c": "s", "d": "s"}]))
    mode = draw(st.sampled_from(["replica", "copy"]))
    redundancy = Redundancy(mode, tuple(nodes), tuple(racks.get(node, "") for node in nodes))
    return World(held, redundancy, draw(st.sampled_from([64, 192, 512, 4096, 1 << 16])))


@given(worlds())
def test_every_chunk_of_a_lost_member_comes_back_from_the_others(world: World) -> None:
    sections = [section for image in world.images for section in image.sections]
    names = {section.group for section in sections if section.group}
    assert names == {group.name for group in world.groups}, "a reader of the slots does not know all groups"
    for group in world.groups:
        assert group.mode == world.redundancy.mode
        nodes = [world.redundancy.nodes[world.shards.index(member.shard)] for member in group.members]
        assert len(set(nodes)) == len(nodes)
        for lost, member in enumerate(group.members):
            found = list(world.rebuilt(group, lost))
            assert len(found) == len(member.lengths)
            for stored, again in found:
                assert np.array_equal(stored, again)


def test_differing_replicas_are_nobodys_parity() -> None:
    held = {rank: [whole("same", 1000), whole("other", 1000)] for rank in range(3)}
    views = sets_of(held, [identity(whole("other", 1000))])
    world = World(held, Redundancy("replica", tuple("abc"), ("",) * 3), 1024, views)
    for rank, laid in enumerate(world.laid):
        assert laid.parts[0].fragment.key == f"other@dp{rank}" and laid.sections[0].fragments == 1
        assert {strip.piece for part in laid.parts for strip in part.strips} == {0}


MEMBERS = tuple(RankPlace({"pp": pp, "dp": dp}, f"n{dp}") for pp in range(2) for dp in range(2))
NODES = tuple(member.node for member in MEMBERS)
NUMEL = 50_000


def described(rank: int) -> Description:
    """A layer of the stage, replicated over two ranks, and an embedding that both stages tie."""
    keys = [f"layer{rank // 2}", "embedding"]
    wholes = [Fragment.whole(key, "F32", (NUMEL,), Box((0,), (NUMEL,))) for key in keys]
    step = Fragment.whole("step", "F32", (1,), Box((0,), (1,)))
    return Description(tuple(Piece(f, live(f)) for f in wholes), (Piece(step, torch.ones(1)),))


def assigned(redundancy: Sequence[Redundancy]) -> list[Assignment]:
    def run(rank: int, gather: Gather) -> Assignment:
        group = cast(Group, LoneGroup(rank, 4, gather))
        topology = Topology(rank, MEMBERS, {"pp": 2, "dp": 2})
        return assign(group, topology, described(rank), 1 << 12, 1 << 16, redundancy=redundancy[rank])

    return in_lockstep(run, 4)


def test_ranks_that_were_told_different_nodes_refuse() -> None:
    same = Redundancy("replica", NODES, ("",) * 4)
    for other in (Redundancy("copy", NODES, ("",) * 4), Redundancy("replica", NODES[::-1], ("",) * 4), Redundancy()):
        with pytest.raises(CaptureError):
            assigned([same, same, other, same])
    with raises(ConfigError, "protect", "3 nodes", "4 ranks"):
        assigned([Redundancy("replica", NODES[:3], ("",) * 3)] * 4)
    with raises(ConfigError, "'mirror'"):
        Redundancy("mirror", NODES, ("",) * 4)
    with raises(ConfigError, "4 nodes", "1 racks"):
        Redundancy("copy", NODES, ("",))
