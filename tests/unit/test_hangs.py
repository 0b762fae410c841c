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

from ftckpt.events import Events
from ftckpt.smp.hang_answer import Abort, HangAnswer, shortened
from ftckpt.smp.hangs import HangPlace, HangWatch, Limits
from ftckpt.store.page import owner_word
from ftckpt.store.process import Process
from ftckpt.store.pulse import PulseSection, RankPulse
from tests.support.event_logs import read_events
from tests.support.waiting import until

SEC = 1_000_000_000


TEN = Limits(10)


def pulse(
    place: int,
    at_secs: float,
    *,
    beats: int = 1,
    lives: bool | None = True,
    owner: int = 1,
    section: PulseSection = PulseSection.STEP,
    longest: dict[PulseSection, float] | None = None,
) -> RankPulse:
    longest_ns = tuple(int((longest or {}).get(each, 0) * SEC) for each in PulseSection)
    at_ns = int(at_secs * SEC)
    return RankPulse(place, place + 10, owner, 5, "forward", at_ns, beats, lives, section, 0, longest_ns)


WHERE = {
    "pid": 1, "iteration": 5, "section": "step", "phase": "forward", "limit_secs": 10, "lives": True,
}  # fmt: skip


def test_a_hang_is_told_once_until_somebody_moves() -> None:
    watch = HangWatch()
    ranks = [pulse(0, 100), pulse(1, 103)]
    assert watch.look(ranks, TEN, 112 * SEC) is None, "rank 1 moved 9 s ago"
    hang = watch.look(ranks, TEN, 113 * SEC)
    assert hang is not None and hang.secs == 10
    assert hang.fields()["ranks"] == [
        {"rank": 10, "place": 0, "secs": 13.0, **WHERE},
        {"rank": 11, "place": 1, "secs": 10.0, **WHERE},
    ]
    assert watch.look(ranks, TEN, 500 * SEC) is None
    ranks[0] = pulse(0, 501)
    assert [watch.look(ranks, TEN, secs * SEC) for secs in range(502, 511)] == [None] * 9
    again = watch.look(ranks, TEN, 511 * SEC)
    assert again is not None and again.secs == 10


def test_a_node_that_stood_still_with_all_that_runs_there_does_not_hang() -> None:
    """As with ``scontrol suspend``: time goes on, and neither the ranks nor who watches them could move."""
    watch, ranks = HangWatch(), [pulse(0, 100), pulse(1, 103)]
    assert [watch.look(ranks, TEN, at * SEC) for at in (111, 112, 500, 501)] == [None] * 4
    assert [watch.look(ranks, TEN, at * SEC) for at in range(502, 510)] == [None] * 8
    hang = watch.look(ranks, TEN, 510 * SEC)
    assert hang is not None, "nor does it come back"


def test_what_is_no_hang() -> None:
    for ranks in (
        [],
        [pulse(0, 0, lives=False)],  # nobody is left to hang
    ):
        assert HangWatch().look(ranks, TEN, 10_000 * SEC) is None
    assert HangWatch().look([pulse(0, 0)], Limits(0), 10_000 * SEC) is None, "0: never"


def test_each_section_has_its_own_limit_which_is_learnt() -> None:
    limits, watch = Limits(10), HangWatch()
    for section in (PulseSection.SETUP, PulseSection.EVALUATION, PulseSection.SAVE, PulseSection.LOAD):
        busy = [pulse(0, 100, section=section), pulse(1, 90, section=section)]
        assert HangWatch().look(busy, limits, 129 * SEC) is None
        hang = HangWatch().look(busy, limits, 130 * SEC)
        assert hang is not None and not hang.is_known, f"told, and nobody knows how long a {section.label} takes"
    assert limits.learn([pulse(0, 100, longest={PulseSection.SAVE: 50})], 100 * SEC)
    saving = [pulse(0, 100, section=PulseSection.SAVE), pulse(1, 90)]
    assert watch.look(saving, limits, 249 * SEC) is None, "the others wait for the rank that saves"
    hang = watch.look(saving, limits, 250 * SEC)
    assert hang is not None and hang.is_known and hang.fields()["ranks"][0]["limit_secs"] == 150
    assert watch.look(saving, limits, 500 * SEC) is None, "once"


def test_a_short_section_is_not_ended_before_an_iteration_would_be() -> None:
    limits = Limits(10)
    limits.learn([pulse(0, 100, longest={PulseSection.EVALUATION: 0.2})], 100 * SEC)
    assert limits.of(PulseSection.EVALUATION) == 30
    assert limits.of(PulseSection.STEP) == 10, "a step that stood still for a while and came back teaches nothing"
    limits.learn([pulse(0, 100, longest={PulseSection.STEP: 90})], 100 * SEC)
    assert limits.of(PulseSection.STEP) == 10


