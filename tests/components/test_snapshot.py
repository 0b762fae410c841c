"""The name of a snapshot: its forms, its order, and how an arena finds it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.model.snapshot import SnapshotId

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
