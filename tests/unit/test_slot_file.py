"""Slots are read by calls and on threads, and what is read is what the arena has mapped."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from ftckpt.errors import ArenaError
from ftckpt.restore import slot_file
from ftckpt.restore.slot_file import SlotFile
from ftckpt.restore.threads import in_order
from ftckpt.store.arena import Arena
from ftckpt.store.directory import node_directory
from ftckpt.store.slots import slot_name
from tests.support.errors import raises
from tests.unit.test_arena_segment import MANIFEST, write


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
    monkeypatch.setattr(slot_file, "_buffers", threading.local())
    chunks = range(len(arena.image.chunks))
    with closing(SlotFile(arena, 0)) as file:
        hashes = [file.hash_chunk(chunk) for chunk in chunks]
        data = bytearray(5000)
        file.read_into(777, memoryview(data))
    assert hashes == [arena.hash_chunk(0, chunk) for chunk in chunks]
    assert data == arena.slot(0)[777:5777]


def test_another_file_under_the_name_of_a_slot_is_not_read(arena: Arena) -> None:
    path = arena.path / slot_name(0)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with raises(ArenaError, "was replaced"):
        SlotFile(arena, 0)


def test_a_file_that_ends_early_is_an_error(arena: Arena) -> None:
    with closing(SlotFile(arena, 0)) as file:
        os.truncate(arena.path / slot_name(0), 8192)
        with raises(ArenaError, "ends before"):
            file.read_into(4096, memoryview(bytearray(8192)))


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
