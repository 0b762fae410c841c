"""Slots: their files, pages, and verification."""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_load import run_ranks

from ftckpt.capture.copier import HostCopier
from ftckpt.errors import ArenaError, CorruptError
from ftckpt.memory import destinations, slot_file
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import SlotState
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.destinations import LoadTarget, TargetPart
from ftckpt.memory.directory import node_directory
from ftckpt.memory.locations import SlotAt
from ftckpt.memory.mapping import Mapping, create_mapping, join_pages, open_mapping
from ftckpt.memory.slot_file import SlotFile, SlotShard
from ftckpt.memory.slots import slot_name
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.chunk_reads import Part, chunks_of, land
from ftckpt.restore.context import RestoreContext
from ftckpt.restore.decide import Decision
from ftckpt.restore.plan import StridedCopy
from ftckpt.restore.staging import StagingBuffers
from ftckpt.restore.threads import in_order
from ftckpt.restore.verify import SlotVerifier
from tests.components.test_arena import MANIFEST, write
from tests.support.errors import raises
from tests.support.waiting import until

# --- slots are read by calls and on threads, and what is read is what the arena has mapped ---


@pytest.fixture
def arena(arena_root: Path) -> Arena:
    arena = Arena.create(node_directory(arena_root, "job", "node"), MANIFEST, 2)
    write(arena, 0, 3)
    return arena


