"""The benchmark of the boundary runs, says what it is asked for, and its goals can be missed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import boundary
from benchmarks.boundary_jobs import FRAMEWORKS

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.multiproc


def run(tmp_path: Path, arena_root: Path, *only: str) -> dict[str, Any]:
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/boundary.py", "--quick", "--json", str(out), "--arena", str(arena_root)]
    arguments = [word for name in only for word in ("--only", name)]
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, timeout=200, check=False)
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert not list(arena_root.iterdir()), "something is left"
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    return found


@pytest.mark.slow
def test_one_framework_by_part(tmp_path: Path, arena_root: Path) -> None:
    found = run(tmp_path, arena_root, "plain")
    (row,) = found["jobs"]
    assert row["framework"] == "plain" and row["pieces"] >= 30 and row["snapshots"] == 2 * boundary.QUICK.counted
    assert 0 < row["cpu_ms_least"] <= row["cpu_ms_median"] <= row["cpu_ms_most"]
    assert {"tensors moved", "writes counted", "encoding", "slot", "round", "rest"} <= row["parts_ms"].keys()
    assert all(ms > 0 for ms in row["proofs_ms"].values())
    restore = row["restore"]
    assert 0 < restore["cpu_ms_median"] <= restore["wall_ms_median"]
    assert {"describe", "look", "plan", "copy", "lay out", "rest"} <= restore["parts_ms"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_each_framework(name: str, tmp_path: Path, arena_root: Path) -> None:
    (row,) = run(tmp_path, arena_root, name)["jobs"]
    assert row["framework"] == name and row["pieces"] >= 30


def test_goals_can_be_missed() -> None:
    good = {"framework": "plain", "asked": 300, "pieces": 309, "cpu_ms_median": 0.2, "cpu_ms_most": 2.0}
    row = {**good, "proofs_ms": {"1": 1.0}, "restore": {"wall_ms_median": 40.0}}
    assert "60 ms" in boundary.missed([{**row, "restore": {"wall_ms_median": 60.0}}])[0]
    assert boundary.missed([row]) == []
    assert "0.40 ms" in boundary.missed([{**row, "cpu_ms_median": 0.4}])[0]
    assert "9.0 ms" in boundary.missed([{**row, "proofs_ms": {"4": 9.0}}])[0]
    assert boundary.missed([{**row, "asked": 30, "cpu_ms_median": 2.0}]) == []
