"""Faults as a table: what happens, at which instant, under which protection, and what must come back."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_LOCK_NAME
from ftckpt.memory.locks import holder_of
from ftckpt.memory.slots import slot_name
from tests.support.flips import flip
from tests.support.waiting import until

KILLS: dict[str, tuple[int, ...]] = {
    "forward": (-2, -1),
    "fence": (-2, -1),
    "before_step": (-1,),
    "after_step": (-1,),
    "boundary": (-1,),
    "begin": (-1,),
    "copy": (-1,),
    "before_seal": (-1,),
    "after_seal": (-1, 0),
    "post": (0,),
    "mark": (0,),
    "between": (-1, 0),
}
"""Instant of a SIGKILL → what may come back, counted from the iteration in which it falls. Up to the fence the copies
of the snapshot before may be under way."""

IN_EVERY_ITERATION = ("forward", "fence", "before_step", "boundary")
"""Instants that come whether an iteration has a snapshot or not: under protection one may be skipped."""

OLDER, SAME, LOST = "the snapshot before", "the same snapshot", "nothing, and the arena is named"


def _flip_in(region: str, by: int) -> Callable[[Path, int], None]:
    def damage(path: Path, slot: int) -> None:
        with closing(Arena.open(path)) as arena:
            begin = int(getattr(arena.image, region).begin)
        flip(path / slot_name(slot), begin + by)

    return damage


def _flip_padding(path: Path, slot: int) -> None:
    with closing(Arena.open(path)) as arena:
        begin = next(pad.begin for pad in arena.image.pads if pad.nbytes)
    flip(path / slot_name(slot), begin)


def _lose_node(path: Path, slot: int) -> None:
    """All of a node at once: its SMP, and the memory of its arenas, parity and packages."""
    lock = path.parent / SMP_LOCK_NAME
    pid = holder_of(lock)
    assert pid is not None, "the node's SMP outlives its trainers"
    os.kill(pid, signal.SIGKILL)
    until(lambda: holder_of(lock) is None, "its end")
    shutil.rmtree(path.parent)


@dataclass(frozen=True, slots=True)
class Protection:
    """What protects the four ranks of a job, and their nodes: as it begins, and in the attempt after the damage."""

    settings: dict[str, Any]
    nodes: tuple[str, ...] = ("node",) * 4
    nodes_after: tuple[str, ...] = ("node",) * 4


PROTECTIONS = {
    "none": Protection({"protect": "none"}),
    "node": Protection({"protect": "node"}),
    "sealed peer": Protection({"protect": "peer", "encrypt": True}, ("a", "a", "b", "b"), ("a", "a", "c", "c")),
}


@dataclass(frozen=True, slots=True)
class DamageRow:
    """Damage to the newest snapshot in one rank's arena, and what comes back by which of ``PROTECTIONS``."""

    damage: Callable[[Path, int], None]
    comes_back: dict[str, str]


DAMAGES = {
    "stepped byte": DamageRow(_flip_in("stepped", 100), {"none": OLDER, "node": SAME}),
    "objects byte": DamageRow(_flip_in("objects", 40), {"none": OLDER, "node": SAME}),
    "slot truncated": DamageRow(
        lambda path, slot: os.truncate(path / slot_name(slot), 8192), {"none": OLDER, "node": SAME}
    ),
    "slot gone": DamageRow(lambda path, slot: (path / slot_name(slot)).unlink(), {"none": OLDER, "node": SAME}),
    # What follows from the manifest alone is put right without any parity.
    "header byte": DamageRow(lambda path, slot: flip(path / slot_name(slot), 2000), {"none": SAME}),
    "padding byte": DamageRow(_flip_padding, {"none": SAME}),
    "arena gone": DamageRow(lambda path, slot: shutil.rmtree(path), {"none": LOST, "node": SAME}),
    "node gone": DamageRow(_lose_node, {"sealed peer": SAME}),
    "control byte": DamageRow(lambda path, slot: flip(path / "control", 20), {"none": LOST, "node": SAME}),
}
