"""Fragments and manifests: impossible geometry is refused, and their texts give back an equal value."""

from __future__ import annotations

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
