"""The benchmark of loading runs, and says what it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.load_frameworks import FRAMEWORKS

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.multiproc


def run(tmp_path: Path, *only: str) -> dict[str, Any]:
    out, disk = tmp_path / "result.json", tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "benchmarks/load.py", "--quick", "--json", str(out), "--disk", str(disk)]
    arguments = [word for name in only for word in ("--only", name)]
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, timeout=280, check=False)
    assert ended.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert not list(disk.iterdir()), "something is left"
    found: dict[str, Any] = json.loads(out.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= found["environment"].keys()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_loading(framework: str, tmp_path: Path) -> None:
    found = run(tmp_path, framework)
    secs = {(one["layout"], one["who"], one["source"]): one for one in found["medians"]}
    sources = {"memory": "memory", "parity": "node_parity", "disk": "storage", "nfs": "storage"}
    for row in found["rows"]:
        if row["who"] == "ftckpt" and row["layout"] == "same":
            assert row["found"] == sources[row["source"]]
            assert row["read_bytes"] > 0 and row["whole_secs"] > row["secs"] > 0
    for layout in ("same", "other"):
        assert secs[layout, FRAMEWORKS[framework].peer, "tmpfs"]["secs"] > 0
        assert secs[layout, "ftckpt", "memory"]["secs"] > 0
