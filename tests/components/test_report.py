"""``ftckpt report``: what it concludes from events, that nothing is hidden, and what broken lines do to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.cli.attempts import Age
from ftckpt.cli.history import read_history
from ftckpt.cli.main import main
from ftckpt.cli.recovery import PARTS
from ftckpt.cli.report import render, write_report
from ftckpt.cli.sections import Additions
from ftckpt.cli.timeline import read_timeline
from ftckpt.errors import EventLogError
from tests.components.made_logs import LINE, PROTECTION, RunLogs, check_page
from tests.support.errors import lacks, raises
from tests.support.repository import is_golden

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.fixture
def logs(tmp_path: Path) -> RunLogs:
    return RunLogs(tmp_path / "run")


def html(logs: RunLogs, additions: Additions | None = None) -> str:
    """The page, which must be one that a browser closes and that fetches nothing."""
    text = render(read_history(logs.run), None, additions or Additions())
    check_page(text)
    return text


def section(text: str, title: str) -> str:
    return text[text.index(f"<h2>{title}") :].partition("</section>")[0]


def test_a_noted_fault_is_timed_by_its_note_and_by_when_processes_were_gone(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3)
    logs.attempt("bb", (11, 12), 110.0, 2, 5)
    logs.write("demo", {"event": "fault", "time": 104.0, "name": "writing", "label": "killed", "iteration": 3,
                        "ranks": [1]})  # fmt: skip
    logs.write("demo", *({"event": "ended", "time": time, "pid": pid} for pid, time in ((1, 104.7), (2, 104.1))))
    logs.losses(1, 2, 3, 4, 3, 4, 5)
    (restart,) = read_history(logs.run).restarts
    assert (restart.name, restart.cause, restart.ranks, restart.iteration) == ("writing", "killed", (1,), 3)
    assert (restart.restored_iteration, restart.iterations_lost, restart.source) == (2, 2, "memory")
    assert list(restart.parts) == list(PARTS)
    assert tuple(restart.parts.values()) == pytest.approx((0.7, 5.4, 0.0, 0.2, 0.8))
    assert restart.total_secs == pytest.approx(111.1 - 104.0)


def test_a_fault_that_nobody_noted_is_dated_by_the_first_rank_that_fell_silent(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3, protects=False)
    logs.write("rank0", {"event": "fence", "time": 104.2, "rank": 0, "pid": 1, "blocked_secs": 0.0})
    logs.attempt("bb", (11, 12), 110.0, 3, 5)
    (restart,) = read_history(logs.run).restarts
    assert (restart.name, restart.iteration, restart.iterations_lost) == ("attempt 2", 4, 0)
    assert restart.struck_at == pytest.approx(103.6), "the last event of rank 1"
    assert restart.parts["detect"] == pytest.approx(0.6)
    assert html(logs)


def test_a_restart_has_its_cause_and_its_source(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 3)
    killed = "node n1: rank 1 (pid 2) was ended by SIGKILL, in step, forward, after iteration 3"
    logs.attempt("bb", (11, 12), 110.0, 2, 5, ends=[killed, "node n0: rank 0: RuntimeError: lost another"])
    logs.attempt("cc", (21, 22), 120.0, 4, 7, source="storage")
    logs.attempt("dd", (31, 32), 130.0, 6, 8, source="peer_parity+storage")
    logs.attempt("ee", (41, 42), 140.0, None, 2)
    restarts = read_history(logs.run).restarts
    assert [restart.source for restart in restarts] == ["memory", "storage", "peer_parity+storage", "nothing"]
    assert restarts[0].cause == killed and all("unknown" in restart.cause for restart in restarts[1:])
    text = html(logs)
    assert f"<td>{killed}</td><td>memory</td>" in text
    for origin in ("memory: 1", "storage: 1", "memory and storage: 1", "no snapshot: 1"):
        assert f"from {origin}" in text or f", {origin}" in text, origin


def test_ages_are_of_snapshots_that_all_ranks_had(logs: RunLogs) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 4)
    (attempt,) = read_history(logs.run).attempts
    assert list(attempt.ages()) == [Age(1, None, None), Age(2, 1, None), Age(3, 1, 2), Age(4, 1, 2)]
    assert [lag for _, lag in attempt.lags()] == pytest.approx([1.4] * 4)
    logs.write("rank1", *({"event": "joined", "time": 200.0, "rank": 1, "pid": 3},))
    lines = [json.loads(line) for line in (logs.directory / "rank1.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["event"], line.get("iteration")) != ("copied", 2)]
    (logs.directory / "rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    ages = list(read_history(logs.run).attempts[0].ages())
    assert ages[2] == Age(3, 2, 2), "rank 1 never had the snapshot of 2"
    checked = [{"event": "checked", "time": 102.4, "shard": shard, "iteration": 2} for shard in ("a", "b", "b")]
    logs.write("smp-n0", *checked[1:])
    assert list(read_history(logs.run).attempts[0].ages())[2] == Age(3, 2, 2), "one shard twice is not two"
    logs.write("smp-n0", checked[0])
    assert list(read_history(logs.run).attempts[0].ages())[2] == Age(3, 1, 2), "the SMPs had all of it"


def test_the_page_has_all_sections_and_says_what_is_missing(logs: RunLogs) -> None:
    logs.write("rank0", {"event": "joined", "time": 99.0, "rank": 0, "pid": 1, "job": "j"})
    text = html(logs)
    for title, words in (
        ("Losses", "None were found"), ("Restarts", "None: the run has 0 attempts"),
        ("Training blocked", "No snapshot was taken"), ("Ages", "show no committed snapshot"),
        ("Protection", "The events show none"), ("One iteration", "have no timeline"),
        ("Warnings", "None"), ("Conditions", "not in the events"),
    ):  # fmt: skip
        assert words in section(text, title), title
    assert text


def test_protection_losses_alarms_and_conditions_are_shown_and_escaped(logs: RunLogs) -> None:
    versions = {"python": "3.11", "torch": "2.13"}
    machine = {"event": "conditions", "node": "n0", "cpu": "<b>", "cores": 2, "memory_bytes": 2**31, "device": "cpu"}
    logs.attempt("aa", (1, 2), 100.0, None, 4, between=[PROTECTION, {**machine, "versions": versions}])
    lost = [
        {"event": "peer_lost", "time": 103.0 + n, "process": "smp-n0", "node": "<i>", "reason": "x"} for n in (1, 0)
    ]
    logs.write("smp-n0", *lost)
    logs.losses(1, 2, 3, 4)
    with open(logs.run / "log.jsonl", "a") as file:
        file.write('{"iteration": 5, "loss": NaN}\nno JSON\n{"iteration": 6}\n{"iteration": 7, "loss": 1')
    text = html(logs)
    assert "<b>" not in section(text, "Conditions") and "<i>" not in text
    assert not lacks(text, "&lt;b&gt", "2", "2 GiB", "3.11", "2.13")
    assert not lacks(section(text, "Protection"), "n0", "&lt;n1&gt") and "slots 3.8 MiB" in text
    assert not lacks(text, "1")
    assert all("<img" in section(text, title) for title in ("Losses", "Training blocked", "Ages", "Protection"))
    row = section(text, "Warnings")
    assert "peer_lost" in row and ">2<" in row and "3.0 s" in row and "smp-n0" in row


def test_the_command(logs: RunLogs, capsys: pytest.CaptureFixture[str]) -> None:
    logs.attempt("aa", (1, 2), 100.0, None, 2)
    logs.attempt("bb", (3, 4), 110.0, 1, 3)
    assert main(["report", str(logs.run)]) == 0
    is_golden("report", capsys.readouterr().out, run=logs.run)
    output = logs.run / "new" / "page.html"
    assert main(["report", str(logs.directory), "-o", str(output)]) == 0
    assert check_page(output.read_text()) and sorted(path.name for path in output.parent.iterdir()) == ["page.html"]


@pytest.mark.parametrize(("name", "words"), [("nowhere", "--ftckpt-events"), ("", "")])
def test_a_directory_without_events_is_an_error_with_a_remedy(
    name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with raises(EventLogError, *words.split()):
        write_report(tmp_path / name, tmp_path / "page.html")
    assert main(["report", str(tmp_path / name)]) == 2
    assert not (tmp_path / "page.html").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and (not name or words in error) and (name or "--ftckpt-events DIR" in error)


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
    {"event": "conditions", "time": 100.6, "rank": 0, "pid": 1, "versions": {"a": "1"}, "memory_bytes": 3},
    {"event": "peer_lost", "time": 100.7, "process": "smp-n0", "pid": 1},
    {"event": "fault", "time": 100.8, "name": "x", "iteration": 4, "ranks": [1]},
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
    text = render(read_history(tmp_path), timeline, Additions())
    check_page(text.encode("utf-8", "replace").decode())
