"""The schedule of a PipelineEngine with the places of an iteration as steps of its own.

DeepSpeed's schedule is a list of lists of instructions; a list that is empty is a bubble. ``Marked`` hands on the
engine's own schedule and puts a ``Place`` around each computation. What lies between two computations is what the
stage waits for and sends, or an empty list: a window. From ``ReduceTiedGrads`` on it is the tail: tied gradients are
reduced over stages, gradients over replicas, and inside of ``OptimizerStep`` the stages that are done wait for the
norm of the gradients of all.

The order of computations is that of 1F1B: stage ``s`` of ``P`` runs forward ``m`` in step ``2m + s`` and backward
``m`` in step ``2m + 2P - 1 - s`` of DeepSpeed's numbering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    OptimizerStep,
    PipeInstruction,
    ReduceGrads,
    ReduceTiedGrads,
    TrainSchedule,
)

from ftckpt.capture import schedule
from ftckpt.capture.places import Places, expected_places
from ftckpt.deepspeed.hooks import Hooks
from ftckpt.errors import ConfigError, UnsupportedError

_COMPUTE = {ForwardPass: "forward", BackwardPass: "backward"}
_END = (ReduceTiedGrads, ReduceGrads, OptimizerStep)


class Place(PipeInstruction):  # type: ignore[misc] # DeepSpeed has no types
    """Training comes to a place of ``kind``."""


class Marked:
    """``inner``, a schedule of DeepSpeed's kind, with a ``Place`` around each computation."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __iter__(self) -> Iterator[list[Any]]:
        yield [Place(kind="window")]
        over = False
        for commands in self._inner:
            marked: list[Any] = []
            for command in commands:
                kind = _COMPUTE.get(type(command))
                if kind is not None:
                    marked += [Place(kind=kind), command, Place(kind="window")]
                    continue
                if isinstance(command, _END) and not over:
                    over = True
                    marked.append(Place(kind="tail"))
                marked.append(command)
            yield marked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def check_pipeline(engine: Any) -> None:
    """Refuse an engine that runs its pipeline in another way than PipelineEngine does.

    Raises:
        UnsupportedError: the engine's class, and what to do.
    """
    if type(engine) is not PipelineEngine:
        raise UnsupportedError(
            f"engine {type(engine).__name__} runs a pipeline in a way that ftckpt does not know; use PipelineModule"
        )


def follow_pipeline(hooks: Hooks, position: Callable[[Any], Any]) -> None:
    """Listen to a PipelineEngine.

    Args:
        hooks: of that engine.
        position: gets the iterator given to ``train_batch``, or None, and returns the one to draw from.
    """
    engine = hooks.engine
    original = engine._train_schedule

    def place(engine: Any, kind: str) -> None:
        hooks.phase(kind)

    def train_schedule() -> Any:
        found = original()
        if type(found) is TrainSchedule:
            model = expected(found.num_stages, found.stage, found.num_micro_batches)
            if model is not None:
                hooks.checkpointer.expect(*model)
        return Marked(found)

    def train_batch(original: Callable[..., Any], data_iter: Any = None) -> Any:
        hooks.start()
        before = engine.global_steps
        loss = original(data_iter=position(data_iter))
        hooks.boundary(before)
        return loss

    hooks.shadow("_INSTRUCTION_MAP", {**engine._INSTRUCTION_MAP, Place: place})
    hooks.shadow("_train_schedule", train_schedule)
    hooks.wrap(engine, "train_batch", train_batch)


@lru_cache(maxsize=16)
def expected(stages: int, stage: int, micro_batches: int) -> Places | None:
    """Kinds and relative lengths of the places that ``stage`` comes to, the tail last; None without a model."""
    try:
        orders = [schedule.one_forward_one_backward(stages, place, micro_batches) for place in range(stages)]
    except ConfigError:
        return None  # DeepSpeed says what is wrong with it
    return expected_places(orders, stage)
