"""Events are whole JSON lines, and nothing about them can end training."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from ftckpt.events import LOUD, Events


def lines(directory: Path, rank: int = 0) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / f"rank{rank}.jsonl").read_text().splitlines()]


def test_a_line_says_when_what_and_who(tmp_path: Path) -> None:
    events = Events(tmp_path / "new" / "folder", 3)
    events.emit("snapshot", iteration=5, blocked_secs=0.25)
    events.close()
    (line,) = lines(tmp_path / "new" / "folder", 3)
    assert isinstance(line.pop("time"), float) and isinstance(line.pop("pid"), int)
    assert line == {"event": "snapshot", "rank": 3, "iteration": 5, "blocked_secs": 0.25}


def test_attempts_follow_each_other_in_one_file(tmp_path: Path) -> None:
    for attempt in range(3):
        events = Events(tmp_path, 0)
        events.emit("joined", attempt=attempt)
        events.close()
    assert [line["attempt"] for line in lines(tmp_path)] == [0, 1, 2]


def test_a_line_is_there_before_the_file_is_closed(tmp_path: Path) -> None:
    Events(tmp_path, 0).emit("joined")
    assert [line["event"] for line in lines(tmp_path)] == ["joined"]


def test_lines_of_several_threads_never_mix(tmp_path: Path) -> None:
    events = Events(tmp_path, 0)

    def emit(thread: int) -> None:
        for index in range(200):
            events.emit("copied", thread=thread, index=index, text="x" * 500)

    threads = [threading.Thread(target=emit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.close()
    found = lines(tmp_path)
    for number in range(4):
        assert [line["index"] for line in found if line["thread"] == number] == list(range(200))


@pytest.mark.parametrize("event", sorted(LOUD))
def test_loud_events_are_logged_without_a_file(event: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ftckpt"):
        Events(None, 2).emit(event, error="why")
    assert f"rank 2: {event}" in caplog.text and "why" in caplog.text


def test_quiet_events_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    Events(None, 0).emit("snapshot", iteration=1)
    assert caplog.text == ""


def test_any_value_can_be_told(tmp_path: Path) -> None:
    events = Events(tmp_path, 0)
    events.emit("snapshot_error", error=ValueError("x"), path=tmp_path, data=b"\xff", numbers={1, 2})
    assert lines(tmp_path)[0]["path"] == str(tmp_path)


def test_after_close_only_the_log_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    events = Events(tmp_path, 0)
    events.close()
    events.close()
    events.emit("turned_off", reason="closed")
    assert lines(tmp_path) == []
    assert "turned_off" in caplog.text


def test_a_full_disk_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    events = Events(tmp_path, 0)
    for _ in range(3):
        events.emit("snapshot", iteration=1)
    assert caplog.text.count("no more events") == 1
