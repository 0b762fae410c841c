"""Notes of ended ranks: who ended, by what, and processes that are watched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftckpt.memory import end_notes
from ftckpt.memory.end_notes import ExitNote
from ftckpt.memory.exit_watch import ExitWatch, exit_now
from ftckpt.memory.heartbeat import RankHeartbeat
from ftckpt.memory.page import exit_status, owner_word
from ftckpt.smp.liveness import DeathWatch
from tests.components.seccomp import PIDFD_OPEN, PIDFD_SEND_SIGNAL
from tests.support.errors import lacks
from tests.support.processes import run_python
from tests.support.waiting import until

# --- how an attempt has ended, as its node sees it and the next attempt reads it ---


ALIVE = RankHeartbeat(0, 3, 77, 11, "forward", 5, 1, True)


def test_lines_of_several_processes_are_read_by_their_time(tmp_path: Path) -> None:
    assert end_notes.read(tmp_path) == []
    end_notes.tell(tmp_path, ExitNote(2.5, "second\nline"))
    end_notes.tell(tmp_path, ExitNote(1.25, "first"))
    with (tmp_path / ".ends").open("a") as file:
        file.write("torn")
    assert end_notes.read(tmp_path) == [ExitNote(1.25, "first"), ExitNote(2.5, "second line")]
    end_notes.forget(tmp_path)
    assert end_notes.read(tmp_path) == []
    end_notes.forget(tmp_path)
    end_notes.tell(tmp_path / "gone", ExitNote(1.0, "nobody hears it"))


def test_it_does_not_grow_without_end(tmp_path: Path) -> None:
    for number in range(500):
        end_notes.tell(tmp_path, ExitNote(number, "x" * 1000))
    assert (tmp_path / ".ends").stat().st_size < 17 << 10
    assert end_notes.read(tmp_path)[0].time == 0, "the first one is the cause"


def test_who_is_gone_is_told_once(tmp_path: Path) -> None:
    watch = DeathWatch(tmp_path, tmp_path)
    assert list(watch.look([ALIVE])) == []
    dead = replace(ALIVE, lives=False)
    (told,) = watch.look([dead])
    assert not lacks(told.text, "3", "77", "11")
    assert told.ranks == (3,) and list(watch.look([dead])) == []
    # Of an attempt before this SMP, of another container, and one that has left.
    assert list(DeathWatch(tmp_path, tmp_path).look([dead])) == []
    unknown = DeathWatch(tmp_path, tmp_path)
    assert list(unknown.look([replace(ALIVE, lives=None)])) + list(unknown.look([dead])) == []
    left = DeathWatch(tmp_path, tmp_path)
    assert list(left.look([ALIVE])) + list(left.look([])) == []
    brief = DeathWatch(tmp_path, tmp_path)
    assert list(brief.look([])) == [] and len(list(brief.look([dead]))) == 1, "it lived between two looks"


Sleeping = list[tuple[subprocess.Popen[bytes], RankHeartbeat]]


@pytest.fixture
def sleeping() -> Iterator[Sleeping]:
    """Four that live, as ranks 0 to 3."""
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(4)]
    owners = [owner_word(process.pid) for process in processes]
    ranks = [replace(ALIVE, place=rank, rank=rank, owner=owner) for rank, owner in enumerate(owners)]
    yield list(zip(processes, ranks, strict=True))
    for process in processes:
        process.kill()
        process.wait()


def end_by(sleeping: Sleeping, rank: int, number: int) -> RankHeartbeat:
    """Ends by that signal, and waits for its parent."""
    process, pulse = sleeping[rank]
    process.send_signal(number)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return replace(pulse, lives=False)


def test_the_signal_is_named_and_its_consequences_come_behind_it(tmp_path: Path, sleeping: Sleeping) -> None:
    watch = DeathWatch(tmp_path, tmp_path)
    assert watch.look([pulse for _, pulse in sleeping]) == []
    dead = []
    for rank, number in ((2, signal.SIGSEGV), (0, signal.SIGTERM), (1, signal.SIGTERM)):
        dead.append(end_by(sleeping, rank, number))
        until(lambda one=dead[-1]: one.owner in watch._exits.exits)
        sleeping[rank][0].wait()  # its parent takes it long before the SMP looks again
    segv, term = sorted(watch.look([*sorted(dead, key=lambda one: one.rank), sleeping[3][1]]))
    pid = sleeping[2][0].pid
    assert not lacks(segv.text, "2", str(pid), "SIGSEGV", "11")
    assert not lacks(term.text, "0", "SIGTERM")
    assert (segv.ranks, term.ranks) == ((2,), (0, 1)) and segv.time < term.time
    assert (segv.kind, term.kind) == (end_notes.CAUSE, end_notes.CONSEQUENCE)


KILLED = """
import os, resource
from pathlib import Path
from ftckpt.memory.heartbeat import Heartbeat
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
Heartbeat.open(Path({node_dir!r}), {place}, {place}).beat(7, "forward")
os.kill(os.getpid(), {signal})
"""


def killed_rank(node_dir: Path, place: int) -> None:
    """A rank that has trained with the memory of ``node_dir`` and was killed."""
    script = KILLED.format(node_dir=str(node_dir), place=place, signal=int(signal.SIGKILL))
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -signal.SIGKILL


def test_a_rank_that_loses_another_says_which(tmp_path: Path) -> None:
    """The launcher ends all others a moment later, and no SMP may be there to see who was the first."""
    killed_rank(tmp_path, 1)
    script = SCRIPT.replace('raise ValueError("loss is\\nnan")', LOSES_ANOTHER)
    assert ended_by(script, tmp_path).returncode == 1
    first, second = end_notes.read(tmp_path)
    assert not lacks(first.text, "1")
    assert second.text.startswith("rank 5: DistStoreError: ") and second.kind == end_notes.CONSEQUENCE
    killed_rank(tmp_path, 2)
    end_notes.tell_silent(tmp_path)
    assert [end.ranks for end in end_notes.read(tmp_path)] == [(1,), (2,), (5,)], "the cause is before what it made"


SCRIPT = """
import sys
from pathlib import Path
from ftckpt.frameworks.launcher import follow_uncaught
from ftckpt.memory import end_notes
follow_uncaught()
end_notes.are_told_in(Path(sys.argv[1]))
raise ValueError("loss is\\nnan")
"""


LOSES_ANOTHER = """
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.2))
"""
"""The other rank never comes."""


def ended_by(script: str, node_dir: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "RANK": "5"}
    words = [sys.executable, "-c", script, str(node_dir)]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_an_exception_is_the_last_word_of_a_rank(tmp_path: Path) -> None:
    done = ended_by(SCRIPT, tmp_path)
    assert done.returncode == 1 and not lacks(done.stderr, "ValueError"), "and it is shown as ever"
    assert [end.text for end in end_notes.read(tmp_path)] == ["rank 5: ValueError: loss is nan"]


# --- how processes have ended, seen by one that is not their parent ---


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


def ending_process(end: str) -> tuple[subprocess.Popen[bytes], int]:
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
    made, owner = ending_process(end)
    assert exit_status(owner) == 0, "it lives"
    let_end(made)
    assert exit_status(owner) == ENDS[end]
    assert exit_status(owner + (1 << 22)) == 0, "another process that has its pid"
    made.wait()
    assert exit_status(owner) == 0


def test_it_is_seen_in_the_moment_before_the_parent_takes_it(watch: ExitWatch) -> None:
    pairs = [ending_process(end) for end in ENDS]
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
    made, owner = ending_process("os._exit(3)")
    watch.follow({owner})
    let_end(made)
    assert watch.exit_of(owner).status == 3 << 8
    made.wait()


def test_a_process_that_withdraws_and_comes_back_has_one_thread(watch: ExitWatch) -> None:
    made, owner = ending_process("os._exit(3)")
    for owners in [{owner}, set[int]()] * 5 + [{owner}]:
        watch.follow(owners)
    assert len([thread for thread in threading.enumerate() if thread.name == "smp-exit"]) == 1
    let_end(made)
    until(lambda: owner in watch.exits)
    assert watch.exit_of(owner).status == 3 << 8
    made.wait()


# --- processes are found, signalled and waited for, with a pidfd and on kernels that give none ---


WITHOUT = """
import atexit, logging, os, signal, subprocess, sys, time
from ftckpt.memory.page import owner_word
from ftckpt.memory.process import Process
from tests.components.seccomp import forbid
logging.basicConfig(level=logging.INFO)
forbid(*map(int, sys.argv[1:]))
sleeper = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(100)"],
                           stdout=subprocess.PIPE)
