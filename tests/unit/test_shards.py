"""Names of shards tell axes and places; a layout tells the names of all its shards."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import MismatchError
from ftckpt.model.manifest import shard_name
from ftckpt.model.topology import axes_of, first_of_each_stage, shard_names
from tests.support.errors import raises

AXES = st.lists(st.sampled_from(["tp", "pp", "cp", "dp", "ep", "x_y"]), min_size=1, unique=True)


@given(AXES, st.data())
def test_the_names_of_a_layout_are_those_of_all_its_places(axes: list[str], data: st.DataObject) -> None:
    sizes: Mapping[str, int] = {axis: data.draw(st.integers(1, 4)) for axis in axes}
    names = shard_names({**sizes, "vpp": 2, "distributed_optimizer": True}, axes)
    places: list[dict[str, int]] = [{}]
    for axis in axes:
        places = [{**place, axis: index} for place in places for index in range(sizes[axis])]
    assert names == tuple(shard_name(place) for place in places)
    assert len(set(names)) == len(names)
    assert all(axes_of(name) == tuple(axes) for name in names)
    firsts = first_of_each_stage(tuple(reversed(names)))
    assert firsts == tuple(
        shard_name({axis: stage if axis == "pp" else 0 for axis in axes}) for stage in range(sizes.get("pp", 1))
    )


def test_stages_are_in_order_beyond_ten() -> None:
    names = shard_names({"tp": 2, "pp": 12}, ("tp", "pp"))
    assert first_of_each_stage(names)[9:] == ("tp0-pp9", "tp0-pp10", "tp0-pp11")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 2}, "dp has no size"),
        ({"tp": 2, "dp": "4"}, "dp has no size"),
        ({"tp": 2, "dp": True}, "dp has no size"),
        ({"tp": 0, "dp": 1}, "tp has no size"),
        ({"tp": 1 << 20, "dp": 2}, "more than 1048576 shards"),
    ],
)
def test_sizes_that_are_none_are_refused(layout: Mapping[str, int], message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        shard_names(layout, ("tp", "dp"))


@pytest.mark.parametrize("name", ["", "tp", "tp0-", "0", "-tp0", "tp0-pp"])
def test_what_is_no_shard_is_refused(name: str) -> None:
    with raises(MismatchError, "shard"):
        axes_of(name)
