"""The model of a pipeline schedule: its orders, and its times against closed forms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.schedule.pipeline import Orders, Step, pipeline_orders, pipeline_places, step_times

LENGTHS = {"forward": 1, "backward": 2}


def orders_of(stages: int, micro_batches: int, chunks: int = 1, group: int | None = None) -> Orders:
    orders = pipeline_orders(stages, micro_batches, chunks, group)
    assert orders is not None
    return orders


def gaps(stages: int, stage: int, micro_batches: int, chunks: int = 1, group: int | None = None) -> dict[int, float]:
    """Where a stage waits, by the index of the step that follows, and for which share of the iteration."""
    places = pipeline_places(stages, stage, micro_batches, chunks, group)
    assert places is not None
    kinds, lengths = places
    assert sum(lengths) == pytest.approx(1.0)
    windows = [length for kind, length in zip(kinds, lengths, strict=True) if kind in ("window", "tail")]
    *before, last_window, tail = windows
    assert last_window == 0
    return {place: gap for place, gap in enumerate([*before, tail]) if gap}


@st.composite
def interleaved_shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(stages, micro-batches, chunks, group)."""
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    group = draw(st.integers(stages, stages + 4))
    groups, rest = draw(st.integers(1, 3)), draw(st.sampled_from([0, *range(stages, group)]))
    return stages, groups * group + rest, chunks, group


@st.composite
def any_orders(draw: st.DrawFn) -> Orders:
    if draw(st.booleans()):
        return orders_of(draw(st.integers(1, 6)), draw(st.integers(1, 12)))
    return orders_of(*draw(interleaved_shapes()))


def short(order: Sequence[Step]) -> str:
    return " ".join(f"{'FB'[step.kind == 'backward']}{step.micro}.{step.chunk}" for step in order)


def test_orders_of_small_schedules() -> None:
    assert short(orders_of(1, 3)[0]) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert short(orders_of(3, 4)[0]) == "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0"
    assert short(orders_of(3, 2)[2]) == "F0.0 B0.0 F1.0 B1.0"
    assert short(orders_of(4, 2)[0]) == "F0.0 F1.0 B0.0 B1.0"
    assert short(orders_of(2, 2, 2)[1]) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"
    assert short(orders_of(3, 3, 2)[1]) == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"
    first, second, _ = orders_of(3, 6, 2)
    assert short(second).startswith("F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F5.0 B0.0 F3.1")
    assert short(first).split().index("B0.1") == 3 + 2 * 2 + 1
    forwards = [step for step in orders_of(2, 5, 2, 3)[0] if step.kind == "forward"]
    assert short(forwards) == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 F3.1 F4.1"


@given(any_orders())
def test_every_step_once_on_every_stage(orders: Orders) -> None:
    micro_batches, chunks = (1 + max(getattr(s, name) for s in orders[0]) for name in ("micro", "chunk"))
    wanted = {
        Step(kind, m, c) for kind in ("forward", "backward") for m in range(micro_batches) for c in range(chunks)
    }
    for order in orders:
        assert len(order) == len(wanted) and set(order) == wanted
        for kind in ("forward", "backward"):
            for chunk in range(chunks):
                micros = [step.micro for step in order if (step.kind, step.chunk) == (kind, chunk)]
                assert micros == sorted(micros)


def needs(step: Step, stage: int, stages: int, chunks: int) -> tuple[int, Step] | None:
    """Stage and step whose output a step takes, from the definition of virtual stages."""
    virtual = step.chunk * stages + stage
    if step.kind == "forward":
        before = virtual - 1
        return None if before < 0 else (before % stages, Step("forward", step.micro, before // stages))
    after = virtual + 1
    if after == stages * chunks:
        return stage, Step("forward", step.micro, step.chunk)
    return after % stages, Step("backward", step.micro, after // stages)


@given(any_orders())
def test_no_step_begins_before_what_it_needs_nor_later_than_it_could(orders: Orders) -> None:
    times = step_times(orders)
    when = {
        (stage, step): t for stage, order in enumerate(orders) for step, t in zip(order, times[stage], strict=True)
    }
    chunks = 1 + max(step.chunk for step in orders[0])
    for stage, order in enumerate(orders):
        free = 0
        for step in order:
            begin, end = when[stage, step]
            need = needs(step, stage, len(orders), chunks)
            assert begin == max(free, 0 if need is None else when[need][1])
            assert end == begin + LENGTHS[step.kind]
            free = end


@given(st.integers(1, 9), st.integers(1, 20))
def test_1f1b_windows_are_those_of_the_closed_form(stages: int, micros: int) -> None:
    whole = (micros + stages - 1) * 3
    for stage in range(stages):
        later = stages - stage - 1
        warmup = min(later, micros)
        first_backward = min(later + 1, micros)
        cool_down = range(2 * micros - warmup + (warmup == micros), 2 * micros)
        wanted = {
            0: stage,
            first_backward: max(0, later + 1 - micros) + 2 * later,
            **dict.fromkeys(cool_down, 1),
            2 * micros: 2 * stage,
        }
        found = {place: gap * whole for place, gap in gaps(stages, stage, micros).items()}
        assert found == pytest.approx({place: length for place, length in wanted.items() if length > 0})


@pytest.mark.parametrize("sizes", [(0, 4), (1, 0), (1, 4, 2), (4, 2, 2), (2, 5, 2), (4, 8, 2, 5)])
def test_sizes_without_orders_have_no_places(sizes: tuple[int, ...]) -> None:
    assert pipeline_orders(*sizes) is None and pipeline_places(sizes[0], 0, *sizes[1:]) is None
