"""``ftckpt report``: what it concludes from events, that nothing is hidden, and what broken lines do to it."""

from __future__ import annotations

import json
import os
import tracemalloc
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.cli.event_log import MOST_LINE_BYTES, event_logs
from ftckpt.cli.history import read_history
from ftckpt.cli.main import main
from ftckpt.cli.recovery import PARTS
from ftckpt.cli.report import describe
from ftckpt.cli.timeline import read_timeline
from ftckpt.errors import EventLogError
from tests.support.errors import lacks, raises
from tests.support.event_logs import LINE, PROTECTION, Logs, RunLogs
from tests.support.repository import is_golden

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path / "run")


def text_of(logs: RunLogs) -> str:
    return "\n".join(describe(read_history(logs.run), None))


def test_a_fault_is_dated_by_the_first_rank_that_fell_silent(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3, protects=False)
    logs.write("rank0", {"event": "fence", "time": 104.2, "rank": 0, "pid": 1, "blocked_secs": 0.0})
    logs.attempt("bb", (11, 12), 110.0, 3, 5)
    (restart,) = read_history(logs.run).restarts
    assert (restart.name, restart.iteration, restart.iterations_lost) == ("attempt 2", 4, 0)
    assert restart.struck_at == pytest.approx(103.6), "the last event of rank 1"
    assert list(restart.parts) == list(PARTS)
    assert tuple(restart.parts.values()) == pytest.approx((0.6, 5.9, 0.0, 0.2, 0.8))
    assert restart.total_secs == pytest.approx(111.1 - 103.6)


def test_a_restart_has_its_cause_and_its_source(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3)
    killed = "node n1: rank 1 (pid 2) was ended by SIGKILL, in step, forward, after iteration 6"
    logs.attempt("bb", (11, 12), 110.0, 2, 5, ends=[killed, "node n0: rank 0: RuntimeError: lost another"])
    logs.attempt("cc", (21, 22), 120.0, 4, 7, source="storage")
    logs.attempt("dd", (31, 32), 130.0, 6, 8, source="peer_parity+storage")
    logs.attempt("ee", (41, 42), 140.0, None, 2)
    restarts = read_history(logs.run).restarts
    assert [restart.source for restart in restarts] == ["memory", "storage", "peer_parity+storage", "nothing"]
    assert (restarts[0].iteration, restarts[0].iterations_lost) == (7, 4), "the note knows more than events"
    assert restarts[0].cause == killed and all("unknown" in restart.cause for restart in restarts[1:])
    text = text_of(logs)
    assert killed in text
    for origin in ("memory: 1", "storage: 1", "memory and storage: 1", "no snapshot: 1"):
        assert f"from {origin}" in text or f", {origin}" in text, origin


def test_what_was_rebuilt_and_reshaped_is_told_with_its_sources(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3)
    rebuilt = {"event": "rebuilt", "shards": ["b"], "bytes": 22, "secs": 0.05}
    more = {**rebuilt, "shards": ["a"], "secs": 0.15}
    reshaped = {"event": "loaded", "from": "tp2", "to": "tp1"}
    source = "peer_parity+replica_parity"
    logs.attempt("bb", (11, 12), 110.0, 2, 5, between=[rebuilt, more, reshaped], source=source)
    (restart,) = read_history(logs.run).restarts
    assert (restart.source, restart.rebuilt_shards) == (source, ("a", "b"))
    assert (restart.rebuilt_bytes, restart.layout) == (44, "tp2 → tp1")
    assert restart.parts["rebuild"] == pytest.approx(0.15)
    assert restart.parts["rebuild"] + restart.parts["load"] == pytest.approx(0.2)
    assert "tp2 → tp1" in text_of(logs)


def test_protection_and_alarms_are_shown(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 4, between=[PROTECTION])
    lost = [
        {"event": "peer_lost", "time": 103.0 + n, "process": "smp-n0", "node": "far", "reason": "x"} for n in (1, 0)
    ]
    logs.write("smp-n0", *lost)
    history = read_history(logs.run)
    assert [lag for attempt in history.attempts for lag in attempt.lags()] == pytest.approx([1.4] * 4)
    text = text_of(logs)
    assert not lacks(text, "2 of 2", "0 of 1", "1.40 s", "4.8 MiB")
    assert not lacks(text, "peer_lost", "2 times", "3.0 s", "smp-n0")


