"""A rank that hangs writes its stacks, whatever holds it; nobody who has announced nothing is signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ftckpt.store.page import owner_word
from ftckpt.store.pulse import RankPulse
from ftckpt.store.stacks import StackRequest, StackSignals
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]

RANK = """
import ctypes, faulthandler, os, signal, sys, threading, time
from ftckpt.store.stacks import answer_signals

def waits_elsewhere():
    time.sleep(100)

def hangs():
    threading.Thread(target=waits_elsewhere, daemon=True).start()
    print(signals.word, flush=True)
    HANG

signals = answer_signals()
assert answer_signals() is signals
hangs()
"""
HANGS = {
    "python": "time.sleep(100)",
    "the interpreter's lock": "while True: ctypes.PyDLL(None).sleep(100)",  # a signal ends one sleep
    "a lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


@contextmanager
def rank(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and the word that it announces."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], text=True, cwd=REPOSITORY, **pipes)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=10)


def asked(process: subprocess.Popen[str], word: int, answer_secs: float = 20) -> StackRequest:
    """After the last step."""
    pulse = RankPulse(0, 3, owner_word(process.pid), 5, "forward", 0, 1, True, stacks=word)
    request = StackRequest(pulse, answer_secs)
    until(request.step)
    return request


@pytest.mark.parametrize("holder", HANGS)
def test_a_hung_rank_says_where_its_threads_are(holder: str) -> None:
    with rank(RANK.replace("HANG", HANGS[holder])) as (process, word):
        for _ in range(2):  # a second hang is answered anew
            request = asked(process, word)
            request.show(f"rank {request.pulse.rank} hangs\n")
            assert request.problem == ""
            assert request.text.count("in hangs") == 1 and request.text.count("in waits_elsewhere") == 1
            assert process.poll() is None and process.stderr is not None
            assert process.stderr.readline() == "rank 3 hangs\n", "whose stacks these are comes before them"
            stacks = ""
            while "in <module>" not in stacks:  # the oldest frame of the main thread, which comes last
                stacks += process.stderr.readline()
            assert stacks.count("in hangs") == stacks.count("in waits_elsewhere") == 1


def test_a_rank_that_is_asked_while_it_answers_somebody_is_asked_again() -> None:
    with rank(RANK.replace("HANG", HANGS["python"])) as (process, word):
        signals = StackSignals.of(word)
        assert signals is not None and process.stderr is not None
        stderr = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
        with pytest.raises(BlockingIOError):
            while True:
                os.write(stderr, bytes(1024))
        os.close(stderr)
        os.kill(process.pid, signals.to_stderr)  # whose answer waits until the pipe is read
        pulse = RankPulse(0, 3, owner_word(process.pid), 5, "forward", 0, 1, True, stacks=word)
        request = StackRequest(pulse, 20)
        caught = f"/proc/{process.pid}/status"
        until(lambda: "ShdPnd:\t0000000000000000" in Path(caught).read_text())  # and dropped
        process.stderr.read(64 << 10)
        until(request.step)
        assert request.problem == "" and "in hangs" in request.text


def test_a_stopped_rank_does_not_answer_and_that_is_said() -> None:
    with rank(RANK.replace("HANG", HANGS["python"])) as (process, word):
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        request = asked(process, word, answer_secs=0.3)
        assert request.text == "" and "T (stopped)" in request.problem
        request.show("it hangs\n")
        assert process.stderr is not None and process.stderr.readline() == "it hangs\n"


def test_who_does_not_catch_the_signals_is_not_signalled() -> None:
    free = StackSignals(signal.SIGRTMIN + 5, signal.SIGRTMIN + 6, 0)
    for word in (0, free.word, 12345, 1 << 63):
        with rank("import time; print(1, flush=True); time.sleep(100)") as (process, _):
            request = asked(process, word)
            assert request.text == "" and request.problem
            assert process.poll() is None
    for_stacks = "signals.to_file, signals.to_stderr"
    code = f"[faulthandler.unregister(number) for number in ({for_stacks})]; print(0, flush=True); time.sleep(100)"
    with rank(RANK.replace("HANG", code)) as (process, word):
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        request = asked(process, word)
        assert "does not catch signal" in request.problem and process.poll() is None
    # After an exec it is the same process, and all handlers are gone.
    code = RANK.replace("HANG", "os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(100)'])")
    with rank(code) as (process, word):
        name = Path(f"/proc/{process.pid}/cmdline")
        until(lambda: b"answer_signals" not in name.read_bytes())
        request = asked(process, word)
        assert request.text == "" and request.problem and process.poll() is None


def test_a_file_that_is_not_for_stacks_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("of the script")
    code = (
        f"os.dup2(os.open({str(tmp_path / 'data')!r}, os.O_RDWR), signals.fd); print(0, flush=True); time.sleep(100)"
    )
    with rank(RANK.replace("HANG", code)) as (process, word):
        assert process.stdout is not None and process.stdout.readline() == "0\n"
        request = asked(process, word)
        assert "is gone" in request.problem and (tmp_path / "data").read_text() == "of the script"


def test_signals_that_somebody_uses_are_left_alone() -> None:
    taken = "for n in range(signal.SIGRTMIN, signal.SIGRTMAX + 1): signal.signal(n, signal.SIG_IGN)"
    code = f"import signal\n{taken}\nfrom ftckpt.store.stacks import answer_signals\nprint(answer_signals() is None)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "True\n"
    first = taken.replace("signal.SIGRTMAX + 1", "signal.SIGRTMAX - 3").replace("SIG_IGN", "default_int_handler")
    code = f"import signal\n{first}\nfrom ftckpt.store.stacks import answer_signals\ns = answer_signals()\n"
    code += "print(min(s.to_stderr, s.to_file) >= signal.SIGRTMAX - 3)"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == "True\n"


@pytest.mark.parametrize("word", [0, 1, 40, 40 | 41 << 8 | 1 << 40, 1 << 63, (1 << 64) - 1])
def test_what_is_no_announcement(word: int) -> None:
    assert StackSignals.of(word) is None


def test_an_announcement_is_read_as_it_was_written() -> None:
    signals = StackSignals(39, 64, 517)
    assert StackSignals.of(signals.word) == signals and 0 < signals.word < 1 << 64
