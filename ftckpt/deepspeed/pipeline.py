"""The schedule of a PipelineEngine, extended by instructions that report phases.

DeepSpeed's schedule is a list of lists of instructions; an empty list is a bubble. ``PhaseSchedule`` forwards the
engine's own schedule and puts a ``PhaseInstruction`` before and after each computation. Between two computations the
stage communicates or is idle: a window. The tail starts with ``ReduceTiedGrads``: tied gradients are reduced over
stages and gradients over replicas, and within ``OptimizerStep`` stages wait for the global gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    InferenceSchedule,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
    ReduceTiedGrads,
)

from ftckpt.deepspeed.active_engine import steps_of
from ftckpt.deepspeed.hooks import EngineHooks
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.entry import Proxy

_COMPUTE = {ForwardPass: "forward", BackwardPass: "backward"}
_END = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


class PhaseInstruction(PipeInstruction):  # type: ignore[misc] # DeepSpeed has no types
    """Reports the start of a phase of ``kind``."""


class PhaseSchedule(Proxy):
    """A DeepSpeed schedule with a ``PhaseInstruction`` before and after each computation."""

    def __iter__(self) -> Iterator[list[Any]]:
        # Before its first computation a stage waits for earlier stages.
        yield [PhaseInstruction(kind="window")]
        is_in_tail = False
        for commands in self.wrapped:
            step: list[Any] = []
            for command in commands:
                kind = _COMPUTE.get(type(command))
                if kind is not None:
                    step += [PhaseInstruction(kind=kind), command, PhaseInstruction(kind="window")]
                    continue
                if isinstance(command, _END) and not is_in_tail:
                    is_in_tail = True
                    step.append(PhaseInstruction(kind="tail"))
                step.append(command)
            yield step


def check_pipeline(engine: Any) -> None:
    """Checks that an engine runs its pipeline as PipelineEngine does.

    Raises:
        UnsupportedError: it has another class.
    """
    if type(engine) is not PipelineEngine:
        raise UnsupportedError(
            f"engine {type(engine).__name__} runs a pipeline in an unsupported way; use PipelineModule"
        )


def follow_pipeline(hooks: EngineHooks, draw_from: Callable[[Any], Any]) -> None:
    """Hooks a PipelineEngine.

    Args:
        hooks: the engine's hooks.
        draw_from: receives the iterator passed to ``train_batch``, or None, and returns the one to draw from.
    """
    engine = hooks.engine

    def enter(_: Any, kind: str) -> None:
        hooks.phase(kind)

    def run_schedule(original: Callable[..., Any], schedule: Any) -> Any:
        return original(schedule if isinstance(schedule, InferenceSchedule) else PhaseSchedule(schedule))

    def train_batch(original: Callable[..., Any], data_iter: Any = None) -> Any:
        hooks.begin()
        before = steps_of(engine)
        loss = original(data_iter=draw_from(data_iter))
        hooks.boundary(before)
        return loss

    # The engine looks up the function for an instruction by its class.
    hooks.patches.shadow(engine, "_INSTRUCTION_MAP", {**engine._INSTRUCTION_MAP, PhaseInstruction: enter})
    hooks.patches.wrap(engine, "_exec_schedule", run_schedule)
    hooks.patches.wrap(engine, "train_batch", train_batch)
