"""Ranks of the node that are gone without having left: what an SMP, which is not their parent, can see of it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ftckpt.store.ends import EndNote, silent_end
from ftckpt.store.memory import cgroup_directories
from ftckpt.store.pulse import RankPulse

_STRUCK = "the kernel's OOM killer has struck here (memory.events)"


class DeathWatch:
    """Tells once of each rank that is gone, but for those that were gone at the first look: an attempt may be shorter
    than the time between two.

    The kernel tells nobody but a parent how a process ended. That memory was too small shows in the counts of its
    OOM killer, of the groups of processes that this one is in.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> None:
        self._places = (proc, cgroup_root)
        self._gone: set[int] | None = None  # owners that were
        self._killed = self._oom_kills()

    def look(self, pulses: Sequence[RankPulse], told: Collection[int] = ()) -> Iterator[EndNote]:
        """What is to be told, if anything is; ``pulses``: of the node's ranks now; ``told``: ranks of whose end
        something is known."""
        gone = [pulse for pulse in pulses if pulse.lives is False]
        dead = [pulse for pulse in gone if self._gone is not None and pulse.owner not in self._gone]
        # Those of another container, of which nothing is known for now, too: they may be of an earlier attempt.
        self._gone = {pulse.owner for pulse in pulses if not pulse.lives}
        if dead:
            killed = self._oom_kills()
            out_of_memory, self._killed = killed > self._killed, killed
            silent = [pulse for pulse in dead if pulse.rank not in told]
            if silent:
                yield silent_end(silent, time.time(), f"; {_STRUCK}" if out_of_memory else "")
            elif out_of_memory:
                yield EndNote(time.time(), _STRUCK)

    def _oom_kills(self) -> int:
        """Since the machine started, in the groups of this process."""
        kills = 0
        for directory in cgroup_directories(*self._places):
            with suppress(OSError, ValueError, IndexError):
                for line in (directory / "memory.events").read_text().splitlines():
                    if line.startswith("oom_kill "):
                        kills += int(line.split()[1])
        return kills
