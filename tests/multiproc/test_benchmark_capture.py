"""The capture benchmark's claims hold at a small size, and each fails for results that break it."""

from __future__ import annotations

import copy
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capture, ladder, ladder_report, simulated
from benchmarks.ladder import AMPLE, SCARCE

pytestmark = pytest.mark.multiproc

ATTEMPTS = 3
"""Some claims are about times, which are those of other tests, too, where these run beside this one."""
RUNGS = {("sync", AMPLE), ("thread", AMPLE), ("stream", AMPLE), ("bubble", AMPLE), ("bubble", SCARCE)}


@pytest.mark.slow
def test_at_a_small_size(tmp_path: Path, arena_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    argv = ["--json", str(output), "--quick", "--repeats", "1", "--arena", str(arena_root)]
    for _ in range(ATTEMPTS):
        code = capture.main(argv)
        printed = capsys.readouterr()
        if code == 0:
            break
    assert code == 0, printed.err
    result = json.loads(output.read_text())
    assert {"hardware", "versions", "command", "date", "revision"} <= set(result["environment"])
    assert {(case["schedule"], case["capacity_asked"]) for case in result["cases"]} == RUNGS
    for case in result["cases"]:
        check_ladder(case)
    assert result["missed"] == []
    assert not list(arena_root.iterdir()), "the benchmark left something behind"


def check_ladder(case: dict[str, Any]) -> None:
    assert case["layout"] == ladder.QUICK_LAYOUT.name and case["ranks"] == 4 and case["repeats"] == 1
    assert case["ratio_min"] <= case["ratio_median"] <= case["ratio_max"]
    assert len(case["bytes_per_rank"]) == len(case["window_capacity_bytes"]) == 4
    assert case["host_bytes"] > 2 * sum(case["bytes_per_rank"])
    assert sum(case["shares"].values()) == pytest.approx(1)
    assert sum(case["shares_expected"].values()) == pytest.approx(1)
    assert case["window_share_model"] == pytest.approx(1 / 3)
    assert 0.5 * case["capacity_asked"] < case["capacity_over_bytes"] < 2 * case["capacity_asked"]
    assert 0 <= case["fence_stall_share"] <= case["fence_stall_share_max"]
    if case["schedule"] == "sync":
        assert case["share_in_windows"] == 0 and case["boundary_share"] > 0.1


def good(schedule: str, capacity: float) -> dict[str, Any]:
    """A case as it should be."""
    found = {
        "layout": "some", "schedule": schedule, "capacity_asked": capacity, "capacity_over_bytes": capacity,
        "settled": True, "interference": 0.3, "ratio_median": 1.01, "fence_stall_share": 0.0,
        "share_in_windows": 0.97, "shares": {"window": 0.97, "forward": 0.03},
        "shares_expected": {"windows": 1.0, "forward": 0.0, "backward": 0.0, "fence": 0.0},
        "window_share_measured": 0.21, "window_share_model": 0.2,
    }  # fmt: skip
    if schedule == "stream":
        found |= {"ratio_median": 1.08, "share_in_windows": 0.4, "shares": {"window": 0.4, "forward": 0.6}}
    if capacity == SCARCE:
        found |= {
            "share_in_windows": 0.48, "shares": {"window": 0.48, "forward": 0.22, "backward": 0.3},
            "shares_expected": {"windows": 0.5, "forward": 0.2, "backward": 0.3, "fence": 0.0},
        }  # fmt: skip
    return found


@pytest.mark.parametrize(
    "rung, changes, words",
    [
        (("bubble", AMPLE), {"window_share_measured": 0.23}, "windows are 23.0% of the schedule"),
        (("bubble", AMPLE), {"window_share_measured": 0.17}, "windows are 17.0% of the schedule"),
        (("bubble", AMPLE), {"share_in_windows": 0.89}, "89.0% of the bytes were copied in windows"),
        (("bubble", AMPLE), {"fence_stall_share": 0.011}, "the fence stalls 1.10%"),
        (("bubble", AMPLE), {"settled": False}, "were not measured"),
        (("bubble", SCARCE), {"share_in_windows": 0.39}, "windows took 39.0%"),
        (("bubble", SCARCE), {"shares": {"forward": 0.09, "backward": 0.35}}, "forward took 9.0%"),
        (("bubble", SCARCE), {"shares": {"forward": 0.2, "backward": 0.41}}, "backward took 41.0%"),
        (("bubble", SCARCE), {"shares": {"forward": 0.2, "fence": 0.04}}, "fence took 4.0%"),
        (("stream", AMPLE), {"share_in_windows": 0.8}, "without windows lie in them by 80.0%"),
        (("stream", AMPLE), {"ratio_median": 1.02}, "without windows cost +1.00%"),
    ],
)
def test_a_broken_claim_of_the_ladder(rung: tuple[str, float], changes: dict[str, Any], words: str) -> None:
    cases = [good(*rung) for rung in sorted(RUNGS)]
    assert ladder_report.verdict(cases, ladder_report.Bounds()) == []
    doctored = copy.deepcopy(cases)
    next(case for case in doctored if (case["schedule"], case["capacity_asked"]) == rung).update(changes)
    (problem,) = ladder_report.verdict(doctored, ladder_report.Bounds())
    assert problem.startswith("some: ") and words in problem


def test_a_step_takes_longer_beside_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.capture import copier
    from ftckpt.capture.chunks import ChunkCopy, Segment

    monkeypatch.setattr(copier, "copy_chunk", lambda *args: None)
    copies = simulated.SlowCopies()
    copies.bytes_per_sec = 1e6
    steps = simulated.TimedSteps(0.1, 0.2, copies)
    chunk = ChunkCopy(0, (Segment(0, 0, 500_000, 0, 500_000),))

    def measured(interference: float) -> float:
        steps.interference = interference
        thread = threading.Thread(target=copier.copy_chunk, args=([], chunk, None))
        thread.start()
        time.sleep(0.05)  # a part of the copy of 0.5 s
        begin = time.perf_counter()
        steps("forward-compute").start()
        steps("forward-compute").stop()
        secs = time.perf_counter() - begin
        thread.join()
        return secs

    # All of the first two steps beside the copy; the third ends its own time after the copy, 0.45 s long.
    for interference, expected in ((0.0, 0.1), (0.5, 0.2), (1.0, 0.55)):
        found: list[float] = []
        while len(found) < 5 and (not found or found[-1] != pytest.approx(expected, abs=0.075)):
            found.append(measured(interference))
        assert found[-1] == pytest.approx(expected, abs=0.075), found  # the others: beside other tests
