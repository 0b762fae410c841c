"""Phases of Megatron's schedule, observed through the timers that it starts and stops.

Every schedule of every tested release calls ``config.timers`` around each compute step, so no patch is needed.
Between two compute steps a rank communicates: receives, sends that wait for their receiver, and under
``overlap_p2p_comm`` waits for earlier requests, which no receive timer measures. So windows are the gaps between
compute steps, not the spans of ``forward-recv`` and similar timers; wrapping ``P2PCommunicator`` would add nothing.
"""

from __future__ import annotations

from typing import Any

from ftckpt.frameworks.entry import Proxy
from ftckpt.session.checkpointer import Checkpointer

_COMPUTE = {"forward-compute": "forward", "backward-compute": "backward"}


class _NullTimer:
    """A timer without effect for a train loop without timers; has the interface of ``megatron.core.timers.Timer``."""

    def start(self, *args: Any, **kwargs: Any) -> None: ...

    def stop(self, *args: Any, **kwargs: Any) -> None: ...


class _ComputeTimer(Proxy):
    """The timer of a compute step, which also reports the step's start and end."""

    def __init__(self, timer: Any, checkpointer: Checkpointer, kind: str) -> None:
        super().__init__(timer)
        self._checkpointer = checkpointer
        self._kind = kind

    # The phase includes the user's timer: its waits (for the device, a barrier) are not a window.
    def start(self, *args: Any, **kwargs: Any) -> None:
        self._checkpointer.phase(self._kind)
        self.wrapped.start(*args, **kwargs)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped.stop(*args, **kwargs)
        self._checkpointer.phase("window")


class PhaseTimers(Proxy):
    """A wrapper of ``config.timers``, which may be None, while a schedule runs."""

    def __init__(self, timers: Any, checkpointer: Checkpointer) -> None:
        super().__init__(timers)
        self._checkpointer = checkpointer

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Any:
        # A train loop without timers has phases as well.
        timer = self.wrapped(name, *args, **kwargs) if self.wrapped is not None else _NullTimer()
        kind = _COMPUTE.get(name)
        return timer if kind is None else _ComputeTimer(timer, self._checkpointer, kind)


def follow(checkpointer: Checkpointer, config: Any) -> None:
    """Wraps the fields of ``config`` in listeners at the start of a schedule's run."""
    finalize = config.finalize_model_grads_func

    def finalize_in_the_tail(*args: Any, **kwargs: Any) -> Any:
        checkpointer.phase("tail")
        return finalize(*args, **kwargs) if finalize is not None else None

    config.finalize_model_grads_func = finalize_in_the_tail
    config.timers = _begin(checkpointer, config)


def _shows_no_gaps(config: Any) -> bool:
    """Whether forward and backward of two micro-batches run concurrently, so that timers show no gaps."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def _begin(checkpointer: Checkpointer, config: Any) -> Any:
    """Reports the start of the schedule; returns the value of ``config.timers`` during its run."""
    if _shows_no_gaps(config):
        checkpointer.phase("forward")
        return config.timers
    # Before its first compute step a stage waits for its input, so the schedule starts in a window.
    checkpointer.phase("window")
    return PhaseTimers(config.timers, checkpointer)
