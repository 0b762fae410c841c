"""Parity files: a reader finds the blocks of one whole snapshot or none, whatever died or flipped."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ftckpt.errors import ArenaError, CorruptError, MemoryBudgetError
from ftckpt.memory import parity_file
from ftckpt.memory.parity_file import FORMAT, ParityFile, list_parity, parity_bytes, parity_path
from ftckpt.memory.record import SEALED, Header
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import Member, ParityGroup
from ftckpt.parity.stripes import block_length, num_blocks
from tests.support.errors import raises
from tests.support.killing import fails_with
from tests.support.processes import running_python

OLD, NEW = b"o" * 16, b"n" * 16


def group_of(code: str = "xor", losses: int = 1, mode: str = "node", members: int = 3) -> ParityGroup:
    sizes = [(5000, 5000, 4100, 5000, 7), (5000, 5000, 4000), (5000, 5000, 5000, 90), (5000,)]
    chosen = [Member(f"dp{i}", "n0", f"dp{i}.0123abcd", 0, sizes[i]) for i in range(members)]
    return ParityGroup.of(mode, code, losses, 5000, chosen)


GROUP = group_of()


@pytest.fixture
def node_dir(arena_root: Path) -> Path:
    for member in GROUP.members:
        (arena_root / member.arena).mkdir()
    return arena_root


@pytest.fixture
def path(node_dir: Path) -> Path:
    return parity_path(node_dir / GROUP.members[1].arena, "node", 0)


@pytest.fixture
def file(path: Path) -> Iterator[ParityFile]:
    with closing(ParityFile.create(path, GROUP, 1)) as made:
        yield made


def contents(block: int, nbytes: int, iteration: int) -> Any:
    return np.random.default_rng([block, iteration]).integers(0, 256, nbytes, dtype=np.uint8)


def write(file: ParityFile, lineage: bytes, iteration: int) -> None:
    file.begin(SnapshotId(lineage, iteration))
    for block in range(file.num_blocks):
        file.put(block, contents(block, len(file.block(block)), iteration))
    file.seal()


def assert_holds(file: ParityFile, lineage: bytes, iteration: int) -> None:
    assert file.snapshot() == SnapshotId(lineage, iteration)
    for block in range(file.num_blocks):
        view = file.block(block)
        assert file.verify(block) and np.array_equal(view, contents(block, len(view), iteration))


@pytest.mark.parametrize("holder", range(4))
@pytest.mark.parametrize(("code", "losses"), [("xor", 1), ("rs", 2), ("rs", 3), ("mirror", 1)])
def test_every_holder_of_every_code(path: Path, code: str, losses: int, holder: int) -> None:
    group = group_of(code, losses, "peer", 4)
    file = ParityFile.create(path, group, holder)
    assert file.num_blocks == num_blocks(group, holder)
    assert [len(file.block(b)) for b in range(file.num_blocks)] == [
        block_length(group, holder, b) for b in range(file.num_blocks)
    ]
    assert file.snapshot() is None
    write(file, NEW, 4)
    assert path.stat().st_size == parity_bytes(group, holder)
    for writable in (False, True):
        again = ParityFile.open(path, writable)
        assert (again.group, again.holder) == (group, holder)
        assert_holds(again, NEW, 4)
        again.close()
    file.close()


def test_blocks_begin_on_pages_and_nothing_overlaps(path: Path, file: ParityFile) -> None:
    write(file, NEW, 1)
    base = np.frombuffer(file._map.data, np.uint8).ctypes.data
    spans = sorted(
        (file.block(b).ctypes.data - base, file.block(b).ctypes.data - base + len(file.block(b)))
        for b in range(file.num_blocks)
    )
    assert all(begin % 4096 == 0 for begin, _ in spans) and spans[-1][1] <= path.stat().st_size
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_the_file_is_private_and_allocated(path: Path) -> None:
    before = os.umask(0)
    try:
        ParityFile.create(path, GROUP, 1).close()
    finally:
        os.umask(before)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_blocks * 512 >= status.st_size
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_block_computed_in_place(file: ParityFile) -> None:
    file.begin(SnapshotId(NEW, 2))
    for block in range(file.num_blocks):
        view = file.block(block)
        view[:] = contents(block, len(view), 2)
        file.put(block, view, xxhash.xxh3_64_intdigest(view.data) if block % 2 else None)
    file.seal()
    assert_holds(file, NEW, 2)
    file.begin(SnapshotId(NEW, 3))
    file.put(0, file.block(0), 5)  # what the caller hashed was something else
    assert not file.verify(0)


def test_an_array_that_is_not_contiguous(file: ParityFile) -> None:
    file.begin(SnapshotId(NEW, 2))
    for block in range(file.num_blocks):
        wide = np.zeros((len(file.block(block)), 2), np.uint8)
        wide[:, 1] = contents(block, len(wide), 2)
        file.put(block, wide[:, 1])
    file.seal()
    assert_holds(file, NEW, 2)


def test_order_of_calls_and_arguments(path: Path, file: ParityFile) -> None:
    block = np.zeros(len(file.block(0)), np.uint8)
    for call in (file.seal, lambda: file.put(0, block)):
        with pytest.raises(ArenaError):
            call()
    file.begin(SnapshotId(NEW, 1))
    file.put(0, block)
    for wrong in (block[:-1], block.astype(np.int8), block.reshape(1, -1)):
        with raises(ValueError, "0"):
            file.put(0, wrong)
    with raises(ArenaError, f"{file.num_blocks - 1} blocks"):
        file.seal()
    assert file.snapshot() is None
    for index in (-1, file.num_blocks):
        with pytest.raises(IndexError):
            file.block(index)
    write(file, NEW, 1)
    with pytest.raises(ArenaError):
        file.put(0, block)
    file.begin(SnapshotId(NEW, 2))  # blocks put for another snapshot do not count
    with pytest.raises(ArenaError):
        file.seal()
    with closing(ParityFile.open(path)) as reader:
        with pytest.raises(TypeError):
            reader.begin(SnapshotId(NEW, 3))
        assert not reader.block(0).flags.writeable
    with raises(ArenaError, "3"):
        ParityFile.create(path, GROUP, 3)


def test_a_state_byte_does_not_bring_back_what_was_given_up(file: ParityFile) -> None:
    write(file, NEW, 2)
    file.begin(SnapshotId(NEW, 2))
    file.block(0)[0] ^= 1
    file._stores.data[FORMAT.records_offset] = SEALED
    assert file.snapshot() is None


def with_group(path: Path, text: bytes, holder: int = 1) -> None:
    """The file with other JSON of a group, in a header that fits it."""
    raw = bytearray(path.read_bytes())
    words = struct.unpack_from("<I", raw, 16)[0]
    FORMAT.write(memoryview(raw), Header(1, words, len(raw), text, numbers=(holder, 0, 0)))
    path.write_bytes(raw)


def test_json_that_is_no_group_or_another_one(path: Path) -> None:
    ParityFile.create(path, GROUP, 1).close()
    wide = json.dumps(GROUP.to_json()).encode()
    renamed = json.dumps(GROUP.to_json() | {"name": "0" * 16}, separators=(",", ":"), sort_keys=True).encode()
    for text in (b"", b"{", b"[]", b"null", b"1e999", b"[" * 500, b'{"members":[]}', b"\xff", renamed):
        with_group(path, text)
        with pytest.raises(CorruptError):
            ParityFile.open(path)
    other = json.dumps(group_of("rs", 2).to_json(), separators=(",", ":"), sort_keys=True).encode()
    for text in (other, wide):
        with_group(path, text)
        with raises(CorruptError, "member 1"):
            ParityFile.open(path)
    good = json.dumps(GROUP.to_json(), separators=(",", ":"), sort_keys=True).encode()
    for holder in (0, 3, (1 << 32) - 1):
        with_group(path, good, holder)
        with raises(CorruptError, f"member {holder}"):
            ParityFile.open(path)
    with_group(path, good)
    ParityFile.open(path).close()


def test_a_group_too_large_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_file, "MAX_GROUP_BYTES", 100)
    with raises(ArenaError, "100"):
        ParityFile.create(path, GROUP, 1)


def test_missing_and_links(path: Path) -> None:
    with pytest.raises(ArenaError):
        ParityFile.open(path)
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ArenaError):
        ParityFile.open(path)


def test_create_replaces_and_views_outlive(path: Path, file: ParityFile) -> None:
    write(file, OLD, 1)
    other = ParityFile.create(path, group_of("rs", 2), 0)
    write(other, NEW, 2)
    assert_holds(file, OLD, 1)
    view = file.block(0)
    file.close()
    assert np.array_equal(view, contents(0, len(view), 1))
    other.close()
    with closing(ParityFile.open(path)) as again:
        assert_holds(again, NEW, 2)


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, MemoryBudgetError), (errno.EIO, ArenaError)])
def test_no_room_leaves_the_old_one(
    path: Path, file: ParityFile, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    write(file, OLD, 1)
    monkeypatch.setattr(os, "posix_fallocate", fails_with(code))
    with pytest.raises(kind):
        ParityFile.create(path, GROUP, 1)
    assert_holds(file, OLD, 1)
    assert list(path.parent.iterdir()) == [path]


def test_list_parity(node_dir: Path) -> None:
    assert list_parity(node_dir) == [] and list_parity(node_dir / "none") == []
    for holder, member in enumerate(GROUP.members):
        for index in (0, 1):
            ParityFile.create(parity_path(node_dir / member.arena, "node", index), GROUP, holder).close()
    for stranger in (".parity.node.0.0123abcd.new", "parity.node.2", "parity.raid.0", "slot0.safetensors"):
        (node_dir / GROUP.members[0].arena / stranger).write_bytes(b"")
    names = list_parity(node_dir)
    assert [(n.arena, n.mode, n.index) for n in names] == [
        (m.arena, "node", i) for m in GROUP.members for i in (0, 1)
    ]
    for name in names:
        file = ParityFile.open(name.path)
        assert GROUP.members[file.holder].arena == name.arena
        file.close()


def test_an_arena_that_goes_while_parity_is_listed_hides_no_other(
    node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (member.arena for member in GROUP.members[:2])
    for arena in (first, second):
        ParityFile.create(parity_path(node_dir / arena, "node", 0), GROUP, 0).close()
    monkeypatch.setattr(parity_file, "list_arenas", lambda path: [path / first, path / "gone", path / second])
    assert [name.arena for name in list_parity(node_dir)] == sorted([first, second])


WRITE = """
import sys
from pathlib import Path
import numpy as np
from ftckpt.model.snapshot import SnapshotId
from ftckpt.memory.parity_file import ParityFile
file = ParityFile.open(Path(sys.argv[1]), True)
print("up", flush=True)
iteration = 10
while True:
    iteration += 1
    file.begin(SnapshotId(b"n" * 16, iteration))
    for block in range(file.num_blocks):
        data = np.random.default_rng([block, iteration]).integers(0, 256, len(file.block(block)), dtype=np.uint8)
        file.put(block, data)
    file.seal()
"""


def test_a_killed_writer_leaves_one_snapshot_or_none(path: Path, file: ParityFile) -> None:
    write(file, OLD, 1)
    for round_ in range(8):
        with running_python(WRITE, path):
            time.sleep(0.0007 * round_)  # any instant
        found = file.snapshot()
        if found is not None:
            assert_holds(file, found.lineage, found.iteration)


def test_two_that_create_one_file_do_not_meet(path: Path) -> None:
    """A target that was given up leaves a thread behind that still allocates what the next one allocates, too."""
    (path.parent / ".parity.node.0.0123abcd.new").write_bytes(b"what a killed process left")

    def create(_: int) -> None:
        for _ in range(20):
            ParityFile.create(path, GROUP, 0).close()
            ParityFile.open(path).close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(create, range(2)))
    assert list(path.parent.iterdir()) == [path]
