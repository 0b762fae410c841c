"""The capture benchmark keeps its promises at toy size, and fails where a rank copies more than its share."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks import capture

pytestmark = pytest.mark.multiproc

NUM_CUTS = 8
CUT_BYTES = 64
"""A share begins and ends within this many bytes of the exact cut, once per set of replicas."""


def test_every_rank_copies_its_share(tmp_path: Path, arena_root: Path) -> None:
    output = tmp_path / "result.json"
    argv = ["--json", str(output), "--layers", "2", "--hidden", "64", "--repeats", "2", "--arena", str(arena_root)]
    assert capture.main(argv) == 0
    result = json.loads(output.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= set(result["environment"])
    cases = {case["optimizer"]: case for case in result["cases"]}
    assert set(cases) == {"distributed", "non-distributed"}
    for case in cases.values():
        check(case)
    # However the optimizer keeps its state, the job has it once. Adam's step counts, 4 bytes each, are kept
    # per shard of a parameter.
    sums = [sum(case["bytes_per_rank"]) for case in cases.values()]
    assert abs(sums[0] - sums[1]) < 4096
    spread = cases["non-distributed"]
    assert sum(spread["full_bytes_per_rank"]) > 2 * sum(spread["bytes_per_rank"])
    assert not list(arena_root.iterdir()), "the benchmark left something behind"


def check(case: dict[str, Any]) -> None:
    copied, expected = case["bytes_per_rank"], case["expected_bytes_per_rank"]
    differences = [abs(a - b) for a, b in zip(copied, expected, strict=True)]
    assert len(copied) == 8
    assert case["max_difference_bytes"] == max(differences) <= NUM_CUTS * CUT_BYTES <= case["chunk_bytes"]
    assert case["derived_bytes"] == sum(case["derived_bytes_per_rank"]) > 0
    assert all(arena > 2 * nbytes for arena, nbytes in zip(case["arena_bytes_per_rank"], copied, strict=True))
    assert case["repeats"] == 2
    for name in ("blocked_ms_median", "sync_copy_ms_median", "sync_same_bytes_ms_median", "copy_ms_median"):
        assert case[name] > 0, name
    assert case["ratio"] == pytest.approx(case["blocked_ms_median"] / case["sync_copy_ms_median"])
    assert set(case["iteration_ms_median"]) == {"with", "without", "sync_copy", "sync_same_bytes"}


def test_more_than_a_share_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []
    for rank in range(8):
        report = capture.Report(1_000_000, 10, 3_000_000, 1e10, 1e9, arena_bytes=1)
        report.snapshots = [capture.Snapshot(0.1), capture.Snapshot(0.01)]
        for mode in capture.MODES:
            report.iteration_secs[mode], report.sync_secs[mode] = [0.1], [0.01]
        off = capture.CHUNK_MIB * capture.MIB + 1 if rank == 5 else 0
        report.bytes_copied, report.copy_secs, report.copy_cpu_secs = [1_000_000 + off], [0.1], [0.1]
        reports.append(report)
    case = capture.case_of("distributed", reports, repeats=1)
    monkeypatch.setattr(capture, "run_case", lambda optimizer, args: {**case, "optimizer": optimizer})
    assert capture.main(["--json", str(tmp_path / "result.json")]) == 1
