"""How an attempt has ended, as far as its node has seen it: lines beside the arenas, for the next attempt to read.

Each process that knows something appends a line; whoever is killed while it does loses its own. A rank that ends by
an error says first which ranks of its node have gone without one: the launcher ends the others a moment later, and
then nobody can tell them from the cause.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.model.text import listed
from ftckpt.store.directory import ENDS_NAME, PULSE_NAME
from ftckpt.store.page import pid_of
from ftckpt.store.pulse import Pulse, RankPulse

_MOST_BYTES = 16 << 10
_MOST_CHARS = 300
"""Of a line: an exception may quote a whole tensor."""
_MOST_NAMED = 8
_LOST_ANOTHER = re.compile("(closed|reset) by peer|Broken pipe|remote process exited")
"""What gloo, NCCL and torch's store say on a rank whose peer is gone."""


class EndNote(NamedTuple):
    """``text`` says what was seen at ``time``, seconds since the epoch, of the end of ``ranks``."""

    time: float
    text: str
    ranks: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[bool, float]:
        """Causes before consequences: who has lost another rank may have noticed before anybody saw that one gone."""
        return lost_another(self.text), self.time


def lost_another(text: str) -> bool:
    """Whether an error is of a rank whose peer is gone: a consequence, of which that one has the cause."""
    return _LOST_ANOTHER.search(text) is not None


def silent_end(dead: Sequence[RankPulse], time_secs: float, beside: str = "") -> EndNote:
    """Of ranks that are gone and have not said why."""
    first = min(dead, key=lambda pulse: pulse.beat_ns)
    who = listed([f"{pulse.rank} (pid {pid_of(pulse.owner)})" for pulse in dead], _MOST_NAMED)
    text = f"rank{'s' if len(dead) > 1 else ''} {who} ended without a word, in {first.section.label}, "
    text += f"{first.phase or 'before a first phase'}, after iteration {first.iteration}{beside}"
    return EndNote(time_secs, text, tuple(pulse.rank for pulse in dead))


def tell(node_dir: Path, end: EndNote) -> None:
    """Append it; what has no room is lost. Nothing raises: it comes from processes that end."""
    ranks = ",".join(map(str, end.ranks)) or "-"
    path, line = node_dir / ENDS_NAME, f"{end.time:.3f} {ranks} {' '.join(end.text.split())[:_MOST_CHARS]}\n"
    with suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, line.encode())  # one call: lines of several processes do not mix
        finally:
            os.close(fd)


def are_told_in(node_dir: Path) -> None:
    """This process trains with the memory of that node: ``tell_here`` tells there."""
    _here[:] = [node_dir]


_here: list[Path] = []


def tell_here(rank: int, text: str) -> None:
    """This process, ``rank``, ends, for the reason ``text``."""
    for node_dir in _here:
        tell_silent(node_dir)
        tell(node_dir, EndNote(time.time(), f"rank {rank}: {text}", (rank,)))


def tell_silent(node_dir: Path) -> None:
    """Tell of the ranks of the node that are gone by now, and of which nothing was told. Nothing raises."""
    if (node_dir / PULSE_NAME).exists():  # to open it would make it
        told = told_of(node_dir)
        dead = [one for one in Pulse.open(node_dir, None).ranks() if one.lives is False and one.rank not in told]
        if dead:
            tell(node_dir, silent_end(dead, time.time()))


def told_of(node_dir: Path) -> frozenset[int]:
    """Ranks of which something was told since ``forget``."""
    with suppress(OSError):
        return frozenset(rank for end in read(node_dir) for rank in end.ranks)
    return frozenset()


def read(node_dir: Path) -> list[EndNote]:
    """What was told since ``forget``, causes and what is older first. Raises OSError."""
    path = node_dir / ENDS_NAME
    if not path.exists():
        return []
    ends: list[EndNote] = []
    for line in path.read_bytes()[: 2 * _MOST_BYTES].decode("utf-8", "replace").splitlines():
        with suppress(ValueError):
            at, ranks, text = line.split(" ", 2)
            end = EndNote(float(at), text, tuple(map(int, ranks.split(","))) if ranks != "-" else ())
            # Two that end at once may both have told of a third.
            if not end.ranks or end.ranks not in [one.ranks for one in ends]:
                ends.append(end)
    return sorted(ends, key=lambda end: end.order)


def forget(node_dir: Path) -> None:
    """A new attempt trains. Raises OSError."""
    (node_dir / ENDS_NAME).unlink(missing_ok=True)
