"""Reads are executed to the byte, whichever rank holds them and however they are cut into messages."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.comm import Bytes, Group
from ftckpt.errors import ArenaError
from ftckpt.restore import load
from ftckpt.restore.blocks import run
from ftckpt.restore.load import OpenArenas, Target, Transfer, execute, messages, transfer
from ftckpt.restore.plan import Have, Read
from ftckpt.restore.source import BlockAt, ChunkAt, PackageAt, Place, Source, place_of_json
from ftckpt.state.fragment import Box, Fragment

WAIT_SECS = 20.0
POLL_SECS = 0.05
SLOT_BYTES = 1 << 12


class Exchange:
    """What the ranks of a job share when they are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.parts: list[bytes] = [b""] * size
        self.lines = {(a, b): queue.Queue[torch.Tensor](1) for a in range(size) for b in range(size)}

    def patiently(self, action: Callable[[], Any]) -> Any:
        """Repeat a queue's action until it is done, another rank has failed, or time is up."""
        deadline = time.monotonic() + WAIT_SECS
        while not self.barrier.broken and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty, queue.Full):
                return action()
        raise TimeoutError("the other rank does not answer")


class ThreadGroup:
    """Stands in for ``Group``: one message at a time between two ranks, as gloo has it."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.exchange, self.rank, self.size = exchange, rank, exchange.size
        self.longest = 0

    def gather(self, data: Bytes) -> list[bytes]:
        self.exchange.parts[self.rank] = bytes(data)
        self.exchange.barrier.wait(WAIT_SECS)
        parts = list(self.exchange.parts)
        self.exchange.barrier.wait(WAIT_SECS)
        return parts

    def send(self, data: torch.Tensor, to: int) -> None:
        self.longest = max(self.longest, data.numel())
        line, copy = self.exchange.lines[self.rank, to], data.clone()
        self.exchange.patiently(lambda: line.put(copy, timeout=POLL_SECS))

    def receive(self, into: torch.Tensor, source: int) -> None:
        line = self.exchange.lines[source, self.rank]
        data = self.exchange.patiently(lambda: line.get(timeout=POLL_SECS))
        assert data.shape == into.shape
        into.copy_(data)


class FakeArenas:
    """Slots of random bytes, by arena and slot."""

    def __init__(self, slots: dict[tuple[str, int], bytes]) -> None:
        self.slots = slots

    def view(self, place: Place) -> memoryview:
        assert isinstance(place, Source)
        if (place.arena, place.slot) not in self.slots:
            raise ArenaError(f"{place.arena}: no such arena")
        return memoryview(self.slots[place.arena, place.slot])


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


Plan = list[list[tuple[int, int, list[tuple[int, int]]]]]
"""Per asking rank: reader, slot, and extents."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    size = draw(st.integers(1, 4))
    extent = st.integers(0, SLOT_BYTES).flatmap(lambda at: st.tuples(st.just(at), st.integers(0, SLOT_BYTES - at)))
    wish = st.tuples(st.integers(0, size - 1), st.integers(0, 1), st.lists(extent, max_size=4))
    return [draw(st.lists(wish, max_size=3)) for _ in range(size)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans(), st.sampled_from([64, 1000, 1 << 20]))
def test_every_rank_gets_every_byte_it_wants(monkeypatch: pytest.MonkeyPatch, plan: Plan, bound: int) -> None:
    monkeypatch.setattr(load, "MESSAGE_BYTES", bound)
    bits = np.random.default_rng(0)
    slots = {(f"a{r}", s): bits.bytes(SLOT_BYTES) for r in range(len(plan)) for s in range(2)}

    def rank_main(group: ThreadGroup) -> tuple[list[torch.Tensor], int, int]:
        arenas = FakeArenas({key: data for key, data in slots.items() if key[0] == f"a{group.rank}"})
        buffers, transfers = [], []
        for reader, slot, extents in plan[group.rank]:
            live = torch.zeros(8 + sum(nbytes for _, nbytes in extents), dtype=torch.uint8)
            starts = np.cumsum([8, *(nbytes for _, nbytes in extents)]).tolist()
            targets = tuple(Target(live, start) for start in starts[:-1])
            transfers.append(Transfer(Source("n", f"a{reader}", slot), reader, tuple(extents), targets))
            buffers.append(live)
        received = execute(cast(Group, group), transfers, cast(OpenArenas, arenas))
        return buffers, received, group.longest

    for rank, (buffers, received, longest) in enumerate(run_ranks(len(plan), rank_main)):
        foreign = 0
        for (reader, slot, extents), live in zip(plan[rank], buffers, strict=True):
            wanted = b"".join(slots[f"a{reader}", slot][at : at + nbytes] for at, nbytes in extents)
            assert live.numpy().tobytes() == bytes(8) + wanted
            foreign += len(wanted) if reader != rank else 0
        assert received == foreign
        assert longest <= bound


