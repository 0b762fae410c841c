"""Events, errors and metrics."""

from __future__ import annotations

import ast
import fcntl
import inspect
import json
import os
import re
import termios
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftckpt import errors, event_file
from ftckpt.cli.event_log import EventLog
from ftckpt.errors import FtckptError, error_from_json
from ftckpt.events import ADVICE, EVENTS, Events, reference
from ftckpt.smp.metrics import METRICS, full_name
from ftckpt.smp.metrics import reference as metrics_reference
from tests.support.errors import lacks
from tests.support.repository import files_in
from tests.support.waiting import until

# --- events are complete JSON lines, and nothing about them can end training ---


def lines(directory: Path, rank: int = 0) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / f"rank{rank}.jsonl").read_text().splitlines()]


def read(directory: Path) -> tuple[EventLog, list[dict[str, Any]]]:
    """Rank 0's log as commands read it, and its lines."""
    log = EventLog(directory)
    return log, [line for _, line in log.lines(log.rank_files[0])]


def test_a_line_says_when_what_and_who(tmp_path: Path) -> None:
    events = Events(tmp_path / "new" / "folder", 3)
    events.emit("snapshot", iteration=5, blocked_secs=0.25)
    events.close()
    (line,) = lines(tmp_path / "new" / "folder", 3)
    assert isinstance(line.pop("time"), float) and isinstance(line.pop("pid"), int)
    assert line == {"event": "snapshot", "rank": 3, "iteration": 5, "slot": None, "blocked_secs": 0.25}


MIB = 1 << 20


def emit_copied(events: Events, numbers: range) -> None:
    """A line of a kilobyte for each number."""
    for number in numbers:
        events.emit("copied", iteration=number, moved_bytes="x" * 1000)


def test_a_log_that_comes_to_its_limit_loses_its_older_half(tmp_path: Path) -> None:
    """Lines stay complete, in their order, and the log notes that the first of them were dropped."""
    events = Events(tmp_path, 0, limit_bytes=2 * MIB)
    events.emit("joined", job="j")
    events.emit("restored", lineage="first")
    events.emit("restored", lineage="second")
    emit_copied(events, range(3000))
    events.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"rank0.jsonl", "rank0.jsonl.1"} and sum(sizes.values()) <= 2 * MIB
    log, (joined, restored, *found) = read(tmp_path)
    assert (joined["job"], restored["lineage"]) == ("j", "second"), "which attempt the rest is of"
    numbers = [line["iteration"] for line in found]
    assert numbers == list(range(numbers[0], 3000)) and numbers[0] > 500
    assert len(log.notes) == 1


@pytest.mark.parametrize("may_hang", [False, True])
def test_a_full_disk_does_not_stop_training(tmp_path: Path, caplog: pytest.LogCaptureFixture, may_hang: bool) -> None:
    (tmp_path / "rank0.jsonl").symlink_to("/dev/full")
    events = Events(tmp_path, 0, may_hang=may_hang)
    for _ in range(3):
        events.emit("snapshot", iteration=1)
        until(lambda: not events.kept, secs=5.0)
    assert len(caplog.messages) == 1


def test_a_line_that_was_left_half_written_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text('{"event": "snap')
    events = Events(tmp_path, 0)
    events.emit("joined")
    events.close()
    log, found = read(tmp_path)
    assert [line["event"] for line in found] == ["joined"] and log.num_broken == 1


