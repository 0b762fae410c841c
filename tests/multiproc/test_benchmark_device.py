"""The device benchmark runs on a CPU: a row for each system, restores compared bit by bit, a failure is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import device

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.multiproc


def run(folder: Path, *words: str) -> dict[str, Any]:
    """The result of a tiny run, a second for each system."""
    tiny = ["--device", "cpu", "--tiny", "--rounds", "1", "--each", "2", "--out", str(folder)]
    command = [sys.executable, str(ROOT / "benchmarks" / "device.py"), *tiny, *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=200)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((folder / "device.json").read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= set(result["environment"])
    assert any("q1..q3" in line for line in ran.stdout.splitlines())
    return result


def test_rows_of_systems(tmp_path: Path) -> None:
    result = run(tmp_path, "--systems", "nothing,plain,plain-batch,bubble-smp")
    rows = {key.rpartition("/")[2]: row for key, row in result["rows"].items()}
    assert [*rows] == ["job", "nothing", "plain", "plain-batch", "bubble-smp"]
    assert all(rows[name]["ratio"] > 0 for name in ("nothing", "plain", "bubble-smp"))
    assert "error" in rows["plain-batch"], "no driver is here"
    restarted = rows["bubble-smp"]
    assert {"describe", "look", "plan", "copy", "lay out", "rest"} <= restarted["restore_parts_ms"].keys()
    parts_secs = sum(restarted["restore_parts_ms"].values()) / 1e3
    assert 0 < parts_secs <= restarted["restore_secs"] < parts_secs + 1.0, "something else was timed"
    assert restarted["exact"] is True and restarted["compared"] > 50 and restarted["notes"]["has_smp"] == 1.0


@pytest.mark.slow
def test_the_job_of_megatron(tmp_path: Path) -> None:
    result = run(tmp_path, "--jobs", "megatron", "--systems", "nothing,plain,bubble")
    assert [*result["rows"]] == [f"megatron/tiny/{name}" for name in ("job", "nothing", "bubble")]
    assert result["rows"]["megatron/tiny/bubble"]["exact"] is True


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("bubble-smp", {"ratio": 1.006}, "1.0060"),
        ("bubble-smp", {"exact": False}, "restored"),
        ("lm-resiliency", {"blocked_ms": 1.0}, "lm-resiliency 1.00"),
        ("plain", {"blocked_ms": 0.1}, ""),
        ("nothing", {"ratio_three_quarters": 1.001}, ""),
    ],
)
def test_goals_can_be_missed(name: str, changes: dict[str, Any], words: str) -> None:
    good = {"ratio": 1.005, "ratio_three_quarters": 1.006, "blocked_ms": 1.0, "exact": True}
    rows: dict[str, dict[str, Any]] = {
        f"plain/launch/{name}": {**good} for name in ("nothing", "bubble-smp", "plain")
    }
    rows |= {"plain/launch/job": {"error": "3.6 GB"}, "plain/launch/lm-resiliency": {**good, "blocked_ms": 2.0}}
    rows["plain/launch/nothing"]["ratio_three_quarters"] = 1.0
    assert device.missed(rows) == []
    rows[f"plain/launch/{name}"] |= changes
    assert [words in line for line in device.missed(rows)] == [True] * bool(words)
    del rows["plain/launch/bubble-smp"]
    assert "bubble-smp" in device.missed(rows)[0]
