"""The pool of ranks tells a test of each failure, and leaves no rank behind."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.support.pool import RankFailure, run_ranks, spawn_ranks
from tests.support.processes import is_running

pytestmark = pytest.mark.multiproc


def fail_on_one(rank: int, world_size: int, culprit: int, kind: type[Exception] = ValueError) -> None:
    if rank == culprit:
        raise kind("told to")
    time.sleep(60)  # until it is killed


def test_a_failure_ends_all_and_shows_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailure, match="ValueError: told to") as failure:
        run_ranks(fail_on_one, 3, 1)
    assert time.monotonic() - started < 45
    assert [result.exitcode for result in failure.value.results] == [-signal.SIGKILL, 1, -signal.SIGKILL]


def test_an_assertion_is_no_failure_that_was_expected() -> None:
    with pytest.raises(RankFailure, match="AssertionError: told to"):
        run_ranks(fail_on_one, 2, 0, AssertionError, expect_failures=True, grace_secs=0.5)


def test_a_late_rank_is_named() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] still ran after 1 s"):
        run_ranks(fail_on_one, 2, 7, timeout_secs=1)


def kill_itself(rank: int, world_size: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_expected_deaths_are_results() -> None:
    results = run_ranks(kill_itself, 3, expect_failures=True)
    assert (results[1].exitcode, results[1].value) == (-signal.SIGKILL, None)
    assert [results[0].value, results[2].value] == ["alive", "alive"]


def test_ranks_go_with_their_group() -> None:
    with spawn_ranks(fail_on_one, 3, 7, init_process_group=False) as group:
        pids = group.pids
        assert group.wait(0.2) is None and group.alive() == [0, 1, 2]
    assert not any(is_running(pid) for pid in pids)
