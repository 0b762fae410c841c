"""Parity over byte arrays: XOR, Reed-Solomon and mirror, blocked so that work stays in cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 1 << 20


def xor_into(target: Bytes, source: Bytes) -> None:
    """``target ^= source`` for the bytes that ``source`` has; it may be the shorter one."""
    for begin in range(0, len(source), BLOCK_BYTES):
        piece = source[begin : begin + BLOCK_BYTES]
        part = target[begin : begin + len(piece)]
        np.bitwise_xor(part, piece, out=part)
