"""The position of Megatron-LM's train loop, as an object of a snapshot, and the arguments of the job."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ftckpt.frameworks.log_sums import LogSums

_COUNTERS = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
)
# All other arguments are equal on all ranks, so ``ftckpt convert`` can use those of any shard.
_OF_ONE_RANK = ("rank", "local_rank")
_PLAIN = (str, bool, int, float, type(None))


class Counters:
    """The counters of the train loop, which are in Megatron's global arguments; two are later only in its local
    variables (``current``).

    The other arguments are not restored. They are for ``ftckpt convert``: Megatron reads the consumed samples from
    the arguments in a checkpoint, and compares the model's sizes with them.
    """

    def __init__(self, args: Any) -> None:
        self._args = args
        self._arguments = json.dumps(_plain_arguments(args))  # once: a snapshot copies one text
        self._log_sums = LogSums()
        self.current: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """The current counters; ``arguments`` is a JSON text."""
        arguments = {name: getattr(self._args, name) for name in _COUNTERS if hasattr(self._args, name)}
        counters = {**arguments, **self.current}
        return {"counters": counters, "log_sums": self._log_sums.save(), "arguments": self._arguments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters from which the loop starts."""
        for name, value in state["counters"].items():
            setattr(self._args, name, value)
        self._log_sums.load(state["log_sums"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Loads from another layout: all stages have the same position, only the last one has losses."""
        self.load_state_dict({"counters": states[0]["counters"], "log_sums": states[-1]["log_sums"]})

    def follow_log(self, losses: Mapping[str, Any], sums: dict[str, Any], is_first_iteration: bool) -> bool:
        """Must be called before ``losses`` are added to ``sums``; returns whether this iteration starts new sums."""
        # False after a restore: otherwise the loop would set the restored sums to zero.
        return not self._log_sums.follow(losses, sums) and is_first_iteration


def _plain_arguments(args: Any) -> dict[str, Any]:
    """Arguments that JSON can represent, except ftckpt's settings and per-rank ones."""
    return {
        name: value
        for name, value in vars(args).items()
        if name not in _OF_ONE_RANK and not name.startswith("ftckpt") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return all(type(item) in _PLAIN for item in items)
