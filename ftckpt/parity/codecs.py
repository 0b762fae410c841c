"""Parity over byte arrays: XOR, Reed-Solomon and mirror, in numpy, blocked to stay in cache.

Parity row ``r`` of a stripe is the sum over i of ``coefficient(r, i)`` times data array i, byte by byte in
GF(2^8) with the polynomial 0x11d and the generator 2. Addition is XOR. The coefficients are an extended Cauchy
matrix (R. M. Roth and A. Lempel, On MDS codes via Cauchy matrices, IEEE Trans. Inf. Theory 35(6), 1989): a row
of ones, then rows 1/(y_i + x_r) with y_i = 2^-i and all x_r different from each other and from all y_i. Every
square submatrix is invertible, so any ``m`` rows recover any ``m`` lost arrays. x_1 = 0 makes the second row 2^i,
as in RAID-6.

Multiplication tables are slow in numpy; doubling entire arrays is fast (H. P. Anvin, The mathematics of RAID-6). So
row 1 is summed by Horner's rule, with one doubling per array. Any other row, and the solution of a decode, is
summed by the bits of its coefficients, highest first: one doubling for each of 8 bits, one XOR for each set bit
(J. Blömer et al., An XOR-based erasure-resilient coding scheme, ICSI TR-95-048, 1995, without its transposed
layout). numpy releases the GIL in these operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Final

import numpy as np

from ftckpt.array_types import Bytes
from ftckpt.config import PAGE_BYTES
from ftckpt.errors import ConfigError, LostError

BLOCK_BYTES = 1 << 20
"""Bytes per step of XOR."""

MAX_MEMBERS = 256
"""Maximum of data arrays and parity rows of one Reed-Solomon stripe together: the size of the field."""

_CACHE_BYTES = 1 << 20
"""Bytes that one step of Reed-Solomon touches, over all arrays: they fit into a core's private cache."""
_STEP_BYTES = 256 << 10
"""Bytes per step of a decode."""
# x^8 + x^4 + x^3 + x^2 + 1, a primitive polynomial: every element but 0 is a power of 2, as the tables below need.
# x^8 + x^4 + x^3 + x^2 + 1 is primitive: the powers of 2 run through all 255 non-zero bytes.
_POLYNOMIAL = 0x11D
_REMAINDER = np.uint8(_POLYNOMIAL & 0xFF)


class MissingArray(Enum):
    """The type of ``MISSING``, which stands for a data array to solve for."""

    MISSING = 0


MISSING: Final = MissingArray.MISSING


def encode(data: Sequence[Bytes | None], length: int, row: int, losses: int, out: Bytes | None = None) -> Bytes:
    """Compute parity block ``row`` (0 to ``losses`` - 1) of a stripe of ``length`` bytes, in ``out`` or a new array.

    ``data`` are uint8 arrays in the stripe's order, each of ``length`` bytes at most; shorter ones are padded with
    zeros, and None counts as zeros. Row 0 is their XOR, of a single array (``mirror``) a copy.

    Raises:
        ConfigError: there is no such row for so many arrays.
        ValueError: an array longer than ``length``, or ``out`` of another length.
    """
    fold = encoder(len(data), row, losses)
    if out is None:
        out = np.empty(length, np.uint8)
    if len(out) != length or any(array is not None and len(array) > length for array in data):
        raise ValueError(
            f"arrays of a stripe of {length} bytes: {[len(a) for a in data if a is not None]}, {len(out)}"
        )
    for begin in range(0, length, BLOCK_BYTES):
        part = out[begin : begin + BLOCK_BYTES]
        fold((None if array is None else array[begin : begin + len(part)] for array in data), part)
    return out


def encoder(width: int, row: int, losses: int) -> Callable[[Iterable[Bytes | None], Bytes], None]:
    """A function that computes parity block ``row`` of ``width`` arrays piece by piece.

    It takes the pieces of all arrays, as ``encode`` takes arrays, and fills the piece of the block. For a plain XOR
    row it consumes the pieces lazily, one by one: a caller that also hashes each piece finds it in cache.

    Raises:
        ConfigError: as ``encode``.
    """
    factors = _row(row, width, losses)
    if set(factors) == {1}:
        return lambda pieces, out: _sum_plain((piece for piece in pieces if piece is not None), out)
    return lambda pieces, out: _sum_row(row, factors, list(pieces), out)