def test_a_source_that_one_rank_cannot_open_is_an_error_on_all_before_any_message() -> None:
    def rank_main(group: ThreadGroup) -> tuple[str, int]:
        buffer = torch.zeros(8, dtype=torch.uint8)
        wanted = [Transfer(Source("n", "a0", 7), 0, ((0, 8),), (Target(buffer, 0),))] if group.rank == 1 else []
        arenas = FakeArenas({("a0", 0): bytes(SLOT_BYTES)})
        with pytest.raises(ArenaError) as error:
            execute(cast(Group, group), wanted, cast(OpenArenas, arenas))
        return str(error.value), group.longest

    assert run_ranks(3, rank_main) == [("rank 0: a0: no such arena", 0)] * 3


PLACES = [Source("n", "a", 1), ChunkAt("n", "a", 1, 2), BlockAt("n", "a", "parity.node.0", 3), PackageAt("n", "f")]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: type(place).__name__)
def test_a_place_survives_json(place: Place) -> None:
    assert place_of_json(json.loads(json.dumps(place.to_json()))) == place


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=8), st.integers(1, 64))
def test_messages_are_bounded_full_and_in_order(extents: list[tuple[int, int]], bound: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "MESSAGE_BYTES", bound)
        found = list(messages(extents))
    sizes = [sum(nbytes for _, _, nbytes in message) for message in found]
    assert all(size == bound for size in sizes[:-1]) and all(0 < size <= bound for size in sizes)
    flat = [(i, begin + k) for message in found for i, begin, nbytes in message for k in range(nbytes)]
    assert flat == [(i, k) for i, (_, nbytes) in enumerate(extents) for k in range(nbytes)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float64, torch.uint8])
def test_elements_of_a_read_land_at_their_bytes(dtype: torch.dtype) -> None:
    item = dtype.itemsize
    names = {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.bool: "BOOL",
        torch.float64: "F64",
        torch.uint8: "U8",
    }
    fragment = Fragment.whole("w", names[dtype], (10,), Box((0,), (10,)))
    live = [torch.zeros(4, dtype=dtype), torch.zeros(6, dtype=dtype)]
    runs = [(2, 1, 3), (7, 4, 2)]
    source = Source("n", "a0", 0)
    planned = transfer(source, 0, [Read(Have(0, fragment, 64), 1, tuple(run(*blocks) for blocks in runs))], live)
    assert planned.extents == ((64 + 2 * item, 3 * item), (64 + 7 * item, 2 * item))
    data = bytes([0, 1] * (SLOT_BYTES // 2))
    run_ranks(
        1, lambda group: execute(cast(Group, group), [planned], cast(OpenArenas, FakeArenas({("a0", 0): data})))
    )
    held = data[64 : 64 + 10 * item]
    wanted = bytearray(6 * item)
    for begin, at, numel in runs:
        wanted[at * item : (at + numel) * item] = held[begin * item : (begin + numel) * item]
    assert live[1].view(torch.uint8).numpy().tobytes() == bytes(wanted)
    assert not live[0].any()


def test_arenas_are_opened_once_and_all_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []

    class Opened:
        def __init__(self, path: Path) -> None:
            self.path = path
            calls.append(f"open {path.name}")

        @classmethod
        def open(cls, path: Path) -> Opened:
            return cls(path)

        def close(self) -> None:
            calls.append(f"close {self.path.name}")

    monkeypatch.setattr(load, "Arena", Opened)
    arenas = OpenArenas(tmp_path)
    assert arenas.get("a") is arenas.get("a") is not arenas.get("b")
    arenas.close()
    arenas.close()
    assert calls == ["open a", "open b", "close a", "close b"]
