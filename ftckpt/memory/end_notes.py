"""Exit notes: how the ranks of a node ended, as lines of a file in the node's directory for the next attempt.

Each process that observes an end appends a line; a kill during the append loses that line. A rank that ends by an
error first notes the ranks of its node that have already disappeared: a moment later the launcher ends the others,
and these would be indistinguishable from the cause.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.memory.directory import ENDS_NAME, PULSE_NAME
from ftckpt.memory.exit_watch import Exit, exit_now
from ftckpt.memory.heartbeat import Heartbeat, RankHeartbeat
from ftckpt.memory.page import pid_of
from ftckpt.model.text import listed

_MOST_BYTES = 16 << 10
_MOST_CHARS = 300
"""Maximum length of a line: an exception may quote an entire tensor."""
_MOST_NAMED = 8
CAUSE, CONSEQUENCE, UNKNOWN = "cause", "consequence", "unknown"
"""Kinds of ends: the rank's own failure; a rank that lost another one or was ended by the launcher's SIGTERM; a rank
that disappeared with an unknown exit status."""


class ExitNote(NamedTuple):
    """An observed end of ``ranks``; ``time`` is the time of the observation in seconds since the epoch."""

    time: float
    text: str
    ranks: tuple[int, ...] = ()
    kind: str = CAUSE

    @property
    def order(self) -> tuple[bool, float]:
        """A sort key: causes before consequences, then by time."""
        return self.kind == CONSEQUENCE, self.time


def silent_ends(
    dead: Sequence[RankHeartbeat], exit_of: Callable[[int], Exit] = exit_now, beside: Mapping[int, str] | None = None
) -> Iterator[ExitNote]:
    """Notes on ranks that disappeared without a note of their own, one for each exit status.

    ``exit_of`` returns the exit of an owner; ``beside`` maps a status to additional text.
    """
    seen = {pulse.owner: exit_of(pulse.owner) if pulse.is_here else Exit(0, time.time()) for pulse in dead}
    for status in dict.fromkeys(one.status for one in seen.values()):
        alike = [pulse for pulse in dead if seen[pulse.owner].status == status]
        first = min(alike, key=lambda pulse: pulse.beat_ns)
        who = listed([f"{pulse.rank} (pid {pid_of(pulse.owner)})" for pulse in alike], _MOST_NAMED)
        text = f"rank{'s' if len(alike) > 1 else ''} {who} {_how(status, len(alike) > 1)}, {first.where}"
        text += (beside or {}).get(status, "")
        began = min(seen[pulse.owner].time for pulse in alike)
        yield ExitNote(began, text, tuple(pulse.rank for pulse in alike), _kind(status))


def _kind(status: int) -> str:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM:
        return CONSEQUENCE
    return CAUSE if status else UNKNOWN


def _how(status: int, several: bool) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        known = number in set(signal.Signals)
        name = signal.Signals(number).name if known else f"signal {number}"
        return f"{'were' if several else 'was'} ended by {name}"
    if not status:
        return "exited, status unknown"
    return f"{'have' if several else 'has'} exited with code {os.WEXITSTATUS(status)}"


def tell(node_dir: Path, end: ExitNote) -> None:
    """Append a note; it is lost if the file is full. Never raises, because its callers are about to exit."""
    ranks, text = ",".join(map(str, end.ranks)) or "-", " ".join(end.text.split())[:_MOST_CHARS]
    line = f"{end.time:.3f} {ranks} {end.kind} {text}\n"
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(node_dir / ENDS_NAME, flags, 0o600)
        try:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, line.encode())  # one call, so that lines of several processes do not mix
        finally:
            os.close(fd)


def are_told_in(node_dir: Path) -> None:
    """Set the node directory to which ``tell_here`` of this process writes."""
    _here[:] = [node_dir]


_here: list[Path] = []


def tell_here(rank: int, text: str, kind: str) -> None:
    """Note that this process, ``rank``, ends for the reason ``text``."""
    for node_dir in _here:
        tell_silent(node_dir)
        tell(node_dir, ExitNote(time.time(), f"rank {rank}: {text}", (rank,), kind))


def tell_silent(node_dir: Path) -> None:
    """Note the ranks of the node that have disappeared without a note. Never raises."""
    if (node_dir / PULSE_NAME).exists():  # ``open`` would create it
        told = told_of(node_dir)
        dead = [one for one in Heartbeat.open(node_dir, None).ranks() if one.lives is False and one.rank not in told]
        for end in silent_ends(dead):
            tell(node_dir, end)


def told_of(node_dir: Path) -> dict[int, bool]:
    """Rank → whether its end is known, for ranks with a note since ``forget``."""
    told: dict[int, bool] = {}
    with suppress(OSError):
        for end in read(node_dir):
            told |= {rank: end.kind != UNKNOWN or told.get(rank, False) for rank in end.ranks}
    return told


def read(node_dir: Path) -> list[ExitNote]:
    """The notes since ``forget``, causes first, then by time. Raises OSError."""
    path = node_dir / ENDS_NAME
    if not path.exists():
        return []
    ends: list[ExitNote] = []
    for line in path.read_bytes()[: 2 * _MOST_BYTES].decode("utf-8", "replace").splitlines():
        with suppress(ValueError):
            at, ranks, kind, text = line.split(" ", 3)
            ends.append(ExitNote(float(at), text, tuple(map(int, ranks.split(","))) if ranks != "-" else (), kind))
    return sorted(_without_repetitions(ends), key=lambda end: end.order)


def _without_repetitions(ends: Sequence[ExitNote]) -> list[ExitNote]:
    """Drop duplicates: two ranks may both note a third one's end, and the SMP may know more of it than they."""
    known = {rank for end in ends if end.kind != UNKNOWN for rank in end.ranks}
    left: list[ExitNote] = []
    for end in ends:
        is_told = end.ranks in [one.ranks for one in left] or (end.kind == UNKNOWN and known.issuperset(end.ranks))
        if not end.ranks or not is_told:
            left.append(end)
    return left


def forget(node_dir: Path) -> None:
    """Delete the notes of the previous attempt. Raises OSError."""
    (node_dir / ENDS_NAME).unlink(missing_ok=True)