def decode(
    data: Sequence[Bytes | MissingArray | None], blocks: Mapping[int, Bytes], length: int, losses: int
) -> dict[int, Bytes]:
    """Reconstruct the ``MISSING`` data arrays: index → a new array of ``length`` bytes.

    ``data`` as for ``encode``; ``blocks``: verified parity blocks by row, at least as many as arrays are missing.

    Raises:
        LostError: more arrays are missing than there are ``blocks``.
        ConfigError, ValueError: as ``encode``; also a parity block of another length.
    """
    lost = [index for index, array in enumerate(data) if isinstance(array, MissingArray)]
    known = [None if isinstance(array, MissingArray) else array for array in data]
    # The lowest rows are the cheapest: row 0 has no factors, row 1 has one doubling per array.
    rows = sorted(blocks)[: len(lost)]
    if len(rows) < len(lost):
        raise LostError(
            f"{len(lost)} of {len(data)} arrays of a stripe are missing, with only {len(rows)} parity blocks"
        )
    if any(len(blocks[row]) != length for row in rows):
        raise ValueError(f"parity blocks of {[len(blocks[row]) for row in rows]} bytes in a stripe of {length}")
    solved = {index: np.empty(length, np.uint8) for index in lost}
    # Row 0 is plain XOR: the lost array is the XOR of the block and all other arrays.
    if rows == [0]:
        _sum([1] * (len(known) + 1), [*known, blocks[0]], solved[lost[0]])
        return solved
    _solve([_row(row, len(data), losses) for row in rows], rows, known, blocks, solved)
    return solved


def coefficient(row: int, index: int) -> int:
    """The factor of data array ``index`` in parity row ``row``."""
    if row == 0:
        return 1
    # All x_r must differ from each other and from all y_i = 2^-i: 0 does, and so do 2, 4, … if members and rows
    # together are at most 256. Addition is XOR.
    x = 0 if row == 1 else _EXP[row - 1]
    return _reciprocal(_EXP[-index % 255] ^ x)


def _row(row: int, width: int, losses: int) -> list[int]:
    """Coefficients of one parity row of ``width`` data arrays."""
    if not 0 <= row < losses:
        raise ConfigError(f"--ftckpt-peer-losses: {width} arrays have no parity block {row} of {losses}")
    if losses > 1 and width + losses > MAX_MEMBERS:
        raise ConfigError(
            f"--ftckpt-peer-group: rs spans {MAX_MEMBERS} members at most, not {width + losses}; lower it"
        )
    return [coefficient(row, index) for index in range(width)]


def _solve(
    matrix: Sequence[Sequence[int]],
    rows: Sequence[int],
    known: Sequence[Bytes | None],
    blocks: Mapping[int, Bytes],
    solved: Mapping[int, Bytes],
) -> None:
    """Fill ``solved`` (by index) from an equal number of parity ``rows`` with the coefficients ``matrix``."""
    # Only the missing columns: the size is the number of losses, not the width of the stripe.
    inverse = _inverse([[factors[index] for index in solved] for factors in matrix])
    length = len(blocks[rows[0]]) if rows else 0
    # Per row, the sum over the missing arrays only, one step at a time: it stays in cache.
    remains = np.empty((len(rows), min(length, _STEP_BYTES)), np.uint8)
    for begin in range(0, length, _STEP_BYTES):
        end = min(begin + _STEP_BYTES, length)
        arrays = [None if array is None else array[begin:end] for array in known]
        sums = [remain[: end - begin] for remain in remains]
        for row, factors, total in zip(rows, matrix, sums, strict=True):
            _sum_row(row, factors, arrays, total)
            _add(total, blocks[row][begin:end])
        parts = [array[begin:end] for array in solved.values()]
        if rows[0] == 0:  # a row of ones: the last array is its sum minus the other missing arrays
            # The last row of the inverse is not applied: that array costs only XORs, no doublings.
            for factors, part in zip(inverse, parts[:-1], strict=False):
                _sum(factors, sums, part)
            _sum_plain([sums[0], *parts[:-1]], parts[-1])
        else:
            for factors, part in zip(inverse, parts, strict=True):
                _sum(factors, sums, part)


def _sum_row(row: int, factors: Sequence[int], arrays: Sequence[Bytes | None], out: Bytes) -> None:
    if row == 1 and len(arrays) > 1:
        _sum_powers(arrays, out)
    else:
        _sum(factors, arrays, out)


