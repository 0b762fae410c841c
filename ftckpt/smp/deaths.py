"""Ranks of the node that are gone without having left: what an SMP, which is not their parent, can see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ftckpt.model.text import listed
from ftckpt.store.memory import cgroup_directories
from ftckpt.store.page import pid_of
from ftckpt.store.pulse import RankPulse

_MOST_NAMED = 8


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

    def look(self, pulses: Sequence[RankPulse]) -> Iterator[str]:
        """What is to be told, a line, if anything is; ``pulses``: of the node's ranks now."""
        gone = [pulse for pulse in pulses if pulse.lives is False]
        dead = [pulse for pulse in gone if self._gone is not None and pulse.owner not in self._gone]
        # Those of another container, of which nothing is known for now, too: they may be of an earlier attempt.
        self._gone = {pulse.owner for pulse in pulses if not pulse.lives}
        if dead:
            killed = self._oom_kills()
            out_of_memory, self._killed = killed > self._killed, killed
            first = min(dead, key=lambda pulse: pulse.beat_ns)
            who = listed([f"{pulse.rank} (pid {pid_of(pulse.owner)})" for pulse in dead], _MOST_NAMED)
            text = f"rank{'s' if len(dead) > 1 else ''} {who} ended without a word, in {first.section.label}, "
            text += f"{first.phase or 'before a first phase'}, after iteration {first.iteration}"
            yield text + ("; the kernel's OOM killer has struck here (memory.events)" if out_of_memory else "")

    def _oom_kills(self) -> int:
        """Since the machine started, in the groups of this process."""
        kills = 0
        for directory in cgroup_directories(*self._places):
            with suppress(OSError, ValueError, IndexError):
                for line in (directory / "memory.events").read_text().splitlines():
                    if line.startswith("oom_kill "):
                        kills += int(line.split()[1])
        return kills
