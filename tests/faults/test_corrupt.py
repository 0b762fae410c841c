"""Wrong bytes are never restored: an older snapshot is taken, or the restart says what is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import pytest

from ftckpt.arena.segment import Arena, slot_name
from ftckpt.testing.faults import Fault
from ftckpt.testing.pool import RankFailure

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

LAYOUT = ["--tp", "2"]
RANKS = 4
UNTIL = 7
DIED_AT = 5


@cache
def reference() -> list[jobs.Outcome]:
    return jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL))


@pytest.fixture(autouse=True)
def without_protection(settings: dict[str, Any]) -> None:
    """Here nothing can be rebuilt; test_rebuild_faults.py has the rest."""
    settings["protect"] = "none"


def die(settings: dict[str, Any], tmp_path: Path) -> tuple[list[Path], int]:
    """Arenas of a job that died between two snapshots, by name, and the newest iteration that they hold."""
    dead = Fault("all", DIED_AT, "boundary", tmp_path / "dead", "kill", secs=20)
    results = jobs.broken(RANKS, jobs.Run(LAYOUT, UNTIL, settings, faults=[dead]))
    assert all(map(jobs.killed, results)), [result.error for result in results]
    paths = sorted((Path(settings["arena"]) / "ftckpt-test" / "node").glob("tp*"))
    assert len(paths) == RANKS
    return paths, min(newest(path)[1] for path in paths)


def newest(path: Path) -> tuple[int, int]:
    """Slot and iteration of the newest snapshot in an arena."""
    arena = Arena.open(path)
    try:
        records = [(arena.control.record(i), i) for i in range(arena.control.slots)]
        iteration, slot = max((r.iteration, i) for r, i in records if r.sealed)
        return slot, iteration
    finally:
        arena.close()


def slot_with(path: Path, iteration: int) -> int:
    arena = Arena.open(path)
    try:
        found = [i for i in range(arena.control.slots) if arena.control.record(i).iteration == iteration]
        return found[0]
    finally:
        arena.close()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def span_of(path: Path, region: str) -> int:
    arena = Arena.open(path)
    try:
        return int(getattr(arena.image, region).begin)
    finally:
        arena.close()


DAMAGES: dict[str, Callable[[Path, int], None]] = {
    "stepped byte": lambda path, slot: flip(path / slot_name(slot), span_of(path, "stepped") + 100),
    "objects byte": lambda path, slot: flip(path / slot_name(slot), span_of(path, "objects") + 40),
    "truncated": lambda path, slot: os.truncate(path / slot_name(slot), 8192),
    "slot gone": lambda path, slot: (path / slot_name(slot)).unlink(),
    "record byte": lambda path, slot: flip(path / "control", 4096 + slot * record_bytes(path) + 24),
}


REPAIRED: dict[str, Callable[[Path, int], None]] = {
    "header byte": lambda path, slot: flip(path / slot_name(slot), 2000),
    "padding byte": lambda path, slot: flip(path / slot_name(slot), padding_of(path)),
}
"""What follows from the manifest alone is put right without any parity."""


def padding_of(path: Path) -> int:
    arena = Arena.open(path)
    try:
        return next(pad.begin for pad in arena.image.pads if pad.nbytes)
    finally:
        arena.close()


def record_bytes(path: Path) -> int:
    """Distance of two slots' records in the control block, see FORMAT.md."""
    arena = Arena.open(path)
    try:
        return -(-(64 + 8 * len(arena.image.chunks)) // 64) * 64
    finally:
        arena.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_snapshot_falls_back_to_the_older_one(
    damage: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    paths, whole = die(settings, tmp_path)
    DAMAGES[damage](paths[2], slot_with(paths[2], whole))
    resumed = jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings))
    assert jobs.assert_continues(reference(), resumed) == whole - 1
    told = jobs.events(settings, "fallback") + jobs.events(settings, "passed_over")
    assert any(str(whole) in str(event) or "chunk" in str(event) for event in told), told


@pytest.mark.parametrize("damage", REPAIRED)
def test_what_follows_from_the_manifest_is_put_right(damage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    paths, whole = die(settings, tmp_path)
    REPAIRED[damage](paths[2], slot_with(paths[2], whole))
    resumed = jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings))
    assert jobs.assert_continues(reference(), resumed) == whole
    (event,) = jobs.events(settings, "rebuilt")
    assert event["iteration"] == whole and event["sources"] == {}


@pytest.mark.parametrize("damage", ["arena gone", "control byte"])
def test_a_lost_arena_is_named(damage: str, settings: dict[str, Any], tmp_path: Path) -> None:
    paths, _ = die(settings, tmp_path)
    if damage == "arena gone":
        shutil.rmtree(paths[3])
    else:
        flip(paths[3] / "control", 20)
    with pytest.raises(RankFailure, match=r"(?s)LostError.*tp1-pp0-cp0-dp1"):
        jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings))
    fresh = jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, {**settings, "on_lost": "fresh"}))
    assert jobs.assert_continues(reference(), fresh) == 0
    assert jobs.events(settings, "lost")


def test_both_snapshots_of_one_rank_damaged(settings: dict[str, Any], tmp_path: Path) -> None:
    paths, _ = die(settings, tmp_path)
    for slot in range(2):
        DAMAGES["stepped byte"](paths[1], slot)
    with pytest.raises(RankFailure, match=r"(?s)LostError.*corrupt in"):
        jobs.outcomes(RANKS, jobs.Run(LAYOUT, UNTIL, settings))
