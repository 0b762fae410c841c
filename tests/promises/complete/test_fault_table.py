"""Fault × instant × protection → what must come back (the table is in ``tests/support/faults.py``), and kills
that follow each other or come with other faults."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.arena import Arena
from ftckpt.memory.directory import SMP_STATE_NAME
from ftckpt.smp.channel import HELLO, MAGIC, NONCE_BYTES, connect
from tests.support import jobs
from tests.support.arenas import check_all
from tests.support.event_logs import read_events
from tests.support.faults import DAMAGES, IN_EVERY_ITERATION, KILLS, LOST, OLDER, PROTECTIONS, Fault
from tests.support.pool import RankFailure
from tests.support.tiers import by_default
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

RANKS = 4
PP2 = ("--pp", "2")
UNTIL = 8
AT = 5
COVER_SECS = 60.0
"""For the SMPs, at most: they cover the snapshot before the pause."""


@cache
def reference(*layout: str) -> list[jobs.Outcome]:
    return jobs.outcomes(RANKS, jobs.Run(list(layout), until=UNTIL))


def resume(settings: dict[str, Any], *layout: str, nodes: Sequence[str] | None = None) -> int:
    resumed = jobs.outcomes(RANKS, jobs.Run(list(layout), UNTIL, settings, nodes))
    assert not list(Path(settings["arena"]).iterdir()), "an ended job left something behind"
    return jobs.assert_continues(reference(*layout), resumed)


def attempt(settings: dict[str, Any], *faults: Fault, until: int = UNTIL, **more: Any) -> list[Any]:
    results = jobs.broken(RANKS, jobs.Run(PP2, until, settings, faults=faults, **more))
    for fault in faults:
        ranks = range(RANKS) if fault.rank == "all" else [fault.rank]
        assert all(fault.fired(rank) for rank in ranks), f"{fault} did not fire"
    return results


@pytest.mark.parametrize(
    ("instant", "protect"),
    by_default(
        [*((i, "none") for i in KILLS), *((i, "node") for i in IN_EVERY_ITERATION)],
        [("before_step", "none"), ("boundary", "node")],
    ),
)
def test_one_rank_killed(instant: str, protect: str, settings: dict[str, Any], tmp_path: Path) -> None:
    settings["protect"] = protect
    fault = Fault(1, AT, instant, tmp_path / "fired", "kill")
    assert jobs.killed(attempt(settings, fault)[1])
    back = {AT + offset for offset in KILLS[instant]}
    # With protection a snapshot may be skipped while another is being protected.
    assert (start := resume(settings, *PP2)) in back or (protect != "none" and 0 < start < min(back))


def die(settings: dict[str, Any], tmp_path: Path, nodes: Sequence[str] | None = None) -> tuple[list[Path], int]:
    """Arenas of a job that died between two snapshots, and the newest iteration that all hold, or all protect."""
    pause = Fault("all", AT - 1, "boundary", tmp_path / "pause", "wait", secs=COVER_SECS)
    dead = Fault("all", AT + 1, "boundary", tmp_path / "dead", "kill", secs=20)
    protects = settings["protect"] != "none"
    if protects:
        threading.Thread(
            target=go_on_once_covered, args=(pause, settings, set(nodes or ["node"])), daemon=True
        ).start()
    faults = [*([pause] if protects else []), dead]
    results = jobs.broken(RANKS, jobs.Run(["--tp", "2"], UNTIL, settings, nodes, faults))
    assert all(map(jobs.killed, results)), [result.error for result in results]
    paths = sorted((Path(settings["arena"]) / "ftckpt-test").glob("*/tp*"))
    assert len(paths) == RANKS
    if settings["protect"] != "none":
        return paths, max(event["iteration"] for event in jobs.events(settings, "protected"))
    return paths, min(max(id.iteration for id in snapshots(path)) for path in paths)


def go_on_once_covered(pause: Fault, settings: dict[str, Any], nodes: set[str]) -> None:
    """What is not covered by then no boundary finds protected."""
    events = Path(settings["events"])
    until(lambda: all(read_events(events, "covered", of=f"smp-{node}") for node in nodes), secs=COVER_SECS)
    pause.go_on()


def wants_sealed(node_dir: Path) -> bool:
    """Whether the node's SMP tells by its hello that all which follows is to be sealed."""
    description = json.loads((node_dir / SMP_STATE_NAME).read_text())["description"]
    with closing(connect((description["address"], description["port"]), 10.0)) as channel:
        channel.write(HELLO.pack(MAGIC, 0, bytes(NONCE_BYTES)), time.monotonic() + 10.0)
        return HELLO.unpack(channel.read(HELLO.size, time.monotonic() + 10.0))[1] == 1


def snapshots(path: Path) -> dict[Any, int]:
    with closing(Arena.open(path)) as arena:
        return dict(arena.snapshots())


def slot_with(path: Path, iteration: int) -> int:
    return next(slot for id, slot in snapshots(path).items() if id.iteration == iteration)


