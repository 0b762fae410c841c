"""Whether a planned job can have what it asks for on its nodes: one line, yes or no, and what to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.commands.plan_holdings import ProtectionPlan, StartPlan, leaner
from ftckpt.commands.plan_intervals import Costs, IntervalForecast
from ftckpt.config import Config
from ftckpt.errors import written
from ftckpt.model.text import human
from ftckpt.parity.table import Memory

_TMPFS_SHARE = 0.5
"""Of a node's memory, that a tmpfs may take where nobody has said how much."""


@dataclass(frozen=True)
class PlanAnswer:
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
    planned: StartPlan, config: Config, node_bytes: int, costs_of: Callable[[ProtectionPlan], Costs | None],
    predicted: IntervalForecast | None,
) -> PlanAnswer:  # fmt: skip
    """Whether ``planned`` fits nodes of ``node_bytes``, and whether its snapshots come to be protected.

    ``costs_of`` gives None where they are not known.
    """

    def protect_secs(arrangement: ProtectionPlan) -> float:
        costs = costs_of(arrangement) if arrangement.modes.names else None
        return costs.protect if costs else 0.0

    need, faults, timeout_secs = planned.table.fullest, [], config.protect_timeout_secs
    secs = longest_secs = protect_secs(planned.arrangement)
    if need.sum > node_bytes:
        setting, arrangement, text = _fitting(planned, config, node_bytes)
        # Peers may have to send what was made of replicas.
        longest_secs = max(secs, protect_secs(arrangement))
        wait = f" {_waiting(longest_secs)}" if longest_secs > timeout_secs >= secs else ""
        faults.append(("it does not fit", f"{setting}{wait} {text}".strip()))
    if secs > timeout_secs:
        why = f"protecting one takes {secs:.0f} s and is given up after {timeout_secs:g}"
        faults.append((why, f"{_waiting(longest_secs)} waits for it"))
    names = ",".join(planned.modes.names) or "none"
    return PlanAnswer(node_bytes, need, planned.slots, names, predicted, tuple(faults))


def _waiting(secs: float) -> str:
    return f"--ftckpt-protect-timeout-secs {math.ceil(2 * secs)}"


def _fitting(planned: StartPlan, config: Config, node_bytes: int) -> tuple[str, ProtectionPlan, str]:
    """The first setting with which a node has room, what that leads to, and a text of it; without a setting what is
    lacking with all of them."""
    least, with_setting = planned.table.fullest, ""
    for setting, arrangement, memory in leaner(planned, config):
        if memory.sum <= node_bytes:
            return setting, arrangement, f"needs {human(memory.sum)}"
        if memory.sum < least.sum:
            least, with_setting = memory, f" with {setting}"
    text = f"more ranks, or {human(least.sum)} of a node{with_setting}, the least that any setting needs"
    return "", planned.arrangement, text


def _each(iterations: int) -> str:
    return "every iteration" if iterations == 1 else f"each {iterations} iterations"
