"""The control block: whichever store is the last, what is sealed stays readable and nothing false is sealed."""

from __future__ import annotations

import hashlib

import pytest

from ftckpt.errors import CorruptError
from ftckpt.memory.control_block import FORMAT, ControlBlock, SlotState, control_bytes
from ftckpt.memory.image import SlotImage
from ftckpt.memory.record import HEADER_BYTES, MARK_BYTES, RECORD_BYTES
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import SnapshotId

CHUNKS = 3
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
MANIFEST = Manifest({"tp": 1, "pp": 0}, {"tp": 2}, (WEIGHTS,), (), 100, 4096)
OLD, NEW = b"o" * 16, b"n" * 16


def new_block(slots: int = 2) -> tuple[bytearray, ControlBlock]:
    buffer = bytearray(control_bytes(slots, CHUNKS))
    return buffer, ControlBlock.format_into(buffer, SlotImage.of(MANIFEST), slots)


def hash_of(lineage: bytes, iteration: int, chunk: int) -> int:
    return int.from_bytes(hashlib.sha256(lineage + bytes([iteration, chunk])).digest()[:8], "little")


def write(block: ControlBlock, slot: int, lineage: bytes, iteration: int, hashed: bool = True) -> None:
    """A seal without hashes drops those that were set."""
    block.begin(slot)
    for chunk in range(CHUNKS):
        block.set_chunk_hash(slot, chunk, hash_of(lineage, iteration, chunk))
    block.set_objects(slot, iteration, hash_of(lineage, iteration, 99))
    block.seal(slot, SnapshotId(lineage, iteration), hashed)


PLACES = {name: HEADER_BYTES + MARK_BYTES * place for place, name in enumerate(("whole", "target", "protected"))}
MARKS: dict[str, tuple[int, int]] = {name: (place, place + RECORD_BYTES) for name, place in PLACES.items()}
RECORDS = FORMAT.records_offset


def mark(block: ControlBlock, name: str, lineage: bytes, iteration: int) -> None:
    getattr(block, f"mark_{name}")(SnapshotId(lineage, iteration))


def marked(block: ControlBlock, name: str) -> tuple[bytes, int] | None:
    found: SnapshotId | None = getattr(block, name)()
    return None if found is None else (found.lineage, found.iteration)


def assert_holds(block: ControlBlock, slot: int, lineage: bytes, iteration: int, hashed: bool = True) -> None:
    record = block.record(slot)
    assert record.sealed and not record.torn and record.hashed == hashed
    assert (record.snapshot, record.objects_used) == (SnapshotId(lineage, iteration), iteration)
    assert record.objects_hash == hash_of(lineage, iteration, 99)
    hashes = [hash_of(lineage, iteration, chunk) for chunk in range(CHUNKS)] if hashed else [0] * CHUNKS
    assert record.chunk_hashes.tolist() == hashes


@pytest.mark.parametrize("hashed", [True, False])
def test_the_sequence_of_a_snapshot_never_comes_back(hashed: bool) -> None:
    buffer, block = new_block()
    seen = []
    for number in range(6):
        write(block, number % 2, OLD, 5, hashed)
        seen.append(block.record(number % 2).sequence)
        if number % 3:
            block.void(number % 2)
    assert seen == [1, 2, 3, 4, 5, 6]
    block.void(0)
    buffer[RECORDS + 32 : RECORDS + 40] = b"\xff" * 8
    write(block, 1, OLD, 6)
    assert block.record(1).sequence == 7, "damage in a slot that holds nothing is no number"


def prepare_both(block: ControlBlock) -> None:
    write(block, 0, OLD, 1)
    write(block, 1, OLD, 2)
    block.mark_whole(SnapshotId(OLD, 2))


def test_both_copies_of_whole_bad_is_an_error_not_never_whole() -> None:
    buffer, _ = new_block()
    for place in MARKS["whole"]:
        buffer[place + 8] ^= 1
    with pytest.raises(CorruptError):
        ControlBlock(buffer)


def sealed_unhashed() -> tuple[bytearray, ControlBlock]:
    buffer, block = new_block()
    prepare_both(block)
    write(block, 0, NEW, 3, hashed=False)
    return buffer, block


def test_a_seal_without_hashes() -> None:
    buffer, block = sealed_unhashed()
    assert buffer[RECORDS : RECORDS + 2] == bytes([SlotState.SEALED, 1])
    assert_holds(block, 0, NEW, 3, hashed=False)
    assert_holds(block, 1, OLD, 2)
    assert buffer[RECORDS + 64 : RECORDS + 128] == bytes(64), "hashes of the slot's previous snapshot remain"
    write(block, 0, NEW, 4)
    assert buffer[RECORDS + 1] == 0
    assert_holds(block, 0, NEW, 4)


@pytest.mark.parametrize("state", [SlotState.SEALED, SlotState.CHECKED, SlotState.PROTECTED])
def test_a_slot_never_written_cannot_be_flipped_into_a_snapshot(state: int) -> None:
    buffer, block = new_block()
    buffer[RECORDS] = state
    assert block.record(0).torn
    write(block, 0, OLD, 1)
    block.void(0)
    buffer[RECORDS] = state
    assert block.record(0).torn
