"""The schedule of a PipelineEngine with the places of an iteration as steps of its own.

DeepSpeed's schedule is a list of lists of instructions; a list that is empty is a bubble. ``PhaseSchedule`` hands on
the engine's own schedule and puts a ``PhaseInstruction`` around each computation. What lies between two computations
is what the stage waits for and sends, or an empty list: a window. From ``ReduceTiedGrads`` on it is the tail: tied
gradients are reduced over stages, gradients over replicas, and inside of ``OptimizerStep`` the stages that are done
wait for the norm of the gradients of all.

The order of computations is that of 1F1B: stage ``s`` of ``P`` runs forward ``m`` in step ``2m + s`` and backward
``m`` in step ``2m + 2P - 1 - s`` of DeepSpeed's numbering.
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
    TrainSchedule,
)

from ftckpt.deepspeed.hooks import EngineHooks
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.entry import Proxy
from ftckpt.schedule.pipeline import pipeline_places

_COMPUTE = {ForwardPass: "forward", BackwardPass: "backward"}
_END = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


class PhaseInstruction(PipeInstruction):  # type: ignore[misc] # DeepSpeed has no types
    """Training comes to a place of ``kind``."""


class PhaseSchedule(Proxy):
    """A schedule of DeepSpeed's kind with a ``PhaseInstruction`` around each computation."""

    def __iter__(self) -> Iterator[list[Any]]:
        # Before its first computation a stage waits for the ones before it.
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
    """Refuse an engine that runs its pipeline in another way than PipelineEngine does.

    Raises:
        UnsupportedError: the engine's class, and what to do.
    """
    if type(engine) is not PipelineEngine:
        raise UnsupportedError(
            f"engine {type(engine).__name__} runs a pipeline in a way that ftckpt does not know; use PipelineModule"
        )


def follow_pipeline(hooks: EngineHooks, draw_from: Callable[[Any], Any]) -> None:
    """Listen to a PipelineEngine.

    Args:
        hooks: of that engine.
        draw_from: gets the iterator given to ``train_batch``, or None, and returns the one to draw from.
    """
    engine = hooks.engine

    def enter(_: Any, kind: str) -> None:
        hooks.phase(kind)

    def run_schedule(original: Callable[..., Any], schedule: Any) -> Any:
        if isinstance(schedule, InferenceSchedule):
            return original(schedule)
        if type(schedule) is TrainSchedule:
            model = pipeline_places(schedule.num_stages, schedule.stage, schedule.num_micro_batches)
            if model is not None:
                hooks.checkpointer.expect(*model)
        return original(PhaseSchedule(schedule))

    def train_batch(original: Callable[..., Any], data_iter: Any = None) -> Any:
        hooks.begin()
        before = engine.global_steps
        loss = original(data_iter=draw_from(data_iter))
        hooks.boundary(before)
        return loss

    # The engine looks up what to do for an instruction by its class.
    hooks.patches.shadow(engine, "_INSTRUCTION_MAP", {**engine._INSTRUCTION_MAP, PhaseInstruction: enter})
    hooks.patches.wrap(engine, "_exec_schedule", run_schedule)
    hooks.patches.wrap(engine, "train_batch", train_batch)
