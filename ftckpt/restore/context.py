"""The job and node of a restart, as all its steps need them, and its counts of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.memory.locations import OpenArenas
from ftckpt.model.topology import Topology


class RestoreContext(NamedTuple):
    """All ranks, their places, the event stream of this rank, and the arenas of its node."""

    group: Group
    topology: Topology
    events: Events
    arenas: OpenArenas


Counts = dict[str, int]
"""``chunks`` and ``bytes`` that were reconstructed or fetched."""

Usage = dict[str, Counts]
"""Source (``source`` of ``parity.modes.TRAITS``, or ``storage``) → counts."""


def total_of(counts: Iterable[Mapping[str, int]]) -> Counts:
    """The sum of ``counts``."""
    total = {"chunks": 0, "bytes": 0}
    for one in counts:
        for name, number in one.items():
            total[name] += number
    return total
