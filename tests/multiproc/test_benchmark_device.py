"""The device benchmark runs on a CPU: a row for each system, restores compared bit by bit, a failure is a row."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
    assert "ratio" in ran.stdout.splitlines()[-2 - len(result["rows"])]
    return result


def test_rows_of_systems(tmp_path: Path) -> None:
    result = run(tmp_path, "--systems", "nothing,plain,plain-batch,bubble-smp")
    rows = {key.rpartition("/")[2]: row for key, row in result["rows"].items()}
    assert [*rows] == ["job", "nothing", "plain", "plain-batch", "bubble-smp"]
    assert all(rows[name]["ratio"] > 0 for name in ("nothing", "plain", "bubble-smp"))
    assert "error" in rows["plain-batch"], "no driver is here"
    restarted = rows["bubble-smp"]
    assert restarted["exact"] is True and restarted["compared"] > 50 and restarted["notes"]["has_smp"] == 1.0


@pytest.mark.slow
def test_the_job_of_megatron(tmp_path: Path) -> None:
    result = run(tmp_path, "--jobs", "megatron", "--systems", "nothing,plain,bubble")
    assert [*result["rows"]] == [f"megatron/tiny/{name}" for name in ("job", "nothing", "bubble")]
    assert result["rows"]["megatron/tiny/bubble"]["exact"] is True
