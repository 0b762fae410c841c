"""A hang is told once, with who waits where, and only those who hang are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.smp.hangs import Abort, HangWatch
from ftckpt.store.page import owner_word
from ftckpt.store.process import Process
from ftckpt.store.pulse import RankPulse
from tests.support.waiting import until

SEC = 1_000_000_000


def pulse(place: int, at_secs: float, beats: int = 1, lives: bool | None = True, owner: int = 1) -> RankPulse:
    return RankPulse(place, place + 10, owner, 5, "forward", int(at_secs * SEC), beats, lives)


def test_a_hang_is_told_once_until_somebody_moves() -> None:
    watch = HangWatch()
    ranks = [pulse(0, 100), pulse(1, 103)]
    assert watch.look(ranks, 10, 112 * SEC) is None, "rank 1 moved 9 s ago"
    hang = watch.look(ranks, 10, 113 * SEC)
    assert hang is not None and hang.secs == 10
    assert hang.fields()["ranks"] == [
        {"rank": 10, "place": 0, "pid": 1, "iteration": 5, "phase": "forward", "secs": 13.0, "lives": True},
        {"rank": 11, "place": 1, "pid": 1, "iteration": 5, "phase": "forward", "secs": 10.0, "lives": True},
    ]
    assert watch.look(ranks, 10, 500 * SEC) is None
    ranks[0] = pulse(0, 501)
    assert watch.look(ranks, 10, 502 * SEC) is None
    again = watch.look(ranks, 10, 512 * SEC)
    assert again is not None and again.secs == 11


def test_what_is_no_hang() -> None:
    for ranks in (
        [],
        [pulse(0, 0, beats=0)],  # it has not begun: loading and compiling may take any time
        [pulse(0, 0, lives=False)],  # nobody is left to hang
        [pulse(0, 0, beats=0), pulse(1, 0, lives=False)],  # new ranks beside what a dead attempt left
    ):
        assert HangWatch().look(ranks, 10, 10_000 * SEC) is None
    assert HangWatch().look([pulse(0, 0)], 0, 10_000 * SEC) is None, "0: never"


def test_a_dead_rank_keeps_nobody_from_hanging_and_is_named() -> None:
    ranks = [pulse(0, 100), pulse(1, 109, lives=False)]
    hang = HangWatch().look(ranks, 10, 111 * SEC)
    assert hang is not None and hang.secs == 11
    assert [rank["lives"] for rank in hang.fields()["ranks"]] == [True, False]


def test_a_hang_whose_ranks_end_one_by_one_is_still_the_same() -> None:
    watch = HangWatch()
    assert watch.look([pulse(0, 100), pulse(1, 103)], 10, 120 * SEC) is not None
    assert watch.look([pulse(0, 100), pulse(1, 103, lives=False)], 10, 121 * SEC) is None


def test_a_rank_of_another_container_counts_as_live() -> None:
    assert HangWatch().look([pulse(0, 100, lives=None)], 10, 111 * SEC) is not None
    assert HangWatch().look([pulse(0, 100), pulse(1, 105, lives=None)], 10, 111 * SEC) is None


@given(st.lists(st.tuples(st.integers(0, 1 << 64), st.integers(0, 3), st.sampled_from([True, False, None]))))
def test_numbers_of_a_broken_page_are_no_error(entries: list[tuple[int, int, bool | None]]) -> None:
    watch = HangWatch()
    ranks = [RankPulse(place, -1, 7, -1, "?", at, beats, lives) for place, (at, beats, lives) in enumerate(entries)]
    for now in (0, SEC, 1 << 63):
        hang = watch.look(ranks, 1, now)
        assert hang is None or (hang.secs >= 1 and hang.fields())
        assert watch.look(ranks, 1, now) is None


SLEEPER = "import sys, time; print('up', flush=True); time.sleep(100)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
)


def child(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def step_until_done(abort: Abort, timeout_secs: float = 10) -> float:
    return until(abort.step, "done", timeout_secs)


def test_those_who_heed_a_signal_are_not_killed_those_who_do_not_are() -> None:
    children = [child(SLEEPER), child(STUBBORN), child(STUBBORN)]
    children[2].send_signal(signal.SIGSTOP)
    try:
        abort = Abort([pulse(n, 0, owner=owner_word(c.pid)) for n, c in enumerate(children)], grace_secs=0.5)
        assert abort.pids == [c.pid for c in children]
        assert not abort.step()
        assert step_until_done(abort) >= 0.3
        assert abort.killed == [children[1].pid, children[2].pid]
        assert [c.wait(10) for c in children] == [-signal.SIGTERM, -signal.SIGKILL, -signal.SIGKILL]
    finally:
        for process in children:
            process.kill()
            process.communicate(timeout=10)


@pytest.mark.parametrize("lives", [True, False, None])
def test_a_process_that_only_has_the_pid_of_a_trainer_is_left_alone(lives: bool | None) -> None:
    bystander = child(SLEEPER)
    owner = owner_word(bystander.pid)
    try:
        for wrong in [owner + (1 << 22), owner - (1 << 22)] if lives else [owner]:
            abort = Abort([pulse(0, 0, owner=wrong, lives=lives)], grace_secs=0)
            assert abort.pids == [] and abort.step() and abort.killed == []
        bystander.send_signal(signal.SIGSTOP)  # later than any signal before: it would have ended by that one
        _, status = os.waitpid(bystander.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
    finally:
        bystander.kill()
        bystander.communicate(timeout=10)


def test_a_pid_that_is_reused_after_sigterm_is_not_killed() -> None:
    process = child(SLEEPER)
    abort = Abort([pulse(0, 0, owner=owner_word(process.pid))], grace_secs=0)
    process.communicate(timeout=10)  # waited for: from here on the kernel may give the pid to another
    assert abort.step() and abort.killed == []


def test_what_is_no_process_cannot_be_opened(tmp_path: Path) -> None:
    gone = child(SLEEPER)
    owner = owner_word(gone.pid)
    gone.kill()
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert Process.open(gone.pid, owner) is None, "a zombie"
    gone.communicate(timeout=10)
    assert [Process.open(pid) for pid in (gone.pid, 0, -1, 1 << 22)] == [None] * 4
    here = Process.open(os.getpid(), owner_word(os.getpid()))
    assert here is not None and not here.gone(0)
    here.close()
    here.close()
