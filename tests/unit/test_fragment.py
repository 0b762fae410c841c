"""Fragments and manifests: impossible geometry is refused, and their texts give back an equal value."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import VERSION, Manifest, shard_name
from tests.support.errors import raises

DTYPES = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def fragments(draw: st.DrawFn) -> Fragment:
    whole = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in whole)
    shape = tuple(draw(st.integers(0, size - begin)) for size, begin in zip(whole, offset, strict=True))
    ends = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return Fragment(draw(st.text(max_size=8)), draw(DTYPES), whole, Box(offset, shape), *ends)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    names = st.text(max_size=4)
    return Manifest(
        coords=draw(st.dictionaries(names, st.integers(0, 99), max_size=4)),
        layout=draw(st.dictionaries(names, st.integers() | st.text(max_size=4) | st.booleans(), max_size=4)),
        stepped=tuple(draw(st.lists(fragments(), max_size=3))),
        volatile=tuple(draw(st.lists(fragments(), max_size=2))),
        objects_bytes=draw(st.integers(0, 1 << 40)),
        chunk_bytes=draw(st.integers(1, 1 << 40)),
    )


MANIFEST = Manifest(
    {"tp": 0, "pp": 1},
    {"tp": 1, "pp": 2},
    (Fragment.whole("weight/a", "BF16", (4, 6), Box((0, 2), (4, 2))),),
    (),
    4096,
    1 << 20,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "F31"}, "F31"),
        ({"box": Box((0,), (4,))}, "2"),
        ({"box": Box((0, 0), (4,))}, "2"),
        ({"box": Box((0, 5), (4, 2))}, "4 6"),
        ({"box": Box((-1, 0), (1, 1))}, ""),
        ({"start": -1}, "-1:8"),
        ({"stop": 9}, "0:9"),
    ],
)
def test_impossible_geometry_is_refused_with_the_key(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "key": "weight/a", "dtype": "F32", "global_shape": (4, 6), "box": Box((0, 2), (4, 2)), "start": 0, "stop": 8,
    }  # fmt: skip
    assert Fragment(**good).nbytes == 32
    with raises(ValueError, "weight/a", *message.split()):
        Fragment(**{**good, **change})


@given(fragments())
def test_a_fragment_survives_json(fragment: Fragment) -> None:
    assert Fragment.from_json(json.loads(json.dumps(fragment.to_json()))) == fragment


@given(fragments(), st.data())
def test_parts_count_from_the_fragments_own_start(fragment: Fragment, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, fragment.numel))
    left, right = fragment.part(0, cut), fragment.part(cut, fragment.numel)
    assert (left.start, left.stop, right.stop) == (fragment.start, right.start, fragment.stop)
    assert left.nbytes + right.nbytes == fragment.nbytes == fragment.numel * fragment.item_bytes
    assert right.part(0, right.numel) == right


def test_a_part_cannot_leave_the_box() -> None:
    with pytest.raises(ValueError):
        MANIFEST.stepped[0].part(0, 9)


@given(st.lists(fragments(), min_size=2, max_size=2))
def test_names_tell_key_box_and_range(pair: list[Fragment]) -> None:
    a, b = (f.with_key("weight/a") for f in pair)
    assert (a.name == b.name) == ((a.box, a.start, a.stop) == (b.box, b.start, b.stop))
    assert a.with_key("weight/b").name != a.name


def test_a_scalar_is_one_element() -> None:
    scalar = Fragment.whole("step", "I64", (), Box((), ()))
    assert (scalar.numel, scalar.nbytes, scalar.name) == (1, 8, "step[+](0:1)")


@given(manifests())
def test_a_manifest_comes_back_equal_in_the_order_of_its_coordinates(manifest: Manifest) -> None:
    back = Manifest.decode(manifest.encode())
    assert back == manifest
    assert list(back.coords) == list(manifest.coords)
    assert (back.encode(), back.digest, back.shard) == (manifest.encode(), manifest.digest, manifest.shard)


def test_a_manifest_is_canonical_whatever_the_order_of_the_layout() -> None:
    turned = Manifest(MANIFEST.coords, {"pp": 2, "tp": 1}, *list(MANIFEST.__dict__.values())[2:])
    assert turned.encode() == MANIFEST.encode()
    assert len(MANIFEST.digest) == 16
    assert shard_name({"tp": 0, "pp": 1, "dp": 12}) == "tp0-pp1-dp12"


def test_another_version_is_a_mismatch_that_names_both() -> None:
    text = MANIFEST.encode().replace(f'"version":{VERSION}'.encode(), b'"version":7')
    with raises(MismatchError, "version 7", str(VERSION)):
        Manifest.decode(text)


def attempt(data: bytes) -> None:
    """Hostile bytes are refused, or they are a manifest in every respect."""
    try:
        manifest = Manifest.decode(data)
    except (CorruptError, MismatchError):
        return
    assert Manifest.decode(manifest.encode()) == manifest


@given(manifests(), st.data())
def test_flipped_bits_and_cuts_are_refused_or_harmless(manifest: Manifest, data: st.DataObject) -> None:
    encoded = bytearray(manifest.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    attempt(bytes(encoded))
    attempt(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


FOREIGN: list[Any] = [None, "x", -1, 1.5, 10**30, float("inf"), float("nan"), [], [[]], {}, [1, 2, 3], [["k", None]]]


@pytest.mark.parametrize("value", FOREIGN, ids=repr)
@pytest.mark.parametrize(
    "name", ["coords", "layout", "stepped", "volatile", "objects_bytes", "chunk_bytes", "version"]
)
def test_a_field_of_another_kind_is_refused_or_harmless(name: str, value: Any) -> None:
    attempt(json.dumps({**json.loads(MANIFEST.encode()), name: value}).encode())


@pytest.mark.parametrize("value", FOREIGN, ids=repr)
@pytest.mark.parametrize("place", range(7))
def test_a_fragment_of_other_kinds_is_a_value_error(place: int, value: Any) -> None:
    text = MANIFEST.stepped[0].to_json()
    text[place] = value
    with contextlib.suppress(ValueError):
        Fragment.from_json(text)


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"version":1}'])
def test_foreign_bytes_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        Manifest.decode(data)
