"""Parity: whatever is missing comes back, by any rows, as an independent arithmetic and ISA-L compute it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from pyeclib.ec_iface import ECDriver

from ftckpt.array_types import Bytes
from ftckpt.errors import LostError
from ftckpt.parity.codecs import MISSING, coefficient, decode, encode, encoder
from tests.support.errors import raises


def product(a: int, b: int) -> int:
    """The product of two elements of GF(2^8), bit by bit."""
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(14, 7, -1):
        if result >> bit & 1:
            result ^= 0x11D << (bit - 8)
    return result


def determinant(matrix: list[list[int]]) -> int:
    """Expansion by the first row; signs do not matter where 1 = -1."""
    if len(matrix) == 1:
        return matrix[0][0]
    total = 0
    for column, value in enumerate(matrix[0]):
        minor = [row[:column] + row[column + 1 :] for row in matrix[1:]]
        total ^= product(value, determinant(minor))
    return total


def arrays(width: int, length: int, seed: int = 0) -> list[Bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length, dtype=np.uint8) for _ in range(width)]


def padded(array: Bytes | None, length: int) -> Bytes:
    result = np.zeros(length, np.uint8)
    if array is not None:
        result[: len(array)] = array
    return result


def test_every_square_submatrix_is_invertible() -> None:
    losses = 4
    for size in range(1, losses + 1):
        for rows in combinations(range(losses), size):
            for columns in combinations(range(10 - 1), size):
                assert determinant([[coefficient(row, column) for column in columns] for row in rows]), (
                    rows,
                    columns,
                )


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [80, 5000, 300_000])
def test_two_rows_are_those_of_isa_l(width: int, length: int) -> None:
    data = arrays(width, length)
    fragments = ECDriver(k=width, m=2, ec_type="isa_l_rs_vand").encode(b"".join(array.tobytes() for array in data))
    for row in range(2):
        behind_header = fragments[width + row][80 : 80 + length]  # the header is liberasurecode's
        assert behind_header == encode(data, length, row, 2).tobytes()


def test_mirror() -> None:
    data = arrays(1, 5000)
    block = encode([data[0][:4000]], 5000, 0, 1)
    assert np.array_equal(block, padded(data[0][:4000], 5000)) and not np.shares_memory(block, data[0])
    found = decode([MISSING], {0: block}, 5000, 1)
    assert np.array_equal(found[0], block) and not np.shares_memory(found[0], block)
    assert decode(data, {}, 5000, 1) == {}


@pytest.mark.parametrize(("row", "losses"), [(0, 1), (0, 3), (1, 3), (2, 3)])
@pytest.mark.parametrize("sizes", [(9000, 40_000, None, 40_000, 0), (None, 39_999), (40_000, 5000, 40_000), (1,)])
def test_pieces_make_the_block_that_whole_arrays_make(row: int, losses: int, sizes: tuple[int | None, ...]) -> None:
    data = [None if size is None else arrays(1, size, seed)[0] for seed, size in enumerate(sizes)]
    whole = np.zeros(40_000, np.uint8)
    for array in data:
        whole ^= padded(array, 40_000)
    expected = whole if row == 0 else encode(data, 40_000, row, losses)
    fold, out = encoder(len(data), row, losses), np.full(40_000, 255, np.uint8)
    for begin in range(0, 40_000, 12_288):
        part = out[begin : begin + 12_288]
        fold((None if array is None else array[begin : begin + len(part)] for array in data), part)
    assert np.array_equal(out, expected)


def test_too_much_missing_is_lost_and_says_so() -> None:
    data = arrays(4, 100)
    blocks = {1: encode(data, 100, 1, 2)}
    with raises(LostError, "2", "4", "1"):
        decode([MISSING, MISSING, *data[2:]], blocks, 100, 2)


LENGTHS = [1, 4096, (256 << 10) + 77]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("losses", [1, 3])
def test_whatever_is_missing_comes_back_by_any_rows(losses: int, length: int) -> None:
    data: list[Bytes | None] = [*arrays(4, length), None, arrays(1, length // 2)[0]]
    blocks = {row: encode(data, length, row, losses) for row in range(losses)}
    for missing in range(losses + 1):
        for lost in combinations(range(6), missing) if length < 5000 else [tuple(range(0, 2 * missing, 2))]:
            for rows in combinations(range(losses), missing):
                have = [MISSING if index in lost else array for index, array in enumerate(data)]
                found = decode(have, {row: blocks[row] for row in rows}, length, losses)
                assert set(found) == set(lost)
                for index in lost:
                    assert np.array_equal(found[index], padded(data[index], length)), (lost, rows, index)
