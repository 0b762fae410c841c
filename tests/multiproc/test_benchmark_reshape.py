"""The benchmark of states in another layout runs, and says what it is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.multiproc
def test_the_benchmark_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/reshape.py", "--tiny", "--repeats", "1", "--json", str(out)]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.run(
            [*command, "--disk", str(tmp_path)], cwd=ROOT, stdout=log, stderr=log, timeout=280, check=False
        )
    assert run.returncode == 0, (tmp_path / "log").read_text()[-2000:]
    found = json.loads(out.read_text())
    assert {"ratio_vs_megatron_dist", "ratio_vs_ds_universal", "bytes_read_over_bytes_needed"} <= set(found)
    assert found["hardware"] and found["command"] and found["fixed_secs"] and found["secs_per_gib"]
