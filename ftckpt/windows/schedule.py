"""A pipeline schedule as pure data: what each stage computes in which order, and when it has nothing to do.

The orders are those of 1F1B and interleaved 1F1B (Narayanan et al., SC'21, arXiv 2104.04473). What one stage holds
of the model is cut into chunks; chunk ``c`` of stage ``s`` is virtual stage ``c * stages + s``. The times follow from
data alone: a stage computes as soon as its step before and the step whose output it needs are done, and sending costs
the sender nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from ftckpt.errors import ConfigError

FORWARD, BACKWARD = "forward", "backward"

_NEVER = -1.0
_ROUNDING = 1e-9
"""Gaps below this share of the iteration come from adding floats in another order."""


@dataclass(frozen=True, slots=True)
class Step:
    """One compute step of one stage: ``kind`` is ``forward`` or ``backward``, ``chunk`` the virtual stage on it."""

    kind: str
    micro: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """One stage's iteration as shares of 1: ``gaps[i]`` lies before ``steps[i]``, ``gaps[-1]`` after the last."""

    gaps: tuple[float, ...]
    steps: tuple[float, ...]


def one_forward_one_backward(stages: int, stage: int, micro_batches: int) -> tuple[Step, ...]:
    """The order of ``stage`` in non-interleaved 1F1B (PipeDream-flush): one chunk per stage.

    Raises:
        ConfigError: a number below 1, or no such stage.
    """
    _check(stages, stage, micro_batches)
    forwards, backwards = _queues(micro_batches, 1, micro_batches)
    return _merge(forwards, backwards, stages - stage - 1)


def interleaved(
    stages: int, stage: int, micro_batches: int, chunks: int, group: int | None = None, *, extra_warmup: int = 0
) -> tuple[Step, ...]:
    """The order of ``stage`` in interleaved 1F1B with ``chunks`` chunks per stage.

    Args:
        group: micro-batches that a chunk runs in a row before the next chunk does (``stages`` if None).
        extra_warmup: forwards more before the first backward: 1 where each later forward runs at the same time as
            the backward after it, to hide the communication of experts.

    Raises:
        ConfigError: a number below 1, fewer than two stages, no such stage, ``group`` outside ``stages`` to
            ``micro_batches``, or a last group that is not empty and smaller than ``stages``.
    """
    _check(stages, stage, micro_batches)
    if stages < 2:
        raise ConfigError("an interleaved schedule needs two pipeline stages or more: take one chunk per stage")
    if chunks < 1 or extra_warmup < 0:
        raise ConfigError(f"chunks must be 1 or more and extra_warmup not negative, not {chunks} and {extra_warmup}")
    group = stages if group is None else group
    if not stages <= group <= micro_batches:
        raise ConfigError(f"group must be {stages} (stages) to {micro_batches} (micro-batches), not {group}")
    # Else stage 0 would come to the next chunk of a micro-batch before the last stage is through with this one.
    rest = micro_batches % group
    if 0 < rest < stages:
        raise ConfigError(
            f"{micro_batches} micro-batches in groups of {group} leave {rest}, not 0 or {stages} and more"
        )
    forwards, backwards = _queues(micro_batches, chunks, group)
    # Two for each stage behind it (there and back), and a round of every chunk but the last: Megatron's own count.
    return _merge(forwards, backwards, (stages - stage - 1) * 2 + (chunks - 1) * group + extra_warmup)


def _check(stages: int, stage: int, micro_batches: int = 1) -> None:
    if stages < 1 or micro_batches < 1:
        raise ConfigError(f"stages and micro_batches must be 1 or more, not {stages} and {micro_batches}")
    if not 0 <= stage < stages:
        raise ConfigError(f"there is no stage {stage} of {stages}: stages are numbered from 0")


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


