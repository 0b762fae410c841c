"""Parity: whatever is missing comes back, by any rows, as an independent arithmetic and ISA-L compute it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyeclib.ec_iface import ECDriver

from ftckpt.array_types import Bytes
from ftckpt.errors import ConfigError, LostError
from ftckpt.parity import codecs
from ftckpt.parity.codecs import MISSING, coefficient, decode, encode, encoder
from tests.support.errors import raises
from tests.support.tiers import by_default

LENGTHS = [1, 100, 4096, 16 << 10, (128 << 10) + 1, (256 << 10) - 1, (256 << 10) + 77, (1 << 20) + 4097]


def product(a: int, b: int) -> int:
    """Of two elements of GF(2^8), bit by bit."""
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(14, 7, -1):
        if result >> bit & 1:
            result ^= 0x11D << (bit - 8)
    return result


def determinant(matrix: list[list[int]]) -> int:
    """By the first row; signs do not matter where 1 = -1."""
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


@pytest.mark.parametrize(
    ("width", "losses"), by_default([(254, 2), (253, 3), (128, 128), (1, 255)], [(254, 2), (253, 3), (1, 255)])
)
def test_no_two_columns_of_any_two_rows_depend_on_each_other(width: int, losses: int) -> None:
    for low, high in combinations(range(losses), 2):
        ratios = {product(coefficient(high, i), codecs._reciprocal(coefficient(low, i))) for i in range(width)}
        assert len(ratios) == width and 0 not in ratios


def test_coefficients_are_those_of_the_format() -> None:
    inverse = {value: next(i for i in range(1, 256) if product(value, i) == 1) for value in range(1, 256)}
    power = [1]
    for _ in range(254):
        power.append(product(power[-1], 2))
    for index in range(40):
        assert coefficient(0, index) == 1
        assert coefficient(1, index) == power[index]
        for row in range(2, 6):
            assert coefficient(row, index) == inverse[inverse[power[index]] ^ power[row - 1]]


@pytest.mark.parametrize("row", range(4))
def test_a_row_is_the_sum_of_products(row: int) -> None:
    data = arrays(6, 300)
    table = np.array([[product(a, b) for b in range(256)] for a in range(256)], np.uint8)
    expected = np.zeros(300, np.uint8)
    for index, array in enumerate(data):
        expected ^= table[coefficient(row, index)][array]
    assert np.array_equal(encode("rs", data, 300, row, 4), expected)


@pytest.mark.parametrize("width", [1, 2, 5, 8])
@pytest.mark.parametrize("length", [80, 5000, 300_000])
def test_two_rows_are_those_of_isa_l(width: int, length: int) -> None:
    data = arrays(width, length)
    fragments = ECDriver(k=width, m=2, ec_type="isa_l_rs_vand").encode(b"".join(array.tobytes() for array in data))
    for row in range(2):
        behind_header = fragments[width + row][80 : 80 + length]  # the header is liberasurecode's
        assert behind_header == encode("rs", data, length, row, 2).tobytes()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("code", ["xor", "rs"])
def test_whatever_is_missing_comes_back_by_any_rows(code: str, length: int) -> None:
    losses = 1 if code == "xor" else 3
    data: list[Bytes | None] = [*arrays(4, length), None, arrays(1, length // 2)[0]]
    blocks = {row: encode(code, data, length, row, losses) for row in range(losses)}
    for missing in range(losses + 1):
        for lost in combinations(range(6), missing) if length < 5000 else [tuple(range(0, 2 * missing, 2))]:
            for rows in combinations(range(losses), missing):
                have = [MISSING if index in lost else array for index, array in enumerate(data)]
                found = decode(code, have, {row: blocks[row] for row in rows}, length, losses)
                assert set(found) == set(lost)
                for index in lost:
                    assert np.array_equal(found[index], padded(data[index], length)), (lost, rows, index)


@given(st.data())
def test_random_stripes_come_back(draw: st.DataObject) -> None:
    length = draw.draw(st.integers(1, 5000))
    width, losses = draw.draw(st.integers(1, 12)), draw.draw(st.integers(1, 5))
    sizes = draw.draw(st.lists(st.none() | st.integers(0, length), min_size=width, max_size=width))
    random = np.random.default_rng(draw.draw(st.integers(0, 1 << 30)))
    data = [None if size is None else random.integers(0, 256, size, dtype=np.uint8) for size in sizes]
    blocks = {row: encode("rs", data, length, row, losses) for row in range(losses)}
    lost = draw.draw(st.sets(st.integers(0, width - 1), max_size=losses))
    rows = draw.draw(st.permutations(range(losses)))[: draw.draw(st.integers(len(lost), losses))]
    have = [MISSING if index in lost else array for index, array in enumerate(data)]
    found = decode("rs", have, {row: blocks[row] for row in rows}, length, losses)
    assert set(found) == lost
    assert all(np.array_equal(found[index], padded(data[index], length)) for index in lost)


def test_a_wide_stripe_comes_back() -> None:
    data = arrays(250, 70_000)
    blocks = {row: encode("rs", data, 70_000, row, 6) for row in (1, 3, 5)}
    found = decode("rs", [MISSING if i in (0, 100, 249) else a for i, a in enumerate(data)], blocks, 70_000, 6)
    assert all(np.array_equal(found[index], data[index]) for index in (0, 100, 249))


def test_mirror() -> None:
    data = arrays(1, 5000)
    block = encode("mirror", [data[0][:4000]], 5000, 0, 1)
    assert np.array_equal(block, padded(data[0][:4000], 5000)) and not np.shares_memory(block, data[0])
    found = decode("mirror", [MISSING], {0: block}, 5000, 1)
    assert np.array_equal(found[0], block) and not np.shares_memory(found[0], block)
    assert decode("mirror", data, {}, 5000, 1) == {}


def test_data_is_only_read_and_out_is_used() -> None:
    data = arrays(4, 40_000)
    copies = [array.copy() for array in data]
    for array in data:
        array.flags.writeable = False
    for row in range(3):
        out = np.full(40_000, 255, np.uint8)
        assert encode("rs", data, 40_000, row, 3, out) is out
        assert np.array_equal(out, encode("rs", data, 40_000, row, 3))
        decode("rs", [MISSING, *data[1:]], {row: out}, 40_000, 3)
    assert all(np.array_equal(a, b) for a, b in zip(data, copies, strict=True))


@pytest.mark.parametrize(("code", "row", "losses"), [("xor", 0, 1), ("rs", 0, 3), ("rs", 1, 3), ("rs", 2, 3)])
@pytest.mark.parametrize("sizes", [(9000, 40_000, None, 40_000, 0), (None, 39_999), (40_000, 5000, 40_000), (1,)])
def test_pieces_make_the_block_that_whole_arrays_make(
    code: str, row: int, losses: int, sizes: tuple[int | None, ...]
) -> None:
    data = [None if size is None else arrays(1, size, seed)[0] for seed, size in enumerate(sizes)]
    whole = np.zeros(40_000, np.uint8)
    for array in data:
        whole ^= padded(array, 40_000)
    expected = whole if row == 0 else encode(code, data, 40_000, row, losses)
    fold, out = encoder(code, len(data), row, losses), np.full(40_000, 255, np.uint8)
    for begin in range(0, 40_000, 12_288):
        part = out[begin : begin + 12_288]
        fold((None if array is None else array[begin : begin + len(part)] for array in data), part)
    assert np.array_equal(out, expected)


def test_a_piece_is_added_before_the_piece_after_the_next_is_drawn() -> None:
    """Whoever hashes each piece as it is drawn finds it in cache, and leaves it there for its sum."""
    data, out = arrays(6, 1000), np.zeros(1000, np.uint8)

    def drawn() -> Iterator[Bytes]:
        for index, array in enumerate(data):
            if index > 1:
                assert np.array_equal(out, np.bitwise_xor.reduce(data[:index]))
            yield array

    encoder("xor", 6, 0, 1)(drawn(), out)
    assert np.array_equal(out, np.bitwise_xor.reduce(data))


def test_nothing_at_all_gives_zeros() -> None:
    for code, row, losses in (("xor", 0, 1), ("rs", 1, 2), ("rs", 2, 3)):
        assert not encode(code, [None, None], 5000, row, losses, np.full(5000, 1, np.uint8)).any()
        found = decode(code, [MISSING, None], {row: np.zeros(5000, np.uint8)}, 5000, losses)
        assert not found[0].any()


def test_too_much_missing_is_lost_and_says_so() -> None:
    data = arrays(4, 100)
    blocks = {1: encode("rs", data, 100, 1, 2)}
    with raises(LostError, "2", "4", "1"):
        decode("rs", [MISSING, MISSING, *data[2:]], blocks, 100, 2)


@pytest.mark.parametrize(
    ("code", "width", "row", "losses", "text"),
    [
        ("raid", 3, 0, 1, "raid"),
        ("xor", 3, 1, 2, "peer_losses 3"),
        ("rs", 3, 2, 2, "peer_losses 3 2"),
        ("rs", 3, -1, 2, "peer_losses"),
        ("mirror", 2, 0, 1, "peer_losses 2"),
        ("mirror", 1, 1, 2, "peer_losses 1"),
        ("rs", 255, 0, 2, "peer_group 256 257"),
    ],
)
def test_impossible_codes(code: str, width: int, row: int, losses: int, text: str) -> None:
    with raises(ConfigError, *text.split()):
        encode(code, [None] * width, 10, row, losses)


def test_lengths_that_do_not_fit() -> None:
    data = arrays(3, 100)
    with raises(ValueError, "99"):
        encode("xor", data, 99, 0, 1)
    with raises(ValueError, "100"):
        encode("xor", data, 100, 0, 1, np.empty(101, np.uint8))
    with pytest.raises(ValueError):
        decode("xor", [MISSING, *data[1:]], {0: np.zeros(99, np.uint8)}, 100, 1)