def test_the_command(logs: RunLogs, capsys: pytest.CaptureFixture[str]) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 2)
    logs.attempt("bb", (3, 4), 110.0, 1, 3)
    assert main(["report", str(logs.run)]) == 0
    is_golden("report", capsys.readouterr().out, run=logs.run)
    assert not (logs.run / "trace.json").exists(), "no rank has recorded a timeline"
    Logs(logs.directory).attempt(range(4, 6))
    output = logs.run / "new" / "one.json"
    assert main(["report", str(logs.directory), "-o", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "j"
    assert json.loads(output.read_text())["traceEvents"]
    assert [path.name for path in output.parent.iterdir()] == ["one.json"]


@pytest.mark.parametrize(("name", "words"), [("nowhere", "--ftckpt-events"), ("", "")])
def test_a_directory_without_events_is_an_error_with_a_remedy(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises(EventLogError, *words.split()):
        read_history(tmp_path / name)
    assert main(["report", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (not name or words in error) and (name or "--ftckpt-events DIR" in error)


def test_of_several_runs_the_one_that_began_last_is_shown_and_the_others_are_named(tmp_path: Path) -> None:
    for name, joined in (("b", 100.0), ("a", 300.0), ("c", 200.0)):
        RunLogs(tmp_path / name).attempt("aa", (1, 2), joined, None, 2)
    history = read_history(tmp_path)
    assert history.directory == tmp_path / "a" / "events"
    assert history.notes == [
        f"taken from {history.directory}, the newest; there are also {tmp_path}/b/events, {tmp_path}/c/events"
    ]


LINES = [
    {"event": "joined", "time": 99.0, "rank": 0, "pid": 1, "job": "j", "node": "n"},
    {"event": "rebuilt", "time": 99.5, "rank": 0, "pid": 1, "shards": ["a"], "bytes": 3, "secs": 0.1, "sources": {}},
    {"event": "restored", "time": 100.0, "rank": 0, "pid": 1, "iteration": 3, "lineage": "aa", "blocked_secs": 0.1},
    {**PROTECTION, "time": 100.1, "rank": 0, "pid": 1},
    {"event": "fence", "time": 100.2, "rank": 0, "pid": 1, "blocked_secs": 0.1},
    {"event": "snapshot", "time": 100.3, "rank": 0, "pid": 1, "iteration": 4, "blocked_secs": 0.1},
    {"event": "copied", "time": 100.4, "rank": 0, "pid": 1, "iteration": 4, "secs": 0.1},
    {"event": "protected", "time": 100.5, "rank": 0, "pid": 1, "iteration": 4},
    {**LINE, "time": 100.5, "pid": 1},
    {"event": "peer_lost", "time": 100.7, "process": "smp-n0", "pid": 1},
]


def values() -> st.SearchStrategy[Any]:
    leaves = (
        st.integers() | st.floats() | st.none() | st.text(max_size=4) | st.sampled_from([10**400, True, -1, 2**60])
    )
    return st.recursive(
        leaves, lambda deep: st.lists(deep, max_size=2) | st.dictionaries(st.text(), deep, max_size=2)
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broken_lines_are_left_out_and_break_nothing(tmp_path: Path, data: st.DataObject) -> None:
    directory = tmp_path / "events"
    directory.mkdir(exist_ok=True)
    lines = [dict(line) for line in LINES]
    for _ in range(data.draw(st.integers(1, 3))):
        line = data.draw(st.sampled_from(lines))
        if line:
            line[data.draw(st.sampled_from(sorted(line)))] = data.draw(values())
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    at = data.draw(st.integers(0, len(content)))
    content = content[:at] + data.draw(st.binary(max_size=6)) + content[at + data.draw(st.integers(0, 40)) :]
    (directory / "rank0.jsonl").write_bytes(content)
    (directory / "smp-n0.jsonl").write_bytes(content)
    try:
        timeline = read_timeline(read_history(tmp_path))
    except EventLogError:
        timeline = None
    assert list(describe(read_history(tmp_path), timeline))


def test_a_number_too_large_for_a_float_is_a_broken_line(tmp_path: Path) -> None:
    lines = [dict(line) for line in LINES]
    protection = next(line for line in lines if line["event"] == "protection")
    protection["memory_per_node"] = {**protection["memory_per_node"], "sum": 10**400}
    (tmp_path / "events").mkdir()
    for name in ("rank0", "smp-n0"):
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        (tmp_path / "events" / f"{name}.jsonl").write_bytes(content)
    assert list(describe(read_history(tmp_path), None))


def test_what_is_no_log_is_not_read(tmp_path: Path) -> None:
    """A link to a device has no end, and a FIFO is waited for; a file without ends of lines is read in parts."""
    for name, made in (("a", lambda path: path.symlink_to("/dev/zero")), ("b", os.mkfifo)):
        (tmp_path / name).mkdir()
        made(tmp_path / name / "rank0.jsonl")
    with pytest.raises(EventLogError):
        event_logs(tmp_path, "")
    (tmp_path / "c").mkdir()
    with open(tmp_path / "c" / "rank0.jsonl", "wb") as file:
        file.truncate(1 << 28)
    (log,) = event_logs(tmp_path, "")
    tracemalloc.start()
    assert not list(islice(log.lines(log.rank_files[0]), 1))
    assert tracemalloc.get_traced_memory()[1] < 4 * MOST_LINE_BYTES
    tracemalloc.stop()
