"""Processes are found, signalled and waited for, with a pidfd and on kernels that give none."""

from __future__ import annotations

import errno

import pytest

from tests.support.killing import PIDFD_OPEN, PIDFD_SEND_SIGNAL
from tests.support.processes import run_python

WITHOUT = """
import atexit, logging, os, signal, subprocess, sys, time
from ftckpt.memory.page import owner_word
from ftckpt.memory.process import Process
from tests.support.killing import forbid
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
from tests.support.killing import PIDFD_OPEN, forbid
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