def _merge(forwards: Sequence[Step], backwards: Sequence[Step], warmup: int) -> tuple[Step, ...]:
    """``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    pairs = chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
    return (*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :])


def _run(
    orders: Sequence[Sequence[Step]], forward: float, backward: float, hop: float
) -> tuple[list[list[int]], list[float], list[float]]:
    """By stage the numbers (``_Grid``) of its steps, in order; by number the begin and the end of the step."""
    if not (forward > 0.0 and backward > 0.0 and hop >= 0.0 and math.isfinite(forward + backward + hop)):
        raise ConfigError(f"times must be finite, {forward} and {backward} positive, the hop {hop} not negative")
    grid = _Grid.of(orders)
    numbers = [[grid.number(stage, step) for step in order] for stage, order in enumerate(orders)]
    needs = [[grid.needed(number) for number in mine] for mine in numbers]
    _refuse_uneven(numbers, grid)
    stages, size = grid.stages, grid.size
    begins, ends = ([_NEVER] * (2 * stages * size) for _ in range(2))
    done, free, awaited = [0] * stages, [0.0] * stages, [-1] * stages
    # Stages that may get further: each runs until a step that it needs is missing, and is woken by that step.
    awake = list(range(stages))
    while awake:
        stage = awake.pop()
        now = free[stage]
        for place in range(done[stage], len(numbers[stage])):
            number, need = numbers[stage][place], needs[stage][place]
            if need >= 0:
                ready = ends[need]
                if ready == _NEVER:
                    awaited[stage] = need
                    break
                # Steps are numbered by stage first: what the stage made itself takes no hop.
                now = max(now, ready if need // (2 * size) == stage else ready + hop)
            is_backward = number // size % 2
            begins[number] = now
            ends[number] = now = now + (backward if is_backward else forward)
            done[stage], free[stage] = place + 1, now
            # What a step gives goes to one virtual stage, so at most one other stage waits for it.
            other = (stage - 1 if is_backward else stage + 1) % stages
            if awaited[other] == number:
                awaited[other] = -1
                awake.append(other)
    _refuse_deadlock(orders, done)
    return numbers, begins, ends


@dataclass(frozen=True, slots=True)
class _Grid:
    """Numbers all steps by stage, forward or backward, micro-batch, chunk; ``size`` is micro-batches × chunks."""

    stages: int
    chunks: int
    size: int

    @classmethod
    def of(cls, orders: Sequence[Sequence[Step]]) -> _Grid:
        """Large enough for every step of ``orders``."""
        if not orders or not all(orders):
            raise ConfigError("a schedule needs at least one stage, and each stage at least one step")
        chunks = 1 + max(step.chunk for order in orders for step in order)
        micro_batches = 1 + max(step.micro for order in orders for step in order)
        return cls(len(orders), chunks, micro_batches * chunks)

    def number(self, stage: int, step: Step) -> int:
        """The number of a step."""
        if step.kind not in (FORWARD, BACKWARD) or step.micro < 0 or step.chunk < 0:
            raise ConfigError(f"{step} of stage {stage} is no step: forward or backward, numbers from 0")
        kind = self.size if step.kind == BACKWARD else 0
        return 2 * self.size * stage + kind + step.micro * self.chunks + step.chunk

    def needed(self, number: int) -> int:
        """The number of the step whose output a step needs; -1 for the first forward of a micro-batch."""
        width, last = 2 * self.size, self.stages - 1
        stage, code = divmod(number, width)
        # Numbers count chunks fastest, then micro-batches, then forward before backward, then stages.
        chunk = code % self.chunks
        if code < self.size:
            if stage > 0:
                return number - width
            # Stage 0 goes on with what the last stage made of the chunk before.
            return last * width + code - 1 if chunk > 0 else -1
        if stage < last:
            return number + width
        # The last stage: from stage 0 of the next chunk, or, on the last chunk, from its own forward.
        return code + 1 if chunk < self.chunks - 1 else number - self.size


def _refuse_uneven(numbers: Sequence[Sequence[int]], grid: _Grid) -> None:
    known = set(numbers[0])
    for stage, mine in enumerate(numbers):
        same = {number - 2 * grid.size * stage for number in mine} == known
        if not same or len(mine) != len(known):
            raise ConfigError(f"stage {stage} has a step twice, or other steps than stage 0")


def _refuse_deadlock(orders: Sequence[Sequence[Step]], done: Sequence[int]) -> None:
    stuck = [
        f"stage {stage} at {order[place].kind} {order[place].micro} of chunk {order[place].chunk}"
        for stage, (order, place) in enumerate(zip(orders, done, strict=True))
        if place < len(order)
    ]
    if stuck:
        raise ConfigError(f"these orders of steps deadlock: {', '.join(stuck[:4])} wait for each other for ever")


def place_lengths(
    orders: Sequence[Sequence[Step]], stage: int, forward: float = 1.0, backward: float = 2.0, hop: float = 0.0
) -> Lengths:
    """When one stage computes and waits.

    A forward needs the forward of the virtual stage before it, a backward the backward of the virtual stage after
    it, and on the last virtual stage the forward of its own micro-batch. Linear in the number of steps.

    In 1F1B with P stages, M micro-batches and ``hop`` 0, stage s waits s forwards before its first forward,
    max(0, P−s−M) forwards and P−s−1 backwards before its first backward, one forward before each of its last
    min(P, M+s)−s−1 backwards, and s backwards at the end. Interleaved or not, with c chunks the wait of every
    stage adds up to P−1 forwards and P−1 backwards: (P−1)/(cM+P−1) of the iteration.

    Args:
        orders: one per stage.
        forward: time of one forward of one chunk, in any unit.
        backward: time of one backward of one chunk.
        hop: time from the end of a step until another stage has its output.

    Raises:
        ConfigError: no such stage, no stage at all, no step or an unknown kind of step, a time that is not finite
            and positive (``hop`` may be 0), stages that differ in their steps, a step twice, or orders that wait
            for each other for ever.
    """
    numbers, begins, ends = _run(orders, forward, backward, hop)
    _check(len(orders), stage)
    whole = max(ends[mine[-1]] for mine in numbers)
    starts = [*(begins[number] for number in numbers[stage]), whole]
    stops = [0.0, *(ends[number] for number in numbers[stage])]
    gaps = [(start - stop) / whole for start, stop in zip(starts, stops, strict=True)]
    steps = [(stop - start) / whole for start, stop in zip(starts[:-1], stops[1:], strict=True)]
    return Lengths(tuple(gap if gap > _ROUNDING else 0.0 for gap in gaps), tuple(steps))


_FORWARD, _BACKWARD = 1.0, 2.0
"""A backward step computes the gradients of inputs and of weights: twice a forward. A guess until measured."""

Places = tuple[tuple[str, ...], tuple[float, ...]]
"""Kinds of ``ftckpt.windows.iteration`` and relative lengths."""


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


@lru_cache(maxsize=16)
def pipeline_places(
    stages: int, stage: int, micro_batches: int, chunks: int = 1, group: int | None = None
) -> Places | None:
    """``expected_places`` of 1F1B, interleaved where a stage has several chunks; None where there is no such order.

    A framework that is given sizes without an order has its own message for them.
    """
    try:
        if chunks > 1:
            orders = [interleaved(stages, place, micro_batches, chunks, group or None) for place in range(stages)]
        else:
            orders = [one_forward_one_backward(stages, place, micro_batches) for place in range(stages)]
    except ConfigError:
        return None
    return expected_places(orders, stage)
