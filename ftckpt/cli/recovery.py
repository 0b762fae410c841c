"""The recoveries of a run: cause and cost of each restart between two attempts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ftckpt.cli.attempts import Attempt

PARTS = ("detect", "rejoin", "rebuild", "load", "first-step")
"""The parts of the time from the end of an attempt to the first boundary after it."""
_REACHED = re.compile(r"after iteration (\d+)")
"""In the notes that ``ftckpt.memory.heartbeat`` describes."""


@dataclass(frozen=True)
class Recovery:
    """The recovery between two attempts.

    ``cause``: how the old attempt ended, as its nodes observed it. ``source``: ``memory``, ``storage``, or the
    sources of lost shards, joined by ``+``; ``nothing``: no snapshot was loaded. ``is_failure``: the launcher of the
    old attempt started the new one; otherwise the job was launched again. ``iteration``: the one under way.
    ``iterations_lost``: those after the restored one that are known to have ended, which are trained again.

    ``parts`` divide the time since ``struck_at``, the earliest last event of a rank: ``detect``, until the last event
    of the attempt; ``rejoin``, until the last rank had joined; ``rebuild``, reconstruction of lost shards from
    parity, on the slowest rank; ``load``, the rest, until all had restored; ``first-step``, until all ranks had
    passed a boundary. ``layout``: old and new layout, if it changed.
    """

    name: str
    cause: str
    source: str
    is_failure: bool
    iteration: int
    struck_at: float
    restored_iteration: int
    iterations_lost: int
    parts: Mapping[str, float]
    trained: bool
    rebuilt_shards: tuple[str, ...] = ()
    rebuilt_bytes: int = 0
    layout: str = ""
    nodes: str = ""

    @property
    def total_secs(self) -> float:
        """The time from the fault to the first boundary after it."""
        return sum(self.parts.values())


def recoveries(attempts: Sequence[Attempt]) -> Iterator[Recovery]:
    """The recoveries between successive attempts, without launches after an attempt that had finished."""
    for number, (old, new) in enumerate(pairwise(attempts), 2):
        if not old.ended_well:
            yield _recovery(f"attempt {number}", old, new)


def _recovery(name: str, old: Attempt, new: Attempt) -> Recovery:
    # Every rank writes events in each iteration: the earliest last event dates the fault to within an iteration.
    struck_at = min(old.last_signs.values())
    # Clocks of nodes differ: parts must not be negative.
    gone_at = min(max(old.last_signs.values()), max(struck_at, new.joined_at))
    loading = new.restore_secs - new.rebuild_secs
    secs = (gone_at - struck_at, new.joined_at - gone_at, new.rebuild_secs, loading, new.first_step_secs)
    nodes = [f"{node} lost" for node in sorted(old.nodes - new.nodes)]
    nodes += [f"{node} joined" for node in sorted(new.nodes - old.nodes)]
    # Iterations without a snapshot leave no event; notes of ends say how far ranks were.
    reached = max([old.last_iteration, *map(int, _REACHED.findall(" ".join(new.ends)))])
    is_relaunched = bool(old.launches and new.launches) and not old.launches & new.launches
    return Recovery(
        name=name,
        cause=new.ends[0] if new.ends else "unknown: no process reported it",
        source=new.source or "nothing",
        is_failure=not is_relaunched,
        iteration=reached + 1,
        struck_at=struck_at,
        restored_iteration=new.start or 0,
        iterations_lost=max(0, reached - (new.start or 0)),
        parts=dict(zip(PARTS, (max(0.0, value) for value in secs), strict=True)),
        trained=bool(new.boundary_at),
        rebuilt_shards=tuple(sorted(new.rebuilt_shards)),
        rebuilt_bytes=new.rebuilt_bytes,
        layout=new.layout,
        nodes=", ".join(nodes),
    )