@pytest.mark.parametrize("piece_bytes", [1000, 8192, 1 << 20])
def test_a_chunk_has_the_same_checksum_by_calls(
    arena: Arena, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_file, "_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(destinations, "_of_thread", threading.local())
    chunks = range(len(arena.image.chunks))
    with closing(SlotFile(arena, 0)) as file:
        hashes = [file.take([TargetPart(span, ())]) for span in arena.image.chunks]
        data = bytearray(5000)
        file.read_into(777, memoryview(data))
    assert hashes == [arena.hash_chunk(0, chunk) for chunk in chunks]
    assert data == arena.slot(0)[777:5777]


def test_a_slot_gives_only_what_is_proven(arena: Arena) -> None:
    expected, taken = dict(enumerate(arena.hashes(0).tolist())), arena.control.record(0).snapshot

    def shard() -> SlotShard:
        return SlotShard(arena, 0, SlotFile(arena, 0), taken, expected)

    assert shard().objects() == bytes(arena.read_objects(0))
    span = arena.image.chunks[1]
    arena.slot(0)[span.end - 1] ^= 1
    first = arena.image.chunks[0]
    shard().scatter(0, lambda: [TargetPart(first, [LoadTarget(first.begin, memoryview(bytearray(first.nbytes)))])])
    for wanted in ([LoadTarget(span.begin, memoryview(bytearray(3)))], []):
        with raises(CorruptError, "chunk 1"):
            shard().scatter(1, lambda wanted=wanted: [TargetPart(span, wanted)])  # type: ignore[misc]
    with raises(CorruptError, "record"):
        SlotShard(arena, 0, SlotFile(arena, 0), SnapshotId(bytes(16), 3), expected)
    arena.slot(0)[arena.image.objects.begin] ^= 1
    with raises(CorruptError, "objects"):
        shard()


def test_what_is_between_rows_is_read_beside_them(arena: Arena) -> None:
    """A chunk is verified with all its bytes, though few are wanted, and these not as one run."""
    expected, snapshot = dict(enumerate(arena.hashes(0).tolist())), arena.control.record(0).snapshot
    with closing(SlotFile(arena, 0)) as file:
        shard, begin = SlotShard(arena, 0, file, snapshot, expected), arena.image.chunks[1].begin + 1000
        copy = StridedCopy(begin, 0, (20, 7), (100, 1), (7, 1))
        live, there = torch.zeros(140, dtype=torch.uint8), torch.tensor(list(arena.slot(0)[begin:]))
        for chunk in chunks_of(shard, [Part(copy, live)]):
            land(chunk, StagingBuffers())
    assert torch.equal(live.view(copy.shape), there.as_strided(copy.shape, copy.source_strides))


def test_another_file_under_the_name_of_a_slot_is_not_read(arena: Arena) -> None:
    path = arena.path / slot_name(0)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with raises(ArenaError):
        SlotFile(arena, 0)


def test_a_file_that_ends_early_is_an_error(arena: Arena) -> None:
    with closing(SlotFile(arena, 0)) as file:
        os.truncate(arena.path / slot_name(0), 8192)
        with raises(ArenaError):
            file.read_into(4096, memoryview(bytearray(8192)))


def test_memory_between_begins_with_a_page_and_is_of_one_process() -> None:
    memory = destinations.scratch(5000)
    assert np.frombuffer(memory, np.uint8).ctypes.data % mmap.PAGESIZE == 0
    assert len(memory) == 5000 and destinations.scratch(10) is not memory
    memory[0] = 1
    if (child := os.fork()) == 0:
        destinations.scratch(10)[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert memory[0] == destinations.scratch(10)[0] == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_keep_the_order_and_begin_nothing_behind_an_error(threads: int) -> None:
    begun: list[int] = []

    def square(number: int) -> int:
        begun.append(number)
        if number == 40:
            raise ValueError("forty")
        return number * number

    assert list(in_order(square, range(40), threads)) == [number * number for number in range(40)]
    begun.clear()
    with pytest.raises(ValueError, match="forty"):
        list(in_order(square, range(1000), threads))
    assert len(begun) <= 41 + 2 * threads


# --- pages of slots ---


NBYTES = 8 << 20


def resident(path: Path) -> int:
    """Bytes of the file that this process has page tables for."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def slot_of(mapping: Mapping) -> torch.Tensor:
    return torch.frombuffer(mapping.data[:], dtype=torch.uint8)


def test_a_large_file_is_mapped_without_touching_its_pages(arena_root: Path) -> None:
    """A restart opens all arenas of a node; their pages would take seconds for each 100 GB."""
    path = arena_root / "file"
    with closing(create_mapping(path, NBYTES)):
        assert path.stat().st_blocks * 512 >= NBYTES, "room is reserved"
        assert resident(path) == 0
        with closing(open_mapping(path, NBYTES, writable=True)):
            assert resident(path) == 0


def test_the_copier_has_the_pages_of_slots_before_the_first_copy(arena_root: Path) -> None:
    path = arena_root / "file"
    with closing(create_mapping(path, NBYTES)) as mapping, closing(HostCopier()) as copier:
        mapping.data[5] = 7
        copier.prepare([slot_of(mapping)])
        until(lambda: resident(path) == NBYTES, "pages are mapped")
        assert bytes(mapping.data[:8]) == b"\0\0\0\0\0\7\0\0", "bytes stay as they are"


def test_joined_pages_keep_what_is_in_them(arena_root: Path) -> None:
    path, nbytes = arena_root / "file", (6 << 20) + 5
    mapped = create_mapping(path, nbytes)
    data = bytearray(os.urandom(nbytes))
    mapped.data[:] = data
    with path.open("r+b") as file:
        joined = join_pages(file.fileno(), 0, nbytes)
        mapped.data[5 << 20] = data[5 << 20] = 255 - data[5 << 20]  # by pages that were mapped before
        assert not join_pages(file.fileno(), 4096, nbytes - 4096), "no huge page begins there"
        assert join_pages(file.fileno(), 0, nbytes) == joined
    assert path.read_bytes() == bytes(mapped.data) == data
    mapped.close()


# --- ranks verify what a decision would take ---


RANKS = 3
SNAPSHOT = SnapshotId(b"1" * 16, 5)
OTHER = SnapshotId(b"1" * 16, 4)


class FakeArena:
    def __init__(self, name: str) -> None:
        self._good = "bad" not in name
        snapshot = OTHER if "other" in name else SNAPSHOT
        self.control = SimpleNamespace(record=lambda slot: SimpleNamespace(snapshot=snapshot))
        self.image = SimpleNamespace(chunks=[], file_bytes=0)

    def state(self, slot: int) -> SlotState:
        return SlotState.SEALED

    def hashes(self, slot: int) -> Any:
        return np.zeros(0, np.uint64)

    def damage(self, slot: int, record: Any, bad_chunks: Any) -> Corruption:
        return Corruption() if self._good else Corruption((0,))

    def gap_secs(self, slot: int) -> float:
        return 0.0


def verify(*decisions: Decision) -> list[list[bool]]:
    """Whether something bad was found, by rank and decision; x0 and x1 are ranks of node A, x2 is of B."""
    members = [SimpleNamespace(node=node, shard=f"x{i}") for i, node in enumerate("AAB")]
    events = SimpleNamespace(emit=lambda *_, **__: None, tell=lambda *_: None)
    arenas = SimpleNamespace(get=FakeArena, file=lambda at: SimpleNamespace(take=None))

    def run(group: Any) -> list[bool]:
        topology = SimpleNamespace(me=members[group.rank], members=members, is_node_leader=group.rank in (0, 2))
        topology.ranks_on = lambda node: [at for at, member in enumerate(members) if member.node == node]
        verifier = SlotVerifier(RestoreContext(group, topology, events, arenas))  # type: ignore[arg-type]
        return [bool(verifier.verify(decision)) for decision in decisions]

    return run_ranks(RANKS, run)


def test_a_slot_that_another_rank_has_verified_is_no_surprise() -> None:
    """After a bad slot the turns of all later shards shift."""
    b, c = SlotAt("A", "b", 0), SlotAt("A", "c", 0)
    first = Decision(SNAPSHOT, {"a": SlotAt("B", "a.bad", 0), "b": b, "c": c})
    second = Decision(SNAPSHOT, {"a": SlotAt("A", "a.good", 0), "b": b, "c": c})
    assert verify(first, second) == [[True, False]] * RANKS


def test_a_slot_that_holds_another_snapshot_by_now_is_bad() -> None:
    decision = Decision(SNAPSHOT, {"a": SlotAt("A", "a.other", 0)})
    assert verify(decision) == [[True]] * RANKS
