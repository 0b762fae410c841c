"""The SMP's checks: whichever store is the last, whatever bit flips, no reader gets a result that was not found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftckpt.errors import ArenaError
from ftckpt.memory.checks import Check, Checks, CheckState
from ftckpt.memory.record import Stores
from ftckpt.model.snapshot import SnapshotId
from tests.support.errors import raises

CHUNKS = 3
SLOTS = 2
DIGEST = b"d" * 16
OLD, NEW = b"o" * 16, b"n" * 16


def new_checks(arena_dir: Path) -> Checks:
    return Checks.create_or_open(arena_dir, SLOTS, CHUNKS, DIGEST, True)


def opened(arena_dir: Path) -> Checks:
    """Opens the checks as a reader."""
    return Checks.create_or_open(arena_dir, SLOTS, CHUNKS, DIGEST, False)


@pytest.fixture
def writer(arena_root: Path) -> Iterator[Checks]:
    with closing(new_checks(arena_root)) as made:
        yield made


@pytest.fixture
def reader(arena_root: Path, writer: Checks) -> Iterator[Checks]:
    with closing(opened(arena_root)) as made:
        yield made


def hashes_of(iteration: int) -> Any:
    return np.arange(CHUNKS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(iteration)


def check(checks: Checks, slot: int, lineage: bytes, iteration: int) -> None:
    checks.store_checked(
        slot, (SnapshotId(lineage, iteration), 10 * iteration), hashes_of(iteration), 0.25 * iteration
    )


def assert_tells(found: Check | None, state: CheckState, lineage: bytes, iteration: int) -> None:
    assert found is not None and found.state == state
    assert found.seal_id == (SnapshotId(lineage, iteration), 10 * iteration) and found.gap_secs == 0.25 * iteration
    assert found.chunk_hashes.dtype == np.uint64
    assert found.chunk_hashes.tolist() == hashes_of(iteration).tolist()


def test_checked_then_encoded_as_readers_see_it(arena_root: Path, writer: Checks, reader: Checks) -> None:
    assert [reader.read(slot) for slot in range(SLOTS)] == [None, None]
    check(writer, 1, NEW, 3)
    assert_tells(reader.read(1), CheckState.CHECKED, NEW, 3)
    writer.store_encoded(1, (SnapshotId(NEW, 3), 30))
    assert_tells(reader.read(1), CheckState.ENCODED, NEW, 3)
    assert reader.read(0) is None
    check(writer, 1, NEW, 5)
    assert_tells(reader.read(1), CheckState.CHECKED, NEW, 5)
    check(writer, 1, NEW, 6)
    writer.close()
    with closing(new_checks(arena_root)) as again:
        assert_tells(again.read(1), CheckState.CHECKED, NEW, 6)
        assert not reader.replaced and not again.replaced
    with pytest.raises(TypeError):
        reader.drop_encoded(0)


def test_what_is_encoded_must_be_what_was_checked(writer: Checks) -> None:
    three, four = SnapshotId(NEW, 3), SnapshotId(NEW, 4)
    others = [(0, (three, 30)), (1, (SnapshotId(OLD, 3), 30)), (1, (four, 30)), (1, (three, 31))]
    for slot, seal_id in [(1, (three, 30)), *others]:
        with raises(ArenaError, "CHECKED", "iteration"):
            writer.store_encoded(slot, seal_id)
        check(writer, 1, NEW, 3)
    assert_tells(writer.read(1), CheckState.CHECKED, NEW, 3)


def test_what_was_checked_is_there_at_every_store_that_revokes_encoded(
    writer: Checks, reader: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainer takes no checksums there are no others: a later hash might be of corrupt bytes."""
    for slot in range(2):
        check(writer, slot, OLD, slot + 1)
        writer.store_encoded(slot, (SnapshotId(OLD, slot + 1), 10 * (slot + 1)))
    store, seen = Stores.store, list[bool]()

    def told(self: Stores, offset: int, data: bytes | memoryview) -> None:
        store(self, offset, data)
        found = reader.read(0)
        seen.append(found is not None and found.chunk_hashes.tolist() == hashes_of(1).tolist())

    monkeypatch.setattr(Stores, "store", told)
    writer.drop_encoded(0)
    assert seen and all(seen)
    assert_tells(reader.read(0), CheckState.CHECKED, OLD, 1)
