"""Record files of every format: whatever store is the last, whatever bit flips, only what was sealed is claimed."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ftckpt.errors import ArenaError, MismatchError
from ftckpt.memory import checks, control_block, package, parity_file
from ftckpt.memory.checks import Checks
from ftckpt.memory.control_block import ControlBlock, control_bytes
from ftckpt.memory.image import SlotImage
from ftckpt.memory.mapping import create_mapping, open_mapping
from ftckpt.memory.package import Package
from ftckpt.memory.parity_file import ParityFile
from ftckpt.memory.record import HEADER_BYTES, RECORD_BYTES, SEALED, WRITING, Format, Mark, Records, Stores
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.groups import Member, ParityGroup

OLD, NEW = SnapshotId(b"o" * 16, 1), SnapshotId(b"n" * 16, 3)
OTHER = SnapshotId(b"o" * 16, 2)
Claims = dict[str, Any]
"""The facts that a reader of a file believes, by their subject."""


def whole(key: str, shape: int) -> Fragment:
    return Fragment.whole(key, "U8", (shape,), Box((0,), (shape,)))


MANIFEST = Manifest({"dp": 0}, {"dp": 1}, (whole("w", 20000),), (whole("rng", 5),), 40, 8192)
CHUNKS = len(SlotImage.of(MANIFEST).chunks)
LENGTHS = (4096, 100, 50)
GROUP = ParityGroup.of("node", 1, 4096, [Member(f"dp{i}", "n", f"a{i}", 0, LENGTHS) for i in range(3)])
HOLDER = 2
"""It has fewer blocks than the others, so that it cannot be taken for one of them."""


@dataclass(frozen=True)
class Kind:
    """One format: how a file of it is made and changed, and what a reader finds in it."""

    format: Format
    make: Callable[[Path], None]
    read: Callable[[Path], Claims]
    changes: dict[str, Callable[[Path], None]]
    counts: tuple[int, ...] = (12, 16, 20)
    """The offsets of counts (u32) that its reader must not believe."""


# --- control ---


def hashes_of(snapshot: SnapshotId) -> list[int]:
    return [int.from_bytes(snapshot.lineage[:4], "little") * (snapshot.iteration + 7) + c for c in range(CHUNKS)]


def seal(block: ControlBlock, slot: int, snapshot: SnapshotId, hashed: bool = True) -> None:
    block.begin(slot)
    for chunk, value in enumerate(hashes_of(snapshot)):
        block.set_chunk_hash(slot, chunk, value)
    block.set_objects(slot, snapshot.iteration, 99)
    block.seal(slot, snapshot, hashed)


def changing_block(act: Callable[[ControlBlock], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(open_mapping(path, None, writable=True)) as mapping, memoryview(mapping.data) as view:
            act(ControlBlock(view))

    return change


def make_control(path: Path) -> None:
    with closing(create_mapping(path, control_bytes(2, CHUNKS))) as mapping, memoryview(mapping.data) as view:
        block = ControlBlock.format_into(view, SlotImage.of(MANIFEST), 2)
        seal(block, 0, OLD)
        seal(block, 1, OTHER)
        for mark in (block.mark_whole, block.mark_target, block.mark_protected):
            mark(OTHER)


def read_control(path: Path) -> Claims:
    with closing(open_mapping(path, None, writable=False)) as mapping, memoryview(mapping.data) as view:
        block = ControlBlock(view)
        found: Claims = {"whole": block.whole(), "target": block.target(), "protected": block.protected()}
        for slot in range(block.slots):
            r = block.record(slot)
            if r.sealed:
                values = (r.snapshot, r.hashed, r.objects_used, r.objects_hash, r.chunk_hashes.tolist())
                found[f"slot {slot}"] = values
        found["of"] = (block.slots, block.num_chunks, block.chunk_bytes, block.digest, block.shard)
    return {name: value for name, value in found.items() if value is not None}


CONTROL = Kind(
    control_block.FORMAT,
    make_control,
    read_control,
    {
        "seal": changing_block(lambda block: seal(block, 0, NEW)),
        "seal without hashes": changing_block(lambda block: seal(block, 0, NEW, hashed=False)),
        "void": changing_block(lambda block: block.void(0)),
        "mark whole": changing_block(lambda block: block.mark_whole(NEW)),
        "mark target": changing_block(lambda block: block.mark_target(NEW)),
        "take back": changing_block(lambda block: block.mark_protected(None)),
    },
    counts=(12, 20),  # the number of chunks is compared with that of the slots, when an arena is opened
)

# --- checks ---


def opened_checks(path: Path, writable: bool) -> Checks:
    return Checks(path, 2, CHUNKS, MANIFEST.digest, writable)


def check(file: Checks, slot: int, snapshot: SnapshotId, encoded: bool = False, gap: float = 0.25) -> None:
    file.store_checked(slot, (snapshot, 10 * snapshot.iteration), np.array(hashes_of(snapshot), np.uint64), gap)
    if encoded:
        file.store_encoded(slot, (snapshot, 10 * snapshot.iteration))


def changing_checks(act: Callable[[Checks], None]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(opened_checks(path, writable=True)) as file:
            act(file)

    return change


def make_checks(path: Path) -> None:
    made = Checks.create_or_open(path.parent, 2, CHUNKS, MANIFEST.digest, writable=True)
    with closing(made) as file:
        check(file, 0, OLD, encoded=True)
        check(file, 1, OTHER)
    made.path.rename(path)


def read_checks(path: Path) -> Claims:
    with closing(opened_checks(path, writable=False)) as file:
        found = {slot: file.read(slot) for slot in range(2)}
        claims: Claims = {}
        for slot, told in found.items():
            if told is not None:
                claims[f"slot {slot}"] = (told.seal_id, told.gap_secs, told.chunk_hashes.tolist())
                if told.state == checks.CheckState.ENCODED:
                    claims[f"slot {slot} encoded"] = told.seal_id
        return claims


CHECKS = Kind(
    checks.FORMAT,
    make_checks,
    read_checks,
    {
        "checked": changing_checks(lambda file: check(file, 0, NEW)),
        "checked again": changing_checks(lambda file: check(file, 0, OLD, gap=0.5)),
        "encoded": changing_checks(lambda file: file.store_encoded(1, (OTHER, 20))),
        "both": changing_checks(lambda file: check(file, 0, NEW, encoded=True)),
        "encoded is revoked": changing_checks(lambda file: file.drop_encoded(0)),
    },
)

# --- parity ---


def write_parity(path: Path, snapshot: SnapshotId) -> None:
    with closing(ParityFile.open(path, writable=True)) as file:
        file.begin(snapshot)
        for block in range(file.num_blocks):
            file.put(block, block_of(snapshot, block, len(file.block(block))))
        file.seal()


def block_of(snapshot: SnapshotId, block: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([snapshot.iteration, block]).integers(0, 256, nbytes, dtype=np.uint8)


def make_parity(path: Path) -> None:
    ParityFile.create(path, GROUP, HOLDER).close()
    write_parity(path, OLD)


def read_parity(path: Path) -> Claims:
    with closing(ParityFile.open(path)) as file:
        snapshot = file.snapshot()
        claims: Claims = {"of": (file.group, file.holder)}
        if snapshot is not None:
            claims["snapshot"] = snapshot
            for block in range(file.num_blocks):
                if file.verify(block):
                    claims[f"block {block}"] = file.block(block).tobytes()
        return claims


PARITY = Kind(
    parity_file.FORMAT, make_parity, read_parity, {"write": lambda path: write_parity(path, NEW)}, (12, 16, 20, 56)
)

# --- packages ---


def package_of(sequence: int) -> Package:
    volatile = b"rngs!"
    hashes = np.array(hashes_of(OLD), np.uint64)
    hashes[-1] = xxhash.xxh3_64_intdigest(volatile)
    return Package(MANIFEST, OLD, sequence, hashes, b"objects", volatile)


def make_package(path: Path) -> None:
    store_package(path, 1)


def store_package(path: Path, sequence: int) -> None:
    package.store(path.parent.parent, package_of(sequence).encode())


def read_package(path: Path) -> Claims:
    found = package.load(path)
    values = (found.manifest.encode(), found.snapshot, found.sequence, found.chunk_hashes.tolist())
    return {"package": (*values, found.objects, found.volatile)}


PACKAGE = Kind(package.FORMAT, make_package, read_package, {"store": lambda path: store_package(path, 2)})

KINDS = {"control": CONTROL, "checks": CHECKS, "parity": PARITY, "package": PACKAGE}
CHANGES = [(name, change) for name, kind in KINDS.items() for change in kind.changes]


@pytest.fixture
def folder(arena_root: Path) -> Path:
    path = arena_root / package.MIRROR_NAME
    path.mkdir()
    return path


def made(name: str, folder: Path) -> Path:
    """A file of that format with something sealed in it."""
    path = folder / f"{MANIFEST.shard}.{OLD}"
    path.unlink(missing_ok=True)
    KINDS[name].make(path)
    return path


def believed(kind: Kind, path: Path) -> Claims:
    """The facts that a reader believes; none where it refuses the file."""
    with suppress(ArenaError, MismatchError):
        return kind.read(path)
    return {}


class Killed(Exception):
    pass


class Stop:
    """Dies inside the store number ``fatal``, once ``partial`` bytes of it are written."""

    def __init__(self, fatal: int, partial: int) -> None:
        self.fatal, self.partial, self.stores = fatal, partial, 0
        self._store = Stores.store

    def dying(self) -> Callable[..., None]:
        def store(stores: Stores, offset: int, data: bytes | memoryview) -> None:
            self.stores += 1
            if self.stores == self.fatal:
                self._store(stores, offset, data[: self.partial])
                raise Killed
            self._store(stores, offset, data)

        return store


def dies(change: Callable[[Path], None], path: Path, fatal: int, partial: int) -> bool:
    """Whether ``change`` died at that store; the buffer is left as it is then."""
    stop = Stop(fatal, partial)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stores, "store", stop.dying())
        try:
            change(path)
        except Killed:
            return True
    assert stop.stores == fatal - 1, "a store went another way"
    return False


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_death_at_any_store(name: str, change: str, folder: Path) -> None:
    kind = KINDS[name]
    before = kind.read(path := made(name, folder))
    kind.changes[change](path)
    after = kind.read(path)
    assert before != after
    fatal, died = 1, True
    while died:
        for partial in (0, 1, 3, 8, 15, 23, 33, 63, 4000):
            path = made(name, folder)
            died = dies(kind.changes[change], path, fatal, partial)
            found = kind.read(path)
            assert died or found == after
            for key, value in found.items():
                assert value in (before.get(key), after.get(key)), f"{key} at store {fatal}, {partial} bytes"
            # What the change does not speak of is not touched.
            assert all(found.get(key) == value for key, value in before.items() if after.get(key) == value)
            if change.startswith("mark"):
                assert found.keys() == before.keys(), "a mark is known at every instant"
            if not died:
                break
        fatal += 1
    if name != "package":
        assert fatal > 3, "there are stores to die at"


def test_death_at_any_store_leaves_nothing_torn(folder: Path) -> None:
    """The remains of a kill are no corruption: none is reported."""
    for change in CONTROL.changes:
        fatal = 1
        while dies(CONTROL.changes[change], path := made("control", folder), fatal, 0):
            with closing(open_mapping(path, None, writable=False)) as mapping, memoryview(mapping.data) as view:
                assert not any(ControlBlock(view).record(slot).torn for slot in range(2)), (change, fatal)
            fatal += 1


@pytest.mark.parametrize("name", KINDS)
def test_no_bit_flip_changes_what_is_believed(name: str, folder: Path) -> None:
    kind = KINDS[name]
    before = kind.read(path := made(name, folder))
    raw = path.read_bytes()
    refused = 0
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        found = believed(kind, path)
        assert found.items() <= before.items(), f"a flip at {at} is believed"
        refused += found != before
    assert refused >= HEADER_BYTES, "no flip in a header goes unnoticed"
    if name == "package":
        assert refused == len(raw), "no flip in a package does"


def resigned(raw: bytes, offset: int, value: bytes) -> bytes:
    data = bytearray(raw)
    data[offset : offset + len(value)] = value
    data[504:512] = xxhash.xxh3_64_intdigest(bytes(data[:504])).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("name", KINDS)
def test_another_version_is_a_mismatch(name: str, folder: Path) -> None:
    path = made(name, folder)
    path.write_bytes(resigned(path.read_bytes(), 8, struct.pack("<I", 9)))
    with pytest.raises(MismatchError, match="version 9"):
        KINDS[name].read(path)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("value", [0, 1, 3, 65, 457, 1 << 20, 1 << 31, (1 << 32) - 1])
def test_hostile_sizes(name: str, value: int, folder: Path) -> None:
    """Nothing is allocated because a header asks for it, and no count that contradicts another one is believed."""
    kind = KINDS[name]
    before = kind.read(path := made(name, folder))
    raw = path.read_bytes()
    for at in kind.counts:
        path.write_bytes(resigned(raw, at, struct.pack("<I", value)))
        found = believed(kind, path)
        assert found in ({}, before), (at, value)
        assert found == {} or raw[at : at + 4] == struct.pack("<I", value), (at, value)
    for nbytes in (value, len(raw) - 1, len(raw) + 1, (1 << 64) - 1):
        path.write_bytes(resigned(raw, 24, struct.pack("<Q", nbytes)))
        with pytest.raises(ArenaError, match="sizes"):
            kind.read(path)


@pytest.mark.parametrize("name", KINDS)
def test_truncated_or_longer(name: str, folder: Path) -> None:
    path = made(name, folder)
    raw = path.read_bytes()
    for length in {0, 7, 511, 512, 513, 1024, 4095, 4096, 5000, len(raw) // 2, len(raw) - 64, len(raw) - 1}:
        path.write_bytes(raw[: min(length, len(raw) - 1)])
        with pytest.raises(ArenaError):
            KINDS[name].read(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(ArenaError):
        KINDS[name].read(path)


@pytest.mark.parametrize("name", ["control", "checks"])
def test_records_of_two_slots_cannot_be_exchanged(name: str, folder: Path) -> None:
    kind = KINDS[name]
    path = made(name, folder)
    raw = bytearray(path.read_bytes())
    begin, nbytes = kind.format.records_offset, RECORD_BYTES * 2
    raw[begin : begin + nbytes] = raw[begin + nbytes : begin + 2 * nbytes]
    path.write_bytes(raw)
    assert "slot 0" not in kind.read(path) and "slot 1" in kind.read(path)


def test_the_bytes_of_a_record_are_as_documented() -> None:
    data = memoryview(bytearray(256))
    records = Records(Stores(data), 64, 1, 9)
    records.give_up(0, WRITING)
    assert data[64] == WRITING
    records.put_fields(0, struct.pack("<QQQ", 5, 6, 7))
    records.put_words(0, struct.pack("<9Q", *range(9)))
    records.seal(0, NEW, flags=1)
    assert (data[64], data[65], bytes(data[66:72])) == (SEALED, 1, bytes(6))
    assert struct.unpack_from("<16sqQQQ", data, 72) == (NEW.lineage, NEW.iteration, 5, 6, 7)
    vouched = bytes(data[65:120]) + bytes(data[128:192]) + bytes(data[192:256])
    assert struct.unpack_from("<Q", data, 120)[0] == xxhash.xxh3_64_intdigest(vouched, seed=64)
    assert struct.unpack_from("<9Q", data, 128) == tuple(range(9))


def test_a_mark_after_a_half_written_one_never_goes_back() -> None:
    stores = Stores(memoryview(bytearray(2 * RECORD_BYTES)))
    mark = Mark(stores, 0)
    assert mark.read() is None
    for snapshot in (OLD, None, OTHER, NEW):
        mark.write(snapshot)
        assert mark.read() == (snapshot,)
    stores.data[0:3] = b"\0\0\0"  # one copy is lost
    assert mark.read() == (NEW,)
    mark.write(OLD)
    stores.data[RECORD_BYTES + 20] ^= 1  # now the other one
    assert mark.read() == (OLD,)
