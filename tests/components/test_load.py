"""Reads are executed to the byte, whichever rank holds them and however they are cut into messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.errors import ArenaError
from ftckpt.group import Group
from ftckpt.memory.destinations import TargetParts
from ftckpt.memory.image import Span
from ftckpt.memory.locations import Location, OpenArenas, SlotAt
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.restore import redistribute as wire
from ftckpt.restore.chunk_reads import OpenShard
from ftckpt.restore.load import Item, Reads, Traffic, Transfer, execute, fetch, transfers_of
from ftckpt.restore.plan import StridedCopy, run
from ftckpt.restore.tensor_index import Index, ShardEntry
from tests.support.arenas import ThreadGroup as Gathering
from tests.support.errors import lacks

WAIT_SECS = 20.0
SLOT_BYTES = 1 << 12


class Exchange:
    """The shared state of a job's ranks when they are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[bytes] = [b""] * size
        self.posted = threading.Condition()
        self.sends: dict[tuple[int, int, int], list[Message]] = {}


@dataclass
class Message:
    """One that was posted; its memory is read when it is received, as gloo does."""

    data: torch.Tensor
    through: bool = False


class Work:
    """The result of ``start_send`` and ``start_receive``."""

    def __init__(self, group: ThreadGroup, done: Callable[[], bool]) -> None:
        self.group, self.done = group, done
        group.open += 1
        group.most_open = max(group.most_open, group.open)

    def wait(self) -> None:
        exchange = self.group.exchange
        with exchange.posted:
            if not exchange.posted.wait_for(lambda: self.done() or exchange.barrier.broken, WAIT_SECS):
                raise TimeoutError("the other rank does not answer")
        self.group.open -= 1


class ThreadGroup(Gathering):
    """Stands in for ``Group``: a message is through once its receiver waits for it, not when it is posted."""

    name = "ftckpt/group/threads"

    def __init__(self, exchange: Exchange, rank: int) -> None:
        super().__init__(rank, (exchange.parts, exchange.barrier))
        self.exchange = exchange
        self.longest = self.sent = self.open = self.most_open = 0
        self.partners: set[int] = set()

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        return self.gather(data)[source]

    def start_send(self, data: torch.Tensor, to: int, tag: int) -> Work:
        assert data.dtype == torch.uint8 and data.dim() == 1 and data.is_contiguous()
        self.longest = max(self.longest, data.numel())
        self.sent += data.numel()
        self.partners.add(to)
        message = Message(data)
        with self.exchange.posted:
            self.exchange.sends.setdefault((self.rank, to, tag), []).append(message)
            self.exchange.posted.notify_all()
        return Work(self, lambda: message.through)

    def start_receive(self, into: torch.Tensor, source: int, tag: int) -> Work:
        self.partners.add(source)
        line = self.exchange.sends.setdefault((source, self.rank, tag), [])

        def done() -> bool:
            if not line:
                return False
            message = line.pop(0)
            assert message.data.shape == into.shape
            into.copy_(message.data)
            message.through = True
            self.exchange.posted.notify_all()
            return True

        return Work(self, done)


class FakeArenas:
    """Slots of random bytes, by arena and slot."""

    def __init__(self, slots: dict[tuple[str, int], bytes]) -> None:
        self.slots = slots

    def view(self, place: Location) -> memoryview:
        assert isinstance(place, SlotAt)
        if (place.arena, place.slot) not in self.slots:
            raise ArenaError(f"{place.arena}: no such arena")
        return memoryview(self.slots[place.arena, place.slot])

    def shard(self, place: SlotAt) -> FakeShard:
        return FakeShard(self.view(place))

    def reads(self, group: ThreadGroup, transfers: Sequence[Transfer]) -> Reads:
        return Reads.of(group.rank, transfers, cast(OpenShard, self.shard))


