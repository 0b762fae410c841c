"""Timelines: which iteration is chosen, what the trace and the picture hold, and what broken logs do to them."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.commands.charts import merged, shown_tracks, ticks_of
from ftckpt.commands.event_log import EventLogError
from ftckpt.commands.page import ms, size
from ftckpt.commands.timeline import (
    HTML_NAME,
    TRACE_NAME,
    heads_of,
    page,
    picture,
    remove_timeline,
    rows_of,
    summary,
    text_table,
    trace_of,
    write_timeline,
)
from ftckpt.commands.tracks import IterationTracks, TrackCopy, parse_track, read_tracks
from ftckpt.errors import FtckptError
from tests.support.run_logs import (
    CHUNK_BYTES,
    EPOCH,
    FORWARD,
    LINE,
    OPTIMIZER,
    Logs,
    check_page,
    timeline_line,
)

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.fixture
def logs(tmp_path: Path) -> Logs:
    return Logs(tmp_path / "run" / "events")


def one(tmp_path: Path, **layout: int) -> IterationTracks:
    """The recording of one iteration of a layout."""
    written = Logs(tmp_path / "run" / "events", **layout)
    written.attempt(range(4, 6))
    return read_tracks(tmp_path / "run")


def test_the_newest_iteration_that_all_ranks_left_is_taken(logs: Logs) -> None:
    logs.attempt(range(1, 22), skip={3: {20}})
    assert read_tracks(logs.directory.parent).iteration == 15
    found = read_tracks(logs.directory.parent, 20)
    assert (found.iteration, found.missing) == (20, (3,))
    assert found.notes == ("no timeline of rank 3",)


def test_of_an_iteration_that_was_trained_twice_the_later_is_taken_and_never_a_mix(logs: Logs) -> None:
    logs.attempt(range(1, 12))
    logs.attempt(range(9, 12), skip={2: {10}, 5: {10}})
    found = read_tracks(logs.directory)
    assert (found.iteration, found.missing) == (10, ()) and found.secs < 10
    assert found.tracks[0].begin < EPOCH + 2000, "the earlier attempt is the one that is whole"
    logs.attempt(range(9, 12))
    assert read_tracks(logs.directory).tracks[0].begin > EPOCH + 3000


def test_without_a_lineage_time_tells_attempts_apart(logs: Logs) -> None:
    logs.attempt(range(9, 12), told=False)
    logs.attempt(range(9, 12), told=False, skip={2: {10}})
    found = read_tracks(logs.directory, 10)
    assert (found.missing, found.secs < 10) == ((2,), True)


def test_the_first_iteration_after_a_start_is_taken_only_if_there_is_no_other(logs: Logs) -> None:
    logs.attempt(range(5, 6))
    assert read_tracks(logs.directory).iteration == 5
    logs.attempt(range(1, 6))
    logs.attempt(range(15, 19))
    assert read_tracks(logs.directory).iteration == 5
    logs.attempt(range(20, 26))
    assert read_tracks(logs.directory).iteration == 25


def test_a_rank_that_left_only_its_start_is_missed(logs: Logs) -> None:
    logs.attempt(range(1, 6), skip={6: {5}})
    assert read_tracks(logs.directory).missing == (6,)


def test_of_several_directories_the_newest_is_taken_and_the_others_are_named(tmp_path: Path) -> None:
    old, new = Logs(tmp_path / "a"), Logs(tmp_path / "b" / "c")
    old.attempt(range(1, 8))
    new.attempt(range(1, 4), every=100)
    assert read_tracks(tmp_path).directory == old.directory, "the other has no timeline"
    new.attempt(range(1, 8))
    found = read_tracks(tmp_path)
    assert found.directory == new.directory
    assert found.notes == (f"taken from {new.directory}, the newest; there are also {old.directory}",)


@pytest.mark.parametrize(
    ("prepare", "iteration", "said"),
    [
        (
            lambda logs: logs.directory.rename(logs.directory.with_name("gone")),
            None,
            "no such directory; run with --ftckpt-events DIR",
        ),
        (lambda _: None, None, "no event logs .* --ftckpt-events DIR"),
        (lambda logs: logs.attempt(range(1, 4), every=9), 3, "no timelines .* --ftckpt-events DIR"),
        (lambda logs: logs.attempt(range(1, 16)), 7, "iteration 7 left no timeline; those that did are 5, 10, 15"),
        (lambda logs: logs.attempt(range(1, 30), every=1), 99, "the last that did are 10, 11,"),
    ],
)
def test_errors_say_what_is_missing(logs: Logs, prepare: Any, iteration: int | None, said: str) -> None:
    prepare(logs)
    with pytest.raises(EventLogError, match=said) as caught:
        read_tracks(logs.directory, iteration)
    assert isinstance(caught.value, FtckptError) and "\n" not in str(caught.value)


def test_ranks_are_sorted_by_stage_and_aligned_by_their_boundaries(tmp_path: Path) -> None:
    written = Logs(tmp_path / "events", pp=2, dp=2)
    written.coords.reverse()
    written.attempt(range(4, 6))
    found = read_tracks(tmp_path)
    assert [(track.stage, track.rank) for track in found.tracks] == [(0, 2), (0, 3), (1, 0), (1, 1)]
    assert found.origin == min(track.begin for track in found.tracks)
    assert found.at(found.tracks[1], 0.5) == pytest.approx(0.5003, abs=1e-6)


def check_trace(trace: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Hold what Perfetto needs; returns begin, end and name of events by ``process/thread``."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    names: dict[tuple[int, int, str], str] = {}
    threads: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert event["pid"] > 0
        if event["ph"] == "M":
            names[event["pid"], event["tid"], event["name"]] = event["args"].get("name", "")
        elif event["ph"] == "C":
            assert event["ts"] >= 0 and event["args"]["bytes"] >= 0
        else:
            assert event["ph"] == "X" and event["ts"] >= 0 and event["dur"] >= 0
            process = names[event["pid"], 0, "process_name"]
            thread = f"{process}/{names[event['pid'], event['tid'], 'thread_name']}"
            threads[thread].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for thread, events in threads.items():
        for (_, end, _), (begin, _, _) in itertools.pairwise(sorted(events)):
            assert begin >= end - 1e-6 * max(1.0, end * 1e-6), thread
    return threads


def test_the_trace_has_a_process_per_rank_with_what_it_did(tmp_path: Path) -> None:
    found = one(tmp_path, pp=4, tp=2, dp=1)
    trace = trace_of(found)
    threads = check_trace(trace)
    assert set(threads) == {
        f"rank {rank} · pp{rank // 2} tp{rank % 2} dp0/{lane}" for rank in range(8) for lane in ("training", "copy")
    }
    for track in found.tracks:
        name = f"rank {track.rank} · {track.label}"
        training = threads[f"{name}/training"]
        assert [kind for _, _, kind in training] == [span.kind for span in track.spans]
        shift = (track.begin - found.origin) * 1e6
        for (begin, end, _), span in zip(training, track.spans, strict=True):
            assert (begin, end) == pytest.approx((shift + span.begin * 1e6, shift + span.end * 1e6), abs=0.01)
        assert len(threads[f"{name}/copy"]) == len(track.copies)
    events = trace["traceEvents"]
    places = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert places == {rank + 1: rank for rank in range(8)}
    copied = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert copied == sorted(copied) and copied[-1] == found.tracks[0].total_bytes
    copy = next(event for event in events if event.get("cat") == "copy")
    assert copy["args"] == {"bytes": CHUNK_BYTES, "snapshot": 5, "GB/s": pytest.approx(4.0, abs=0.01)}
    assert trace["otherData"]["bytes copied"]["0"]["window"] > 0


def test_copies_that_overlap_get_threads_of_their_own(logs: Logs) -> None:
    line = timeline_line(0, logs.coords[0], 4, 5, EPOCH)
    line["copies"] = [[0.1, 0.2, 1], [0.15, 0.3, 2], [0.2, 0.4, 3], [0.2999999, 0.5, 4]]
    line["parity"] = [[0.6, 0.7, 5]]
    logs.append(0, line)
    threads = check_trace(trace_of(read_tracks(logs.directory)))
    name = "rank 0 · pp0 tp0 dp0"
    copies = [[begin for begin, _, _ in threads[f"{name}/{lane}"]] for lane in ("copy", "copy 2")]
    assert copies == [[100e3, 200e3], [150e3, 300e3]]
    assert [begin for begin, _, _ in threads[f"{name}/parity"]] == [600e3]


def test_a_copy_before_the_boundary_moves_second_0(logs: Logs) -> None:
    line = timeline_line(0, logs.coords[0], 4, 5, EPOCH)
    line["copies"] = [[-0.25, -0.125, 1]]
    logs.append(0, line)
    threads = check_trace(trace_of(read_tracks(logs.directory)))
    assert threads["rank 0 · pp0 tp0 dp0/copy"] == [(0.0, 125e3, "copy")]
    assert threads["rank 0 · pp0 tp0 dp0/training"][0][0] == 250e3


def test_the_picture_shows_every_span_of_every_rank(tmp_path: Path) -> None:
    found = one(tmp_path)
    parsed = check_page(page(found))
    legend = 1
    for kind in ("forward", "backward"):
        spans = [span for track in found.tracks for span in track.spans if span.kind == kind]
        bars = len(found.tracks) if kind == "backward" else 0  # bytes were copied during the backward
        assert len(parsed.rects[kind]) == len(spans) + bars + legend
    assert len(parsed.rects["hidden"]) == len(found.tracks) + legend
    assert min(width for _, _, width in parsed.rects["fence"]) >= 2.0
    assert parsed.rects["parity"] == [] and parsed.rects["other"] == []
    tops = sorted({y for _, y, _ in parsed.rects["forward"]} - {0.0})
    assert len(tops) == len(found.tracks)
    text = page(found)
    assert text.count("prefers-color-scheme: dark") == 1
    assert "rank 0, forward 2 of 8: 24.00 to 44.00 ms (20.0 ms)" in text
    assert "Iteration 6: how the snapshot of 5 was copied" in text


def test_the_picture_keeps_time_to_scale(tmp_path: Path) -> None:
    found = one(tmp_path, pp=2, dp=1)
    # The first rectangle of a kind is that of the legend.
    forward, optimizer = (check_page(page(found)).rects[kind][1] for kind in ("forward", "optimizer"))
    assert forward[2] / optimizer[2] == pytest.approx(FORWARD / (OPTIMIZER - 0.002), rel=0.01)


def test_the_picture_aligns_ranks_by_their_boundaries(logs: Logs) -> None:
    for rank in range(2):
        line = timeline_line(rank, logs.coords[rank], 4, 5, EPOCH + 0.125 * rank)
        logs.append(rank, {**line, "spans": [["forward", 0.25, 0.5]]})
    found = read_tracks(logs.directory)
    first, second = check_page(page(found)).rects["forward"][1:3]
    assert second[0] - first[0] == pytest.approx((first[2]) / 2, abs=0.02), "half of the forward's width"


def test_parity_and_unknown_kinds_are_shown_tracks(logs: Logs) -> None:
    line = timeline_line(0, logs.coords[0], 4, 5, EPOCH)
    line["parity"] = [[0.1, 0.12, 10**6]]
    line["spans"].append(["evaluate", 0.9, 1.0])
    logs.append(0, line)
    text = page(read_tracks(logs.directory))
    parsed = check_page(text)
    assert (len(parsed.rects["parity"]), len(parsed.rects["other"])) == (2, 2)
    assert "rank 0, evaluate: 900.00 to 1000.00 ms" in text and "parity: 1 MB in 1 chunk" in text


def test_beyond_64_ranks_one_replica_of_each_stage_is_shown_tracks(tmp_path: Path) -> None:
    assert len(shown_tracks(one(tmp_path / "64", pp=4, tp=4, dp=4))) == 64
    found = one(tmp_path / "80", pp=4, tp=5, dp=4)
    assert [track.coords for track in shown_tracks(found)] == [{"tp": 0, "pp": pp, "dp": 0} for pp in range(4)]
    text = page(found)
    check_page(text)
    assert "4 of 80 ranks shown, one for each stage; the trace holds all" in text
    assert len(check_trace(trace_of(found))) == 160
    assert len(text_table(found).splitlines()) == 5


def test_what_files_say_is_escaped(logs: Logs) -> None:
    evil = "<script>alert('x')</script><!--\ud800\x1b[31m"
    line = timeline_line(0, logs.coords[0], 4, 5, EPOCH)
    logs.append(0, {**line, "schedule": evil, "spans": [[evil, 0.0, 0.1], *line["spans"][1:]]})
    for target in write_timeline(read_tracks(logs.directory), logs.directory):
        assert "<script" not in target.read_text("utf-8") or target.suffix == ".json"
    check_page((logs.directory / HTML_NAME).read_text("utf-8"))
    logs.append(1, {**line, "coords": {"pp\x1b[31m": 0}})
    assert read_tracks(logs.directory).notes == ("1 broken line of the event logs left out",)


def test_many_chunks_are_drawn_as_few() -> None:
    chunks = [TrackCopy(n / 1000, (n + 1) / 1000, 2) for n in range(1000)] + [TrackCopy(2.0, 2.1, 3)]
    found = list(merged(chunks, 0.0005))
    assert [(num, item.nbytes) for item, num in found] == [(1000, 2000), (1, 3)]
    assert (found[0][0].begin, found[0][0].end) == (0.0, 1.0)


def test_the_table_adds_up(tmp_path: Path) -> None:
    found = one(tmp_path, pp=4, dp=1)
    first = dict(zip(heads_of(found), next(iter(rows_of(found))), strict=True))
    track = found.tracks[0]
    assert (first["forward"], first["backward"]) == ("160 ms", "320 ms")
    idle = track.secs - 0.16 - 0.32 - OPTIMIZER
    assert (first["idle"], first["idle share"]) == (ms(idle), f"{idle / track.secs:.1%}")
    moved = track.moved_bytes
    assert (first["in windows"], first["in backward"]) == (size(moved["window"]), size(moved["backward"]))
    assert (first["in forward"], first["in fence"], "elsewhere" in first) == ("0 B", "0 B", False)
    assert first["windows' share"] == f"{moved['window'] / sum(moved.values()):.1%}"
    assert first["fence"] == "2.00 ms"
    assert "the longest fence was 2.00 ms (" in summary(found)


def test_bytes_of_start_and_tail_count_as_windows_and_unknown_places_as_elsewhere(logs: Logs) -> None:
    line = timeline_line(0, {"pp": 0}, 4, 5, EPOCH)
    line["moved_bytes"] = {"start": 1, "window": 2, "tail": 4, "fence": 8, "optimizer": 16, "new": 32}
    found = parse_track(line)
    assert [found.bytes_of(place) for place in ("window", "forward", "fence", "elsewhere")] == [7, 0, 8, 48]
    assert found.total_bytes == 63
    logs.append(0, line)
    recording = read_tracks(logs.directory)
    told = dict(zip(heads_of(recording), next(iter(rows_of(recording))), strict=True))
    assert (told["in windows"], told["in fence"], told["elsewhere"]) == ("7 B", "8 B", "48 B")


def test_sizes_and_times_are_told_in_few_digits() -> None:
    assert [size(num) for num in (0, 999, 1000, 1_234_567, 99.96e6, 12.8e9)] == [
        "0 B", "999 B", "1 kB", "1.23 MB", "100 MB", "12.8 GB",
    ]  # fmt: skip
    assert [ms(secs) for secs in (0.00002, 0.0123, 1.5)] == ["0.02 ms", "12.3 ms", "1500 ms"]
    assert ticks_of(0.0, 0.7, 8) == pytest.approx([0.1 * n for n in range(8)])
    assert ticks_of(0.0, 14.2) == [0.0, 2.5, 5.0, 7.5, 10.0, 12.5, 15.0]
    assert ticks_of(3.0, 3.0)[0] <= 3.0 < ticks_of(3.0, 3.0)[-1]


def test_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = one(tmp_path)
    out = tmp_path / "new" / "folder"
    assert write_timeline(found, out) == (out / HTML_NAME, out / TRACE_NAME)
    check_trace(json.loads((out / TRACE_NAME).read_text()))
    before = (out / HTML_NAME).read_bytes()

    def torn(self: Path, text: str, **_: Any) -> int:
        self.write_bytes(text[:100].encode())
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="disk full"):
        write_timeline(found, out)
    assert (out / HTML_NAME).read_bytes() == before
    assert sorted(path.name for path in out.iterdir()) == [HTML_NAME, TRACE_NAME]
    remove_timeline(out)
    remove_timeline(out)
    assert list(out.iterdir()) == []


def test_a_torn_line_costs_its_rank_alone(logs: Logs) -> None:
    logs.attempt(range(4, 6))
    path = logs.directory / "rank3.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    found = read_tracks(logs.directory)
    assert (found.missing, found.notes) == ((3,), ("no timeline of rank 3",))
    # The next attempt's first line follows the torn one without an end of line between them.
    logs.attempt(range(6, 7))
    found = read_tracks(logs.directory, 5)
    assert found.missing == (3,)
    assert "1 broken line of the event logs left out" in found.notes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -1), ("rank", True), ("rank", 2**53), ("rank", "3"), ("iteration", 5.0), ("begin", -1.0),
        ("begin", float("inf")), ("begin", float("nan")), ("begin", 10**400), ("secs", None), ("secs", 1e7),
        ("spans", None), ("spans", [["forward", 0.2, 0.1]]), ("spans", [[1, 0.1, 0.2]]), ("spans", [["x", 0.1]]),
        ("spans", [["forward", 0.1, 1e7]]), ("copies", [[0.1, 0.2, -1]]), ("copies", [[0.1, 0.2, 1.5]]),
        ("copies", 3), ("parity", [[0.1, 0.2]]), ("coords", {"pp": -1}), ("coords", {"p p": 1}), ("coords", [1]),
        ("moved_bytes", {"window": 2**60}), ("moved_bytes", 1), ("schedule", 1), ("fence_secs", -0.1),
        ("window_capacity_bytes", "all"),
    ],
)  # fmt: skip
def test_a_field_that_is_not_what_it_should_be_breaks_its_line(name: str, value: Any) -> None:
    parse_track(LINE)
    with pytest.raises(ValueError):
        parse_track({**LINE, name: value})


@pytest.mark.parametrize(
    "name", ["coords", "schedule", "copies", "parity", "moved_bytes", "fence_secs", "pid", "time"]
)
def test_a_field_that_may_be_missing_breaks_nothing(name: str) -> None:
    found = parse_track({key: value for key, value in LINE.items() if key != name})
    assert found.fence_secs == pytest.approx(0.002)
    for empty in ("copies", "parity", "fence_secs", "window_capacity_bytes"):
        parse_track({**LINE, empty: None})


def test_a_fence_of_any_length_can_be_seen(logs: Logs) -> None:
    line = timeline_line(0, logs.coords[0], 4, 5, EPOCH)
    line["spans"] = [["start", 0.0, 9.0], ["fence", 9.0, 9.000001], ["optimizer", 9.000001, 10.0]]
    logs.append(0, line)
    text = page(read_tracks(logs.directory))
    assert [width for _, _, width in check_page(text).rects["fence"][1:]] == [2.0]
    assert text.rindex('class="track-fence"') > text.rindex('class="track-optimizer"'), "it is drawn last"


def values() -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats() | st.sampled_from([10**400, -1, 1e308, True, 2**53])
    leaves = numbers | st.none() | st.text(max_size=4)
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
    )


@st.composite
def broken_lines(draw: st.DrawFn) -> bytes:
    """A timeline with a field replaced or without it, with bytes cut out or put in, or anything at all."""
    line: dict[str, Any] = json.loads(json.dumps(LINE))
    how = draw(st.sampled_from(["field", "drop", "span", "copy", "cut", "insert", "any"]))
    if how == "field":
        line[draw(st.sampled_from(sorted(line)))] = draw(values())
    elif how == "drop":
        del line[draw(st.sampled_from(sorted(line)))]
    elif how in ("span", "copy"):
        items = line["spans" if how == "span" else "copies"]
        items[draw(st.integers(0, len(items) - 1))] = draw(st.lists(values(), min_size=2, max_size=4))
    elif how == "any":
        line = draw(values())
    data = json.dumps(line).encode()
    if how in ("cut", "insert"):
        at = draw(st.integers(0, len(data)))
        end = draw(st.integers(at, len(data)))
        data = data[:at] + (data[end:] if how == "cut" else draw(st.binary(max_size=8)) + data[at:])
    return data + draw(st.sampled_from([b"\n", b""]))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(broken_lines(), min_size=1, max_size=4), good=st.booleans())
def test_broken_lines_are_left_out_or_drawn_but_never_break_it(
    tmp_path: Path, lines: list[bytes], good: bool
) -> None:
    for old in tmp_path.glob("rank*"):
        old.unlink()
    (tmp_path / "rank0.jsonl").write_bytes(b"".join(lines))
    if good:
        (tmp_path / "rank1.jsonl").write_text(json.dumps({**LINE, "rank": 1, "coords": {"pp": 1}}) + "\n")
    try:
        found = read_tracks(tmp_path)
    except EventLogError as error:
        assert not good and "no timelines" in str(error)
        return
    html, trace = write_timeline(found, tmp_path)
    check_trace(json.loads(trace.read_text()))
    check_page(html.read_text("utf-8"))
    assert "NaN" not in picture(found) and '"inf' not in picture(found)
    assert len(text_table(found).splitlines()) == 1 + len(shown_tracks(found))


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not [path for path in tmp_path.rglob(".timeline*")], "a temporary file is left"
