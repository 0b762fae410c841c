"""Compressed shard files: each chunk is a zstd frame, its bytes grouped by significance.

Neighbouring numbers have similar signs and exponents, and their lowest bits are noise. With all first bytes together,
then all second bytes, and so on, a compressor finds the former and skips the latter (byte grouping, as in Blosc and
ZipNN, https://arxiv.org/abs/2411.05239). Each chunk is compressed separately, so that a reader may take any of them
and compare it to the checksum from memory. Pure except for the compressor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftckpt.array_types import Buffer
from ftckpt.errors import ConfigError, CorruptError
from ftckpt.memory.image import SlotImage, Span
from ftckpt.model.fragment import DTYPE_BYTES

_LEVEL = 1
"""The fastest of zstd: higher levels do not compress noise either."""


class ElementRun(NamedTuple):
    """``nbytes`` of consecutive elements of ``item_bytes`` each."""

    nbytes: int
    item_bytes: int


def packed(image: SlotImage, objects_used: int, pieces: Iterable[Buffer], lengths: list[int]) -> Iterator[Buffer]:
    """The bytes of a shard's compressed file: the header, a frame per chunk, and a frame of the objects in use.

    Args:
        pieces: the bytes of the uncompressed file of image ``image``, in any pieces. All are consumed: their source
            verifies the last of them at the end.
        lengths: receives the lengths of the header and of each frame.
    """
    objects = Span(image.objects.begin, image.objects.begin + objects_used)
    parts = _parts(pieces, [Span(0, len(image.header)), *image.chunks, objects])
    header = next(parts)
    lengths.append(len(header))
    yield header
    for part, runs in zip(parts, runs_of(image, objects_used), strict=True):
        frame = compress(part, runs)
        lengths.append(len(frame))
        yield frame


def _parts(pieces: Iterable[Buffer], spans: Sequence[Span]) -> Iterator[Buffer]:
    """The bytes of ``spans``, which are ascending, from a stream that is consumed to its end."""
    stream, position, rest = iter(pieces), 0, memoryview(b"")
    for span in spans:
        part = bytearray()
        while position < span.end:
            rest = rest or memoryview(next(stream))
            skipped = min(len(rest), max(0, span.begin - position))
            taken = min(len(rest), span.end - position)
            part += rest[skipped:taken]
            position, rest = position + taken, rest[taken:]
        yield memoryview(part)
    deque(stream, maxlen=0)


def runs_of(image: SlotImage, objects_used: int) -> list[list[ElementRun]]:
    """The element runs of each chunk of a slot, in order, and last of the objects in use; gaps count as bytes."""
    spans = [
        (offset, offset + fragment.nbytes, DTYPE_BYTES[fragment.dtype])
        for fragment, offset in zip(image.manifest.fragments, image.offsets, strict=True)
    ]
    found, first = [], 0
    for chunk in image.chunks:
        while first < len(spans) and spans[first][1] <= chunk.begin:
            first += 1
        found.append(list(_runs(spans[first:], chunk.begin, chunk.end)))
    return [*found, [ElementRun(objects_used, 1)]]


def _runs(spans: Sequence[tuple[int, int, int]], begin: int, end: int) -> Iterator[ElementRun]:
    for low, high, item_bytes in spans:
        if low >= end:
            break
        if low > begin:
            yield ElementRun(low - begin, 1)
            begin = low
        nbytes = min(high, end) - begin
        # A chunk of an unusual size may end within an element.
        yield ElementRun(nbytes, 1 if nbytes % item_bytes else item_bytes)
        begin += nbytes
    if begin < end:
        yield ElementRun(end - begin, 1)


def compress(data: Buffer, runs: Sequence[ElementRun]) -> bytes:
    """A zstd frame of a chunk; the frame records the chunk's length."""
    grouped = np.empty(len(data), np.uint8)
    for piece, into, item_bytes in _pieces(np.frombuffer(data, np.uint8), grouped, runs):
        into.reshape(item_bytes, -1)[...] = piece.reshape(-1, item_bytes).T
    frame: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(grouped.data)
    return frame


def decompress(frame: Buffer, runs: Sequence[ElementRun]) -> memoryview:
    """Inverse of ``compress``.

    Raises:
        CorruptError: not a frame of a chunk with these runs.
    """
    nbytes, zstandard = sum(run.nbytes for run in runs), _zstandard()
    try:
        # Checked before memory is allocated: a damaged frame may claim any length.
        found = zstandard.frame_content_size(frame)
        if found != nbytes:
            raise CorruptError(f"cannot be unpacked: claims {found} bytes, not {nbytes}")
        grouped = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise CorruptError(f"cannot be unpacked: {error}") from None
    data = np.empty(nbytes, np.uint8)
    for piece, into, item_bytes in _pieces(np.frombuffer(grouped, np.uint8), data, runs):
        # Not in one assignment, in which numpy's inner loop would run over the few bytes of an element.
        for number, alike in enumerate(piece.reshape(item_bytes, -1)):
            into[number::item_bytes] = alike
    return data.data.toreadonly()


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        text = "a compressed snapshot needs zstandard, which is not installed: pip install 'ftckpt[storage]'"
        raise ConfigError(text) from None
    return zstandard


def _pieces(source: Any, into: Any, runs: Sequence[ElementRun]) -> Iterator[tuple[Any, Any, int]]:
    position = 0
    for run in runs:
        end = position + run.nbytes
        yield source[position:end], into[position:end], run.item_bytes
        position = end
