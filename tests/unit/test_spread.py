"""Ranks that lack the same bytes agree, each by itself, on who fetches what."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.restore import redistribute
from ftckpt.restore.plan import StridedCopy, run
from ftckpt.restore.redistribute import NAME_BYTES, name_of, part_of, sharers

NAMES = [name_of(b"place", [run(number, 0, 4)]) for number in range(6)]


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=6))
def test_all_ranks_find_the_same_sharers(held: list[set[bytes]]) -> None:
    told = [b"".join(sorted(names)) for names in held]
    for rank, names in enumerate(held):
        found = sharers(told, rank)
        assert set(found) == {name for name in names if sum(name in other for other in held) > 1}
        for name, ranks in found.items():
            assert ranks == tuple(other for other, has in enumerate(held) if name in has)


def test_half_a_name_is_not_the_name() -> None:
    one, other = NAMES[0], NAMES[0][:8] + NAMES[1][8:]
    assert sharers([one, other], 0) == {} == sharers([one, other], 1)
    assert sharers([one, other, other], 0) == {}
    assert sharers([one, other, other], 1) == {other: (1, 2)}


@given(st.sampled_from(NAMES), st.integers(0, 1 << 20), st.integers(2, 9), st.integers(1, 5000))
def test_parts_fill_the_whole_and_are_of_a_size(name: bytes, nbytes: int, count: int, grain: int) -> None:
    ranks = tuple(range(3, 3 + 2 * count, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redistribute, "GRAIN_BYTES", grain)
        parts = sorted(part_of(name, nbytes, ranks, rank) for rank in ranks)
    position = 0
    for begin, end in parts:
        assert begin in (position, end)
        position = max(position, end)
    assert position == nbytes
    sizes = [end - begin for begin, end in parts]
    assert max(sizes) - min(sizes) <= 2 * grain


def test_small_ones_go_to_different_ranks() -> None:
    names = [name_of(b"place", [run(number, 0, 4)]) for number in range(400)]
    fetched = [sum(part_of(name, 100, (0, 1, 2, 3), rank)[1] > 0 for name in names) for rank in range(4)]
    assert sum(fetched) == 400 and min(fetched) > 50


def test_a_name_is_of_what_is_read_and_its_order() -> None:
    rows, columns = StridedCopy(0, 0, (2, 3), (10, 1), (3, 1)), StridedCopy(0, 0, (3, 2), (1, 10), (1, 3))
    names = [
        name_of(b"one", [rows]),
        name_of(b"two", [rows]),
        name_of(b"one", [columns]),
        name_of(b"one", [rows, columns]),
        name_of(b"one", [columns, rows]),
        name_of(b"one", [rows._replace(source=1)]),
        name_of(b"one", [rows._replace(source_strides=(11, 1))]),
    ]
    assert len(set(names)) == len(names) and {len(name) for name in names} == {NAME_BYTES}
    assert name_of(b"one", [rows._replace(dest=7, dest_strides=(9, 1))]) == names[0]


def test_sixteen_thousand_ranks_are_looked_through_in_no_time() -> None:
    rng = np.random.default_rng(0)
    own = [rng.bytes(NAME_BYTES * 100) for _ in range(128)]
    told = [own[rank // 128] for rank in range(16_384)]
    found = sharers(told, 200)
    assert len(found) == 100
    assert all(ranks == tuple(range(128, 256)) for ranks in found.values())
