"""Phases of Megatron's schedule, observed through the timers that it starts and stops.

``config.timers`` is called around every compute step of every schedule, in every release that ftckpt knows, and
so nothing needs a patch. Between two compute steps a rank communicates:
receives, sends that wait for their receiver, and under ``overlap_p2p_comm`` the waits on requests posted earlier,
which no timer of a receive sees. That is why windows are taken as the gaps between compute steps, not as the
spans of ``forward-recv`` and its kin; a wrapper of ``P2PCommunicator`` would add nothing to it.
"""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state as mpu

from ftckpt.frameworks.entry import Proxy
from ftckpt.schedule.pipeline import pipeline_places
from ftckpt.session.checkpointer import Checkpointer

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


class _NullTimer:
    """A timer for a train loop that has none; takes the arguments of ``megatron.core.timers.Timer``."""

    def start(self, *args: Any, **kwargs: Any) -> None: ...

    def stop(self, *args: Any, **kwargs: Any) -> None: ...


class _ComputeTimer(Proxy):
    """The timer of a compute step, which reports where the step begins and ends."""

    def __init__(self, timer: Any, checkpointer: Checkpointer, kind: str) -> None:
        super().__init__(timer)
        self._checkpointer = checkpointer
        self._kind = kind

    # The place is around the user's timer: what that waits for (the device, a barrier) is no window.
    def start(self, *args: Any, **kwargs: Any) -> None:
        self._checkpointer.phase(self._kind)
        self.wrapped.start(*args, **kwargs)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped.stop(*args, **kwargs)
        self._checkpointer.phase("window")


class PhaseTimers(Proxy):
    """Stands for ``config.timers``, None or not, while a schedule runs."""

    def __init__(self, timers: Any, checkpointer: Checkpointer) -> None:
        super().__init__(timers)
        self._checkpointer = checkpointer

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A train loop that runs without timers still has its places.
        timer = self.wrapped(name, *args, **kwargs) if self.wrapped is not None else _NullTimer()
        kind = _COMPUTE.get(name)
        return timer if kind is None else _ComputeTimer(timer, self._checkpointer, kind)


def follow(checkpointer: Checkpointer, config: Any, micro_batches: int) -> None:
    """A schedule begins to run with ``config``: put listeners around what its fields hold."""
    finalize = config.finalize_model_grads_func

    def finalize_in_the_tail(*args: Any, **kwargs: Any) -> Any:
        checkpointer.phase("tail")
        return finalize(*args, **kwargs) if finalize is not None else None

    config.finalize_model_grads_func = finalize_in_the_tail
    config.timers = _begin(checkpointer, config, micro_batches)


def _shows_no_gaps(config: Any) -> bool:
    """Whether forward and backward of two micro-batches run at once, so that no timer tells of receives."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def _begin(checkpointer: Checkpointer, config: Any, micro_batches: int) -> Any:
    """Returns what ``config.timers`` must be while the schedule runs."""
    if _shows_no_gaps(config):
        checkpointer.phase("forward")
        return config.timers
    stages, stage = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
    chunks = config.virtual_pipeline_model_parallel_size or 1
    group = getattr(config, "microbatch_group_size_per_vp_stage", None)
    model = pipeline_places(stages, stage, micro_batches, chunks, group)
    if model is not None:
        checkpointer.expect(*model)
    # Before its first compute step a stage waits for its input: the schedule begins in a window.
    checkpointer.phase("window")
    return PhaseTimers(config.timers, checkpointer)
