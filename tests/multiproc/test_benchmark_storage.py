"""The benchmarks of persisting and of loading run, and say what they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load_frameworks import FRAMEWORKS
from benchmarks.persist_systems import SYSTEMS

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.multiproc


def run(script: str, tmp_path: Path, *only: str) -> dict[str, Any]:
    out, disk = tmp_path / "result.json", tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--json", str(out), "--disk", str(disk)]
    arguments = [word for name in only for word in ("--only", name)]
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, timeout=280, check=False)
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert not list(disk.iterdir()), "something is left"
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    return found


@pytest.mark.slow
def test_persisting(tmp_path: Path) -> None:
    found = run("persist", tmp_path)
    assert found["systems"].keys() == SYSTEMS.keys()
    for name, one in found["systems"].items():
        assert one["iteration_secs"] > 0
        assert (one["checkpoints"] > 0) == (name != "off")
        # Beside training without checkpoints: of a short run less than the noise of its iterations.
        assert name == "off" or (abs(one["blocked_secs"]) < one["iteration_secs"] and one["durable_secs"] > 0)
    assert set(found["write_bytes_per_sec"]) == {"flush", "plain, beside", "plain, alone"}
    for turn in found["raw"]["turns"]:
        if turn["system"] == "ftckpt":
            notes = turn["ranks"][0]["notes"]
            assert notes["committed"] and not notes["flush_failed"] and not notes["storage_fails"]
            assert notes["flushed"][0]["bytes"] >= found["state_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loading(framework: str, tmp_path: Path) -> None:
    found = run("load", tmp_path, framework)
    secs = {(one["layout"], one["who"], one["source"]): one for one in found["medians"]}
    sources = {"memory": "memory", "parity": "node_parity", "disk": "storage", "nfs": "storage"}
    for row in found["rows"]:
        if row["who"] == "ftckpt" and row["layout"] == "same":
            assert row["found"] == sources[row["source"]]
            assert row["read_bytes"] > 0 and row["whole_secs"] > row["secs"] > 0
    for layout in ("same", "other"):
        assert secs[layout, FRAMEWORKS[framework].peer, "tmpfs"]["secs"] > 0
        assert secs[layout, "ftckpt", "memory"]["secs"] > 0