class FakeShard:
    """A slot in chunks of 1000 bytes."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        chunks = [Span(at, min(at + 1000, len(data))) for at in range(0, len(data), 1000)]
        self.image = SimpleNamespace(chunks=chunks, objects=Span(len(data), len(data)))

    def scatter(self, number: int, parts: TargetParts) -> None:
        for part in parts():
            for begin, memory in part.targets:
                memory[:] = self.data[begin : begin + len(memory)]


def run_ranks(size: int, rank_main: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Results of ``rank_main`` on ``size`` threads; raises what any of them raised."""
    exchange, results, errors = Exchange(size), [None] * size, []

    def run(rank: int) -> None:
        try:
            results[rank] = rank_main(ThreadGroup(exchange, rank))
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)
            exchange.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECS)
        assert not thread.is_alive(), "ranks wait for each other"
    if errors:
        raise errors[0]
    return results


IntervalRequest = tuple[int, int, list[StridedCopy]]
"""The rank that holds the slot, its number, and the bytes of it."""

NODES = ["n0", "n0", "n1", "n1"]


@st.composite
def blocks(draw: st.DrawFn) -> StridedCopy:
    """Any loops of up to three dimensions inside a slot; their writes are packed one after another."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    strides: list[int] = []
    for size in reversed(shape):
        inner = strides[0] * shape[-len(strides)] if strides else 1
        strides.insert(0, draw(st.integers(inner, inner + 3)))
        assert size
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    begin = draw(st.integers(0, SLOT_BYTES - 1 - reach)) if reach < SLOT_BYTES else 0
    if reach >= SLOT_BYTES:
        return run(0, 0, SLOT_BYTES)
    packed = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    return StridedCopy(begin, 0, tuple(shape), tuple(strides), tuple(packed))


@st.composite
def plans(draw: st.DrawFn) -> list[list[IntervalRequest]]:
    """Per rank what it wants; ranks often want the same as others, in another order."""
    size = draw(st.integers(1, 4))
    wish = st.tuples(st.integers(0, size - 1), st.integers(0, 1), st.lists(blocks(), max_size=3))
    common = draw(st.lists(wish, min_size=1, max_size=4))
    return [
        draw(st.lists(wish, max_size=2)) + draw(st.permutations(draw(st.lists(st.sampled_from(common), max_size=4))))
        for _ in range(size)
    ]


def held(slot: bytes, block: StridedCopy) -> bytes:
    """The bytes that a block reads, in its order."""
    at = np.full(1, block.source)
    for size, stride in zip(block.shape, block.source_strides, strict=True):
        at = (at[:, None] + np.arange(size) * stride).reshape(-1)
    return np.frombuffer(slot, np.uint8)[at].tobytes()


def wanted(rank: int, wish: IntervalRequest, spread_out: bool) -> tuple[Transfer, torch.Tensor, list[int]]:
    """One item with the bytes of all blocks, one after another or with gaps, in a tensor of its own."""
    owner, slot, found = wish
    step = 2 if spread_out else 1
    placed, starts, position = [], [], 8
    for block in found:
        dest = tuple(step * stride for stride in block.dest_strides)
        placed.append(block._replace(dest=position, dest_strides=dest))
        starts.append(position)
        position += step * block.numel
    live = torch.zeros(position, dtype=torch.uint8)
    reader = rank if NODES[owner] == NODES[rank] else owner
    return Transfer(SlotAt(NODES[owner], f"a{owner}", slot), reader, (Item(tuple(placed), live),)), live, starts


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans(), st.sampled_from([7, 64, 1000, 1 << 20]), st.integers(1, 3), st.booleans())
def test_every_rank_gets_every_byte_it_wants(
    monkeypatch: pytest.MonkeyPatch, plan: list[list[IntervalRequest]], bound: int, window: int, spread_out: bool
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_BYTES", bound)
    monkeypatch.setattr(wire, "ALONE_BYTES", 200)
    monkeypatch.setattr(wire, "OPEN_STEPS", window)
    monkeypatch.setattr("ftckpt.restore.redistribute.GRAIN_BYTES", 16)
    bits = np.random.default_rng(0)
    slots = {(f"a{r}", s): bits.bytes(SLOT_BYTES) for r in range(len(plan)) for s in range(2)}

    def rank_main(group: ThreadGroup) -> tuple[list[tuple[torch.Tensor, list[int]]], Traffic, ThreadGroup]:
        near = {f"a{r}" for r in range(len(plan)) if NODES[r] == NODES[group.rank]}
        arenas = FakeArenas({key: data for key, data in slots.items() if key[0] in near})
        found = [wanted(group.rank, wish, spread_out) for wish in plan[group.rank]]
        moved = execute(
            cast(Group, group), lambda: arenas.reads(group, [each for each, _, _ in found]), cast(OpenArenas, arenas)
        )
        return [(live, starts) for _, live, starts in found], moved, group

    fetched: dict[tuple[str, str], int] = {}
    ranks = run_ranks(len(plan), rank_main)
    for rank, (found, moved, group) in enumerate(ranks):
        far = needed = 0
        for (owner, slot, wished), (live, starts) in zip(plan[rank], found, strict=True):
            step = 2 if spread_out else 1
            untouched = live.clone()
            for block, start in zip(wished, starts, strict=True):
                landed = live[start : start + step * block.numel : step]
                assert landed.numpy().tobytes() == held(slots[f"a{owner}", slot], block)
                untouched[start : start + step * block.numel : step] = 0
            assert not untouched.any()
            nbytes = sum(block.numel for block in wished)
            needed += nbytes
            if NODES[owner] != NODES[rank]:
                far += nbytes
                if nbytes:
                    fetched[f"{owner} {slot} {wished}", NODES[rank]] = nbytes
        assert moved.needed_bytes == needed == moved.read_bytes + moved.spread_bytes
        assert moved.received_bytes + moved.spread_bytes == far
        assert group.longest <= bound
        assert group.most_open <= 2 * window and group.open == 0
    if all(len({str(wish) for wish in wishes}) == len(wishes) for wishes in plan):
        assert sum(moved.received_bytes for _, moved, _ in ranks) == sum(fetched.values())  # once to each node


def test_ranks_hand_on_what_they_have_fetched_whatever_order_they_want_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftckpt.restore.redistribute.GRAIN_BYTES", 16)
    slot = np.random.default_rng(0).bytes(SLOT_BYTES)
    stretches = [(0, 300), (300, 1000), (1300, 77), (2000, 512)]

    def rank_main(group: ThreadGroup) -> tuple[bool, Traffic]:
        turned = stretches[group.rank :] + stretches[: group.rank]
        buffers = [torch.zeros(nbytes if group.rank else 0, dtype=torch.uint8) for _, nbytes in turned]
        source = SlotAt("n0", "a0", 0)
        wishes = [fetch(source, 0, (at, into)) for (at, _), into in zip(turned, buffers, strict=True)]
        arenas = FakeArenas({("a0", 0): slot} if group.rank == 0 else {})
        moved = execute(cast(Group, group), lambda: arenas.reads(group, wishes), cast(OpenArenas, arenas))
        found = zip(turned, buffers, strict=True)
        return all(into.numpy().tobytes() == slot[at : at + into.numel()] for (at, _), into in found), moved

    ranks = run_ranks(4, rank_main)
    assert all(right for right, _ in ranks)
    total = sum(nbytes for _, nbytes in stretches)
    assert sum(moved.received_bytes for _, moved in ranks) == total
    assert [moved.needed_bytes for _, moved in ranks] == [0, total, total, total]
    assert all(0 < moved.received_bytes < moved.spread_bytes for _, moved in ranks[1:])


def test_a_rank_of_many_has_few_partners() -> None:
    """All ranks have equal parts of one tensor, and each rank needs all parts."""
    nodes, local, part = 8, 4, 3 * 4096
    size, numel = nodes * local, nodes * local * part
    whole = Box((0,), (numel,))
    places = tuple(RankPlace({"dp": rank}, f"n{rank // local}") for rank in range(size))
    parts = [np.random.default_rng(rank).bytes(part) for rank in range(size)]
    fragments = [Fragment("w", "U8", (numel,), whole, rank * part, (rank + 1) * part) for rank in range(size)]
    index = Index(ShardEntry(rank, fragment, 0) for rank, fragment in enumerate(fragments))
    slots = [SlotAt(place.node, f"a{rank}", 0) for rank, place in enumerate(places)]

    def rank_main(group: ThreadGroup) -> tuple[bool, int]:
        here = places[group.rank].node
        arenas = FakeArenas({(at.arena, 0): parts[rank] for rank, at in enumerate(slots) if at.node == here})
        live = torch.zeros(numel, dtype=torch.uint8)
        need = Fragment("w", "U8", (numel,), whole, 0, numel)
        transfers = transfers_of(Topology(group.rank, places, {"dp": size}), index, [(need, live)], slots)
        execute(cast(Group, group), lambda: arenas.reads(group, transfers), cast(OpenArenas, arenas))
        return live.numpy().tobytes() == b"".join(parts), len(group.partners)

    ranks = run_ranks(size, rank_main)
    assert all(right for right, _ in ranks)
    # One rank of each other node, and those after and before it among the ranks that lack the same.
    assert max(partners for _, partners in ranks) <= nodes - 1 + 2 + 2, ranks


def test_a_source_that_one_rank_cannot_open_is_an_error_on_all_before_any_data() -> None:
    def rank_main(group: ThreadGroup) -> str:
        buffer = torch.zeros(8, dtype=torch.uint8)
        wishes = [fetch(SlotAt("n", "a0", 7), 0, (0, buffer))] if group.rank == 1 else []
        arenas = FakeArenas({("a0", 0): bytes(SLOT_BYTES)})
        with pytest.raises(ArenaError) as error:
            execute(cast(Group, group), lambda: arenas.reads(group, wishes), cast(OpenArenas, arenas))
        assert group.sent == (0 if group.rank != 1 else group.longest), "what it asks for, and nothing else"
        return str(error.value)

    assert not any(lacks(said, "rank 0", "a0") for said in run_ranks(3, rank_main))


@pytest.mark.parametrize("reader", [0, 1])
def test_more_bytes_than_there_are_is_an_error_on_all(reader: int) -> None:
    def rank_main(group: ThreadGroup) -> str:
        buffer = torch.zeros(16, dtype=torch.uint8)
        wishes = [fetch(SlotAt("n", "a0", 0), reader, (SLOT_BYTES - 8, buffer))] if group.rank == 1 else []
        arenas = FakeArenas({("a0", 0): bytes(SLOT_BYTES)})
        with pytest.raises(ArenaError) as error:
            execute(cast(Group, group), lambda: arenas.reads(group, wishes), cast(OpenArenas, arenas))
        return str(error.value)

    text = (f"rank {reader}", "16 bytes", f"offset {SLOT_BYTES - 8}", str(SLOT_BYTES))
    assert not any(lacks(said, *text) for said in run_ranks(2, rank_main))


STRIPS = st.tuples(st.integers(0, 100), st.integers(1, 9), st.integers(9, 12))


@given(st.lists(STRIPS, max_size=8), st.integers(1, 64), st.sampled_from([15, 30, 1000]))
def test_messages_are_bounded_full_and_in_order(strips: list[tuple[int, int, int]], bound: int, alone: int) -> None:
    memory = torch.arange(250, dtype=torch.uint8)
    whole = [wire.Strip(memory, begin, (size, 5), (stride, 1)) for begin, size, stride in strips]
    long = [strip.nbytes >= alone for strip in whole]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MESSAGE_BYTES", bound)
        patch.setattr(wire, "ALONE_BYTES", alone)
        found = list(wire.Stream(whole).messages())
    sizes = [sum(strip.nbytes for strip in message) for message in found]
    assert all(0 < size <= bound for size in sizes)
    ends = np.cumsum(sizes).tolist()
    edges = [0, *np.cumsum([strip.nbytes for strip in whole]).tolist()]
    beside_long = {edge for number, alike in enumerate(long) if alike for edge in edges[number : number + 2]}
    assert beside_long <= {0, *ends}
    assert all(size == bound or end in beside_long for size, end in zip(sizes[:-1], ends, strict=False))
    flat = [value for message in found for strip in message for value in strip.view.reshape(-1).tolist()]
    assert flat == [value for strip in whole for value in strip.view.reshape(-1).tolist()]


TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "BOOL": torch.bool, "F64": torch.float64, "U8": torch.uint8}
