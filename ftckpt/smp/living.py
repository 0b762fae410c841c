"""Which ranks of the node live: by their pids; where those are of another container, by the locks that they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftckpt.store.directory import LOCK_NAME, list_arenas
from ftckpt.store.locks import JOB_LOCK_NAME, holder_of
from ftckpt.store.pulse import RankPulse


class Liveness:
    """The kernel keeps a lock for as long as its process lives, whatever pid namespace that is in."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._arenas: dict[int, str] = {}  # by rank

    def know(self, places: Mapping[str, Mapping[str, Any]]) -> None:
        """``places`` as ranks have told them: where the arena of each lies."""
        self._arenas = {int(rank): str(place["arena"]) for rank, place in places.items()}

    def judge(self, pulses: Iterable[RankPulse]) -> list[RankPulse]:
        """The pulses, with what can be known of ranks of other containers: ``lives`` stays None where only an attempt
        that begins may hold locks."""
        judged = list(pulses)
        if all(pulse.is_here for pulse in judged):
            return judged
        unlocked = None if self.any_lock_is_held() else False
        return [
            pulse if pulse.is_here else replace(pulse, lives=True if self._writes(pulse.rank) else unlocked)
            for pulse in judged
        ]

    def any_lock_is_held(self) -> bool:
        """Whether a process trains on this node, or is about to."""
        locks = [self._node_dir / JOB_LOCK_NAME, *(arena / LOCK_NAME for arena in list_arenas(self._node_dir))]
        return any(holder_of(lock) is not None for lock in locks)

    def _writes(self, rank: int) -> bool:
        arena = self._arenas.get(rank)
        return arena is not None and holder_of(self._node_dir / arena / LOCK_NAME) is not None
