"""The recoveries of a run: cause and cost of each restart between two attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ftckpt.cli.attempts import Attempt

PARTS = ("detect", "rejoin", "rebuild", "load", "first-step")
"""The parts of the time from a fault to the first boundary after it."""

Losses = list[tuple[int, float]]


@dataclass(frozen=True)
class FaultNote:
    """An event ``fault``, which a program that injects faults adds to the events of the ranks."""

    time: float
    name: str
    label: str
    iteration: int
    ranks: tuple[int, ...]


@dataclass
class Evidence:
    """Observations beyond attempts: noted faults, the times at which processes were seen to be gone, and the rank and
    time of starts that did not restore."""

    faults: list[FaultNote] = field(default_factory=list)
    gone_at: dict[int, float] = field(default_factory=dict)
    fruitless: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Recovery:
    """The recovery between two attempts.

    ``cause``: how the old attempt ended, as its nodes observed it. ``source``: ``memory``, ``storage``, or the
    sources of lost shards, joined by ``+``; ``nothing``: no snapshot was loaded. ``is_failure``: the launcher of the
    old attempt started the new one, or a fault was noted; otherwise the job was launched again.

    ``struck_at``: the time of the noted fault, or the earliest last event of a rank. ``parts`` divide the time since
    then: ``detect``, until the last process of the old attempt was gone (or its last event); ``rejoin``, until the
    last rank had joined; ``rebuild``, reconstruction of lost shards from parity, on the slowest rank; ``load``, the
    rest, until all had restored; ``first-step``, until all ranks had passed a boundary.

    ``starts``: the number of starts, including those refused or ended before they had restored. ``layout``: old and
    new layout, if it changed.
    """

    name: str
    cause: str
    source: str
    is_failure: bool
    ranks: tuple[int, ...]
    iteration: int
    struck_at: float
    noted: bool
    restored_iteration: int
    iterations_lost: int
    parts: Mapping[str, float]
    trained: bool
    starts: int
    rebuilt_shards: tuple[str, ...] = ()
    rebuilt_bytes: int = 0
    layout: str = ""
    nodes: str = ""

    @property
    def total_secs(self) -> float:
        """The time from the fault to the first boundary after it."""
        return sum(self.parts.values())


def recoveries(attempts: Sequence[Attempt], losses: Losses, evidence: Evidence) -> Iterator[Recovery]:
    """The recoveries between successive attempts, without launches after an attempt that had finished."""
    logged, pairs = ascending_runs(losses), list(pairwise(attempts))
    for number, (old, new) in enumerate(pairs, 1):
        back = new.start or 0
        later = [before.last_iteration for before, after in pairs[number:] if (after.start or 0) == back]
        finished = _take_finished(logged, back, old.last_iteration, later)
        if not old.ended_well:
            yield _recovery(f"attempt {number + 1}", old, new, max(0, finished - back), evidence)


def _recovery(name: str, old: Attempt, new: Attempt, lost: int, evidence: Evidence) -> Recovery:
    # Every rank writes events in each iteration: the earliest last event dates the fault to within an iteration.
    signs = old.last_signs.values()
    faults = sorted(
        (note for note in evidence.faults if old.joined_at < note.time <= new.joined_at), key=lambda note: note.time
    )
    struck_at = faults[0].time if faults else min(signs)
    gone = [evidence.gone_at[pid] for pid in old.pids if pid in evidence.gone_at]
    gone_at = max([struck_at, *(gone or signs)])
    # Clocks of nodes differ, and a note may be late: parts must not be negative.
    gone_at = min(gone_at, max(struck_at, new.joined_at))
    loading = new.restore_secs - new.rebuild_secs
    secs = (gone_at - struck_at, new.joined_at - gone_at, new.rebuild_secs, loading, new.first_step_secs)
    nodes = [f"{node} lost" for node in sorted(old.nodes - new.nodes)]
    nodes += [f"{node} joined" for node in sorted(new.nodes - old.nodes)]
    is_relaunched = bool(old.launches and new.launches) and not old.launches & new.launches
    return Recovery(
        name="+".join(note.name for note in faults) or name,
        cause="; ".join([*(note.label for note in faults), *new.ends[:1]]) or "unknown: no process reported it",
        source=new.source or "nothing",
        is_failure=bool(faults) or not is_relaunched,
        ranks=tuple(sorted({rank for note in faults for rank in note.ranks})),
        iteration=faults[0].iteration if faults else old.last_iteration + 1,
        struck_at=struck_at,
        noted=bool(faults),
        restored_iteration=new.start or 0,
        iterations_lost=lost,
        parts=dict(zip(PARTS, (max(0.0, value) for value in secs), strict=True)),
        trained=bool(new.boundary_at),
        starts=1 + _num_fruitless(old, new, evidence),
        rebuilt_shards=tuple(sorted(new.rebuilt_shards)),
        rebuilt_bytes=new.rebuilt_bytes,
        layout=new.layout,
        nodes=", ".join(nodes),
    )


def _num_fruitless(old: Attempt, new: Attempt, evidence: Evidence) -> int:
    """The maximal number of a rank's starts between two attempts that did not restore."""
    last = max(old.last_signs.values())
    ranks = [rank for rank, time in evidence.fruitless if old.last_signs.get(rank, last) < time < new.joined_at]
    return max(map(ranks.count, set(ranks)), default=0)


def ascending_runs(points: Losses) -> list[Losses]:
    """The points, split where the iteration does not grow, that is, where training rolled back."""
    found: list[Losses] = []
    for point in points:
        if not found or point[0] <= found[-1][-1][0]:
            found.append([])
        found[-1].append(point)
    return found


def _take_finished(logged: list[Losses], back: int, last: int, later: Sequence[int]) -> int:
    """The last iteration that an attempt rolled back to ``back`` had finished; removes its losses from ``logged``.

    If the log jumps back to ``back + 1``, the last iteration before the jump was finished. The jump may belong to a
    ``later`` attempt that was rolled back to the same snapshot and had progressed further; then the log has none for
    this attempt.

    Args:
        last: the attempt's last iteration by its events.
        later: the same for later attempts that were also rolled back to ``back``.
    """
    for place in range(1, len(logged)):
        if logged[place][0][0] == back + 1:
            end = logged[place - 1][-1][0]
            if any(last < other <= end for other in later):
                return last
            del logged[:place]
            return max(last, end)
    return last
