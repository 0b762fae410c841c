"""Snapshot ids, fragments, manifests and their codec."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import CorruptError, MismatchError
from ftckpt.model.codec import decode, encode
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment
from ftckpt.model.manifest import VERSION, Manifest, shard_name
from ftckpt.model.snapshot import SnapshotId
from tests.support.errors import raises

# --- the name of a snapshot ---


IDS = st.builds(SnapshotId, st.binary(min_size=16, max_size=16), st.integers(0, (1 << 63) - 1))


@given(IDS)
def test_both_forms_give_the_same_snapshot_back(snapshot: SnapshotId) -> None:
    assert SnapshotId.parse(str(snapshot)) == snapshot
    assert SnapshotId.unpack(snapshot.pack()) == snapshot
    assert len(snapshot.pack()) == SnapshotId.NBYTES
    assert "/" not in str(snapshot)
    assert len(str(snapshot)) <= 52


@given(IDS, IDS)
def test_snapshots_sort_by_iteration_then_lineage(one: SnapshotId, other: SnapshotId) -> None:
    assert (one < other) == ((one.iteration, one.lineage) < (other.iteration, other.lineage))
    assert (one == other) == (str(one) == str(other)) == (one.pack() == other.pack())


HEX = "ab" * 16


@pytest.mark.parametrize(
    "text", ["", "1.2", HEX, f"{HEX}.-1", f"{HEX}.01", f"{HEX.upper()}.1", f"{HEX}.1\n", f"{HEX}.{1 << 63}"]
)
def test_what_is_not_the_text_of_a_snapshot_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        SnapshotId.parse(text)


@pytest.mark.parametrize("data", [b"", bytes(23), bytes(25), bytes(16) + b"\xff" * 8])
def test_what_is_not_the_bytes_of_a_snapshot_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        SnapshotId.unpack(data)


# --- fragments and manifests ---


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


# --- the JSON form of dataclasses ---


class Pair(NamedTuple):
    left: int
    right: tuple[str, ...]


@dataclass(frozen=True)
class Near:
    slot: int


@dataclass(frozen=True)
class Far:
    slot: int
    node: str


@dataclass(frozen=True)
class Report:
    snapshot: SnapshotId | None
    pair: Pair
    raw: bytes
    at: Near | Far
    layout: Mapping[str, int | str | bool]
    fragments: Sequence[Fragment] = ()
    notes: tuple[tuple[str, str], ...] = field(default=())


SNAPSHOTS = st.builds(SnapshotId, st.binary(min_size=16, max_size=16), st.integers(0, 1 << 40))
FRAGMENTS = st.builds(lambda n: Fragment.whole("k", "F32", (n,), Box((0,), (n,))), st.integers(0, 9))
REPORTS = st.builds(
    Report,
    st.none() | SNAPSHOTS,
    st.builds(Pair, st.integers(), st.lists(st.text()).map(tuple)),
    st.binary(),
    st.builds(Near, st.integers()) | st.builds(Far, st.integers(), st.text()),
    st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()),
    st.lists(FRAGMENTS).map(tuple),
    st.lists(st.tuples(st.text(), st.text())).map(tuple),
)


@given(REPORTS)
def test_what_was_written_is_read(report: Report) -> None:
    read = decode(encode(report), Report)
    assert read == report
    assert {name: type(value) for name, value in read.layout.items()} == {
        name: type(value) for name, value in report.layout.items()
    }


GOOD: dict[str, Any] = {
    "snapshot": f"{'aa' * 16}.5", "pair": [1, ["a"]], "raw": "00ff", "at": {"slot": 1}, "layout": {"tp": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("snapshot", "aa.5"),
        ("pair", [True, []]),
        ("raw", "0"),
        ("at", {"slot": 1, "rack": "r"}),
        ("layout", [["tp", 2]]),
        ("layout", {"tp": None}),
        ("fragments", [["k"]]),
        ("notes", [["a", "b", "c"]]),
        ("stranger", 1),
    ],
)
def test_what_does_not_belong_there_is_refused(name: str, wrong: Any) -> None:
    decode(json.dumps(GOOD).encode(), Report)
    with pytest.raises(ValueError):
        decode(json.dumps({**GOOD, name: wrong}).encode(), Report)
    with pytest.raises(ValueError):
        decode(json.dumps({key: value for key, value in GOOD.items() if key not in (name, "raw")}).encode(), Report)


@pytest.mark.parametrize("text", [b"", b"{", b"\xff", b"[" * 100_000, b"[]", b"null"])
def test_what_is_no_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        decode(text, Report)
