"""The places that one stage comes to in an iteration, by the model of its schedule: for ``Checkpointer.expect``."""

from __future__ import annotations

from collections.abc import Sequence

from ftckpt.capture.schedule import Step, place_lengths

_FORWARD, _BACKWARD = 1.0, 2.0
"""A backward step computes the gradients of inputs and of weights: twice a forward. A guess until measured."""

Places = tuple[tuple[str, ...], tuple[float, ...]]
"""Kinds of ``ftckpt.capture.iteration`` and relative lengths."""


def expected_places(orders: Sequence[Sequence[Step]], stage: int) -> Places:
    """Windows and compute steps of ``stage`` in turn, the tail last; ``orders`` are those of all stages.

    Raises:
        ConfigError: no such stage, or orders that wait for each other for ever.
    """
    lengths = place_lengths(orders, stage, _FORWARD, _BACKWARD)
    kinds: list[str] = []
    secs: list[float] = []
    for step, gap, length in zip(orders[stage], lengths.gaps, lengths.steps, strict=False):
        kinds += ["window", step.kind]
        secs += [gap, length]
    return (*kinds, "window", "tail"), (*secs, 0.0, lengths.gaps[-1])
