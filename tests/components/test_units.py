"""Sizes, rates, times and counts as users write them: a number alone is none of the first three."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.units import counted, in_words, rate, seconds, size


def test_sizes() -> None:
    texts = ("64MiB", "64MB", "1.5 GiB", "512KiB", "100B", "2kB", "1TiB", "0")
    assert [size(text) for text in texts] == [64 << 20, 64_000_000, 3 << 29, 512 << 10, 100, 2000, 1 << 40, 0]


def test_rates_of_bytes_and_of_bits() -> None:
    assert [rate(text) for text in ("2GB/s", "16Gbit/s", "500 MiB/s", "100Gbit/s", "0")] == [
        2e9, 2e9, 500 * 2**20, 12.5e9, 0.0,
    ]  # fmt: skip


def test_times_and_counts() -> None:
    assert [seconds(text) for text in ("500ms", "90s", "5min", "40h", "2d")] == [
        0.5,
        90.0,
        300.0,
        144_000.0,
        172_800.0,
    ]
    assert [counted(text) for text in ("34b", "34e9", "1.5t", "7B", "750m")] == [34e9, 34e9, 1.5e12, 7e9, 750e6]


@pytest.mark.parametrize(
    "text", ["", "64", "4 pounds", "64mb", "2g", "8Mbit", "2GB/s", "nan", "inf", "-1GiB", "1e3", "GiB", "0x"]
)
def test_what_is_no_size_is_told_how_to_be_written(text: str) -> None:
    with pytest.raises(ValueError, match="400GiB"):
        size(text)


@given(st.floats(1, 1e14))
def test_a_rate_in_words_is_read_as_it_was(bytes_per_sec: float) -> None:
    assert rate(in_words(bytes_per_sec)) == pytest.approx(bytes_per_sec, rel=0.0006)