class Pipe:
    """A replacement of rank 0's log: a file that takes 64 KiB, and more when somebody reads it."""

    def __init__(self, directory: Path) -> None:
        os.mkfifo(directory / "rank0.jsonl")
        self._end = os.open(directory / "rank0.jsonl", os.O_RDONLY | os.O_NONBLOCK)
        self.text = b""

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)  # what still waits to write fails

    @property
    def is_full(self) -> bool:
        waiting = array("i", [0])
        fcntl.ioctl(self._end, termios.FIONREAD, waiting)
        return waiting[0] > 50_000  # pages are not filled to their ends

    def read(self) -> list[dict[str, Any]]:
        """Every line until now."""
        with suppress(BlockingIOError):
            while part := os.read(self._end, 1 << 16):
                self.text += part
        return [json.loads(line) for line in self.text.split(b"\n")[:-1]]


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is back the log is complete lines in order, with the number of dropped lines."""
    monkeypatch.setattr(event_file, "MAX_WAITING", 500)
    with Pipe(tmp_path) as pipe:
        events = Events(tmp_path, 0, may_hang=True)
        emit_copied(events, range(100))
        until(lambda: pipe.is_full)
        emitting = threading.Thread(target=emit_copied, args=(events, range(100, 2000)), daemon=True)
        emitting.start()
        emitting.join(10.0)
        assert not emitting.is_alive()

        def numbers() -> list[int]:
            return [line["iteration"] for line in pipe.read() if line["event"] == "copied"]

        def num_lost() -> int:
            return sum(line.get("dropped_lines", 0) for line in pipe.read())

        until(lambda: len(numbers()) >= 500, secs=10.0)
        events.emit("copied", iteration=2000)
        until(lambda: numbers()[-1] == 2000, secs=10.0)
        assert len(numbers()) + num_lost() == 2001 and num_lost() > 500
        assert numbers() == sorted(set(numbers()))
        events.close()


PACKAGE = Path(__file__).parents[2] / "ftckpt"


def emits() -> Iterator[tuple[str, ast.Call]]:
    """Each call of ``emit`` in the package, and where it stands."""
    for path in files_in("ftckpt", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "emit":
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_event_and_field_is_in_the_table() -> None:
    seen = set()
    for place, call in emits():
        names = [n.value for n in ast.walk(call.args[0]) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        for name in names:
            assert name in EVENTS, f"{place}: {name} is no event of the table"
            given = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
            assert given <= set(EVENTS[name].fields), f"{place}: {name} has other fields in the table"
            seen.add(name)
    assert len(seen) > 40


def test_every_event_of_the_table_is_written_somewhere() -> None:
    texts = [p.read_text() for p in files_in("ftckpt", ".py") if p.name != "events.py"]
    package = "".join([*texts, inspect.getsource(Events)])
    assert [name for name in EVENTS if f'"{name}"' not in package] == []


def test_the_page_is_made_of_the_table() -> None:
    made = "python -m ftckpt.events > ftckpt/EVENTS.md"
    assert (PACKAGE / "EVENTS.md").read_text() == "\n".join(reference()) + "\n", f"run {made}"


def test_a_loud_event_is_logged_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    Events(None, 3).emit("storage_fails", iteration=7, error="full")
    assert not lacks(caplog.text, "storage_fails", "7", "error") and ADVICE["storage_fails"] in caplog.text
    assert ADVICE.keys() <= {name for name, kind in EVENTS.items() if kind.loud}


# --- errors that another process recreates ---


def kinds(base: type[FtckptError] = FtckptError) -> Iterator[type[FtckptError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def sent(error: FtckptError) -> FtckptError:
    return error_from_json(json.loads(json.dumps(error.to_json())), "rank 1: ")


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_a_class_arrives_as_it_was(kind: type[FtckptError]) -> None:
    arrived = sent(kind("--ftckpt-slots: 3"))
    assert type(arrived) is kind and str(arrived) == f"rank 1: {kind('--ftckpt-slots: 3')}"


def test_all_classes_are_in_one_module() -> None:
    """Another process, whatever it has imported, must find the class."""
    package = Path(errors.__file__).parent
    known = {kind.__name__ for kind in kinds()}
    elsewhere = [
        f"{path.relative_to(package)}: {node.name}"
        for path in package.rglob("*.py")
        if path.name != "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and known & {ast.unparse(base).split(".")[-1] for base in node.bases}
    ]
    assert not elsewhere


@pytest.mark.parametrize("kind", ["Writing", "written", "Any", "", "os", None, 3])
def test_what_names_no_error_is_a_plain_one(kind: object) -> None:
    assert type(error_from_json({"kind": kind, "error": "why"})) is FtckptError


# --- the table of metrics, its generated page, and the metrics of a node whose status is known ---


ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "configs" / "monitoring"
NAMES = {full_name(name) for name in METRICS}


def test_the_page_of_metrics_is_made_of_their_table() -> None:
    assert (ROOT / "ftckpt" / "METRICS.md").read_text() == "\n".join(metrics_reference()) + "\n"


def expressions() -> dict[str, str]:
    """The queries of all alerts and panels, by their titles."""
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    found = {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            found[f"{panel['title']} {target['refId']}"] = target["expr"]
    return found


def test_alerts_and_panels_ask_for_what_there_is() -> None:
    asked = expressions()
    assert len(asked) > 15
    for title, text in asked.items():
        names = set(re.findall(r"\bftckpt_[a-z_]+", text))
        assert names and names <= NAMES, f"{title}: {names - NAMES}"


def test_each_alert_names_a_severity_and_a_page_that_says_what_to_do() -> None:
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            headings = re.findall(r"^## (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in headings]
            assert rule["annotations"]["summary"]
