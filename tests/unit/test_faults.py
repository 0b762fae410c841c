"""Faults fire in a real training process, at every point, exactly once, and leave their marker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.faults import POINTS, Fault, dumps, install, loads
from tests.support.pool import RankResult, run_ranks

pytestmark = pytest.mark.multiproc

SMALL = ["--layers", "1", "--hidden", "16", "--seq", "16", "--global-batch", "4", "--iterations", "4"]
ITERATION = 2
AT_RESTORE = ("void", "load")


def train(rank: int, world_size: int, plan: str, arena: str, log: str) -> None:
    """One attempt of a real job, as the demo's worker runs it."""
    import ftckpt.megatron
    from ftckpt.config import Config
    from launch import train_gpt

    install(loads(plan), rank, world_size)
    ftckpt.megatron.configure(Config(enabled=True, job="faults", node="n", arena=arena))
    train_gpt.main([*SMALL, "--log-file", log])


def attempt(world_size: int, faults: list[Fault], arena: Path, log: Path) -> list[RankResult]:
    return run_ranks(train, world_size, dumps(faults), str(arena), str(log), expect_failures=True, timeout_secs=60)


def logged(log: Path) -> list[int]:
    return [json.loads(line)["iteration"] for line in log.read_text().splitlines()]


def test_every_point_is_reached_once_in_the_order_of_an_iteration(arena_root: Path, tmp_path: Path) -> None:
    """A stall of no length at each point of one run, then of a restart: markers tell what fired, and when."""
    points = [point for point in POINTS if point not in AT_RESTORE]
    plan = [Fault(0, ITERATION, point, tmp_path / point, "stall") for point in points]
    # Behind the fence of the next iteration but one, so that ITERATION + 1 is sealed.
    plan.append(Fault(0, ITERATION + 2, "before_step", tmp_path / "kill", "kill"))
    [killed] = attempt(1, plan, arena_root, tmp_path / "log")
    assert killed.exitcode == -signal.SIGKILL
    assert [fault.point for fault in plan if not fault.fired(0)] == []
    assert logged(tmp_path / "log") == [1, 2, 3]

    restored = ITERATION + 1
    plan += [Fault(0, restored, "load", tmp_path / "load", "stall")]
    [ended] = attempt(1, plan, arena_root, tmp_path / "log")
    assert ended.ok, ended.error
    assert plan[-1].fired(0)
    assert logged(tmp_path / "log") == [1, 2, 3, 4]
    times = {fault.point: json.loads(fault.marker_of(0).read_text())["time"] for fault in plan[: len(points)]}
    trained = ["forward", "fence", "before_step", "after_step", "boundary", "begin", "copy"]
    order = [*trained, "before_seal", "after_seal", "post", "mark"]
    assert sorted(order, key=lambda point: times[point]) == order
    assert times["begin"] <= times["between"]


def test_all_ranks_die_together(arena_root: Path, tmp_path: Path) -> None:
    fault = Fault("all", 2, "before_step", tmp_path / "all", "kill", secs=20)
    results = attempt(2, [fault], arena_root, tmp_path / "log")
    assert [result.exitcode for result in results] == [-signal.SIGKILL] * 2
    assert fault.fired(0) and fault.fired(1)