@pytest.mark.parametrize(
    ("name", "protect"),
    by_default(
        [(name, protect) for name, row in DAMAGES.items() for protect in row.comes_back],
        [("stepped byte", "node"), ("arena gone", "node"), ("control byte", "none")],
    ),
)
def test_memory_damaged_between_attempts(name: str, protect: str, settings: dict[str, Any], tmp_path: Path) -> None:
    row, protection = DAMAGES[name], PROTECTIONS[protect]
    settings |= protection.settings
    paths, iteration = die(settings, tmp_path, protection.nodes)
    if settings.get("encrypt"):
        assert all(wants_sealed(path.parent) for path in paths)
    if protect == "none":
        check_all(paths[2].parent)
    row.damage(paths[2], slot_with(paths[2], iteration))
    if row.comes_back[protect] == LOST:
        with pytest.raises(RankFailure, match=r"(?s)LostError.*tp1-pp0-cp0-dp0"):
            jobs.outcomes(RANKS, jobs.Run(["--tp", "2"], UNTIL, settings))
        assert resume({**settings, "on_lost": "fresh"}, "--tp", "2") == 0
        assert jobs.events(settings, "lost")
        return
    start = resume(settings, "--tp", "2", nodes=protection.nodes_after)
    if protect == "none":
        assert start == iteration - (row.comes_back[protect] == OLDER)
    else:
        # A newer snapshot, not yet protected, may be whole: the damage to the protected one need not show.
        assert start >= iteration
    events = [event for kind in ("fallback", "passed_over", "rebuilt") for event in jobs.events(settings, kind)]
    assert events or start > iteration, "the damage was passed over in silence"


@pytest.mark.slow
def test_both_snapshots_of_one_rank_damaged(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["protect"] = "none"
    paths, _ = die(settings, tmp_path)
    check_all(paths[1].parent)
    for slot in snapshots(paths[1]).values():
        DAMAGES["stepped byte"].damage(paths[1], slot)
    with pytest.raises(RankFailure, match=r"(?s)LostError.*corrupt in"):
        jobs.outcomes(RANKS, jobs.Run(["--tp", "2"], UNTIL, settings))


@pytest.mark.parametrize("point", by_default(["void", "load"], ["load"]))
def test_killed_while_restoring(point: str, settings: dict[str, Any], tmp_path: Path) -> None:
    attempt(settings, Fault(1, AT, "before_seal", tmp_path / "first", "kill"))
    victim = 0 if point == "void" else 1
    results = attempt(settings, Fault(victim, AT - 1, point, tmp_path / "second", "kill"))
    assert jobs.killed(results[victim])
    assert resume(settings, *PP2) == AT - 1


def test_lineages_never_mix(settings: dict[str, Any], tmp_path: Path) -> None:
    """Two attempts each seal the same iteration on some ranks only, the second with other bits."""
    attempt(settings, Fault(1, AT, "before_seal", tmp_path / "first", "kill"))
    attempt(settings, Fault(2, AT, "before_seal", tmp_path / "second", "kill"), perturb=True)
    assert resume(settings, *PP2) == AT - 1


@pytest.mark.slow
def test_stalled_failing_and_killed_ranks_together(settings: dict[str, Any], tmp_path: Path) -> None:
    argv = ["--pp", "2", "--no-distributed-optimizer", "--overlap-grad-reduce"]
    faults = [
        Fault(0, 4, "fence", tmp_path / "stalled", "stall", secs=1.5),
        Fault(1, 4, "copy", tmp_path / "raised", "raise"),
        Fault(2, 6, "boundary", tmp_path / "killed", "kill"),  # whoever is there has passed all fences
    ]
    whole = jobs.outcomes(RANKS, jobs.Run(argv, UNTIL))
    jobs.broken(RANKS, jobs.Run(argv, UNTIL, settings, faults=faults))
    assert [fault.fired(int(fault.rank)) for fault in faults] == [True] * 3
    errors = jobs.events(settings, "snapshot_error")
    assert {event["rank"] for event in errors} == {1}, errors
    start = jobs.assert_continues(whole, jobs.outcomes(RANKS, jobs.Run(argv, UNTIL, settings)))
    assert start == 5


@pytest.mark.slow
def test_old_arenas_stay_until_a_new_snapshot_is_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    """After nodes swapped, new arenas are empty: until they hold a snapshot the old ones have the only one."""
    here, there = ["a", "a", "b", "b"], ["b", "b", "a", "a"]
    attempt(settings, Fault("all", AT, "boundary", tmp_path / "first", "kill", secs=20), nodes=here)
    attempt(settings, Fault("all", AT, "boundary", tmp_path / "second", "kill", secs=20), nodes=there)
    resumed = jobs.outcomes(RANKS, jobs.Run(PP2, UNTIL, settings, nodes=there))
    assert jobs.assert_continues(reference(*PP2), resumed) == AT - 1
    assert not list(Path(settings["arena"]).iterdir()), "old arenas were left behind"


def test_killed_before_anything_was_whole(settings: dict[str, Any], tmp_path: Path) -> None:
    attempt(settings, Fault(1, 1, "before_seal", tmp_path / "fired", "kill"))
    assert resume(settings, *PP2) == 0
