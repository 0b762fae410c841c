from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import RankFailure, run_ranks, spawn_ranks
from tests.support.processes import is_running
from tests.support.waiting import until

pytestmark = pytest.mark.multiproc


def nothing(rank: int, world_size: int) -> None:
    pass


@pytest.fixture(autouse=True)
def no_folders_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    run_ranks(nothing, 1, init_process_group=False)  # the fork server has a folder that stays
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


def sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, str | None, int]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return int(total), os.environ.get("POOL_TEST"), torch.get_num_threads()


def test_values_come_back_by_rank() -> None:
    results = run_ranks(sum_of_ranks, 3, 10, env={"POOL_TEST": "x"})
    assert [result.rank for result in results] == [0, 1, 2]
    assert {result.value for result in results} == {(33, "x", 1)}
    assert all(result.ok for result in results)


def test_eight_ranks_are_ready_within_seconds() -> None:
    run_ranks(sum_of_ranks, 1, 0)
    took: list[float] = []
    while len(took) < 3 and min(took, default=99.0) >= 10:  # one that is not beside other tests
        started = time.monotonic()
        run_ranks(sum_of_ranks, 8, 0)
        took.append(time.monotonic() - started)
    assert min(took) < 10, took


def big_value(rank: int, world_size: int) -> bytes:
    return bytes(8 * 2**20)


def test_a_value_larger_than_a_pipe_arrives() -> None:
    assert len(run_ranks(big_value, 2, init_process_group=False)[1].value) == 8 * 2**20


def raise_on_one(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("told to")
    time.sleep(60)  # until it is killed


def test_a_failure_ends_all_and_shows_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="ValueError: told to") as failure:
        run_ranks(raise_on_one, 3, 1)
    assert time.monotonic() - started < 45
    assert [result.exitcode for result in failure.value.results] == [-signal.SIGKILL, 1, -signal.SIGKILL]


def test_a_late_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] still ran after 1 s"):
        run_ranks(raise_on_one, 2, 7, timeout_secs=1)


def kill_itself(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_expected_deaths_are_results() -> None:
    results = run_ranks(kill_itself, 3, expect_failures=True)
    assert results[1].exitcode == -signal.SIGKILL
    assert results[1].value is None
    assert [results[0].value, results[2].value] == ["alive", "alive"]


def test_survivors_have_their_grace_and_no_more() -> None:
    started = time.monotonic()
    results = run_ranks(raise_on_one, 2, 0, expect_failures=True, grace_secs=0.5)
    assert time.monotonic() - started < 45
    assert "told to" in (results[0].error or "")
    assert results[1].exitcode == -signal.SIGKILL


def sleep(rank: int, world_size: int) -> None:
    time.sleep(60)  # until it is killed


def test_a_spawned_rank_can_be_killed_and_the_rest_goes_with_the_group() -> None:
    with spawn_ranks(sleep, 3, init_process_group=False) as group:
        pids = group.pids
        assert group.wait(0.2) is None
        assert group.alive() == [0, 1, 2]
        group.kill(2)
        assert group.wait_first_failure(10)
        assert group.alive() == [0, 1]
        assert group.results()[2].exitcode == -signal.SIGKILL
    assert not any(is_running(pid) for pid in pids)


ABANDON = """
import os, signal, sys
from tests.support.pool import spawn_ranks
from test_pool import sleep
group = spawn_ranks(sleep, 2, init_process_group=False)
print(*group.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_killed_test_run_leaves_no_rank() -> None:
    # Sockets lie there, whose paths must be short.
    here, folder = Path(__file__).resolve(), Path(tempfile.mkdtemp(dir="/tmp"))
    path = os.pathsep.join([str(here.parents[2]), str(here.parent)])
    run = subprocess.run(
        [sys.executable, "-c", ABANDON],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    pids = [int(pid) for pid in run.stdout.split()]
    until(lambda: not any(is_running(pid) for pid in pids), "none is left")
    shutil.rmtree(folder)
    assert len(pids) == 2


def unpicklable(rank: int, world_size: int) -> Any:
    return lambda: None


def test_a_value_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(RankFailure, match=r"(?i)pickle"):
        run_ranks(unpicklable, 1, init_process_group=False)
