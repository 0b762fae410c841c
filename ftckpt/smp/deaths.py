"""Ranks of the node that are gone without having left: what an SMP, which is not their parent, can see of it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from ftckpt.store.ends import EndNote, silent_ends
from ftckpt.store.exits import ExitWatch
from ftckpt.store.memory import oom_group, oom_kills
from ftckpt.store.page import pid_of
from ftckpt.store.pulse import RankPulse

_OOM_SECS = 5.0
"""Within which a rank is seen gone that the OOM killer has ended, or whose end it has caused."""
_STRUCK = "the kernel's OOM killer has struck here (oom_kill of the memory cgroup)"


class DeathWatch:
    """Tells once of each rank that is gone, but for those that were gone at the first look: an attempt may be shorter
    than the time between two.

    By which signal, or with which exit code, is told where the kernel shows it. That memory was too small shows in
    the counts of its OOM killer, of the groups of processes that this one and the ranks are in.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> None:
        self._places = (proc, cgroup_root)
        self._gone: set[int] | None = None  # owners that were
        self._living: set[int] = set()  # owners whose groups are counted
        self._kills: dict[Path, int] = {}
        self._struck = -math.inf  # when it was seen that the OOM killer has
        self._count(())
        self._exits = ExitWatch()

    def look(self, pulses: Sequence[RankPulse], told: Mapping[int, bool] | None = None) -> list[EndNote]:
        """What is to be told, if anything is; ``pulses``: of the node's ranks now; ``told``: see ``ends.told_of``."""
        self._look_for_kills()
        gone = [pulse for pulse in pulses if pulse.lives is False]
        dead = [pulse for pulse in gone if self._gone is not None and pulse.owner not in self._gone]
        # Those of another container, of which nothing is known for now, too: they may be of an earlier attempt.
        self._gone = {pulse.owner for pulse in pulses if not pulse.lives}
        ends = list(self._ends_of(dead, told or {})) if dead else []
        living = {pulse.owner for pulse in pulses if pulse.lives and pulse.is_here}
        self._exits.follow(living)
        if living != self._living:
            self._count(living)
        return ends

    def close(self) -> None:
        """It looks no more."""
        self._exits.close()

    def _ends_of(self, dead: Sequence[RankPulse], told: Mapping[int, bool]) -> Iterator[EndNote]:
        silent = [
            pulse
            for pulse in dead
            # What others could only call gone is told again by who has seen how.
            if pulse.rank not in told or (not told[pulse.rank] and self._exits.exit_of(pulse.owner).status)
        ]
        struck, self._struck = time.monotonic() - self._struck < _OOM_SECS, -math.inf
        beside = dict.fromkeys((0, int(signal.SIGKILL)), f"; {_STRUCK}") if struck else {}
        ends = list(silent_ends(silent, self._exits.exit_of, beside))
        yield from ends
        if struck and not any(_STRUCK in end.text for end in ends):
            yield EndNote(time.time(), _STRUCK)

    def _look_for_kills(self) -> None:
        """Each time: what the OOM killer did long before a rank dies has nothing to do with that."""
        before, self._kills = self._kills, {group: oom_kills(group) for group in self._kills}
        if any(kills > before[group] for group, kills in self._kills.items()):
            self._struck = time.monotonic()

    def _count(self, living: Collection[int]) -> None:
        """Look at the groups of this process and of these."""
        processes = ["self", *(str(pid_of(owner)) for owner in living)]
        found = {oom_group(*self._places, one) for one in processes} - {None}
        before, self._living = self._kills, set(living)
        self._kills = {one: before[one] if one in before else oom_kills(one) for one in found if one is not None}
