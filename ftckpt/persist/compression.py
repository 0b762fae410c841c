"""A shard's file without what its bytes repeat: each chunk is a zstd frame, its bytes grouped by significance.

Of neighbouring numbers sign and exponent are alike and the lowest bits are noise: where all first bytes stand
together, then all second ones, a compressor finds the former and leaves the latter alone (byte grouping, as in Blosc
and ZipNN, https://arxiv.org/abs/2411.05239). Chunks stay chunks, so that a reader takes any of them and compares it
with the checksum of memory. Pure but for the compressor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ftckpt.errors import ConfigError, CorruptError
from ftckpt.model.fragment import DTYPE_BYTES
from ftckpt.store.image import SlotImage

_LEVEL = 1
"""The fastest of zstd: what is noise stays noise at any other."""
_FIX = "install what compresses: pip install 'ftckpt[storage]'"


class Run(NamedTuple):
    """``nbytes`` bytes of elements of ``item_bytes`` each."""

    nbytes: int
    item_bytes: int


def runs_of(image: SlotImage) -> list[list[Run]]:
    """Of each chunk of a slot what stands in it, in its order; gaps are bytes."""
    spans = [
        (offset, offset + fragment.nbytes, DTYPE_BYTES[fragment.dtype])
        for fragment, offset in zip(image.manifest.fragments, image.offsets, strict=True)
    ]
    found, first = [], 0
    for chunk in image.chunks:
        while first < len(spans) and spans[first][1] <= chunk.begin:
            first += 1
        found.append(list(_runs(spans[first:], chunk.begin, chunk.end)))
    return found


def _runs(spans: Sequence[tuple[int, int, int]], begin: int, end: int) -> Iterator[Run]:
    for low, high, item_bytes in spans:
        if low >= end:
            break
        if low > begin:
            yield Run(low - begin, 1)
        yield Run(min(high, end) - max(low, begin), item_bytes)
        begin = max(begin, min(high, end))
    if begin < end:
        yield Run(end - begin, 1)


def compress(data: memoryview, runs: Sequence[Run]) -> bytes:
    """A zstd frame of a chunk, with its length in it."""
    grouped = np.empty(len(data), np.uint8)
    for piece, into, item_bytes in _pieces(np.frombuffer(data, np.uint8), grouped, runs):
        into.reshape(item_bytes, -1)[...] = piece.reshape(-1, item_bytes).T
    packed: bytes = _zstandard().ZstdCompressor(level=_LEVEL).compress(grouped.data)
    return packed


def decompress(frame: bytes, runs: Sequence[Run]) -> bytes:
    """Inverse of ``compress``.

    Raises:
        CorruptError: not a frame of such a chunk.
    """
    nbytes = sum(run.nbytes for run in runs)
    try:
        # Bounded: a damaged frame may claim to unpack to any length.
        grouped = _zstandard().ZstdDecompressor().decompress(frame, max_output_size=nbytes)
    except _zstandard().ZstdError as error:
        raise CorruptError(f"cannot be unpacked: {error}") from None
    if len(grouped) != nbytes:
        raise CorruptError(f"unpacks to {len(grouped)} bytes, not {nbytes}")
    data = np.empty(nbytes, np.uint8)
    for piece, into, item_bytes in _pieces(np.frombuffer(grouped, np.uint8), data, runs):
        into.reshape(-1, item_bytes)[...] = piece.reshape(item_bytes, -1).T
    return data.tobytes()


def require() -> None:
    """Raises ConfigError where nothing can compress."""
    _zstandard()


@cache
def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise ConfigError(f"persist_compress: zstandard is not installed; {_FIX}") from None
    return zstandard


def _pieces(source: Any, into: Any, runs: Sequence[Run]) -> Iterator[tuple[Any, Any, int]]:
    position = 0
    for run in runs:
        end = position + run.nbytes
        yield source[position:end], into[position:end], run.item_bytes
        position = end
