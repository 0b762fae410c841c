"""Liveness of a node's ranks: by pid or, in other containers, by the locks that they hold. And diagnosis of silent
deaths, as far as the SMP, which is not the parent, can observe them."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftckpt.memory.directory import LOCK_NAME, list_arenas
from ftckpt.memory.end_notes import ExitNote, silent_ends
from ftckpt.memory.exit_watch import ExitWatch
from ftckpt.memory.heartbeat import RankHeartbeat
from ftckpt.memory.locks import JOB_LOCK_NAME, holder_of
from ftckpt.memory.memory_limits import oom_group, oom_kills
from ftckpt.memory.page import pid_of


class Liveness:
    """Determines which ranks live. The kernel holds a lock while its process lives, in any pid namespace."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._arenas: dict[int, str] = {}  # by rank

    def know(self, places: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the arena of each rank; ``places`` is from the description."""
        self._arenas = {int(rank): str(place["arena"]) for rank, place in places.items()}

    def judge(self, pulses: Iterable[RankHeartbeat]) -> list[RankHeartbeat]:
        """The heartbeats, with ``lives`` set for ranks of other containers; it stays None if the locks may belong to
        an attempt that is starting."""
        judged = list(pulses)
        if all(pulse.is_here for pulse in judged):
            return judged
        unlocked = None if self.any_lock_is_held() else False
        return [
            pulse if pulse.is_here else replace(pulse, lives=True if self._writes(pulse.rank) else unlocked)
            for pulse in judged
        ]

    def any_lock_is_held(self) -> bool:
        """Whether a process trains on this node or is starting."""
        locks = [self._node_dir / JOB_LOCK_NAME, *(arena / LOCK_NAME for arena in list_arenas(self._node_dir))]
        return any(holder_of(lock) is not None for lock in locks)

    def _writes(self, rank: int) -> bool:
        arena = self._arenas.get(rank)
        return arena is not None and holder_of(self._node_dir / arena / LOCK_NAME) is not None


_OOM_SECS = 5.0
"""Time from an OOM kill within which the death of a rank is attributed to it."""
_STRUCK = "the kernel's OOM killer has struck here (oom_kill of the memory cgroup)"


class DeathWatch:
    """Reports each dead rank once, except those that were dead at the first poll: an attempt may be shorter than the
    poll interval.

    The signal or exit code is reported if the kernel exposes it. An OOM kill is detected by the kill counters of the
    cgroups of this process and of the ranks.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> None:
        self._places = (proc, cgroup_root)
        self._gone: set[int] | None = None  # owners at the last poll
        self._living: set[int] = set()  # owners whose cgroups are counted
        self._kills: dict[Path, int] = {}
        self._struck = -math.inf  # when an OOM kill was last detected
        self._count(())
        self._exits = ExitWatch()

    def look(self, pulses: Sequence[RankHeartbeat], told: Mapping[int, bool] | None = None) -> list[ExitNote]:
        """Poll; returns notes to report. ``pulses``: the current heartbeats; ``told``: see ``end_notes.told_of``."""
        self._look_for_kills()
        gone = [pulse for pulse in pulses if pulse.lives is False]
        dead = [pulse for pulse in gone if self._gone is not None and pulse.owner not in self._gone]
        # Includes unknown ranks of other containers: they may belong to an earlier attempt.
        self._gone = {pulse.owner for pulse in pulses if not pulse.lives}
        ends = list(self._ends_of(dead, told or {})) if dead else []
        living = {pulse.owner for pulse in pulses if pulse.lives and pulse.is_here}
        self._exits.follow(living)
        if living != self._living:
            self._count(living)
        return ends

    def _ends_of(self, dead: Sequence[RankHeartbeat], told: Mapping[int, bool]) -> Iterator[ExitNote]:
        silent = [
            pulse
            for pulse in dead
            # A rank reported only as gone is reported again if its exit status is known.
            if pulse.rank not in told or (not told[pulse.rank] and self._exits.exit_of(pulse.owner).status)
        ]
        struck, self._struck = time.monotonic() - self._struck < _OOM_SECS, -math.inf
        beside = dict.fromkeys((0, int(signal.SIGKILL)), f"; {_STRUCK}") if struck else {}
        ends = list(silent_ends(silent, self._exits.exit_of, beside))
        yield from ends
        if struck and not any(_STRUCK in end.text for end in ends):
            yield ExitNote(time.time(), _STRUCK)

    def _look_for_kills(self) -> None:
        """Detect new OOM kills. At each poll: earlier kills have nothing to do with a rank's death."""
        before, self._kills = self._kills, {group: oom_kills(group) for group in self._kills}
        if any(kills > before[group] for group, kills in self._kills.items()):
            self._struck = time.monotonic()

    def _count(self, living: Collection[int]) -> None:
        """Count OOM kills in the cgroups of this process and of ``living``."""
        processes = ["self", *(str(pid_of(owner)) for owner in living)]
        found = {oom_group(*self._places, one) for one in processes} - {None}
        before, self._living = self._kills, set(living)
        self._kills = {one: before[one] if one in before else oom_kills(one) for one in found if one is not None}