atexit.register(sleeper.kill)
assert sleeper.stdout.readline() == b"1\\n"
owner = owner_word(sleeper.pid)
assert Process.open(sleeper.pid, owner + (1 << 22)) is None, "another process of that pid"
for _ in range(3):
    process = Process.open(sleeper.pid, owner)
    assert process is not None and not process.gone(0)
begun = time.monotonic()
assert not process.gone(0.3) and 0.25 < time.monotonic() - begun < 20
assert process.send(signal.SIGTERM) and process.gone(20)
assert not process.send(signal.SIGTERM), "a zombie"
assert sleeper.wait(20) == -signal.SIGTERM and not process.send(signal.SIGTERM)
assert [Process.open(pid) for pid in (sleeper.pid, 0, -1, 1 << 22)] == [None] * 4
process.close()
process.close()
"""
REUSED = """
import errno, os, signal, subprocess, sys
from ftckpt.memory.process import Process
from tests.components.seccomp import PIDFD_OPEN, forbid
forbid(errno.ENOSYS, PIDFD_OPEN)
process = Process.open(os.getpid())
process._owner += 1 << 22  # as if it had ended, and its pid were this process's now
assert not process.send(signal.SIGKILL) and process.gone(0)
"""


@pytest.mark.parametrize(
    ("error", "calls"), [(errno.ENOSYS, (PIDFD_OPEN, PIDFD_SEND_SIGNAL)), (errno.EPERM, (PIDFD_SEND_SIGNAL,))]
)
def test_a_kernel_without_pidfds_ends_the_same_processes(error: int, calls: tuple[int, ...]) -> None:
    done = run_python(WITHOUT, error, *calls)
    assert done.returncode == 0, done.stderr


def test_without_a_pidfd_a_pid_that_is_reused_is_not_signalled() -> None:
    done = run_python(REUSED)
    assert done.returncode == 0, done.stderr
