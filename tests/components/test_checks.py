"""The SMP's checks: whichever store is the last, whatever bit flips, no reader gets a result that was not found."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftckpt.errors import ArenaError, CorruptError
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


def test_a_reader_beside_the_writer_never_sees_a_mixture(writer: Checks, reader: Checks) -> None:
    ended = threading.Event()

    def write() -> None:
        for iteration in range(1, 4000):
            check(writer, 1, NEW, iteration)
            if iteration % 3 == 0:
                writer.store_encoded(1, (SnapshotId(NEW, iteration), 10 * iteration))
        ended.set()

    thread = threading.Thread(target=write)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        deadline = time.monotonic() + 60
        while not ended.is_set() and time.monotonic() < deadline:
            found = reader.read(1)
            if found is not None:
                assert_tells(found, found.state, NEW, found.snapshot.iteration)
                assert found.state == CheckState.CHECKED or found.snapshot.iteration % 3 == 0
        thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert ended.is_set()


def test_readers_refuse_and_the_writer_replaces_what_is_bad(arena_root: Path) -> None:
    path = arena_root / "checks"
    with pytest.raises(ArenaError):
        opened(arena_root)
    stale = new_checks(arena_root)
    check(stale, 0, OLD, 1)
    good = path.read_bytes()
    for at in (0, 9, 13, 17, 33, 100, 503, 504, 511):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(CorruptError):
            opened(arena_root)
    for damaged in (b"x", good[:100], good[:-1], good + b"\0", good[:511]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            opened(arena_root)
    for slots, chunks, digest in ((3, CHUNKS, DIGEST), (SLOTS, 4, DIGEST), (SLOTS, CHUNKS, b"e" * 16)):
        path.write_bytes(good)
        with raises(CorruptError, "arena"):
            Checks.create_or_open(arena_root, slots, chunks, digest, False)
        fresh = Checks.create_or_open(arena_root, slots, chunks, digest, True)
        assert fresh.read(0) is None and stale.replaced and not fresh.replaced
        fresh.close()
    stale.close()


CREATE = """
import sys
from pathlib import Path
from ftckpt.memory import checks
print("ready", flush=True)
while True:
    checks._create(Path(sys.argv[1]) / "checks", 2, 3, b"d" * 16)
"""


def test_a_kill_while_it_is_created_leaves_none_or_a_good_one(arena_root: Path) -> None:
    for round_ in range(5):
        with suppress(FileNotFoundError):
            (arena_root / "checks").unlink()
        command = [sys.executable, "-c", CREATE, str(arena_root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            time.sleep(0.001 * round_)  # any instant
            child.kill()
        if (arena_root / "checks").exists():
            opened(arena_root).close()
        new_checks(arena_root).close()
        half_made = {file.name for file in arena_root.iterdir()} - {"checks"}
        assert len(half_made) <= 1 and all(re.fullmatch(r"\.checks\.[0-9a-f]{8}\.new", name) for name in half_made)
    (arena_root / "checks").unlink()
    new_checks(arena_root).close()  # a half-made one is no obstacle, and does not stay
    assert [file.name for file in arena_root.iterdir()] == ["checks"]
