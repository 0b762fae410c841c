"""Where a run of Megatron's schedule is: told by the timers that the schedule itself starts and stops.

``config.timers`` is called around every compute step of every schedule, in every release that ftckpt knows, and
nothing has to be patched to listen. What lies between two compute steps is what a rank waits for and sends:
receives, sends that wait for their receiver, and under ``overlap_p2p_comm`` the waits on requests posted earlier,
which no timer of a receive sees. That is why windows are taken as the gaps between compute steps, not as the
spans of ``forward-recv`` and its kin; a wrapper of ``P2PCommunicator`` would add nothing to it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from megatron.core import parallel_state as mpu

from ftckpt.capture import schedule
from ftckpt.capture.places import Places, expected_places
from ftckpt.checkpointer import Checkpointer
from ftckpt.errors import ConfigError

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


class _Silent:
    """A timer of nobody."""

    def start(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""


class _Compute:
    """Tells begin and end of a compute step, then does what the user's own timer does."""

    def __init__(self, checkpointer: Checkpointer, kind: str, inner: Any) -> None:
        self._checkpointer = checkpointer
        self._kind = kind
        self._inner = inner

    def start(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""
        self._checkpointer.phase(self._kind)
        self._inner.start(*args, **kwargs)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """See megatron.core.timers."""
        self._inner.stop(*args, **kwargs)
        self._checkpointer.phase("window")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class Listening:
    """Stands in for ``config.timers``, which it calls where it is one."""

    def __init__(self, checkpointer: Checkpointer, timers: Any) -> None:
        self._checkpointer = checkpointer
        self._timers = timers

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """The timer of that name."""
        inner = self._timers(name, *args, **kwargs) if self._timers is not None else _Silent()
        kind = _COMPUTE.get(name)
        return inner if kind is None else _Compute(self._checkpointer, kind, inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy that is being made has no timers yet
            raise AttributeError(name)
        return getattr(self._timers, name)


def listen(checkpointer: Checkpointer, config: Any, micro_batches: int) -> None:
    """A schedule begins to run with ``config``: put listeners around what its fields hold."""
    finalize = config.finalize_model_grads_func

    def finalize_in_the_tail(*args: Any, **kwargs: Any) -> Any:
        checkpointer.phase("tail")
        return finalize(*args, **kwargs) if finalize is not None else None

    config.finalize_model_grads_func = finalize_in_the_tail
    config.timers = _begin(checkpointer, config, micro_batches)


def _begin(checkpointer: Checkpointer, config: Any, micro_batches: int) -> Any:
    """Returns what ``config.timers`` must be while the schedule runs."""
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        # Forward and backward of two micro-batches run at once: the timers tell no gaps.
        checkpointer.phase("forward")
        return config.timers
    stages, stage = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    chunks = config.virtual_pipeline_model_parallel_size or 1
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    model = expected(stages, stage, micro_batches, chunks, group)
    if model is not None:
        checkpointer.expect(*model)
    checkpointer.phase("window")
    return Listening(checkpointer, config.timers)


@lru_cache(maxsize=16)
def expected(stages: int, stage: int, micro_batches: int, chunks: int, group: int | None) -> Places | None:
    """Kinds and relative lengths of the places that ``stage`` comes to, the tail last; None without a model."""
    try:
        if chunks > 1:
            orders = [
                schedule.interleaved(stages, place, micro_batches, chunks, group or None) for place in range(stages)
            ]
        else:
            orders = [schedule.one_forward_one_backward(stages, place, micro_batches) for place in range(stages)]
    except ConfigError:
        return None  # Megatron says what is wrong with it
    return expected_places(orders, stage)
