"""A shard's compressed file, a frame of each chunk and of the objects; what reads it, compressed or not."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.config import Config
from ftckpt.errors import ConfigError, CorruptError, StorageError
from ftckpt.memory.destinations import LoadTarget, TargetPart
from ftckpt.memory.image import SlotImage, Span
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.persist.compression import ElementRun, compress, decompress, packed
from ftckpt.persist.shard_file import ShardFile
from ftckpt.persist.shards import StoredShard
from tests.support.errors import raises

OBJECTS = 5000


def fragment(number: int, dtype: str, numel: int) -> Fragment:
    return Fragment.whole(f"tensor{number}", dtype, (numel,), Box((0,), (numel,)))


def image_of(tensors: list[tuple[str, int]], volatile: int, chunk_bytes: int) -> SlotImage:
    """The manifest of a shard with these types and numbers of elements, the last ``volatile`` of them volatile."""
    fragments = tuple(fragment(number, *one) for number, one in enumerate(tensors))
    stepped = len(fragments) - volatile
    return SlotImage.of(
        Manifest({"dp": 0}, {"dp": 1}, fragments[:stepped], fragments[stepped:], OBJECTS, chunk_bytes)
    )


def content(image: SlotImage) -> bytes:
    """Bytes for all of its file: numbers near each other, and noise in the gaps."""
    data = np.random.default_rng(3).standard_normal(image.file_bytes // 4 + 1, np.float32).tobytes()
    return image.header + data[: image.file_bytes - len(image.header)]


def entry_of(image: SlotImage, plain: bytes, used: int) -> StoredShard:
    """The entry of a file that is not compressed."""
    hashes = [xxhash.xxh3_64_intdigest(plain[span.begin : span.end]) for span in image.chunks]
    objects = xxhash.xxh3_64_intdigest(plain[image.objects.begin : image.objects.begin + used])
    digest = image.manifest.digest.hex()
    return StoredShard("dp0", len(plain), "", digest, used, objects, np.array(hashes, np.uint64))


def compressed(image: SlotImage, plain: bytes, used: int, piece_bytes: int = 1 << 16) -> tuple[StoredShard, bytes]:
    lengths: list[int] = []
    pieces = (plain[at : at + piece_bytes] for at in range(0, len(plain), piece_bytes))
    data = b"".join(packed(image, used, pieces, lengths))
    assert sum(lengths) == len(data)
    return replace(entry_of(image, plain, used), nbytes=len(data), frames=np.array(lengths, np.uint64)), data


def opened(entry: StoredShard, data: bytes) -> ShardFile:
    return ShardFile("here", "dp0", entry, lambda begin, nbytes: data[begin : begin + nbytes])


def opened_in_place(entry: StoredShard, data: bytes) -> ShardFile:
    """Reads a file as storage does, to its destination."""

    def read_into(begin: int, memories: Sequence[memoryview]) -> None:
        for memory in memories:
            memory[:] = data[begin : begin + len(memory)]
            begin += len(memory)

    return ShardFile("here", "dp0", entry, lambda begin, nbytes: data[begin : begin + nbytes], read_into)


def part_of(cut: Span, targets: Mapping[int, memoryview]) -> TargetPart:
    """The part of the chunk at ``cut``, with what it has of the targets."""
    inside = []
    for begin, memory in targets.items():
        first, last = max(begin, cut.begin), min(begin + len(memory), cut.end)
        if first < last:
            inside.append(LoadTarget(first, memory[first - begin : last - begin]))
    return TargetPart(cut, inside)


def scattered(file: ShardFile, number: int, rng: random.Random) -> bytes:
    """A chunk whose every second part goes to memory of its own, the others nowhere; those come in another turn."""
    span = file.image.chunks[number]
    edges = sorted({span.begin, span.end, *(rng.randint(span.begin, span.end) for _ in range(5))})
    parts = [(begin, bytearray(end - begin)) for begin, end in pairwise(edges)]
    for half in (parts[::2], parts[1::2]):
        cuts, targets = span.cut(rng.randint(1, 1 << 20)), {begin: memoryview(part) for begin, part in half}
        file.scatter(number, lambda cuts=cuts, targets=targets: [part_of(cut, targets) for cut in cuts])  # type: ignore[misc]
    return b"".join(part for _, part in parts)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.integers(0, 3000)), min_size=1, max_size=12),
    st.integers(0, 4), st.sampled_from([777, 4096, 12288, 1 << 20]), st.integers(0, OBJECTS), st.integers(1, 9000),
)  # fmt: skip
def test_each_part_comes_back(
    tensors: list[tuple[str, int]], volatile: int, chunk_bytes: int, used: int, piece_bytes: int
) -> None:
    """All types, chunks that cut tensors and even elements, any pieces; gaps are left out."""
    image = image_of(tensors, min(volatile, len(tensors)), chunk_bytes)
    plain, rng = content(image), random.Random(used)
    begin = image.objects.begin
    for entry, data in (compressed(image, plain, used, piece_bytes), (entry_of(image, plain, used), plain)):
        file = opened(entry, data)
        assert file.image == image and bytes(file.objects()) == plain[begin : begin + used]
        for number, span in enumerate(image.chunks):
            assert bytes(file.chunk(number)) == plain[span.begin : span.end]
            for opens in (opened, opened_in_place):
                assert scattered(opens(entry, data), number, rng) == plain[span.begin : span.end]


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_bytes_are_grouped_by_significance(dtype: str) -> None:
    size = DTYPE_BYTES[dtype]
    numbers = np.random.default_rng(1).standard_normal(1 << 17, np.float32)
    data = (numbers if size == 4 else (numbers.view(np.uint32) >> 16).astype(np.uint16)).tobytes()
    image = image_of([(dtype, 1 << 17)], 0, 1 << 20)
    (span,) = image.chunks
    plain = bytearray(content(image))
    plain[span.begin : span.end] = data
    _, file = compressed(image, bytes(plain), 0)
    as_they_are = len(compress(data, [ElementRun(len(data), 1)]))
    assert len(file) - len(image.header) < 0.95 * as_they_are


def test_the_last_comparison_is_not_missed() -> None:
    """Where pieces are verified after their last byte, the result comes with the request for one more."""
    image = image_of([("F32", 3000)], 0, 4096)
    plain = content(image)

    def pieces() -> Iterator[bytes]:
        yield plain
        raise CorruptError("bad")

    with raises(CorruptError, "bad"):
        list(packed(image, 10, pieces(), []))


@pytest.mark.parametrize("packs", [False, True], ids=["as it is", "compressed"])
def test_no_flipped_byte_is_missed(packs: bool) -> None:
    image = image_of([("BF16", 3000), ("F32", 5000)], 1, 8192)
    plain, rng = content(image), random.Random(5)
    entry, data = compressed(image, plain, 900) if packs else (entry_of(image, plain, 900), plain)
    ends = [0, *accumulate(entry.frames.tolist())] if entry.frames is not None else []
    spans = list(pairwise(ends[1:])) or [(s.begin, s.end) for s in image.chunks]
    for number, (begin, end) in enumerate(spans[: len(image.chunks)]):
        for at in (begin + 6, (begin + end) // 2, end - 1):
            file = opened(entry, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with raises(StorageError, "here", str(begin)):
                file.chunk(number)
            with raises(StorageError, "here", str(begin)):
                scattered(opened_in_place(entry, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]), number, rng)
            assert all(file.chunk(other) for other in range(len(image.chunks)) if other != number)
    at = ends[-2] + 30 if packs else image.objects.begin + 30
    with raises(StorageError, "here"):
        opened(entry, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]).objects()
    with raises(StorageError, "here"):
        opened(entry, b"\x00" + data[1:])


def test_without_the_library_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = compress(b"abcd", [ElementRun(4, 2)])
    assert bytes(decompress(frame, [ElementRun(4, 2)])) == b"abcd"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with raises(ConfigError, "persist_compress: zstd", "ftckpt[storage"):
        Config(persist_compress="zstd")
    assert Config().persist_compress == "none"
    with raises(ConfigError, "ftckpt[storage"):
        decompress(frame, [ElementRun(4, 2)])


def test_a_damaged_frame_makes_no_room_for_what_it_claims() -> None:
    claims = bytes.fromhex("28b52ffde0") + (1 << 50).to_bytes(8, "little")
    with raises(CorruptError, str(1 << 50), "70"):
        decompress(claims + b"\x01\x00\x00", [ElementRun(70, 1)])


def test_what_came_badly_over_a_network_is_read_again() -> None:
    image = image_of([("BF16", 3000)], 0, 8192)
    entry, data = compressed(image, content(image), 900)
    bad = [b"", b"not a frame"]

    def read(begin: int, nbytes: int) -> bytes:
        good = data[begin : begin + nbytes]
        return bad.pop() if begin >= len(image.header) and bad else good

    assert ShardFile("here", "dp0", entry, read).chunk(0)
    bad += [b"bad"] * 3
    with raises(StorageError, "here"):
        ShardFile("here", "dp0", entry, read).chunk(0)
