"""The reports of an SMP about its node."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ftckpt.errors import SmpError
from ftckpt.memory.inventory import NodeProtection, Problem
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.reports import MarkAge, packed, unpacked

ONE, OTHER = b"a" * 16, b"b" * 16


def test_the_age_of_a_mark() -> None:
    history = MarkAge()
    assert history.fields(1.0) is None
    for place, now in enumerate((10.0, 14.0, 18.0)):
        history.note(SnapshotId(ONE, 5 + 10 * place), now)
        history.note(SnapshotId(ONE, 5 + 10 * place), now + 1)
    said = history.fields(20.0)
    assert said is not None
    assert (said["iteration"], said["age_secs"]) == (25, 2.0)
    history.note(SnapshotId(OTHER, 25), 21.0)  # behind a restart
    said = history.fields(22.0)
    assert said is not None and said["age_secs"] == 1.0
    history.note(None, 23.0)
    assert history.fields(24.0) is None


def marks_of(*whole: SnapshotId | None) -> SnapshotId | None:
    """The snapshot that the SMP considers committed when its node's ranks have marked these."""
    arenas = MonitoredArenas(Path())
    controls = [SimpleNamespace(whole=lambda mark=mark: mark) for mark in whole]
    arenas.by_shard = cast(
        Any, {str(n): SimpleNamespace(mapped=SimpleNamespace(control=c)) for n, c in enumerate(controls)}
    )
    return arenas.oldest_mark(lambda control: control.whole())


def test_ranks_that_pass_a_boundary_one_after_the_other_leave_no_gap() -> None:
    history = MarkAge()
    for place in range(4):
        before, after = SnapshotId(ONE, 10 * place), SnapshotId(ONE, 10 * place + 10)
        for now, marks in ((0, (before, before)), (1, (after, before)), (2, (after, after))):
            history.note(marks_of(*marks), 4.0 * place + now)
            said = history.fields(4.0 * place + now)
            assert said is not None and said["iteration"] == (10 * place if now < 2 else 10 * place + 10)


def test_what_one_rank_has_not_or_of_another_lineage_is_whole_nowhere() -> None:
    one, other = SnapshotId(ONE, 10), SnapshotId(OTHER, 10)
    assert marks_of(one, one) == one
    assert [marks_of(*marks) for marks in ((), (one, None), (None, None), (one, other))] == [None] * 4


def test_protection_is_packed_and_what_is_none_is_refused() -> None:
    told = NodeProtection(problems=(Problem("file", "text"),))
    assert unpacked(packed(told)) == told
    for text in ("", "%", base64.b64encode(b"x").decode(), base64.b64encode(zlib.compress(b"{}[")).decode()):
        with pytest.raises(SmpError, match="protection"):
            unpacked(text)
