"""Ranks that lack the same bytes agree, each by itself, on who fetches what."""

from __future__ import annotations

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
