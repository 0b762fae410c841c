"""What an SMP does about a hang: stacks go to the log, then those who hang are ended, if that is wanted."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence

from ftckpt.events import Events, log
from ftckpt.model.text import listed
from ftckpt.smp.hangs import Hang
from ftckpt.store.page import pid_of
from ftckpt.store.process import Process
from ftckpt.store.pulse import RankPulse
from ftckpt.store.stacks import NativeStacks, StackRequest

GRACE_SECS = 5.0
"""Between SIGTERM and SIGKILL."""
_MESSAGE_CHARS = 3500
"""Of the log: a longer message would be cut."""
_TOLD_CHARS = 100_000
"""Of the stacks of all ranks: the log keeps its newest 128 KiB, and all of them must be in it."""
_MOST_NAMED = 8
_SHARE_PIDS = "let trainers and SMP share their process ids (Kubernetes: shareProcessNamespace: true)"


class HangAnswer:
    """One hang, from its stacks to its end. ``step`` now and then until it returns True; nothing waits.

    Args:
        ends: whether the ranks are ended, if they still hang once their stacks are in the log.
        before: called right before that.
    """

    def __init__(self, hang: Hang, events: Events, ends: bool, before: Callable[[], None]) -> None:
        self._hang, self._events, self._ends, self._before = hang, events, ends, before
        self._requests = [StackRequest(pulse) for pulse in hang.ranks if pulse.lives and pulse.is_here]
        self._hidden = list(self._requests)  # whose stacks are not in the rank's own log yet
        self._native: NativeStacks | None = None
        self._abort: Abort | None = None

    def step(self, pulses: Sequence[RankPulse]) -> bool:
        """Whether all is done; ``pulses``: of the node's ranks now."""
        if self._abort is not None:
            return self._aborted(self._abort)
        # A list: each of them takes its step.
        if not all([request.step() for request in self._requests]):
            return False
        if self._hidden:
            request = self._hidden.pop(0)
            request.show(self._title(request))
            return False
        # Afterwards: it stops each process for a moment, which then cannot answer.
        self._native = self._native or NativeStacks([pid_of(request.pulse.owner) for request in self._requests])
        if not self._native.step():
            return False
        self._tell(self._native)
        if not self._ends:
            return True
        if not self._hang.lasts(pulses):
            log.info("ranks that hung move again: they are not ended")
            return True
        self._before()
        self._abort = Abort(self._hang.ranks)
        log.warning("ending trainers that hang: %s", self._abort.pids)
        return False

    def close(self) -> None:
        """Leave alone those that still live."""
        if self._native is not None:
            self._native.close()
        if self._abort is not None:
            self._abort.close()

    def _aborted(self, abort: Abort) -> bool:
        if not abort.step():
            return False
        self._events.emit("hang_aborted", killed=abort.killed)
        return True

    def _title(self, request: StackRequest) -> str:
        pulse = request.pulse
        secs = max(0, self._hang.now_ns - pulse.beat_ns) / 1e9
        text = (
            f"ftckpt: this job seems to hang: rank {pulse.rank}, pid {pid_of(pulse.owner)}, has given no sign of "
            f"life for {secs:.0f} s ({pulse.section.label} after iteration {pulse.iteration}, {pulse.phase})"
        )
        outlook = "ftckpt is going to end it" if self._ends else "ftckpt leaves it alone"
        stacks = "its threads stand here:" if request.text else f"its stacks cannot be had: {request.problem}"
        return f"{text}; {outlook}; {stacks}\n"

    def _tell(self, native: NativeStacks) -> None:
        room = _TOLD_CHARS // (2 * max(1, len(self._requests)))
        for request in self._requests:
            rank, pid = request.pulse.rank, pid_of(request.pulse.owner)
            for what, text in (("stacks", request.text), ("stacks with frames of C", native.texts.get(pid, ""))):
                for part in _parts(shortened(text, room)):
                    log.info("%s of rank %d, pid %d:\n%s", what, rank, pid, part)
        missing = dict.fromkeys((pulse.rank for pulse in self._hang.elsewhere), "it runs in another container")
        if missing:
            who = listed([str(rank) for rank in missing], _MOST_NAMED)
            log.warning("ranks %s hang in another container, which nobody ends from here: %s", who, _SHARE_PIDS)
        missing |= {request.pulse.rank: request.problem for request in self._requests if request.problem}
        ranks = [request.pulse.rank for request in self._requests if request.text]
        self._events.emit("stacks", ranks=ranks, missing=missing)


def shortened(text: str, room: int) -> str:
    """``text`` without its middle if it is longer than ``room``: the main thread is first, or last."""
    if len(text) <= room:
        return text
    return f"{text[: room // 2]}\n...\n{text[-(room // 2) :]}"


def _parts(text: str) -> Iterator[str]:
    """The lines of ``text`` in pieces that a message can hold."""
    part = ""
    for line in text.splitlines(keepends=True):
        if part and len(part) + len(line) > _MESSAGE_CHARS:
            yield part
            part = ""
        part += line
    if part:
        yield part


class Abort:
    """Ends trainers: SIGTERM at once, SIGKILL to those that live ``grace_secs`` later.

    Only processes that the pulses name by pid *and* start time are touched; a rank of another pid namespace is not.
    ``step`` until it returns True.
    """

    def __init__(self, pulses: Sequence[RankPulse], grace_secs: float = GRACE_SECS) -> None:
        there = (pulse for pulse in pulses if pulse.lives and pulse.is_here)
        processes = (Process.open(pid_of(pulse.owner), pulse.owner) for pulse in there)
        self._targets = [process for process in processes if process is not None]
        self.pids = [process.pid for process in self._targets if process.send(signal.SIGTERM)]
        self._kill_at = time.monotonic() + grace_secs
        self.killed: list[int] = []

    def step(self) -> bool:
        """Whether all are gone, or were killed; does not wait."""
        for process in [process for process in self._targets if process.gone(0)]:
            self._drop(process)
        # By a pidfd each: a process that ended and whose pid is used again is never signalled.
        if self._targets and time.monotonic() >= self._kill_at:
            for process in list(self._targets):
                if process.send(signal.SIGKILL):
                    self.killed.append(process.pid)
                self._drop(process)
        return not self._targets

    def close(self) -> None:
        """Leave alone those that still live."""
        for process in list(self._targets):
            self._drop(process)

    def _drop(self, process: Process) -> None:
        self._targets.remove(process)
        process.close()
