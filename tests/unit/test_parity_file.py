"""Parity files: a reader finds the blocks of one whole snapshot or none, whatever died or flipped."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.errors import ArenaError, CorruptError, MemoryBudgetError, MismatchError
from ftckpt.protect import parity_file
from ftckpt.protect.groups import Member, ParityGroup
from ftckpt.protect.parity_file import ParityFile, list_parity, parity_bytes, parity_path
from ftckpt.protect.stripes import block_length, num_blocks

OLD, NEW = b"o" * 16, b"n" * 16


def group_of(code: str = "xor", losses: int = 1, mode: str = "node", members: int = 3) -> ParityGroup:
    sizes = [(5000, 5000, 4100, 5000, 7), (5000, 5000, 4000), (5000, 5000, 5000, 90), (5000,)]
    chosen = [Member(f"dp{i}", "n0", f"dp{i}.0123abcd", 0, sizes[i]) for i in range(members)]
    return ParityGroup.of(mode, code, losses, 5000, chosen)


GROUP = group_of()


@pytest.fixture
def node_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ftckpt-test-parity-", dir="/dev/shm"))
    for member in GROUP.members:
        (path / member.arena).mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def path(node_dir: Path) -> Path:
    return parity_path(node_dir / GROUP.members[1].arena, "node", 0)


def contents(block: int, nbytes: int, iteration: int) -> Any:
    return np.random.default_rng([block, iteration]).integers(0, 256, nbytes, dtype=np.uint8)


def write(file: ParityFile, lineage: bytes, iteration: int) -> None:
    file.begin(lineage, iteration)
    for block in range(file.num_blocks):
        file.put(block, contents(block, len(file.block(block)), iteration))
    file.seal()


def assert_holds(file: ParityFile, lineage: bytes, iteration: int) -> None:
    assert file.snapshot() == (lineage, iteration)
    for block in range(file.num_blocks):
        view = file.block(block)
        assert file.verify(block) and np.array_equal(view, contents(block, len(view), iteration))


@pytest.mark.parametrize("holder", range(4))
@pytest.mark.parametrize(("code", "losses"), [("xor", 1), ("rs", 2), ("rs", 3), ("mirror", 1), ("mirror", 2)])
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


def test_blocks_begin_on_pages_and_nothing_overlaps(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, NEW, 1)
    base = np.frombuffer(file._map.data, np.uint8).ctypes.data
    spans = sorted(
        (file.block(b).ctypes.data - base, file.block(b).ctypes.data - base + len(file.block(b)))
        for b in range(file.num_blocks)
    )
    assert all(begin % 4096 == 0 for begin, _ in spans) and spans[-1][1] <= path.stat().st_size
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    file.close()


def test_the_file_is_private_and_allocated(path: Path) -> None:
    before = os.umask(0)
    try:
        ParityFile.create(path, GROUP, 1).close()
    finally:
        os.umask(before)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600 and status.st_blocks * 512 >= status.st_size
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_documented_offsets(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, NEW, 6)
    blocks, last = file.num_blocks, bytes(file.block(file.num_blocks - 1).data)
    file.close()
    raw = path.read_bytes()
    assert raw[:8] == b"FTCKPTPF" and struct.unpack_from("<IIII", raw, 8) == (1, 1, blocks, 0)
    text_bytes, nbytes, text_hash = struct.unpack_from("<QQQ", raw, 24)
    assert nbytes == len(raw) and struct.unpack_from("<Q", raw, 504)[0] == xxhash.xxh3_64_intdigest(raw[:504])
    assert raw[512] == 2 and struct.unpack_from("<16sq", raw, 520) == (NEW, 6)
    table = raw[4096 : 4096 + 8 * blocks]
    assert struct.unpack_from("<Q", raw, 568)[0] == xxhash.xxh3_64_intdigest(raw[520:568] + table)
    text = raw[4096 + 8 * blocks : 4096 + 8 * blocks + text_bytes]
    assert xxhash.xxh3_64_intdigest(text) == text_hash and ParityGroup.from_json(json.loads(text)) == GROUP
    assert struct.unpack_from("<Q", table, 8 * blocks - 8)[0] == xxhash.xxh3_64_intdigest(last)


def test_a_block_computed_in_place(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    file.begin(NEW, 2)
    for block in range(file.num_blocks):
        view = file.block(block)
        view[:] = contents(block, len(view), 2)
        file.put(block, view)
    file.seal()
    assert_holds(file, NEW, 2)
    file.close()


def test_an_array_that_is_not_contiguous(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    file.begin(NEW, 2)
    for block in range(file.num_blocks):
        wide = np.zeros((len(file.block(block)), 2), np.uint8)
        wide[:, 1] = contents(block, len(wide), 2)
        file.put(block, wide[:, 1])
    file.seal()
    assert_holds(file, NEW, 2)
    file.close()


def test_order_of_calls_and_arguments(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    block = np.zeros(len(file.block(0)), np.uint8)
    for call in (file.seal, lambda: file.put(0, block)):
        with pytest.raises(ArenaError, match="call begin first"):
            call()
    with pytest.raises(ValueError, match="16 bytes"):
        file.begin(b"short", 1)
    file.begin(NEW, 1)
    file.put(0, block)
    for wrong in (block[:-1], block.astype(np.int8), block.reshape(1, -1)):
        with pytest.raises(ValueError, match="block 0 has"):
            file.put(0, wrong)
    with pytest.raises(ArenaError, match=f"{file.num_blocks - 1} blocks were not put"):
        file.seal()
    assert file.snapshot() is None
    for index in (-1, file.num_blocks):
        with pytest.raises(IndexError):
            file.block(index)
    write(file, NEW, 1)
    with pytest.raises(ArenaError, match="call begin first"):
        file.put(0, block)
    file.begin(NEW, 2)  # blocks put for another snapshot do not count
    with pytest.raises(ArenaError, match="blocks were not put"):
        file.seal()
    file.close()
    reader = ParityFile.open(path)
    with pytest.raises(TypeError):
        reader.begin(NEW, 3)
    assert not reader.block(0).flags.writeable
    reader.close()
    with pytest.raises(ArenaError, match="no member 3"):
        ParityFile.create(path, GROUP, 3)


class Killed(Exception):
    pass


class Dying(ParityFile):
    """Dies inside the store number ``fatal``, once a part of it is written."""

    stores = 0
    fatal = -1
    partial = 0

    def _store(self, offset: int, data: bytes | memoryview) -> None:
        self.stores += 1
        if self.stores == self.fatal:
            super()._store(offset, data[: self.partial])
            raise Killed
        super()._store(offset, data)


def deaths(path: Path) -> Iterator[bool]:
    """Leave the file as each possible death in writing a snapshot over another does; whether it was complete."""
    fatal = 1
    while True:
        for partial in (0, 1, 3, 8, 15, 23, 4000):
            path.unlink(missing_ok=True)
            ParityFile.create(path, GROUP, 1).close()
            file = ParityFile.open(path, True)
            write(file, OLD, 1)
            file.close()
            dying = Dying.open(path, True)
            assert isinstance(dying, Dying)
            dying.fatal, dying.partial = fatal, partial
            complete = True
            try:
                write(dying, NEW, 2)
            except Killed:
                complete = False
            dying.close()
            yield complete
            if complete:
                assert dying.stores == fatal - 1
                return
        fatal += 1


def test_death_at_any_store(path: Path) -> None:
    seen = set()
    for complete in deaths(path):
        file = ParityFile.open(path, True)
        found = file.snapshot()
        seen.add(found)
        assert (file._data[512] == 2) == (found is not None)  # nothing is ever claimed that is not proven
        if found == (OLD, 1):
            assert_holds(file, OLD, 1)
        elif found is not None:
            assert_holds(file, NEW, 2)
        assert not complete or found == (NEW, 2)
        for state in (0, 1, 2):  # the state alone proves nothing
            file._data[512] = state
            if file.snapshot() is not None:
                assert_holds(file, *((OLD, 1) if file.snapshot() == (OLD, 1) else (NEW, 2)))
        write(file, NEW, 3)
        assert_holds(file, NEW, 3)
        file.close()
    assert seen == {(OLD, 1), None, (NEW, 2)}


def test_a_state_byte_does_not_bring_back_what_was_given_up(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, NEW, 2)
    file.begin(NEW, 2)
    file.block(0)[0] ^= 1
    file._data[512] = 2
    assert file.snapshot() is None
    file.close()


def test_any_bit_flip_of_what_is_vouched_for_reads_as_none(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, NEW, 3)
    blocks = file.num_blocks
    for at in [512, *range(520, 576), *range(4096, 4096 + 8 * blocks)]:
        for bit in range(8):
            file._data[at] ^= 1 << bit
            assert file.snapshot() is None, (at, bit)
            file._data[at] ^= 1 << bit
    assert_holds(file, NEW, 3)
    for block in range(blocks):
        for at in (0, len(file.block(block)) - 1):
            file.block(block)[at] ^= 4
            assert [file.verify(other) for other in range(blocks)] == [other != block for other in range(blocks)]
            file.block(block)[at] ^= 4
    file.close()


def test_any_bit_flip_of_header_or_group_is_corrupt(path: Path) -> None:
    ParityFile.create(path, GROUP, 1).close()
    good = path.read_bytes()
    begin = 4096 + 8 * num_blocks(GROUP, 1)
    end = begin + struct.unpack_from("<Q", good, 24)[0]
    for at in [*range(512), *range(begin, end)]:
        damaged = bytearray(good)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"bad magic|checksum does not match"):
            ParityFile.open(path)


def resigned(raw: bytes, offset: int, value: bytes) -> bytes:
    data = bytearray(raw)
    data[offset : offset + len(value)] = value
    data[504:512] = xxhash.xxh3_64_intdigest(bytes(data[:504])).to_bytes(8, "little")
    return bytes(data)


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (12, u32(0), "not those of member 0"),
        (12, u32(3), "not those of member 3"),
        (12, u32((1 << 32) - 1), "not those of member"),
        (16, u32(0), "group's checksum"),
        (16, u32((1 << 32) - 1), "are announced"),
        (24, u64(17 << 20), "are announced"),
        (24, u64((1 << 64) - 1), "are announced"),
        (24, u64(0), "group's checksum"),
        (32, u64(1 << 50), "are announced"),
        (32, u64(4096), "are announced"),
    ],
)
def test_hostile_sizes(path: Path, offset: int, value: bytes, text: str) -> None:
    ParityFile.create(path, GROUP, 1).close()
    path.write_bytes(resigned(path.read_bytes(), offset, value))
    with pytest.raises(CorruptError, match=text):
        ParityFile.open(path)


def test_another_version_is_a_mismatch(path: Path) -> None:
    ParityFile.create(path, GROUP, 1).close()
    path.write_bytes(resigned(path.read_bytes(), 8, u32(2)))
    with pytest.raises(MismatchError, match="version 2"):
        ParityFile.open(path)


@pytest.mark.parametrize("length", [0, 7, 511, 4095, 4096, 5000])
def test_truncated(path: Path, length: int) -> None:
    ParityFile.create(path, GROUP, 1).close()
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ArenaError):
        ParityFile.open(path)


def with_group(raw: bytes, text: bytes) -> bytes:
    """The file with other JSON of a group, signed."""
    blocks, nbytes = struct.unpack_from("<I", raw, 16)[0], len(raw)
    begin = 4096 + 8 * blocks
    data = raw[:begin] + text + raw[begin + len(text) :]
    return resigned(data, 24, struct.pack("<QQQ", len(text), nbytes, xxhash.xxh3_64_intdigest(text)))


def test_json_that_is_no_group_or_another_one(path: Path) -> None:
    ParityFile.create(path, GROUP, 1).close()
    raw = path.read_bytes()
    wide = json.dumps(GROUP.to_json()).encode()
    renamed = json.dumps(GROUP.to_json() | {"name": "0" * 16}, separators=(",", ":"), sort_keys=True).encode()
    for text in (b"", b"{", b"[]", b"null", b"1e999", b"[" * 500, b'{"members":[]}', b"\xff", renamed):
        path.write_bytes(with_group(raw, text))
        with pytest.raises(CorruptError, match="no parity group"):
            ParityFile.open(path)
    other = json.dumps(group_of("rs", 2).to_json(), separators=(",", ":"), sort_keys=True).encode()
    for text in (other, wide):
        path.write_bytes(with_group(raw, text))
        with pytest.raises(CorruptError, match="are not those of member 1"):
            ParityFile.open(path)
    path.write_bytes(with_group(raw, json.dumps(GROUP.to_json(), separators=(",", ":"), sort_keys=True).encode()))
    ParityFile.open(path).close()


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=1, max_size=600))
def test_any_bytes_are_refused(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(ArenaError):
            ParityFile.open(Path(file.name))


def test_another_number_of_blocks_than_the_groups(path: Path) -> None:
    ParityFile.create(path, GROUP, 1).close()
    raw = path.read_bytes()
    blocks, begin = num_blocks(GROUP, 1), 4096 + 8 * num_blocks(GROUP, 1)
    moved = raw[:begin] + bytes(8) + raw[begin : 2 * 4096 - 8] + raw[2 * 4096 :]
    path.write_bytes(resigned(moved, 16, u32(blocks + 1)))
    with pytest.raises(CorruptError, match=f"{blocks + 1} blocks"):
        ParityFile.open(path)


def test_a_group_too_large_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_file, "MAX_GROUP_BYTES", 100)
    with pytest.raises(ArenaError, match="at most 100"):
        ParityFile.create(path, GROUP, 1)


def test_missing_and_links(path: Path) -> None:
    with pytest.raises(ArenaError, match="cannot be opened"):
        ParityFile.open(path)
    path.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(ArenaError):
        ParityFile.open(path)


def test_create_replaces_and_views_outlive(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, OLD, 1)
    other = ParityFile.create(path, group_of("rs", 2), 0)
    write(other, NEW, 2)
    assert_holds(file, OLD, 1)
    view = file.block(0)
    file.close()
    assert np.array_equal(view, contents(0, len(view), 1))
    other.close()
    again = ParityFile.open(path)
    assert_holds(again, NEW, 2)
    again.close()


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, MemoryBudgetError), (errno.EIO, ArenaError)])
def test_no_room_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[Exception]
) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, OLD, 1)

    def full(*args: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(kind):
        ParityFile.create(path, GROUP, 1)
    assert_holds(file, OLD, 1)
    assert list(path.parent.iterdir()) == [path]
    file.close()


def test_list_parity(node_dir: Path) -> None:
    assert list_parity(node_dir) == [] and list_parity(node_dir / "none") == []
    for holder, member in enumerate(GROUP.members):
        for index in (0, 1):
            ParityFile.create(parity_path(node_dir / member.arena, "node", index), GROUP, holder).close()
    for stranger in (".parity.node.0.new", "parity.node.2", "parity.raid.0", "slot0.safetensors"):
        (node_dir / GROUP.members[0].arena / stranger).write_bytes(b"")
    names = list_parity(node_dir)
    assert [(n.arena, n.mode, n.index) for n in names] == [
        (m.arena, "node", i) for m in GROUP.members for i in (0, 1)
    ]
    for name in names:
        file = ParityFile.open(name.path)
        assert GROUP.members[file.holder].arena == name.arena
        file.close()


WRITE = """
import sys
from pathlib import Path
import numpy as np
from ftckpt.protect.parity_file import ParityFile
file = ParityFile.open(Path(sys.argv[1]), True)
print("ready", flush=True)
iteration = 10
while True:
    iteration += 1
    file.begin(b"n" * 16, iteration)
    for block in range(file.num_blocks):
        data = np.random.default_rng([block, iteration]).integers(0, 256, len(file.block(block)), dtype=np.uint8)
        file.put(block, data)
    file.seal()
"""


def test_a_killed_writer_leaves_one_snapshot_or_none(path: Path) -> None:
    file = ParityFile.create(path, GROUP, 1)
    write(file, OLD, 1)
    for round_ in range(8):
        with subprocess.Popen([sys.executable, "-c", WRITE, str(path)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            time.sleep(0.0007 * round_)
            child.kill()
        found = file.snapshot()
        if found is not None:
            assert_holds(file, *found)
    file.close()


def test_two_that_create_one_file_do_not_meet(path: Path) -> None:
    """A target that was given up leaves a thread behind that still allocates what the next one allocates, too."""
    (path.parent / ".parity.node.0.0123abcd.new").write_bytes(b"what a killed process left")
    errors: list[Exception] = []

    def create() -> None:
        try:
            for _ in range(20):
                ParityFile.create(path, GROUP, 0).close()
                ParityFile.open(path).close()
        except Exception as error:  # noqa: BLE001 - told to the test
            errors.append(error)

    threads = [threading.Thread(target=create) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and list(path.parent.iterdir()) == [path]
