"""The benchmark of the host runs and resumes, names peers that are not installed, and its goals can be missed."""

from __future__ import annotations

import json
import signal
import statistics
import uuid
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cost
from benchmarks.cost import DEFAULT, NOISE, OFF
from tests.support.processes import python

pytestmark = pytest.mark.multiproc


@pytest.fixture
def argv(tmp_path: Path, arena_root: Path) -> list[str]:
    (tmp_path / "disk").mkdir()
    out = str(tmp_path / "result.json")
    return ["--quick", "--json", out, "--arena", str(arena_root), "--disk", str(tmp_path / "disk")]


def result(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return found


@pytest.mark.parametrize(
    ("job", "row", "is_protected"), [("plain", "ftckpt, storage", True), ("megatron", OFF, False)]
)
def test_a_block(job: str, row: str, is_protected: bool, tmp_path: Path, arena_root: Path) -> None:
    sizes = cost.QUICK._replace(iterations=cost.STORED_EVERY)
    block = cost.run_block(cost.Plan(job, "idle", 0, row), sizes, arena_root, tmp_path)
    assert "error" not in block, block["error"]
    assert len(block["iterations"]) == len(block["blocked"]) == sizes.iterations
    assert block["iteration_secs"] > sizes.device_secs and block["cpu_secs"] > 0
    assert block["snapshots"] == (row != OFF) and block["state_bytes"] > cost.RANKS << 16
    if is_protected:  # slots of all ranks, and an SMP
        assert block["memory_bytes"] > 5 * block["state_bytes"] and max(block["blocked"]) > 0
    assert not list(arena_root.iterdir()) and not list(tmp_path.glob("ftckpt-benchmark-*"))


@pytest.mark.slow
def test_a_quick_run(argv: list[str], tmp_path: Path, arena_root: Path) -> None:
    assert cost.main(argv) == 0
    found = result(tmp_path)
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    assert not [block["error"] for block in found["blocks"] if "error" in block]
    assert found["tables"].keys() == {"plain/idle", "plain/busy"}
    for table in found["tables"].values():
        assert table[OFF]["ratio"] == 1.0 and table[DEFAULT]["blocked_ms"] > 0
        assert table["torch.save"]["snapshots"] == table["torch.save"]["iterations"]
    assert not list(arena_root.iterdir()) and not list((tmp_path / "disk").iterdir())


UNTIL_ENDED = """
import os, signal, sys, time
from pathlib import Path
from benchmarks.common import scratch
from benchmarks.cost import cleaned
root, name = sys.argv[1:]
with scratch(Path(root), Path(root)) as (folder, _), cleaned(folder, name):
    Path("/dev/shm", f"dlrover-{name}").touch()
    try:
        print("up", flush=True)
        time.sleep(100)
    finally:
        os.kill(os.getpid(), signal.SIGINT)  # of somebody who is impatient
        time.sleep(0.1)
        (folder / "left").touch()
        print("cleans up", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_a_signal_ends_leaves_nothing(number: signal.Signals, arena_root: Path) -> None:
    name = f"bench-{uuid.uuid4().hex[:8]}"
    process = python(UNTIL_ENDED, arena_root, name)
    try:
        assert len(list(arena_root.iterdir())) == 2
        process.send_signal(number)
        assert "cleans up" in process.communicate(timeout=20)[0] and process.returncode == 128 + number
    finally:
        process.kill()
        process.communicate(timeout=10)
    assert not list(arena_root.iterdir()) and not list(Path("/dev/shm").glob(f"*{name}*"))


def block_of(secs: float, blocked: float = 0.0, snapshots: int = 1) -> dict[str, Any]:
    return {
        "iteration_secs": secs, "cpu_secs": secs, "memory_bytes": 5, "snapshots": snapshots, "blocked": [blocked],
        "stored_secs": [],
    }  # fmt: skip


def test_a_run_that_was_ended_resumes(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[tuple[Any, ...]] = []

    def run(plan: cost.Plan, *_: Any) -> dict[str, Any]:
        if len(done) == 4:  # one that does not count, and three
            raise KeyboardInterrupt
        done.append(plan)
        return block_of(1.0) if plan.row != "torch.save" else {"error": "for once"}

    monkeypatch.setattr(cost, "run_block", run)
    monkeypatch.setattr(cost, "version", lambda package: "1")  # of peers that are not here
    rows = [*argv, "--rows", OFF, "torch.save", "DLRover"]
    with pytest.raises(KeyboardInterrupt):
        cost.main(rows)
    first, done[:] = done[1:], []
    monkeypatch.setattr(cost, "run_block", lambda plan, *_: done.append(plan) or block_of(1.0))
    assert cost.main(rows) == 0
    plans = cost.plans_of(["plain"], list(cost.MAX_RATIO), 2, rows[-3:])
    assert {plan for plan in plans if plan not in first or plan.row == "torch.save"} == {*done[1:]}
    assert len(result(tmp_path)["blocks"]) == len(plans) == 12
    assert f"{len(plans)} of {len(plans)}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"result\.json"):  # other sizes in the same file
        cost.main(rows[1:])


def test_a_peer_that_is_not_installed_is_a_row(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cost, "run_block", lambda *_: block_of(1.0))
    monkeypatch.setitem(
        cost.SYSTEMS, "DLRover", type("Dlrover", (cost.SYSTEMS["DLRover"],), {"package": "not-there"})
    )
    assert cost.main([*argv, "--rows", OFF, "DLRover"]) == 0
    assert result(tmp_path)["not_run"] == {"DLRover": "not-there is not installed"}
    assert capsys.readouterr().out.count("not-there is not installed") == len(cost.MAX_RATIO)


def test_figures_are_of_pairs() -> None:
    blocks = []
    for repeat, (off, on) in enumerate([(1.0, 1.5), (2.0, 2.2), (1.0, 1.2)]):
        place = {"job": "plain", "load": "idle", "repeat": repeat}
        blocks += [{**place, "row": OFF, **block_of(off)}, {**place, "row": DEFAULT, **block_of(on, 0.25, 2)}]
    found = cost.figures_of(blocks, "plain", "idle", DEFAULT)
    assert found["ratio"] == statistics.median([1.5, 1.1, 1.2]) and found["blocked_ms"] == 125
    assert found["ratio_quarter"] < found["ratio"] < found["ratio_three_quarters"]
    assert cost.figures_of(blocks, "plain", "busy", DEFAULT) == {}


def figures(ratio: float, blocked_ms: float | None = None) -> dict[str, Any]:
    quarters = {"ratio_quarter": ratio - 0.005, "ratio_three_quarters": ratio + 0.005}
    return {"ratio": ratio, **quarters, "blocked_ms": blocked_ms}


@pytest.mark.parametrize(
    ("load", "changes", "words"),
    [
        ("idle", {DEFAULT: figures(1.011, 1.0)}, ["1.011"]),
        ("busy", {DEFAULT: figures(1.011, 1.0)}, []),
        ("busy", {DEFAULT: figures(1.051, 1.0)}, ["1.051"]),
        ("idle", {DEFAULT: figures(1.011, 1.0), NOISE: figures(1.006)}, []),
        ("idle", {"DLRover": figures(1.0, 1.0)}, ["DLRover 1.00"]),
        ("idle", {"torch.save, storage": figures(1.0, 1.9)}, ["torch.save, storage 1.90"]),
        ("idle", {"DLRover": {}}, []),
        ("idle", {DEFAULT: figures(1.0)}, ["no snapshot"]),
        ("idle", {DEFAULT: {}}, ["not measured"]),
    ],
)
def test_goals_can_be_missed(load: str, changes: dict[str, Any], words: list[str]) -> None:
    table = {
        OFF: figures(1.0), NOISE: figures(1.0), DEFAULT: figures(1.009, 1.0), "DLRover": figures(1.2, 1.1),
        "ftckpt, storage": figures(1.0, 2.0), "torch.save, storage": figures(1.0, 9.0),
    }  # fmt: skip
    assert cost.missed({f"plain/{load}": table}) == []
    lines = cost.missed({f"plain/{load}": table | changes})
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))
