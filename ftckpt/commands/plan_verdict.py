"""Whether a planned job can have what it asks for on its nodes: one line, yes or no, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.commands.plan_holdings import Planned, leaner
from ftckpt.commands.plan_intervals import Costs, IntervalForecast
from ftckpt.config import Config
from ftckpt.errors import written
from ftckpt.model.text import human
from ftckpt.parity.table import Memory

_TMPFS_SHARE = 0.5
"""Of a node's memory, that a tmpfs may take where nobody has said how much."""


@dataclass(frozen=True)
class Verdict:
    """``need`` is what the fullest node holds of the ``node_bytes`` that there are; ``faults``: why that cannot be,
    each with the setting that changes it, none where all is well.
    """

    node_bytes: int
    need: Memory
    slots: int
    protect: str
    predicted: IntervalForecast | None
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def good(self) -> bool:
        return not self.faults

    def line(self) -> str:
        needs = f"a node needs {human(self.need.sum)} of {human(self.node_bytes)}"
        facts = [f"{needs} ({self.slots} slots, protect {self.protect})", *self._how_often()]
        if self.good:
            return written("yes: " + "; ".join(facts))
        faults = "; ".join(f"{reason}: {remedy}" for reason, remedy in self.faults)
        return written(f"no: {faults}; as planned {'; '.join(facts)}")

    def to_json(self) -> dict[str, Any]:
        often: dict[str, Any] = {}
        if (predicted := self.predicted) is not None:
            often = {"snapshot_every": predicted.interval, "snapshot_gap": predicted.gap}
            if self.protect != "none":
                limit = written(predicted.limit)
                often |= {"protected_every": predicted.protected, "protected_limit": limit}
        return {
            "answer": "yes" if self.good else "no", "node_memory": self.node_bytes,
            "need": {**asdict(self.need), "sum": self.need.sum}, "slots": self.slots, "protect": self.protect,
            "faults": [{"reason": written(reason), "remedy": written(remedy)} for reason, remedy in self.faults],
            **often,
        }  # fmt: skip

    def assumed(self) -> Iterator[str]:
        yield "--node-memory is what a node has left beside training, which is not counted here"
        if self.need.sum > _TMPFS_SHARE * self.node_bytes:
            yield (
                f"a tmpfs that takes {human(self.need.sum)}: /dev/shm takes half of a node's memory where it is not "
                "mounted with a size"
            )

    def _how_often(self) -> Iterator[str]:
        predicted = self.predicted
        if predicted is None:
            yield "how often snapshots are taken is not known without --iteration-secs"
            return
        text = f"a snapshot {_each(predicted.interval)}"
        text += " as --ftckpt-overhead-budget allows" if predicted.stretched else ""
        if predicted.gap > predicted.interval:
            text += f", {_each(predicted.gap)} while one is being protected (too few slots for more)"
        yield text
        if self.protect == "none":
            yield "none is protected"
        else:
            yield f"protected {_each(predicted.protected)}" + (
                f" as {predicted.limit} allows" if predicted.limit else ""
            )


def judge(
    planned: Planned, config: Config, node_bytes: int, costs: Costs | None, predicted: IntervalForecast | None
) -> Verdict:
    """Whether ``planned`` fits nodes of ``node_bytes``, and whether its snapshots come to be protected."""
    need, faults = planned.table.fullest, []
    if need.sum > node_bytes:
        faults.append(("it does not fit", _fitting(planned, config, node_bytes)))
    if costs is not None and planned.modes.names and costs.protect > config.protect_timeout_secs:
        why = f"protecting one takes {costs.protect:.0f} s and is given up after {config.protect_timeout_secs:g}"
        faults.append((why, f"--ftckpt-protect-timeout-secs {math.ceil(2 * costs.protect)} waits for it"))
    names = ",".join(planned.modes.names) or "none"
    return Verdict(node_bytes, need, planned.slots, names, predicted, tuple(faults))


def _fitting(planned: Planned, config: Config, node_bytes: int) -> str:
    """The first setting with which a node has room, or what is lacking with all of them."""
    least, with_setting = planned.table.fullest, ""
    for setting, memory in leaner(planned, config):
        if memory.sum <= node_bytes:
            return f"{setting} needs {human(memory.sum)}"
        if memory.sum < least.sum:
            least, with_setting = memory, f" with {setting}"
    return f"more ranks, or {human(least.sum)} of a node{with_setting}, the least that any setting needs"


def _each(iterations: int) -> str:
    return "every iteration" if iterations == 1 else f"each {iterations} iterations"
