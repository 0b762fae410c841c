"""Pipeline schedules as pure data: the order of each stage's compute steps, and the windows between them.

The orders are those of 1F1B and interleaved 1F1B (Narayanan et al., SC'21, arXiv 2104.04473). A stage's part of the
model consists of chunks; chunk ``c`` of stage ``s`` is virtual stage ``c * stages + s``. The times follow from
dependencies alone: a stage computes once its previous step and the step whose output it needs are done, and sending
takes no time.

In 1F1B with P stages and M micro-batches, stage s waits s forwards before its first forward, max(0, P−s−M) forwards
and P−s−1 backwards before its first backward, one forward before each of its last min(P, M+s)−s−1 backwards, and s
backwards at the end. Interleaved or not, with c chunks the wait of every stage adds up to P−1 forwards and P−1
backwards: (P−1)/(cM+P−1) of the iteration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

FORWARD, BACKWARD = "forward", "backward"

_LENGTHS = {FORWARD: 1, BACKWARD: 2}
"""A backward step computes the gradients of inputs and of weights: twice a forward. An estimate until measured."""

Places = tuple[tuple[str, ...], tuple[float, ...]]
"""Kinds of ``ftckpt.schedule.iteration`` and lengths as shares of their sum."""


class Step(NamedTuple):
    """One compute step of one stage: ``kind`` is ``forward`` or ``backward``, ``chunk`` the virtual stage on it."""

    kind: str
    micro: int
    chunk: int


Orders = Sequence[Sequence[Step]]
"""The steps of each stage."""


def pipeline_orders(stages: int, micro_batches: int, chunks: int = 1, group: int | None = None) -> Orders | None:
    """The orders of 1F1B, interleaved if a stage has several chunks; None if these sizes allow none.

    Args:
        group: consecutive micro-batches that a chunk runs before the next chunk does; ``stages`` if not given.
    """
    if stages < 1 or micro_batches < 1:
        return None
    if chunks == 1:
        return [_order(micro_batches, 1, micro_batches, stages - stage - 1) for stage in range(stages)]
    group = group or stages
    # Else stage 0 would reach the next chunk of a micro-batch before the last stage has finished the current one.
    fits = not 0 < micro_batches % group < stages
    if stages < 2 or not stages <= group <= micro_batches or not fits:
        return None
    # Two per later stage (there and back), plus one group per chunk but the last, as Megatron counts.
    warmups = [(stages - stage - 1) * 2 + (chunks - 1) * group for stage in range(stages)]
    return [_order(micro_batches, chunks, group, warmup) for warmup in warmups]


def _order(micro_batches: int, chunks: int, group: int, warmup: int) -> tuple[Step, ...]:
    """``warmup`` forwards, then forwards and backwards alternating, then the remaining backwards."""
    forwards, backwards = _queues(micro_batches, chunks, group)
    warmup = min(warmup, len(forwards))
    pairs = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :])


@lru_cache(maxsize=8)
def _queues(micro_batches: int, chunks: int, group: int) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """All forwards and all backwards, each in the order in which every stage runs them."""
    visits = [
        (micro, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro in range(first, min(first + group, micro_batches))
    ]
    # Backwards visit chunks from the last to the first, micro-batches in the same order.
    forwards = tuple(Step(FORWARD, micro, chunk) for micro, chunk in visits)
    return forwards, tuple(Step(BACKWARD, micro, chunks - 1 - chunk) for micro, chunk in visits)


def step_times(orders: Orders) -> list[list[tuple[int, int]]]:
    """Start and end of each step of each stage.

    A forward needs the forward of the virtual stage before it, a backward the backward of the virtual stage after
    it, and on the last virtual stage the forward of its own micro-batch.
    """
    last = len(orders) * (1 + max(step.chunk for step in orders[0])) - 1
    ends: dict[tuple[str, int, int], int] = {}
    times: list[list[tuple[int, int]]] = [[] for _ in orders]
    moved = True
    while moved:  # each stage runs until an input is missing; the orders above never deadlock
        moved = False
        for stage, (done, order) in enumerate(zip(times, orders, strict=True)):
            while len(done) < len(order):
                kind, micro, chunk = order[len(done)]
                virtual = chunk * len(orders) + stage
                if kind == FORWARD:
                    ready = ends.get((FORWARD, micro, virtual - 1)) if virtual else 0
                else:
                    needed = (BACKWARD, micro, virtual + 1) if virtual < last else (FORWARD, micro, last)
                    ready = ends.get(needed)
                if ready is None:
                    break
                begin = max(ready, done[-1][1] if done else 0)
                ends[kind, micro, virtual] = end = begin + _LENGTHS[kind]
                done.append((begin, end))
                moved = True
    return times


@lru_cache(maxsize=16)
def pipeline_places(
    stages: int, stage: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> Places | None:
    """Windows and compute steps of ``stage``, alternating, then the tail; None if ``pipeline_orders`` returns None.

    The framework itself rejects sizes that allow no order.
    """
    orders = pipeline_orders(stages, micro_batches, chunks, group)
    if orders is None:
        return None
    times = step_times(orders)
    whole = max(done[-1][1] for done in times)
    kinds: list[str] = []
    lengths: list[int] = []
    now = 0
    for step, (begin, end) in zip(orders[stage], times[stage], strict=True):
        kinds += ["window", step.kind]
        lengths += [begin - now, end - begin]
        now = end
    return (*kinds, "window", "tail"), tuple(length / whole for length in (*lengths, 0, whole - now))