def _sum(factors: Sequence[int], arrays: Sequence[Bytes | None], out: Bytes) -> None:
    """``out`` = sum of ``factors[i]`` times ``arrays[i]``."""
    terms = [(f, array) for f, array in zip(factors, arrays, strict=True) if f and array is not None]
    # For each bit, the arrays whose factor has it: their sum is plain XOR.
    planes = [[array for f, array in terms if f >> bit & 1] for bit in range(8)]
    # The highest bit that any factor has.
    top = max((bit for bit in range(8) if planes[bit]), default=0)
    # Plain XOR reads each byte once, so its blocks need not stay in cache; doublings reread theirs.
    block = BLOCK_BYTES if top == 0 else _block_bytes(len(terms))
    scratch = np.empty(block if top else 0, np.uint8)
    for begin in range(0, len(out), block):
        part = out[begin : begin + block]
        _sum_plain(_pieces(planes[top], begin, len(part)), part)
        for bit in range(top - 1, -1, -1):
            _double(part, scratch)
            for piece in _pieces(planes[bit], begin, len(part)):
                _add(part, piece)


def _sum_powers(arrays: Sequence[Bytes | None], out: Bytes) -> None:
    """``out`` = sum of 2^i times ``arrays[i]``."""
    block = _block_bytes(1)
    scratch = np.empty(block, np.uint8)
    for begin in range(0, len(out), block):
        part = out[begin : begin + block]
        # ``out`` may be uninitialized, and arrays may all end before this block.
        part[:] = 0
        started = False
        for array in reversed(arrays):
            if started:
                _double(part, scratch)
            if array is not None and begin < len(array):
                _add(part, array[begin : begin + len(part)])
                started = True


def _sum_plain(pieces: Iterable[Bytes], out: Bytes) -> None:
    """``out`` = XOR of pieces, which may be shorter than ``out``."""
    drawn = iter(pieces)
    first, second = next(drawn, out[:0]), next(drawn, out[:0])
    # One pass over the first two saves clearing or copying ``out`` first.
    both, longer = min(len(first), len(second)), max(first, second, key=len)
    np.bitwise_xor(first[:both], second[:both], out=out[:both])
    out[both : len(longer)] = longer[both:]
    filled = len(longer)
    for piece in drawn:
        _add(out[:filled], piece[:filled])
        out[filled : len(piece)] = piece[filled:]
        filled = max(filled, len(piece))
    out[filled:] = 0


def _pieces(arrays: Sequence[Bytes], begin: int, nbytes: int) -> list[Bytes]:
    return [array[begin : begin + nbytes] for array in arrays if begin < len(array)]


def _add(target: Bytes, source: Bytes) -> None:
    part = target[: len(source)]
    np.bitwise_xor(part, source, out=part)


def _double(array: Bytes, scratch: Bytes) -> None:
    """Multiply ``array`` by 2 in place: a left shift, reduced by the polynomial where the highest bit is set."""
    carry = scratch[: len(array)]
    # The highest bit is the sign of an int8.
    np.less(array.view(np.int8), np.int8(0), out=carry.view(np.bool_))
    np.multiply(carry, _REMAINDER, out=carry)
    # uint8 wraps around, so an addition is a left shift, which numpy vectorizes.
    np.add(array, array, out=array)
    np.bitwise_xor(array, carry, out=array)


def _block_bytes(width: int) -> int:
    """Block size, a multiple of a page, 16 to 128 KiB: ``width`` blocks, a result and a scratch fit in cache."""
    return max(16 << 10, min(128 << 10, _CACHE_BYTES // (width + 2) // PAGE_BYTES * PAGE_BYTES))


def _powers() -> list[int]:
    values = [1]
    while len(values) < 255:
        doubled = values[-1] << 1
        values.append(doubled ^ _POLYNOMIAL if doubled > 0xFF else doubled)
    return values


# The powers of 2 have period 255: exponents are modulo 255, and -i gives the inverse of 2^i.
_EXP = _powers()
_LOG = {value: power for power, value in enumerate(_EXP)}


def _multiply(a: int, b: int) -> int:
    return _EXP[(_LOG[a] + _LOG[b]) % 255] if a and b else 0


def _reciprocal(a: int) -> int:
    return _EXP[-_LOG[a] % 255]


def _inverse(matrix: list[list[int]]) -> list[list[int]]:
    """Gauss-Jordan inverse of a square matrix of coefficients. All its submatrices are invertible: no pivot is 0."""
    size = len(matrix)
    rows = [row + [int(i == j) for j in range(size)] for i, row in enumerate(matrix)]
    for column in range(size):
        scale = _reciprocal(rows[column][column])
        rows[column] = [_multiply(scale, value) for value in rows[column]]
        for i in range(size):
            if i != column and rows[i][column]:
                factor = rows[i][column]
                rows[i] = [a ^ _multiply(factor, b) for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[size:] for row in rows]
