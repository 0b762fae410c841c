"""When no rank of a node moves any more: who waits where, and an end to it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.store.page import pid_of
from ftckpt.store.process import Process
from ftckpt.store.pulse import RankPulse

GRACE_SECS = 5.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Hang:
    """No rank of the node moved for ``secs``; ``ranks`` are all that did not leave, dead ones included."""

    secs: float
    ranks: tuple[RankPulse, ...]
    now_ns: int

    def fields(self) -> dict[str, Any]:
        """For the event: who waits where, and for how long."""
        return {"secs": round(self.secs, 3), "ranks": [describe(pulse, self.now_ns) for pulse in self.ranks]}


def describe(pulse: RankPulse, now_ns: int) -> dict[str, Any]:
    """Where a rank is: ``iteration`` counts from its last boundary; ``secs`` since its last sign of life."""
    return {
        "rank": pulse.rank if pulse.rank >= 0 else None,
        "place": pulse.place,
        "pid": pid_of(pulse.owner),
        "iteration": pulse.iteration,
        "phase": pulse.phase,
        "secs": round(max(0, now_ns - pulse.beat_ns) / 1e9, 3),
        "lives": pulse.lives,
    }


class HangWatch:
    """Reports each hang once. The first move of any rank ends a hang."""

    def __init__(self) -> None:
        # The newest beat of the last hang that was reported: as long as none is newer it is the same hang.
        self._reported_ns = -1

    def look(self, pulses: Iterable[RankPulse], hang_secs: float, now_ns: int) -> Hang | None:
        """A hang that was not reported yet.

        Args:
            pulses: of the ranks of the node.
            hang_secs: time without a beat of any live rank that counts as a hang; 0: none does.
            now_ns: CLOCK_MONOTONIC, read after them.
        """
        ranks = tuple(pulses)
        living = [pulse for pulse in ranks if pulse.lives is not False and pulse.beat_ns <= now_ns]
        if hang_secs <= 0 or not any(pulse.beats for pulse in living):  # the first iteration may take any time
            return None
        # One rank that moves is enough: the others wait for it, in a collective or in the pipeline.
        newest_ns = max(pulse.beat_ns for pulse in living)
        if newest_ns <= self._reported_ns or (now_ns - newest_ns) / 1e9 < hang_secs:
            return None
        self._reported_ns = newest_ns
        return Hang((now_ns - newest_ns) / 1e9, ranks, now_ns)


class Abort:
    """Ends trainers: SIGTERM at once, SIGKILL to those that live ``grace_secs`` later.

    Only processes that the pulses name by pid *and* start time are touched; a rank of another pid namespace is not.
    ``step`` until it returns True.
    """

    def __init__(self, pulses: Sequence[RankPulse], grace_secs: float = GRACE_SECS) -> None:
        processes = (Process.open(pid_of(pulse.owner), pulse.owner) for pulse in pulses if pulse.lives)
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
