"""The control block: whichever store is the last, the sealed stays readable and nothing false is sealed."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.arena.control import ControlBlock, SlotState, control_bytes
from ftckpt.errors import ArenaError, ConfigError, CorruptError, MismatchError
from ftckpt.state.fragment import Box, Fragment
from ftckpt.state.manifest import Manifest

CHUNKS = 3
WEIGHTS = Fragment.whole("w", "F32", (3000,), Box((0,), (3000,)))
MANIFEST = Manifest({"tp": 1, "pp": 0}, {"tp": 2}, (WEIGHTS,), (), 100, 4096)
OLD, NEW = b"o" * 16, b"n" * 16


def new_block(slots: int = 2) -> tuple[bytearray, ControlBlock]:
    buffer = bytearray(control_bytes(slots, CHUNKS))
    return buffer, ControlBlock.format_into(buffer, MANIFEST, slots)


def hash_of(lineage: bytes, iteration: int, chunk: int) -> int:
    return int.from_bytes(hashlib.sha256(lineage + bytes([iteration, chunk])).digest()[:8], "little")


def write(block: ControlBlock, slot: int, lineage: bytes, iteration: int) -> None:
    block.begin(slot)
    for chunk in range(CHUNKS):
        block.set_chunk_hash(slot, chunk, hash_of(lineage, iteration, chunk))
    block.set_objects(slot, iteration, hash_of(lineage, iteration, 99))
    block.seal(slot, lineage, iteration)


def write_unhashed(block: ControlBlock, slot: int, lineage: bytes, iteration: int) -> None:
    block.begin(slot)
    block.set_chunk_hash(slot, 1, hash_of(lineage, iteration, 1))  # dropped by the seal
    block.set_objects(slot, iteration, hash_of(lineage, iteration, 99))
    block.seal(slot, lineage, iteration, hashed=False)


def assert_holds_unhashed(block: ControlBlock, slot: int, lineage: bytes, iteration: int) -> None:
    record = block.record(slot)
    assert record.sealed and not record.torn and not record.hashed
    assert (record.lineage, record.iteration, record.objects_used) == (lineage, iteration, iteration)
    assert record.chunk_hashes.tolist() == [0] * CHUNKS


MARKS: dict[str, tuple[int, int]] = {"whole": (512, 576), "target": (640, 704), "protected": (768, 832)}


def mark(block: ControlBlock, name: str, lineage: bytes, iteration: int) -> None:
    getattr(block, f"mark_{name}")(lineage, iteration)


def marked(block: ControlBlock, name: str) -> tuple[bytes, int] | None:
    found: tuple[bytes, int] | None = getattr(block, name)()
    return found


def assert_holds(block: ControlBlock, slot: int, lineage: bytes, iteration: int) -> None:
    record = block.record(slot)
    assert record.sealed and not record.torn and record.hashed
    assert (record.lineage, record.iteration, record.objects_used) == (lineage, iteration, iteration)
    assert record.objects_hash == hash_of(lineage, iteration, 99)
    assert record.chunk_hashes.tolist() == [hash_of(lineage, iteration, chunk) for chunk in range(CHUNKS)]


def test_a_fresh_block() -> None:
    buffer, block = new_block()
    for view in (block, ControlBlock(bytes(buffer))):
        assert (view.slots, view.num_chunks, view.chunk_bytes) == (2, CHUNKS, 4096)
        assert (view.digest, view.shard) == (MANIFEST.digest, "tp1-pp0")
        assert [marked(view, name) for name in MARKS] == [None] * 3
        assert [view.record(slot).state for slot in range(2)] == [SlotState.EMPTY] * 2
        assert not view.record(0).torn and not view.record(0).sealed


def test_documented_offsets() -> None:
    buffer, block = new_block()
    write(block, 1, OLD, 5)
    begin = 4096 + 128
    assert buffer[:8] == b"FTCKPTCB" and len(buffer) == 4096 + 2 * 128
    assert struct.unpack_from("<III", buffer, 8) == (1, 2, CHUNKS)
    assert buffer[begin] == SlotState.SEALED
    assert struct.unpack_from("<16sqQ", buffer, begin + 8) == (OLD, 5, 1)
    covered = buffer[begin + 8 : begin + 56] + buffer[begin + 64 : begin + 128]
    assert struct.unpack_from("<Q", buffer, begin + 56)[0] == xxhash.xxh3_64_intdigest(bytes(covered), seed=1)


def test_a_block_written_before_there_were_marks_and_flags() -> None:
    """The digest is of what the first version of this format wrote; the bytes of these calls never change."""
    buffer, block = new_block(3)
    write(block, 0, OLD, 1)
    write(block, 1, OLD, 2)
    block.mark_whole(OLD, 2)
    block.begin(0)
    block.set_chunk_hash(0, 1, 7)
    block.void(2)
    assert xxhash.xxh3_128_hexdigest(bytes(buffer)) == "e82b94fc4dad6c73f664e2e38c236407"
    assert buffer[640:4096] == bytes(4096 - 640)
    assert (block.whole(), block.target(), block.protected()) == ((OLD, 2), None, None)
    assert_holds(block, 1, OLD, 2)


@pytest.mark.parametrize("seal", [write, write_unhashed])
def test_the_sequence_of_a_snapshot_never_comes_back(seal: Callable[..., None]) -> None:
    buffer, block = new_block()
    seen = []
    for number in range(6):
        seal(block, number % 2, OLD, 5)
        seen.append(block.record(number % 2).sequence)
        if number % 3:
            block.void(number % 2)
    assert seen == [1, 2, 3, 4, 5, 6]
    block.void(0)
    buffer[4096 + 32 : 4096 + 40] = b"\xff" * 8
    write(block, 1, OLD, 6)
    assert block.record(1).sequence == 7, "damage in a slot that holds nothing is no number"


def test_sequence_orders_snapshots_across_lineages() -> None:
    _, block = new_block(3)
    write(block, 0, OLD, 9)
    write(block, 2, NEW, 3)
    write(block, 1, NEW, 4)
    assert [block.record(slot).sequence for slot in range(3)] == [1, 3, 2]


@pytest.mark.parametrize("name", MARKS)
def test_marks_alternate_and_the_newest_counts(name: str) -> None:
    buffer, block = new_block()
    for iteration in (-1, 0, 4, 2):
        mark(block, name, NEW, iteration)
        assert [marked(block, other) for other in MARKS] == [(NEW, iteration) if n == name else None for n in MARKS]
    for place in MARKS[name]:
        fields = struct.pack("<16sqQ", NEW, 2, 4)
        assert buffer[place : place + 40] == fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


@pytest.mark.parametrize("name", ["target", "protected"])
def test_a_mark_is_taken_back(name: str) -> None:
    _, block = new_block()
    mark(block, name, NEW, 3)
    mark(block, name, bytes(16), -1)
    assert marked(block, name) is None
    mark(block, name, NEW, 4)
    assert marked(block, name) == (NEW, 4)


class Killed(Exception):
    pass


class Dying(ControlBlock):
    """Dies inside the store number ``fatal``, once ``partial`` bytes of it are written."""

    stores = 0
    fatal = -1
    partial = 0

    def _store(self, offset: int, data: bytes) -> None:
        self.stores += 1
        if self.stores == self.fatal:
            super()._store(offset, data[: self.partial])
            raise Killed
        super()._store(offset, data)


def deaths(prepare: Callable[[ControlBlock], None], act: Callable[[ControlBlock], None]) -> list[tuple[bytes, bool]]:
    """The buffer as each possible death during ``act`` leaves it, and whether ``act`` was complete."""
    left = []
    fatal = 1
    while True:
        for partial in range(64):
            buffer, block = new_block()
            prepare(block)
            dying = Dying(buffer)
            dying.fatal, dying.partial = fatal, partial
            try:
                act(dying)
            except Killed:
                left.append((bytes(buffer), False))
            else:
                assert dying.stores == fatal - 1 and len(left) > fatal
                return [*left, (bytes(buffer), True)]
        fatal += 1


def prepare_both(block: ControlBlock) -> None:
    write(block, 0, OLD, 1)
    write(block, 1, OLD, 2)
    block.mark_whole(OLD, 2)


def test_death_at_any_store_of_a_snapshot() -> None:
    left = deaths(prepare_both, lambda block: write(block, 0, NEW, 3))
    seen = set()
    for raw, complete in left:
        block = ControlBlock(raw)
        assert_holds(block, 1, OLD, 2)
        assert block.whole() == (OLD, 2)
        record = block.record(0)
        seen.add(record.state)
        if record.sealed:
            assert_holds(block, 0, *((OLD, 1) if record.lineage == OLD else (NEW, 3)))
            assert record.lineage == NEW or raw[4096] == SlotState.SEALED
        assert not complete or record.lineage == NEW
    assert seen == {SlotState.WRITING, SlotState.SEALED}


def test_after_begin_the_old_snapshot_is_never_claimed() -> None:
    left = deaths(prepare_both, lambda block: write(block, 0, NEW, 3))
    lost_old = [raw for raw, _ in left if raw[4096] == SlotState.WRITING]
    first = lost_old[0]
    for raw in lost_old:
        for state in (SlotState.SEALED, SlotState.CHECKED, SlotState.PROTECTED):
            flipped = bytearray(raw)
            flipped[4096] = state
            record = ControlBlock(flipped).record(0)
            # Until the store that clears the checksum, nothing has been overwritten.
            assert record.torn or raw[4096 + 8 :] == first[4096 + 8 :] or record.lineage == NEW
            if record.lineage == NEW and not record.torn:
                assert_holds(ControlBlock(flipped), 0, NEW, 3)


def test_death_at_any_store_of_void() -> None:
    for raw, complete in deaths(prepare_both, lambda block: block.void(0)):
        block = ControlBlock(raw)
        assert_holds(block, 1, OLD, 2)
        record = block.record(0)
        assert record.state in (SlotState.SEALED, SlotState.EMPTY) and not record.torn
        assert not complete or record.state == SlotState.EMPTY


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("num_before", [0, 1, 2, 3])
def test_death_at_any_store_of_a_mark(name: str, num_before: int) -> None:
    def prepare(block: ControlBlock) -> None:
        for other in MARKS:
            for iteration in range(num_before):
                mark(block, other, OLD, iteration)

    before = (OLD, num_before - 1) if num_before else None
    outcomes = set()
    for raw, complete in deaths(prepare, lambda block: mark(block, name, NEW, 7)):
        now = marked(ControlBlock(raw), name)
        assert now in (before, (NEW, 7))
        assert not complete or now == (NEW, 7)
        assert all(marked(ControlBlock(raw), other) == before for other in MARKS if other != name)
        outcomes.add(now)
    assert outcomes == {before, (NEW, 7)}


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_after_a_half_written_one_never_goes_back(name: str) -> None:
    def prepare(block: ControlBlock) -> None:
        mark(block, name, OLD, 0)
        dying = Dying(block._data)
        dying.fatal = 2
        with pytest.raises(Killed):
            mark(dying, name, OLD, 1)
        assert marked(block, name) == (OLD, 1)

    found = {marked(ControlBlock(raw), name) for raw, _ in deaths(prepare, lambda block: mark(block, name, NEW, 7))}
    assert found == {(OLD, 1), (NEW, 7)}


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("bit", range(8))
def test_a_bit_flip_in_either_copy_of_a_mark_loses_nothing(name: str, bit: int) -> None:
    buffer, block = new_block()
    mark(block, name, NEW, 7)
    for at in (place + offset for place in MARKS[name] for offset in range(40)):
        damaged = bytearray(buffer)
        damaged[at] ^= 1 << bit
        assert marked(ControlBlock(damaged), name) == (NEW, 7)


def test_both_copies_of_whole_bad_is_an_error_not_never_whole() -> None:
    buffer, _ = new_block()
    buffer[512] ^= 1
    buffer[576] ^= 1
    with pytest.raises(CorruptError, match="both whole marks"):
        ControlBlock(buffer)


@pytest.mark.parametrize("name", ["target", "protected"])
def test_both_copies_of_another_mark_bad_is_as_if_there_were_none(name: str) -> None:
    buffer, block = new_block()
    block.mark_whole(OLD, 6)
    mark(block, name, NEW, 7)
    for place in MARKS[name]:
        buffer[place + 3] ^= 8
    again = ControlBlock(buffer)
    assert marked(again, name) is None and again.whole() == (OLD, 6)
    for raw, _ in deaths(lambda block: None, lambda block: mark(block, name, NEW, 8)):
        assert marked(ControlBlock(raw), name) in (None, (NEW, 8))
    mark(again, name, NEW, 8)
    assert marked(again, name) == (NEW, 8)


def sealed_unhashed() -> tuple[bytearray, ControlBlock]:
    buffer, block = new_block()
    prepare_both(block)
    write_unhashed(block, 0, NEW, 3)
    return buffer, block


def test_a_seal_without_hashes() -> None:
    buffer, block = sealed_unhashed()
    assert buffer[4096 : 4096 + 2] == bytes([SlotState.SEALED, 1])
    assert_holds_unhashed(block, 0, NEW, 3)
    assert_holds(block, 1, OLD, 2)
    assert buffer[4096 + 64 : 4096 + 128] == bytes(64), "hashes of the slot's previous snapshot remain"
    covered = bytes(buffer[4096 + 8 : 4096 + 56] + buffer[4096 + 64 : 4096 + 128])
    stored = struct.unpack_from("<Q", buffer, 4096 + 56)[0]
    assert stored == xxhash.xxh3_64_intdigest(covered, seed=256) != xxhash.xxh3_64_intdigest(covered, seed=0)
    write(block, 0, NEW, 4)
    assert buffer[4096 + 1] == 0
    assert_holds(block, 0, NEW, 4)


def test_the_flag_flipped_is_torn_either_way() -> None:
    for slot in range(2):  # the first without hashes, the second with
        buffer, block = sealed_unhashed()
        buffer[4096 + 128 * slot + 1] ^= 1
        assert block.record(slot).torn and not block.record(slot).sealed


@settings(max_examples=200, deadline=None)
@given(st.integers(8, 127), st.integers(0, 7))
def test_a_bit_flip_in_a_record_without_hashes_reads_as_torn(at: int, bit: int) -> None:
    buffer, block = sealed_unhashed()
    buffer[4096 + at] ^= 1 << bit
    assert block.record(0).torn and not block.record(0).sealed


@pytest.mark.parametrize(("first", "then"), [(write, write_unhashed), (write_unhashed, write)])
@pytest.mark.parametrize("flipped", [0, 1])
def test_death_at_any_store_of_a_seal_mistakes_no_hashes(
    first: Callable[..., None], then: Callable[..., None], flipped: int
) -> None:
    """Whatever is sealed has the hashes it was sealed with; nothing else does, not even with the flag flipped."""

    def prepare(block: ControlBlock) -> None:
        first(block, 0, OLD, 1)
        write(block, 1, OLD, 2)

    holds = {write: assert_holds, write_unhashed: assert_holds_unhashed}
    seen = set()
    for raw, complete in deaths(prepare, lambda block: then(block, 0, NEW, 3)):
        for state in (raw[4096], SlotState.SEALED):
            damaged = bytearray(raw)
            damaged[4096], damaged[4096 + 1] = state, raw[4097] ^ flipped
            block = ControlBlock(damaged)
            assert_holds(block, 1, OLD, 2)
            record = block.record(0)
            if not record.sealed:
                assert not complete or flipped
                continue
            seen.add(record.lineage)
            if record.lineage == NEW:
                holds[then](block, 0, NEW, 3)
            else:
                holds[first](block, 0, OLD, 1)
    assert seen == (set() if flipped else {OLD, NEW})


@settings(max_examples=300, deadline=None)
@given(st.integers(8, 127), st.integers(0, 7))
def test_a_bit_flip_in_a_sealed_record_reads_as_torn(at: int, bit: int) -> None:
    buffer, block = new_block()
    prepare_both(block)
    buffer[4096 + at] ^= 1 << bit
    record = ControlBlock(buffer).record(0)
    assert record.torn and record.state == SlotState.EMPTY and not record.sealed
    assert_holds(block, 1, OLD, 2)


@pytest.mark.parametrize("state", [5, 6, 0x82, 255])
def test_an_unknown_state_reads_as_torn(state: int) -> None:
    buffer, block = new_block()
    write(block, 0, OLD, 1)
    buffer[4096] = state
    assert block.record(0).torn and block.record(0).state == SlotState.EMPTY


@pytest.mark.parametrize("state", [SlotState.SEALED, SlotState.CHECKED, SlotState.PROTECTED])
def test_a_slot_never_written_cannot_be_flipped_into_a_snapshot(state: int) -> None:
    buffer, block = new_block()
    buffer[4096] = state
    assert block.record(0).torn
    write(block, 0, OLD, 1)
    block.void(0)
    buffer[4096] = state
    assert block.record(0).torn


def test_records_of_two_slots_cannot_be_exchanged() -> None:
    buffer, block = new_block()
    prepare_both(block)
    buffer[4096 : 4096 + 128] = buffer[4096 + 128 : 4096 + 256]
    assert block.record(0).torn


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 511), st.integers(0, 7))
def test_any_bit_flip_in_the_header_is_corrupt(at: int, bit: int) -> None:
    buffer, _ = new_block()
    buffer[at] ^= 1 << bit
    with pytest.raises(CorruptError, match=r"bad magic|header checksum"):
        ControlBlock(buffer)


def resigned(offset: int, value: bytes) -> bytearray:
    buffer, _ = new_block()
    buffer[offset : offset + len(value)] = value
    buffer[504:512] = xxhash.xxh3_64_intdigest(bytes(buffer[:504])).to_bytes(8, "little")
    return buffer


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def test_another_version_is_a_mismatch() -> None:
    with pytest.raises(MismatchError, match="version 2"):
        ControlBlock(resigned(8, u32(2)))


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (12, u32(0), "impossible sizes"),
        (12, u32(65), "impossible sizes"),
        (16, u32(1 << 31), "impossible sizes"),
        (20, u32(457), "impossible sizes"),
        (12, u32(3), "truncated"),
        (16, u32(100), "truncated"),
    ],
)
def test_hostile_sizes(offset: int, value: bytes, text: str) -> None:
    with pytest.raises(CorruptError, match=text):
        ControlBlock(resigned(offset, value))


@pytest.mark.parametrize("length", [0, 7, 511, 4095, 4096 + 255])
def test_truncated(length: int) -> None:
    buffer, _ = new_block()
    with pytest.raises(CorruptError, match="truncated"):
        ControlBlock(bytes(buffer[:length]))


def test_only_a_slot_being_written_takes_hashes_and_a_seal() -> None:
    _, block = new_block()
    for call in (
        lambda: block.set_chunk_hash(0, 0, 1),
        lambda: block.set_objects(0, 1, 1),
        lambda: block.seal(0, NEW, 1),
    ):
        with pytest.raises(ArenaError, match="call begin first"):
            call()
    write(block, 0, OLD, 1)
    with pytest.raises(ArenaError, match="call begin first"):
        block.set_chunk_hash(0, 0, 1)
    assert_holds(block, 0, OLD, 1)


def test_arguments_out_of_range() -> None:
    _, block = new_block()
    block.begin(0)
    for call in (
        lambda: block.begin(2),
        lambda: block.record(-1),
        lambda: block.set_chunk_hash(0, CHUNKS, 1),
        lambda: block.set_chunk_hash(0, -1, 1),
    ):
        with pytest.raises(IndexError):
            call()
    for action in (lambda: block.seal(0, b"short", 1), lambda: block.mark_whole(b"", 1)):
        with pytest.raises(ValueError, match="16 bytes"):
            action()
    with pytest.raises(ConfigError, match="slots"):
        ControlBlock.format_into(bytearray(9999), MANIFEST, 65)
    with pytest.raises(ConfigError, match="room"):
        ControlBlock.format_into(bytearray(4000), MANIFEST, 1)


def test_a_read_only_view_reads() -> None:
    buffer, block = new_block()
    write(block, 0, OLD, 3)
    view = ControlBlock(memoryview(bytes(buffer)))
    assert_holds(view, 0, OLD, 3)
    with pytest.raises(TypeError):
        view.void(0)
