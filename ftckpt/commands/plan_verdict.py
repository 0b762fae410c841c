"""Whether a planned job can have what it asks for on its nodes: one line, yes or no, and what to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ftckpt.commands.plan_holdings import ProtectionPlan, StartPlan, leaner
from ftckpt.config import Config
from ftckpt.errors import written
from ftckpt.model.text import human
from ftckpt.parity.table import Memory
from ftckpt.smp.link import NetworkLimit

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
    faults: tuple[tuple[str, str], ...] = ()

    @property
    def good(self) -> bool:
        return not self.faults

    def line(self) -> str:
        needs = f"a node needs {human(self.need.sum)} of {human(self.node_bytes)}"
        facts = f"{needs} ({self.slots} slots, protect {self.protect})"
        if self.good:
            return written(f"yes: {facts}")
        faults = "; ".join(f"{reason}: {remedy}" for reason, remedy in self.faults)
        return written(f"no: {faults}; as planned {facts}")

    def to_json(self) -> dict[str, Any]:
        return {
            "answer": "yes" if self.good else "no", "node_memory": self.node_bytes,
            "need": {**asdict(self.need), "sum": self.need.sum}, "slots": self.slots, "protect": self.protect,
            "faults": [{"reason": written(reason), "remedy": written(remedy)} for reason, remedy in self.faults],
        }  # fmt: skip

    def assumed(self) -> Iterator[str]:
        yield "--node-memory is what a node has left beside training, which is not counted here"
        if self.need.sum > _TMPFS_SHARE * self.node_bytes:
            yield (
                f"a tmpfs that takes {human(self.need.sum)}: /dev/shm takes half of a node's memory where it is not "
                "mounted with a size"
            )


def judge(planned: StartPlan, config: Config, node_bytes: int, limit: NetworkLimit) -> PlanAnswer:
    """Whether ``planned`` fits nodes of ``node_bytes``, and whether the network lets its snapshots be protected."""
    need, faults, timeout_secs = planned.table.fullest, [], config.protect_timeout_secs
    secs = longest_secs = limit.secs(planned.arrangement.received_bytes)
    if need.sum > node_bytes:
        setting, arrangement, text = _fitting(planned, config, node_bytes)
        # Peers may have to send what was made of replicas.
        longest_secs = max(secs, limit.secs(arrangement.received_bytes))
        wait = f" {_waiting(longest_secs)}" if longest_secs > timeout_secs >= secs else ""
        faults.append(("it does not fit", f"{setting}{wait} {text}".strip()))
    if secs > timeout_secs:
        why = f"protecting one takes {secs:.0f} s and is given up after {timeout_secs:g}"
        faults.append((why, f"{_waiting(longest_secs)} waits for it"))
    names = ",".join(planned.modes.names) or "none"
    return PlanAnswer(node_bytes, need, planned.slots, names, tuple(faults))


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
