"""How processes have ended, seen by one that is not their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from ftckpt.memory.exit_watch import ExitWatch, exit_now
from ftckpt.memory.page import exit_status, owner_word
from tests.support.waiting import until

ENDS = {
    "os.kill(os.getpid(), signal.SIGSEGV)": signal.SIGSEGV,
    "os.kill(os.getpid(), signal.SIGKILL)": signal.SIGKILL,
    "os._exit(3)": 3 << 8,
    "os._exit(0)": 0,
}


@pytest.fixture
def watch() -> Iterator[ExitWatch]:
    yield ExitWatch()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "smp-exit"])


def process(end: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process that ends so once its input is closed, and its owner variable."""
    code = (
        f"import os, signal, sys, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); sys.stdin.read(); {end}"
    )
    made = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    return made, owner_word(made.pid)


def let_end(made: subprocess.Popen[bytes]) -> None:
    """And leave what the kernel has of it."""
    assert made.stdin is not None
    made.stdin.close()
    os.waitid(os.P_PID, made.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize("end", ENDS)
def test_what_its_parent_has_not_taken_yet_is_seen(end: str) -> None:
    made, owner = process(end)
    assert exit_status(owner) == 0, "it lives"
    let_end(made)
    assert exit_status(owner) == ENDS[end]
    assert exit_status(owner + (1 << 22)) == 0, "another process that has its pid"
    made.wait()
    assert exit_status(owner) == 0


def test_it_is_seen_in_the_moment_before_the_parent_takes_it(watch: ExitWatch) -> None:
    pairs = [process(end) for end in ENDS]
    watch.follow({owner for _, owner in pairs})
    for made, owner in pairs:
        let_end(made)
        until(lambda owner=owner: owner in watch.exits)
        made.wait()
    watch.follow({owner for _, owner in pairs})  # as a look that has begun before
    seen = [watch.exit_of(owner) for _, owner in pairs]
    assert [one.status for one in seen] == list(ENDS.values())
    assert [one.time for one in seen] == sorted(one.time for one in seen), "when it was, not when it is asked for"
    watch.follow(set())
    assert not watch.exits and exit_now(pairs[0][1]).status == 0


def test_without_pidfds_what_is_left_is_seen_when_it_is_asked_for(
    watch: ExitWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    made, owner = process("os._exit(3)")
    watch.follow({owner})
    let_end(made)
    assert watch.exit_of(owner).status == 3 << 8
    made.wait()


def test_a_process_that_withdraws_and_comes_back_has_one_thread(watch: ExitWatch) -> None:
    made, owner = process("os._exit(3)")
    for owners in [{owner}, set[int]()] * 5 + [{owner}]:
        watch.follow(owners)
    assert len([thread for thread in threading.enumerate() if thread.name == "smp-exit"]) == 1
    let_end(made)
    until(lambda: owner in watch.exits)
    assert watch.exit_of(owner).status == 3 << 8
    made.wait()
