"""The JSON form of dataclasses: what was written is read, anything else is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.model.codec import decode, encode
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.snapshot import SnapshotId


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
