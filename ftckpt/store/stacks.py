"""Where the threads of a rank stand, for whoever wants to know why it hangs.

A rank lets itself be asked by two real-time signals that nobody else uses: at one the interpreter's fault handler
writes the stacks of all threads to stderr, at the other into a file in memory that the rank keeps open, and that who
asks reads through ``/proc``. The fault handler runs in the signal handler itself, so that it answers while C code
holds the interpreter's lock or waits in a collective. It knows frames of Python alone; those of C are what py-spy
adds, where it is installed and may look into other processes.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from ftckpt.store.page import pid_of
from ftckpt.store.process import Process
from ftckpt.store.pulse import RankPulse

_STDERR = 2
_FILE_NAME = "ftckpt-stacks"
_ANSWER_SECS = 5.0
"""A rank writes its stacks in milliseconds; one that is stopped, or in a system call that never ends, does not."""
_AGAIN_SECS = 0.5
"""The fault handler does one request at a time, and drops what comes in the middle of another."""
_NATIVE_SECS = 15.0
"""For py-spy, which first reads the symbols of all libraries."""
_MOST_BYTES = 64 << 10
"""Of the text of one rank."""


@dataclass(frozen=True)
class StackSignals:
    """What a rank has announced: its signals, and the number of the file in memory among its descriptors."""

    to_stderr: int
    to_file: int
    fd: int

    @property
    def word(self) -> int:
        """As it stands in the rank's entry of the pulse page; never 0."""
        return self.to_stderr | self.to_file << 8 | self.fd << 16

    @classmethod
    def of(cls, word: int) -> StackSignals | None:
        """None where nothing was announced, or what stands there is no such word."""
        made = cls(word & 0xFF, word >> 8 & 0xFF, word >> 16)
        known = range(signal.SIGRTMIN, signal.SIGRTMAX + 1)
        return made if made.to_stderr in known and made.to_file in known and made.fd < 1 << 20 else None


_announced: tuple[int, StackSignals] | None = None
"""By the process of this pid, and by no child that it forks."""


def answer_signals() -> StackSignals | None:
    """Let this process be asked from here on; None where two signals that nobody uses cannot be had.

    A second call changes nothing. The handlers stay for the life of the process: a signal that is on its way when
    they are taken off would end it.
    """
    global _announced
    if _announced is not None and _announced[0] == os.getpid():
        return _announced[1]
    free = _free_signals()
    if len(free) < 2:
        return None
    try:
        fd = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        # Whoever asks empties it first: what is written next must not begin behind a hole.
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
        for number, file in ((free[0], _STDERR), (free[1], fd)):
            faulthandler.register(number, file=file, all_threads=True, chain=False)
    except (OSError, RuntimeError):
        return None
    _announced = (os.getpid(), StackSignals(free[0], free[1], fd))
    return _announced[1]


def _free_signals() -> list[int]:
    """Real-time signals that are at their default here, also as C code has set them."""
    taken = _signal_set("self", "SigBlk") | _signal_set("self", "SigIgn") | _signal_set("self", "SigCgt")
    # Not the first few: who needs one takes those.
    return [number for number in range(signal.SIGRTMIN + 5, signal.SIGRTMAX) if not taken >> (number - 1) & 1]


def _signal_set(pid: int | str, name: str) -> int:
    """Raises OSError, ValueError."""
    with open(f"/proc/{pid}/status") as file:
        line = next((line for line in file if line.startswith(f"{name}:")), "")
    return int(line.partition(":")[2], 16)


