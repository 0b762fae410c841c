"""Lossy chunks of small checkpoints: about a twelfth of the bytes of an Adam state.

As in ExCP (https://arxiv.org/abs/2406.11257): weights are residuals against an older checkpoint, first moments are
pruned, all three are quantized. Different: second moments are never pruned, and moments have codes of their
logarithms, since the update of a weight whose second moment was lost is many times too large; steps are uniform in
the residual or the logarithm, and an entropy coder makes frequent codes short.

Decoding only looks values up, multiplies and adds: each machine gets the same bits, so that chunks have checksums.
What is no weight or moment, or not finite, is exact. Pure except for the compressor.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from ftckpt.array_types import Buffer
from ftckpt.errors import CorruptError
from ftckpt.persist.compression import ElementRun, group, ungroup, unzipped, zipped

_RESIDUAL_STEP = 0.5
"""Step of residuals, in root mean squares of a run."""
_FIRST_STEP, _SECOND_STEP = 0.7, 0.5
"""Steps of the logarithms of moments."""
_PRUNED = 0.3
"""First moments below this part of a run's root mean square are 0."""
_MAX_CODE = 32000
_LEVELS = {"exp_avg": 127, "exp_avg_sq": 255}
"""Maximum size of a table of magnitudes: with signs, if there are any, and 0, codes are one byte."""
WEIGHTS = ("weight", "master")
_LOSSY_TYPES = ("F32", "BF16")
_BF16_BITS = np.uint32(16)

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


class Coding(IntEnum):
    """The coding of a run."""

    EXACT = 0
    RESIDUAL = 1
    LOGARITHM = 2
    SIGNED_LOGARITHM = 3


_PLANES = range(6)
"""Parts of a frame, each of bytes with a similar distribution."""
_HEADS, _LOW, _HIGH, _FIRST, _SECOND, _EXACT = _PLANES
_SIZES = struct.Struct(f"<{len(_PLANES)}Q")


def shrink_chunk(data: Buffer, reference: Buffer, runs: Sequence[ElementRun]) -> bytes:
    """A frame of a chunk; ``reference``: the same chunk of the older checkpoint."""
    source, before = np.frombuffer(data, np.uint8), np.frombuffer(reference, np.uint8)
    planes = [bytearray() for _ in _PLANES]
    begin = 0
    for run in runs:
        part, old = source[begin : begin + run.nbytes], before[begin : begin + run.nbytes]
        if not (run.dtype in _LOSSY_TYPES and _put_lossy(planes, run, part, old)):
            planes[_HEADS] += bytes([Coding.EXACT])
            planes[_EXACT] += group(part.data, [run])
        begin += run.nbytes
    # One by one: codes of one distribution have the shortest codes in the compressor, too.
    parts = [zipped(plane) for plane in planes]
    return _SIZES.pack(*map(len, parts)) + b"".join(parts)


def restore_chunk(frame: Buffer, reference: Buffer, runs: Sequence[ElementRun]) -> memoryview:
    """The chunk of a frame, not the one that was shrunk; ``reference`` is the same as then.

    Raises:
        CorruptError: not a frame of a chunk with these runs.
    """
    before = np.frombuffer(reference, np.uint8)
    data = np.empty(sum(run.nbytes for run in runs), np.uint8)
    try:
        # Codes are at most as long as their run, and a head has a table.
        most_bytes = len(data) + 1100 * len(runs)
        planes, begin = _Planes(frame, most_bytes), 0
        for run in runs:
            end = begin + run.nbytes
            data[begin:end] = planes.run(run, before[begin:end])
            begin = end
    except (struct.error, ValueError, IndexError) as error:
        raise CorruptError(f"cannot be restored: {error}") from None
    return data.data.toreadonly()


def _put_lossy(planes: Sequence[bytearray], run: ElementRun, part: Codes, old: Codes) -> bool:
    """Codes a weight or a moment; False: it must be exact."""
    values = _floats(part, run.dtype)
    if not len(values) or not np.isfinite(values).all():
        return False
    if run.role in WEIGHTS:
        return _put_residual(planes, values, _floats(old, run.dtype))
    if run.role == "exp_avg":
        floor = _PRUNED * float(np.sqrt(np.square(values, dtype=np.float64).mean()))
        return _put_logarithms(planes, values, floor, _FIRST_STEP, run.role)
    if run.role == "exp_avg_sq" and values.min() >= 0:
        return _put_logarithms(planes, values, 0.0, _SECOND_STEP, run.role)
    return False


