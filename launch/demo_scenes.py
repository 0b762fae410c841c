"""The demo's faults, and how to tell them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftckpt.testing.faults import Fault

WORLD_SIZE = 8
_OCCASIONS = 5


@dataclass(frozen=True)
class Scene:
    """A fault; ``what`` tells it, ``label`` marks it. ``ordinal`` of ``copy``: one chunk is in the slot already."""

    rank: Any
    point: str
    ordinal: int
    secs: float
    what: str
    label: str


@dataclass(frozen=True)
class NodeLoss:
    """All of ``node`` is lost in the middle of ``iteration``, or later where no snapshot is protected by then.

    ``replacement`` takes its place, "": nothing does. ``marker``: the file that says that it happened: time,
    iteration, ranks, process ids and shards.
    """

    node: str
    replacement: str
    iteration: int
    marker: Path


LOST_NODE, REPLACEMENT = "node1", "node2"
SHRINK = "shrink"
"""The scene in which no node replaces the lost one; it has a run of its own."""

SCENES = {
    "rank": Scene(5, "forward", 3, 0.0, "rank 5 killed in the middle of iteration {}", "one rank killed"),
    "writing": Scene(
        2, "copy", 1, 0.0, "rank 2 killed while it wrote the snapshot of iteration {}", "killed while writing"
    ),
    "all": Scene(
        "all",
        "before_step",
        0,
        60.0,
        "all ranks killed before the optimizer step of iteration {}",
        "all ranks killed",
    ),
    "node": Scene(
        None,
        "node",
        0,
        0.0,
        f"all of {LOST_NODE} lost in iteration {{}}: its agent, its ranks, its SMP, its memory; "
        f"{REPLACEMENT} takes its place",
        "a node lost",
    ),
}

SHRINKING = Scene(
    None,
    "node",
    0,
    0.0,
    f"all of {LOST_NODE} lost in iteration {{}}: its agent, its ranks, its SMP, its memory; nothing takes its place",
    "a node lost for good",
)
SCENE_OF = {**SCENES, SHRINK: SHRINKING}


def plan_faults(scenes: Sequence[str], iterations: int, folder: Path) -> dict[str, Fault | NodeLoss]:
    """The faults, spread evenly over the run."""
    faults: dict[str, Fault | NodeLoss] = {}
    for index, name in enumerate(scenes):
        scene = SCENES[name]
        iteration = iterations * (index + 1) // (len(scenes) + 1)
        marker = (folder / f"fired-{name}").resolve()
        if name == "node":
            faults[name] = NodeLoss(LOST_NODE, REPLACEMENT, iteration, marker)
        else:
            faults[name] = Fault(scene.rank, iteration, scene.point, marker, "kill", scene.ordinal, scene.secs)
    return faults


def victims(fault: Fault) -> list[int]:
    """The ranks that kill themselves."""
    return list(range(WORLD_SIZE)) if fault.rank == "all" else [fault.rank]


def occasions(fault: Fault) -> list[Fault]:
    """The first of these that comes is the fault: not every iteration has a snapshot that could be interrupted."""
    if fault.point != "copy":
        return [fault]
    return [replace(fault, iteration=fault.iteration + later) for later in range(_OCCASIONS)]


def marks_of(fault: Fault | NodeLoss) -> list[dict[str, Any]] | None:
    """What is known of the fault once it has happened: of each rank that killed itself, or of the lost node."""
    markers = [fault.marker] if isinstance(fault, NodeLoss) else [fault.marker_of(rank) for rank in victims(fault)]
    try:
        return [json.loads(marker.read_text()) for marker in markers]
    except (FileNotFoundError, json.JSONDecodeError):  # not there, or being written
        return None