class StackRequest:
    """Asks one rank, which the pulse names by pid *and* start time, and only if it still answers what it announced.

    ``text`` is what it wrote; where it is "", ``problem`` says why. Nothing waits.
    """

    def __init__(self, pulse: RankPulse, answer_secs: float = _ANSWER_SECS) -> None:
        self.pulse = pulse
        self.text = self.problem = ""
        self._pid = pid_of(pulse.owner)
        self._deadline = time.monotonic() + answer_secs
        self._next_signal = time.monotonic() + _AGAIN_SECS
        self._size = 0
        signals = StackSignals.of(pulse.stacks)
        if signals is None:
            self.problem = "no signals were free for it to answer"
            return
        self._signals = signals
        try:
            with self._file("r+b") as file:
                file.truncate(0)
            self._send(signals.to_file)
        except (OSError, ValueError) as error:
            self.problem = str(error)

    def step(self) -> bool:
        """Whether nothing more is to be waited for; to be called some tenths of a second apart."""
        if self.text or self.problem:
            return True
        try:
            with self._file("rb") as file:
                written = file.read(_MOST_BYTES)
            if written and len(written) == self._size:
                self.text = written.decode("utf-8", "replace")
            elif time.monotonic() >= self._deadline:
                self.problem = f"it does not answer; its state is {_state(self._pid)}"
            elif not written and time.monotonic() >= self._next_signal:
                self._ask_again()
            self._size = len(written)
        except (OSError, ValueError) as error:
            self.problem = str(error)
        return bool(self.text or self.problem)

    def show(self, title: str) -> None:
        """Write ``title`` to the rank's stderr and let it write its stacks there, once they are known. That takes
        milliseconds, in which no other rank should be asked: they may all write to one file."""
        try:
            _write_to_stderr(self._pid, self.pulse.owner, title)
            if self.text:
                self._send(self._signals.to_stderr)
        except (OSError, ValueError) as error:
            self.problem = self.problem or str(error)

    def _ask_again(self) -> None:
        self._next_signal = time.monotonic() + _AGAIN_SECS
        # Real-time signals queue: one that still waits, as for a rank that is stopped, is enough.
        if not _signal_set(self._pid, "ShdPnd") >> (self._signals.to_file - 1) & 1:
            self._send(self._signals.to_file)

    def _file(self, mode: str) -> IO[bytes]:
        """The rank's file in memory. Raises OSError where that is not what has its number."""
        file = open(f"/proc/{self._pid}/fd/{self._signals.fd}", mode)
        if _FILE_NAME not in os.readlink(f"/proc/self/fd/{file.fileno()}"):
            file.close()
            raise OSError("its file in memory is gone")
        return file

    def _send(self, number: int) -> None:
        process = Process.open(self._pid, self.pulse.owner)
        if process is None:
            raise OSError("it has ended")
        with process:
            # Without its handler the signal would end it, such as after an exec.
            if not _signal_set(self._pid, "SigCgt") >> (number - 1) & 1:
                raise OSError(f"it does not catch signal {number} any more")
            if not process.send(number):
                raise OSError("it cannot be signalled")


def _write_to_stderr(pid: int, owner: int, text: str) -> None:
    """Raises OSError, as where it is a socket, or the process has ended."""
    process = Process.open(pid, owner)
    if process is None:
        raise OSError("it has ended")
    # Without waiting: it may hang because nobody reads what it writes.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    with process, open(os.open(f"/proc/{pid}/fd/{_STDERR}", flags), "wb", buffering=0) as stderr:
        stderr.write(text.encode())


def _state(pid: int) -> str:
    """Such as ``T (stopped)``; raises OSError."""
    with open(f"/proc/{pid}/status") as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith("State:")), "unknown")


class NativeStacks:
    """What py-spy sees of some processes: stacks with frames of C; nothing where it is not installed, or may not."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.texts: dict[int, str] = {}
        self._deadline = time.monotonic() + _NATIVE_SECS
        self._running: dict[int, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
        program = shutil.which("py-spy")
        for pid in pids if program else ():
            output: IO[bytes] = open(os.memfd_create("ftckpt-py-spy", os.MFD_CLOEXEC), "w+b")
            command = [str(program), "dump", "--native", "--pid", str(pid)]
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.DEVNULL
                )
            except OSError:
                output.close()
            else:
                self._running[pid] = (process, output)

    def step(self) -> bool:
        """Whether all have ended; those that take too long are."""
        for pid, (process, output) in list(self._running.items()):
            if process.poll() is None and time.monotonic() < self._deadline:
                continue
            if process.poll() == 0:
                output.seek(0)
                self.texts[pid] = output.read(_MOST_BYTES).decode("utf-8", "replace")
            self._drop(pid)
        return not self._running

    def close(self) -> None:
        """Ask no more."""
        for pid in list(self._running):
            self._drop(pid)

    def _drop(self, pid: int) -> None:
        process, output = self._running.pop(pid)
        process.kill()  # does nothing to one that has ended
        process.wait()
        output.close()
