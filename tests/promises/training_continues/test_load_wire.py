"""Reads between real processes: every byte, once over the wire, within bounds, and no wait without an end."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.group import Group
from ftckpt.memory.destinations import TargetParts
from ftckpt.memory.image import Span
from ftckpt.memory.locations import SlotAt
from ftckpt.model.fragment import Box, Fragment
from ftckpt.restore import load
from ftckpt.restore import redistribute as wire
from ftckpt.restore.plan import plan
from ftckpt.restore.redistribute import Stream, Strip, exchange
from ftckpt.restore.tensor_index import Index, ShardEntry
from tests.support.pool import run_ranks
from tests.support.waiting import meet

pytestmark = pytest.mark.multiproc

RANKS = 4
SHAPES = {"w0": (24, 36), "w1": (7, 12, 10), "w2": (501,), "w3": (64, 48)}


@dataclass
class Sides:
    """The distribution of a tensor over ranks: cut along an axis into boxes; replicas are full or flat ranges."""

    axis: int
    boxes: int
    flat: bool


def value(key: str, fragment: Any) -> np.ndarray:
    """The value of each element: a function of its place in the full tensor and of the key."""
    whole = np.arange(math.prod(fragment.global_shape), dtype=np.int32).reshape(fragment.global_shape)
    box = fragment.box
    slices = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
    return whole[slices].flatten()[fragment.start : fragment.stop] * 10 + int(key[1:])


def fragments(sides: dict[str, Sides], rank: int) -> list[Any]:
    found = []
    for key, side in sides.items():
        shape = SHAPES[key]
        axis = side.axis % len(shape)
        place, copy = rank % side.boxes, rank // side.boxes
        edges = [shape[axis] * edge // side.boxes for edge in (place, place + 1)]
        offset = tuple(edges[0] if a == axis else 0 for a in range(len(shape)))
        size = tuple(edges[1] - edges[0] if a == axis else shape[a] for a in range(len(shape)))
        box = Box(offset, size)
        copies = RANKS // side.boxes
        cut = [box.numel * edge // copies for edge in (copy, copy + 1)] if side.flat else [0, box.numel]
        found.append(Fragment(key, "I32", shape, box, *cut))
    return found


def reshape(rank: int, size: int, folder: str, seeds: list[int]) -> list[dict[str, Any]]:
    """For each seed: from one random layout to another, with slots on two to four nodes."""

    class Files:
        def __init__(self, node: str) -> None:
            self.node, self.views = node, 0

        def view(self, place: SlotAt) -> memoryview:
            assert place.node == self.node, "only what lies on this node"
            self.views += 1
            return memoryview(np.memmap(Path(folder) / f"{seed}-{place.arena}", np.uint8, "r"))

        def shard(self, place: SlotAt) -> Any:
            path = Path(folder) / f"{seed}-{place.arena}"
            size = path.stat().st_size
            chunks = [Span(at, min(at + 1000, size)) for at in range(0, size, 1000)]

            def scatter(number: int, parts: TargetParts) -> None:
                with open(path, "rb") as file:
                    for begin, memory in (target for part in parts() for target in part.targets):
                        assert chunks[number].begin <= begin <= begin + len(memory) <= chunks[number].end
                        file.seek(begin)
                        assert file.readinto(memory) == len(memory)

            return SimpleNamespace(image=SimpleNamespace(chunks=chunks, objects=Span(size, size)), scatter=scatter)

    group, outcomes = Group(60.0), []
    wire.GRAIN_BYTES = 64
    for seed in seeds:
        rng = random.Random(seed)
        wire.MESSAGE_BYTES = rng.choice([100, 1 << 10, 16 << 20])
        wire.ALONE_BYTES = rng.choice([300, 1 << 20])
        wire.OPEN_STEPS = rng.choice([1, 2, 3])
        nodes = [f"n{rng.randrange(rng.randint(2, 4))}" for _ in range(size)]
        old = {key: Sides(rng.randrange(3), rng.choice([1, 2, 4]), True) for key in SHAPES}
        new = {key: Sides(rng.randrange(3), rng.choice([1, 2, 4]), rng.random() < 0.3) for key in SHAPES}
        offers, slot = [], b""
        for source in range(size):
            offset = 0
            for fragment in fragments(old, source):
                offers.append(ShardEntry(source, fragment, offset))
                slot += value(fragment.key, fragment).tobytes() if source == rank else b""
                offset += fragment.nbytes
        (Path(folder) / f"{seed}-a{rank}").write_bytes(slot or b"\0")
        group.barrier()
        needs = fragments(new, rank)
        live = [torch.full((need.numel,), -1, dtype=torch.int32) for need in needs]
        far = [int(node != nodes[rank]) for node in nodes]
        reads = plan(Index(offers), needs, far.__getitem__, turn=rank)
        transfers = []
        for source in range(size):
            reader = rank if nodes[source] == nodes[rank] else source
            found = [read for read in reads if read.offer.source == source]
            transfers.append(load.transfer(SlotAt(nodes[source], f"a{source}", 0), reader, found, live))
        files = Files(nodes[rank])
        reads_of = partial(load.Reads.of, rank, transfers, files.shard)
        moved = load.execute(group, reads_of, files, rng.choice([1, 3]))  # type: ignore[arg-type]
        right = [bool((t.numpy() == value(n.key, n)).all()) for t, n in zip(live, needs, strict=True)]
        outcomes.append({"right": right, "nodes": nodes, "new": {k: asdict(v) for k, v in new.items()}})
        outcomes[-1] |= {**asdict(moved), "needs": sum(need.nbytes for need in needs)}
        outcomes[-1]["far"] = sum(t.nbytes for t in transfers if t.reader != rank)
        lacking = outcomes[-1]["lacking"] = {}
        for read in reads:
            if far[read.offer.source]:
                loops = [(block.source, block.shape, block.source_strides) for block in read.copies]
                lacking[str((read.offer.source, loops, read.need))] = read.nbytes
    return outcomes


def test_any_layout_becomes_any_other_and_replicas_are_fetched_once(tmp_path: Path) -> None:
    seeds = list(range(24))
    results = [result.value for result in run_ranks(reshape, RANKS, str(tmp_path), seeds, timeout_secs=120)]
    spread_bytes = 0
    for number in range(len(seeds)):
        ranks = [result[number] for result in results]
        for rank in ranks:
            assert all(rank["right"])
            assert rank["read_bytes"] + rank["spread_bytes"] == rank["needed_bytes"] == rank["needs"]
            assert rank["received_bytes"] + rank["spread_bytes"] == rank["far"]
        lacking = {what: nbytes for rank in ranks for what, nbytes in rank["lacking"].items()}
        assert sum(rank["received_bytes"] for rank in ranks) == sum(lacking.values()), "what several lack comes once"
        spread_bytes += sum(rank["spread_bytes"] for rank in ranks)
    assert spread_bytes > 0


def unanswered(rank: int, size: int, here: str) -> tuple[str, float]:
    group = Group(1.0)
    group.barrier()
    begin = time.monotonic()
    try:
        if rank == 0:
            buffer = torch.zeros(8, dtype=torch.uint8)
            exchange(group, {}, {1: Stream([Strip(buffer, 0, (8,), (1,))])})
        else:
            meet(Path(here, "told"), size)
    except RuntimeError as error:
        waited = time.monotonic() - begin
        meet(Path(here, "told"), size)
        return str(error), waited
    return "", time.monotonic() - begin


def test_a_message_that_never_comes_is_an_error_in_time(tmp_path: Path) -> None:
    (text, secs), _ = (result.value for result in run_ranks(unanswered, 2, str(tmp_path), timeout_secs=60))
    assert "imed out" in text and 0.9 < secs < 20