def test_what_is_learnt_is_of_ranks_that_live_and_of_the_longest() -> None:
    limits = Limits(1)
    assert not limits.learn([pulse(0, 9, lives=False, longest={PulseSection.SAVE: 5})], 10 * SEC)
    assert not limits.learn([pulse(0, 9, longest={PulseSection.SAVE: 11})], 10 * SEC), "longer than the machine is up"
    assert limits.learn([pulse(0, 9, lives=None, longest={PulseSection.SAVE: 5})], 10 * SEC)
    assert not limits.learn([pulse(0, 9, longest={PulseSection.SAVE: 6})], 10 * SEC), "not worth storing, and known"
    assert not limits.learn([pulse(0, 9, longest={PulseSection.SAVE: 2})], 10 * SEC)
    assert limits.longest_secs == {"save": 6}
    assert Limits(1, limits.longest_secs).of(PulseSection.SAVE) == 18, "of a new SMP, too"


@pytest.mark.parametrize(
    ("before", "now", "repeats"),
    [
        ((7, "step"), (7, "step"), True),
        ((7, "step"), (6, "set-up"), True),  # the restart went on from an older snapshot
        ((-1, "set-up"), (-1, "set-up"), True),
        ((7, "step"), (8, "step"), False),
        ((7, "step"), (7, "evaluation"), False),
        ((7, "save"), (7, "save"), True),
    ],
)
def test_a_hang_repeats_where_a_restart_came_no_further(
    before: tuple[int, str], now: tuple[int, str], repeats: bool
) -> None:
    first, second = HangPlace("a", *before, "forward", 1), HangPlace("a", *now, "tail", 2)
    assert second.repeats(first) == repeats
    assert not second.repeats(None) and not second.repeats(HangPlace("b", *now, "tail", 1)), "another launcher run"
    assert not second.repeats(HangPlace("a", *now, "tail", 2)), "a process that nobody has started again"


def test_a_hang_is_where_the_first_rank_stood_still() -> None:
    ranks = [pulse(0, 100), pulse(1, 90, section=PulseSection.SETUP), pulse(2, 80, lives=False)]
    hang = HangWatch().look(ranks, TEN, 200 * SEC)
    assert hang is not None and hang.place("a") == HangPlace("a", 5, "set-up", "forward", 1) != hang.place("b")
    assert hang.lasts([pulse(0, 100), pulse(1, 90)]) and hang.lasts([])
    assert hang.lasts([pulse(0, 100), pulse(1, 110, lives=False)])
    assert not hang.lasts([pulse(0, 100), pulse(1, 101)])


def test_a_dead_rank_keeps_nobody_from_hanging_and_is_named() -> None:
    ranks = [pulse(0, 100), pulse(1, 109, lives=False)]
    hang = HangWatch().look(ranks, TEN, 111 * SEC)
    assert hang is not None and hang.secs == 11
    assert [rank["lives"] for rank in hang.fields()["ranks"]] == [True, False]


def test_a_hang_whose_ranks_end_one_by_one_is_still_the_same() -> None:
    watch = HangWatch()
    assert watch.look([pulse(0, 100), pulse(1, 103)], TEN, 120 * SEC) is not None
    assert watch.look([pulse(0, 100), pulse(1, 103, lives=False)], TEN, 121 * SEC) is None


def test_a_rank_of_another_container_counts_as_live() -> None:
    assert HangWatch().look([pulse(0, 100, lives=None)], TEN, 111 * SEC) is not None
    assert HangWatch().look([pulse(0, 100), pulse(1, 105, lives=None)], TEN, 111 * SEC) is None


@given(st.lists(st.tuples(st.integers(0, 1 << 64), st.integers(0, 3), st.sampled_from([True, False, None]))))
def test_numbers_of_a_broken_page_are_no_error(entries: list[tuple[int, int, bool | None]]) -> None:
    watch = HangWatch()
    ranks = [RankPulse(place, -1, 7, -1, "?", at, beats, lives) for place, (at, beats, lives) in enumerate(entries)]
    for now in (0, SEC, 1 << 63):
        hang = watch.look(ranks, Limits(1), now)
        assert hang is None or (hang.secs >= 1 and hang.fields())
        assert watch.look(ranks, Limits(1), now) is None


def test_of_stacks_that_are_too_long_both_ends_are_told() -> None:
    assert shortened("main" * 5, 20) == "main" * 5
    assert shortened("first " + "x" * 1000 + " last", 12) == "first \n...\nx last"


SLEEPER = "import sys, time; print('up', flush=True); time.sleep(100)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"
)


def child(code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
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


@pytest.mark.parametrize("moves", [True, False])
def test_ranks_that_move_again_while_their_stacks_are_taken_are_not_ended(tmp_path: Path, moves: bool) -> None:
    process, order = child(SLEEPER), []
    try:
        rank = pulse(0, 100, owner=owner_word(process.pid))
        hang = HangWatch().look([rank], TEN, 200 * SEC)
        assert hang is not None
        answer = HangAnswer(hang, Events(tmp_path, -1, "smp"), True, lambda: order.append(process.poll()))
        until(lambda: answer.step([pulse(0, 201 if moves else 100, owner=rank.owner)]))
        assert (process.poll(), order) == ((None, []) if moves else (-signal.SIGTERM, [None]))
        told = {event["event"]: event for event in read_events(tmp_path, of="smp")}
        assert told["stacks"]["missing"] == {"10": "no signals were free for it to answer"}
        assert ("hang_aborted" in told) != moves
        assert process.stderr is not None
        assert "hang: rank 10," in process.stderr.readline()
    finally:
        process.kill()
        process.communicate(timeout=10)


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
