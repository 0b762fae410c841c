"""The demo's last scene: a node is lost and nothing takes its place.

The job goes on with half of its ranks, in another layout, with the state that lay in memory: what the lost node held
is rebuilt from parity on the other one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.demo_frameworks import SMALL, Framework
from launch.demo_measure import FaultCost, Line
from launch.demo_processes import DemoError
from launch.demo_run import Run, Watch
from launch.demo_scenes import LOST_NODE, SHRINK, NodeLoss

LAYOUTS = ("tp2pp2dp2", "tp2pp1dp2")
"""Of eight ranks, and of four."""

ITERATIONS = 16
ROLES = {"weight": "weights", "master": "masters", "exp_avg": "moments", "exp_avg_sq": "moments", "step": "steps"}


@dataclass(frozen=True)
class Reshape:
    """What the scene has shown. ``differences`` names each tensor that is not bit for bit that of the reference.

    ``before`` and ``after`` name layouts, ``compared`` counts logical tensors, ``secs`` is how long the slowest rank
    reshaped, ``read_bytes`` and ``received_bytes`` are those of all ranks. ``off``: largest difference of a later
    loss from that of the reference.
    """

    before: str
    after: str
    iteration: int
    compared: Mapping[str, int]
    differences: tuple[str, ...]
    secs: float
    read_bytes: int
    received_bytes: int
    off: float
    cost: FaultCost

    @property
    def bit_equal(self) -> bool:
        """Whether tensors were compared, and all of them are equal."""
        return bool(self.compared) and not self.differences

    def summary(self) -> dict[str, Any]:
        """What the report shows."""
        parts = self.cost
        return {
            "from": self.before,
            "to": self.after,
            "source": "memory",
            "bit_equal": self.bit_equal,
            "iteration": self.iteration,
            "rebuilt": {
                "shards": list(parts.rebuilt_shards),
                "bytes": parts.rebuilt_bytes,
                "from": [] if parts.source == "memory" else parts.source.split("+"),
            },
            "tensors_compared": dict(self.compared),
            "differences": list(self.differences),
            "secs": self.secs,
            "read_bytes": self.read_bytes,
            "received_bytes": self.received_bytes,
            "largest_difference_of_a_loss": self.off,
            "iterations_lost": parts.iterations_lost,
            "total_secs": parts.total_secs,
        }


def plan(framework: Framework, training: Sequence[str], folder: Path, job: str) -> tuple[Run, NodeLoss]:
    """The run of the scene, and what happens in it; ``training`` ends with the number of iterations."""
    loss = NodeLoss(LOST_NODE, "", int(training[-1]) // 2, (folder / f"fired-{SHRINK}").resolve())
    settings = {**SMALL, "job": job, "layouts": ",".join(LAYOUTS)}
    return Run(SHRINK, folder, framework, training, settings, (loss,), least_nodes=1, digested=True), loss


def conclude(cost: FaultCost, watch: Watch, lines: Sequence[Line], reference: Run, run: Run) -> Reshape:
    """``watch`` is of ``run``, ``lines`` are those of ``reference``.

    Raises:
        DemoError: nothing was reshaped, or a run has no digests of the iteration.
    """
    told = [event for event in watch.events if event["event"] == "reshaped" and event["time"] > cost.killed_at]
    if not told:
        raise DemoError(f"scene {SHRINK}: no rank told of another layout after the fault")
    iteration = int(told[0]["iteration"])
    expected, restored = _digest(reference.digests, iteration, False), _digest(run.digests, iteration, True)
    losses = {line["iteration"]: line["loss"] for line in lines}
    off = [abs(line["loss"] - losses[line["iteration"]]) for line in watch.lines if line["iteration"] > iteration]
    return Reshape(
        before=told[0]["from"],
        after=told[0]["to"],
        iteration=iteration,
        compared=Counter(ROLES.get(key.partition("/")[0], "others") for key in expected),
        differences=tuple(key for key in sorted({**expected, **restored}) if expected.get(key) != restored.get(key)),
        secs=max(event["secs"] for event in told),
        read_bytes=sum(event["read_bytes"] for event in told),
        received_bytes=sum(event["received_bytes"] for event in told),
        off=max(off, default=0.0),
        cost=cost,
    )


def _digest(path: Path, iteration: int, restored: bool) -> dict[str, Any]:
    for line in map(json.loads, path.read_text().splitlines()):
        if (line["iteration"], line["restored"]) == (iteration, restored):
            found: dict[str, Any] = line["digest"]
            return found
    raise DemoError(f"scene {SHRINK}: {path} has no digest of iteration {iteration}")