def _put_residual(planes: Sequence[bytearray], values: Floats, before: Floats) -> bool:
    if not np.isfinite(before).all():
        return False
    residual = values.astype(np.float64) - before
    mean = float(np.sqrt(np.square(residual).mean()))
    step = np.float32(max(_RESIDUAL_STEP * mean, float(np.abs(residual).max()) / _MAX_CODE))
    if mean and not np.finfo(np.float32).tiny < step < np.finfo(np.float32).max:
        return False
    codes = np.rint(residual / step).astype(np.int16) if step else np.zeros(len(values), np.int16)
    if not np.isfinite(before + codes.astype(np.float32) * step).all():
        return False
    # Zigzag: small codes of both signs have an upper byte of 0.
    folded = (codes.astype(np.int32) << 1 ^ codes.astype(np.int32) >> 31).astype("<u2").view(np.uint8)
    planes[_HEADS] += struct.pack("<Bf", Coding.RESIDUAL, step)
    planes[_LOW] += folded[::2].tobytes()
    planes[_HIGH] += folded[1::2].tobytes()
    return True


def _put_logarithms(planes: Sequence[bytearray], values: Floats, floor: float, step: float, role: str) -> bool:
    magnitudes, is_signed = np.abs(values, dtype=np.float64), role == "exp_avg"
    kept = magnitudes > floor
    logs = np.log(magnitudes[kept])
    low, high = (float(logs.min()), float(logs.max())) if len(logs) else (0.0, 0.0)
    step = max(step, (high - low) / (_LEVELS[role] - 1))
    levels = np.rint((logs - low) / step).astype(np.uint8)
    count = int(levels.max()) + 1 if len(logs) else 0
    table = np.exp(low + step * np.arange(count)).clip(max=float(np.finfo(np.float32).max)).astype("<f4")
    codes = np.zeros(len(values), np.uint8)
    codes[kept] = 1 + 2 * levels + (values[kept] < 0) if is_signed else 1 + levels
    coding = Coding.SIGNED_LOGARITHM if is_signed else Coding.LOGARITHM
    planes[_HEADS] += struct.pack("<BB", coding, count) + table.tobytes()
    planes[_FIRST if is_signed else _SECOND] += codes.tobytes()
    return True


class _Planes:
    """The planes of a frame, read run by run."""

    def __init__(self, frame: Buffer, most_bytes: int) -> None:
        view = memoryview(frame)
        sizes = _SIZES.unpack_from(view)
        if _SIZES.size + sum(sizes) != len(view):
            raise ValueError("its parts do not fill it")
        self._left: list[memoryview] = []
        at = _SIZES.size
        for nbytes in sizes:
            self._left.append(memoryview(unzipped(view[at : at + nbytes], most_bytes)))
            at += nbytes

    def run(self, run: ElementRun, before: Codes) -> Codes:
        """The bytes of the next run; ``before``: those of the reference."""
        coding = Coding(self._take(_HEADS, 1)[0])
        if coding == Coding.EXACT:
            return np.frombuffer(ungroup(self._take(_EXACT, run.nbytes), [run]), np.uint8)
        count = run.nbytes // run.item_bytes
        if coding == Coding.RESIDUAL:
            (step,) = np.frombuffer(self._take(_HEADS, 4), "<f4")
            folded = np.empty((count, 2), np.uint8)
            for column, plane in enumerate((_LOW, _HIGH)):
                folded[:, column] = np.frombuffer(self._take(plane, count), np.uint8)
            unsigned = folded.reshape(-1).view("<u2").astype(np.int32)
            codes = (unsigned >> 1 ^ -(unsigned & 1)).astype(np.float32)
            return _bytes(_floats(before, run.dtype) + codes * step, run.dtype)
        is_signed, (levels,) = coding == Coding.SIGNED_LOGARITHM, self._take(_HEADS, 1)
        magnitudes = np.frombuffer(self._take(_HEADS, 4 * levels), "<f4")
        table = np.zeros(1 + levels * (1 + is_signed), np.float32)
        table[1 :: 1 + is_signed] = magnitudes
        if is_signed:
            table[2::2] = -magnitudes
        codes = np.frombuffer(self._take(_FIRST if is_signed else _SECOND, count), np.uint8)
        return _bytes(table[codes], run.dtype)

    def _take(self, plane: int, nbytes: int) -> memoryview:
        taken, self._left[plane] = self._left[plane][:nbytes], self._left[plane][nbytes:]
        if len(taken) != nbytes:
            raise ValueError("it is too short")
        return taken


def _floats(data: Codes, dtype: str) -> Floats:
    data = np.ascontiguousarray(data)
    if dtype == "F32":
        return data.view(np.float32)
    values: Floats = (data.view(np.uint16).astype(np.uint32) << _BF16_BITS).view(np.float32)
    return values


def _bytes(values: Any, dtype: str) -> Codes:
    """Inverse of ``_floats``; BF16 is rounded to the nearest, ties to even."""
    if dtype == "F32":
        return np.ascontiguousarray(values, np.float32).view(np.uint8)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> _BF16_BITS & np.uint32(1))) >> _BF16_BITS
    found: Codes = rounded.astype(np.uint16).view(np.uint8)
    return found
