"""The demo's faults, and how to tell them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftckpt.testing.faults import Fault


@dataclass(frozen=True)
class Scene:
    """A fault; ``what`` tells it, ``label`` marks it. ``ordinal`` of ``copy``: one chunk is in the slot already."""

    rank: Any
    point: str
    ordinal: int
    secs: float
    what: str
    label: str


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
}


def plan_faults(scenes: Sequence[str], iterations: int, folder: Path) -> dict[str, Fault]:
    """The faults, spread evenly over the run."""
    faults = {}
    for index, name in enumerate(scenes):
        scene = SCENES[name]
        iteration = iterations * (index + 1) // (len(scenes) + 1)
        marker = (folder / f"fired-{name}").resolve()
        faults[name] = Fault(scene.rank, iteration, scene.point, marker, "kill", scene.ordinal, scene.secs)
    return faults
