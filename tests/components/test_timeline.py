"""Timelines: which iteration is chosen, what trace and figure hold, and what broken logs do to them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from ftckpt.cli.history import read_history
from ftckpt.cli.sections import Additions, sections_of
from ftckpt.cli.timeline import Timeline, read_timeline, trace_of
from tests.components.made_logs import CHUNK_BYTES, EPOCH, LINE, OPTIMIZER, Logs
from tests.support.errors import lacks

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "run" / "events")


def one(tmp_path: Path, **layout: int) -> Timeline:
    """The timeline of one iteration of a layout."""
    written = Logs(tmp_path / "run" / "events", **layout)
    written.attempt(range(4, 6))
    return read_timeline(read_history(tmp_path / "run"))


def table(found: Timeline, logs: Path) -> list[dict[str, str]]:
    """The rows of the page, by their heads."""
    sections = sections_of(read_history(logs), found, Additions())
    section = next(section for section in sections if section.title.startswith("One iteration"))
    return [dict(zip(section.heads, row, strict=True)) for row in section.rows]


def test_the_newest_iteration_that_all_ranks_left_is_taken(logs: Logs) -> None:
    logs.attempt(range(1, 22), skip={3: {20}})
    assert read_timeline(read_history(logs.directory.parent)).iteration == 15
    found = read_timeline(read_history(logs.directory.parent), 20)
    assert found.iteration == 20 and 3 not in [rank.rank for rank in found.ranks]
    assert found.notes == ("no timeline of rank 3",)


def test_of_an_iteration_that_was_trained_twice_the_later_is_taken_and_never_a_mix(logs: Logs) -> None:
    logs.attempt(range(1, 12))
    logs.attempt(range(9, 12), skip={2: {10}, 5: {10}})
    found = read_timeline(read_history(logs.directory))
    assert found.iteration == 10 and len(found.ranks) == 8
    assert found.ranks[0].begin < EPOCH + 2000, "the earlier attempt is the one that is complete"
    logs.attempt(range(9, 12))
    assert read_timeline(read_history(logs.directory)).ranks[0].begin > EPOCH + 3000


def check_trace(trace: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Hold what Perfetto needs; returns begin, end and name of events by ``process/thread`` and by copies' name."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    names: dict[tuple[int, int, str], str] = {}
    threads: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    begun: dict[str, float] = {}
    for event in trace["traceEvents"]:
        assert event["pid"] > 0
        if event["ph"] == "M":
            names[event["pid"], event.get("tid", 0), event["name"]] = event["args"].get("name", "")
        elif event["ph"] == "b":
            begun[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            threads[event["name"]].append((begun.pop(event["id"]), event["ts"], event["name"]))
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
            process = names[event["pid"], 0, "process_name"]
            thread = f"{process}/{names[event['pid'], event['tid'], 'thread_name']}"
            threads[thread].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    assert not begun
    for thread, events in threads.items():
        for (_, end, _), (begin, _, _) in itertools.pairwise(events) if "/" in thread else ():
            assert begin >= end - 1e-6 * max(1.0, end * 1e-6), thread
    return threads


def test_the_trace_has_a_process_for_each_node_and_a_thread_for_each_rank(tmp_path: Path) -> None:
    found = one(tmp_path, pp=4, tp=2, dp=1)
    trace = trace_of(found)
    threads = check_trace(trace)
    training = [f"node n{rank // 2}/rank {rank} pp{rank // 2} tp{rank % 2} dp0" for rank in range(8)]
    assert set(threads) == {*training, *(f"rank {rank} copy" for rank in range(8))}
    for rank in found.ranks:
        spans = threads[training[rank.rank]]
        assert [kind for _, _, kind in spans] == [span.kind for span in rank.spans]
        shift = (rank.begin - found.origin) * 1e6
        for (begin, end, _), span in zip(spans, rank.spans, strict=True):
            assert (begin, end) == pytest.approx((shift + span.begin * 1e6, shift + span.end * 1e6), abs=0.01)
        assert len(threads[f"rank {rank.rank} copy"]) == len(rank.copies)
    copy = next(event for event in trace["traceEvents"] if event["ph"] == "b")
    assert copy["args"] == {"bytes": CHUNK_BYTES}
    assert {event["cat"] for event in trace["traceEvents"] if event.get("name") == "window"} == {"bubble"}


def test_the_table_adds_up(tmp_path: Path) -> None:
    found = one(tmp_path, pp=4, dp=1)
    row, rank = table(found, tmp_path)[0], found.ranks[0]
    assert [row[name] for name in ("node", "forward", "backward", "blocked")] == [
        "n0", "160.0 ms", "320.0 ms", "2.0 ms",
    ]  # fmt: skip
    assert row["idle"] == f"{(rank.secs - 0.16 - 0.32 - OPTIMIZER) * 1e3:.1f} ms"
    assert row["copied in forward"] == row["elsewhere"] == "0 B"
    assert rank.bytes_of("windows") + rank.bytes_of("backward") == rank.total_bytes == len(rank.copies) * CHUNK_BYTES
    assert not lacks(found.summary, "2.00")


def broken() -> st.SearchStrategy[bytes]:
    """A timeline with a field replaced or without it, with bytes cut out or put in, or anything at all."""
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    values = st.recursive(leaves, lambda deep: st.lists(deep, max_size=3) | st.dictionaries(st.text(), deep))
    whole = json.dumps(LINE).encode()

    def replaced(name: str, value: Any) -> bytes:
        return json.dumps({**LINE, name: value}).encode()

    def cut(at: int, length: int, new: bytes) -> bytes:
        return whole[:at] + new + whole[at + length :]

    return st.one_of(
        st.builds(replaced, st.sampled_from(sorted(LINE)), values),
        st.builds(cut, st.integers(0, len(whole)), st.integers(0, 40), st.binary(max_size=4)),
        st.binary(max_size=200),
    )
