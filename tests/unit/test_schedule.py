"""The model of a pipeline schedule: its orders, its times against closed forms, and what it refuses."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ftckpt.errors import ConfigError
from ftckpt.windows.schedule import Step, interleaved, one_forward_one_backward, place_lengths
from tests.support.errors import raises

Orders = list[tuple[Step, ...]]
TIMES = st.sampled_from([(1.0, 2.0), (1.0, 1.0), (3.0, 1.0), (0.1, 0.3)])


def plain(stages: int, micro_batches: int) -> Orders:
    """1F1B on all stages."""
    return [one_forward_one_backward(stages, stage, micro_batches) for stage in range(stages)]


def cut(stages: int, micro_batches: int, chunks: int, group: int | None = None, extra_warmup: int = 0) -> Orders:
    """Interleaved 1F1B on all stages."""
    return [
        interleaved(stages, stage, micro_batches, chunks, group, extra_warmup=extra_warmup) for stage in range(stages)
    ]


def times_of(
    orders: Orders, forward: float = 1.0, backward: float = 2.0, hop: float = 0.0
) -> list[list[tuple[float, float]]]:
    """Begin and end of every step of every stage, in the unit of ``forward``; each order begins with a forward."""
    result = []
    for stage in range(len(orders)):
        lengths = place_lengths(orders, stage, forward, backward, hop)
        whole, at, mine = forward / lengths.steps[0], 0.0, []
        for gap, step in zip(lengths.gaps, lengths.steps, strict=False):
            mine.append(((at + gap) * whole, (at + gap + step) * whole))
            at += gap + step
        result.append(mine)
    return result


def gaps(orders: Orders, stage: int, *times: float) -> dict[int, float]:
    """Where a stage waits, by the index of the step that follows, and for which share of the iteration."""
    return {place: gap for place, gap in enumerate(place_lengths(orders, stage, *times).gaps) if gap}


def idle_share(orders: Orders, stage: int, *times: float) -> float:
    """The share of the iteration in which a stage computes nothing."""
    return math.fsum(gaps(orders, stage, *times).values())


def acceptable(stages: int, micro_batches: int, group: int) -> bool:
    rest = micro_batches % group
    return stages <= group <= micro_batches and (rest == 0 or rest >= stages)


@st.composite
def interleaved_shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """(stages, micro-batches, chunks, group)."""
    stages, chunks = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    group = draw(st.integers(stages, stages + 4))
    groups, rest = draw(st.integers(1, 3)), draw(st.sampled_from([0, *range(stages, group)]))
    return stages, groups * group + rest, chunks, group


@st.composite
def any_orders(draw: st.DrawFn) -> Orders:
    if draw(st.booleans()):
        return plain(draw(st.integers(1, 6)), draw(st.integers(1, 12)))
    stages, micro_batches, chunks, group = draw(interleaved_shapes())
    return cut(stages, micro_batches, chunks, group, draw(st.integers(0, 1)))


def short(order: Sequence[Step]) -> str:
    return " ".join(f"{'FB'[step.kind == 'backward']}{step.micro}.{step.chunk}" for step in order)


def test_orders_of_small_schedules() -> None:
    assert short(one_forward_one_backward(1, 0, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert short(one_forward_one_backward(3, 0, 4)) == "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0"
    assert short(one_forward_one_backward(3, 2, 2)) == "F0.0 B0.0 F1.0 B1.0"
    assert short(one_forward_one_backward(4, 0, 2)) == "F0.0 F1.0 B0.0 B1.0"
    assert short(interleaved(2, 1, 2, 2)) == "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"
    assert short(interleaved(3, 1, 3, 2)) == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"
    six = interleaved(3, 1, 6, 2)
    assert short(six).startswith("F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 F3.0 B1.1 F4.0 B2.1 F5.0 B0.0 F3.1")
    assert short(interleaved(3, 0, 6, 2)).split().index("B0.1") == 3 + 2 * 2 + 1
    forwards = [step for step in interleaved(2, 0, 5, 2, 3) if step.kind == "forward"]
    assert short(forwards) == "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F3.0 F4.0 F3.1 F4.1"


def test_extra_warmup_moves_one_forward_ahead() -> None:
    without, extra = interleaved(2, 1, 4, 2), interleaved(2, 1, 4, 2, extra_warmup=1)
    assert short(without).split().index("B0.1") + 1 == short(extra).split().index("B0.1")
    assert sorted(short(without).split()) == sorted(short(extra).split())


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


@given(any_orders(), TIMES, st.sampled_from([0.0, 0.25, 4.0]))
def test_no_step_begins_before_what_it_needs_nor_later_than_it_could(
    orders: Orders, times: tuple[float, float], hop: float
) -> None:
    result = times_of(orders, *times, hop)
    when = {
        (stage, step): t for stage, order in enumerate(orders) for step, t in zip(order, result[stage], strict=True)
    }
    chunks = 1 + max(step.chunk for step in orders[0])
    for stage, order in enumerate(orders):
        free = 0.0
        for step in order:
            begin, end = when[stage, step]
            need = needs(step, stage, len(orders), chunks)
            ready = 0.0 if need is None else when[need][1] + (hop if need[0] != stage else 0.0)
            assert begin == pytest.approx(max(free, ready), abs=1e-6)
            assert end == pytest.approx(begin + times[step.kind == "backward"], abs=1e-6)
            free = end


@given(any_orders(), TIMES, st.sampled_from([0.0, 0.3]))
def test_places_add_up_to_the_iteration(orders: Orders, times: tuple[float, float], hop: float) -> None:
    whole = max(stage[-1][1] for stage in times_of(orders, *times, hop))
    for stage, order in enumerate(orders):
        lengths = place_lengths(orders, stage, *times, hop)
        assert len(lengths.gaps) == len(order) + 1 and len(lengths.steps) == len(order)
        assert sum(lengths.gaps) + sum(lengths.steps) == pytest.approx(1.0)
        assert [length * whole for length in lengths.steps] == pytest.approx(
            [times[step.kind == "backward"] for step in order]
        )


@given(st.integers(1, 9), st.integers(1, 20), TIMES)
@example(1, 7, (1.0, 2.0))  # without pipelining there are none
def test_1f1b_windows_are_those_of_the_closed_form(stages: int, micros: int, times: tuple[float, float]) -> None:
    forward, backward = times
    orders = plain(stages, micros)
    whole = (micros + stages - 1) * (forward + backward)
    for stage in range(stages):
        later = stages - stage - 1
        warmup = min(later, micros)
        first_backward = min(later + 1, micros)
        wait = max(0, later + 1 - micros) * forward + later * backward
        cool_down = range(2 * micros - warmup + (warmup == micros), 2 * micros)
        wanted = {
            0: stage * forward,
            first_backward: wait,
            **dict.fromkeys(cool_down, forward),
            2 * micros: stage * backward,
        }
        wanted = {place: length for place, length in wanted.items() if length > 0}
        found = {place: gap * whole for place, gap in gaps(orders, stage, forward, backward).items()}
        assert found == pytest.approx(wanted)
        assert idle_share(orders, stage, forward, backward) == pytest.approx((stages - 1) / (micros + stages - 1))


@given(interleaved_shapes(), TIMES)
def test_interleaving_divides_the_idle_share_by_the_chunks(
    shape: tuple[int, int, int, int], times: tuple[float, float]
) -> None:
    stages, micros, chunks, group = shape
    orders = cut(stages, micros, chunks, group)
    whole = (chunks * micros + stages - 1) * sum(times)
    for stage in range(stages):
        assert idle_share(orders, stage, *times) == pytest.approx((stages - 1) / (chunks * micros + stages - 1))
        waits = place_lengths(orders, stage, *times).gaps
        assert (waits[0] * whole, waits[-1] * whole) == pytest.approx((stage * times[0], stage * times[1]))


@given(st.integers(2, 6), st.integers(1, 20), TIMES)
def test_a_hop_is_paid_once_down_and_up_and_by_every_full_pipeline(
    stages: int, micros: int, times: tuple[float, float]
) -> None:
    hop = 0.1 * min(times)
    whole = max(stage[-1][1] for stage in times_of(plain(stages, micros), *times, hop))
    hops = 2 * (stages - 1 + (micros - 1) * (stages - 1) // stages)
    assert whole == pytest.approx((micros + stages - 1) * sum(times) + hops * hop)


def test_a_hop_opens_windows_in_the_steady_state() -> None:
    orders = plain(4, 16)
    for stage, order in enumerate(orders):
        kinds = "".join(step.kind[0] for step in order)
        steady = range(kinds.index("b") + 1, kinds.rindex("f") + 1)
        assert not gaps(orders, stage).keys() & set(steady)
        assert gaps(orders, stage, 1.0, 2.0, 0.1).keys() & set(steady)


@given(any_orders(), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_a_longer_hop_never_makes_a_step_earlier(orders: Orders, hop: float, more: float) -> None:
    for before, after in zip(times_of(orders, hop=hop), times_of(orders, hop=hop + more), strict=True):
        # The tiniest gaps are left out of the lengths; a step is 1 or 2 long.
        assert all(a <= b + 1e-4 for (a, _), (b, _) in zip(before, after, strict=True))


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_more_micro_batches_or_chunks_never_idle_more(stages: int, groups: int, chunks: int) -> None:
    def share(groups: int, chunks: int) -> float:
        return idle_share(cut(stages, groups * stages, chunks), 0)

    assert share(groups + 1, chunks) < share(groups, chunks)
    assert share(groups, chunks + 1) < share(groups, chunks)


def rearranged(draw: st.DataObject, orders: Orders) -> Orders:
    return [tuple(draw.draw(st.permutations(order))) for order in orders]


def can_finish(orders: Orders) -> bool:
    """By trial: run whatever can run until nothing can."""
    chunks = 1 + max(step.chunk for step in orders[0])
    done: set[tuple[int, Step]] = set()
    at, moved = [0] * len(orders), True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                need = needs(order[at[stage]], stage, len(orders), chunks)
                if need is not None and need not in done:
                    break
                done.add((stage, order[at[stage]]))
                at[stage], moved = at[stage] + 1, True
    return all(place == len(order) for place, order in zip(at, orders, strict=True))


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_deadlocks_are_found_exactly_where_they_are(
    data: st.DataObject, stages: int, micros: int, chunks: int
) -> None:
    steps = [Step(kind, m, c) for kind in ("forward", "backward") for m in range(micros) for c in range(chunks)]
    orders = [tuple(steps)] * stages
    if data.draw(st.booleans()):
        orders = rearranged(data, orders)
    else:
        swapped = list(steps)
        i, j = (data.draw(st.integers(0, len(steps) - 1)) for _ in range(2))
        swapped[i], swapped[j] = swapped[j], swapped[i]
        orders[data.draw(st.integers(0, stages - 1))] = tuple(swapped)
    if can_finish(orders):
        place_lengths(orders, 0)
    else:
        with pytest.raises(ConfigError, match="deadlock"):
            place_lengths(orders, 0)


def test_a_deadlock_is_told_by_stage_and_step() -> None:
    orders = plain(2, 2)
    orders[1] = tuple(reversed(orders[1]))
    with raises(ConfigError, "stage 1", "backward 1", "chunk 0"):
        place_lengths(orders, 0)


def refusals() -> Iterator[tuple[str, object]]:
    f, b = Step("forward", 0, 0), Step("backward", 0, 0)
    yield "no stage 2 of 2", lambda: one_forward_one_backward(2, 2, 4)
    yield "no stage -1 of 2", lambda: interleaved(2, -1, 4, 2)
    yield "1 or more, not 0", lambda: one_forward_one_backward(0, 0, 4)
    yield "1 or more, not 1 and 0", lambda: one_forward_one_backward(1, 0, 0)
    yield "two pipeline stages", lambda: interleaved(1, 0, 4, 2)
    yield "chunks must be 1", lambda: interleaved(2, 0, 4, 0)
    yield "extra_warmup not negative", lambda: interleaved(2, 0, 4, 2, extra_warmup=-1)
    yield r"4 \(stages\) to 2 \(micro-batches\), not 4", lambda: interleaved(4, 0, 2, 2)
    yield r"4 \(stages\) to 8 \(micro-batches\), not 3", lambda: interleaved(4, 0, 8, 2, 3)
    yield r"4 \(stages\) to 8 \(micro-batches\), not 9", lambda: interleaved(4, 0, 8, 2, 9)
    yield "leave 1, not 0 or 2 and more", lambda: interleaved(2, 0, 5, 2)
    yield "leave 3, not 0 or 4 and more", lambda: interleaved(4, 0, 8, 2, 5)
    yield "at least one stage", lambda: place_lengths([], 0)
    yield "at least one step", lambda: place_lengths([(f, b), ()], 0)
    yield "is no step", lambda: place_lengths([(f, Step("sideways", 0, 0))], 0)
    yield "is no step", lambda: place_lengths([(f, Step("backward", -1, 0))], 0)
    yield "is no step", lambda: place_lengths([(f, Step("backward", 0, -1))], 0)
    yield "a step twice", lambda: place_lengths([(f, b, b)], 0)
    yield "other steps than stage 0", lambda: place_lengths([(f, b), (f, Step("forward", 1, 0))], 0)
    yield "other steps than stage 0", lambda: place_lengths([(f, b), (f,)], 0)
    yield "must be finite", lambda: place_lengths([(f, b)], 0, forward=0.0)
    yield "must be finite", lambda: place_lengths([(f, b)], 0, backward=-1.0)
    yield "must be finite", lambda: place_lengths([(f, b)], 0, hop=-0.1)
    yield "must be finite", lambda: place_lengths([(f, b)], 0, hop=float("inf"))
    yield "must be finite", lambda: place_lengths([(f, b)], 0, forward=float("nan"))
    yield "no stage 1 of 1", lambda: place_lengths([(f, b)], 1)
    yield "no stage -1 of 1", lambda: place_lengths([(f, b)], -1)


@pytest.mark.parametrize("text, call", list(refusals()))
def test_what_cannot_be_is_refused_by_name(text: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(ConfigError, match=text):
        call()


@given(st.integers(2, 6), st.integers(1, 24), st.integers(1, 26))
def test_interleaving_is_refused_exactly_where_the_groups_do_not_fit(stages: int, micros: int, group: int) -> None:
    if acceptable(stages, micros, group):
        interleaved(stages, 0, micros, 2, group)
    else:
        with pytest.raises(ConfigError):
            interleaved(stages, 0, micros, 2, group)


def test_forwards_alone_are_a_schedule_too() -> None:
    orders = [tuple(Step("forward", micro, 0) for micro in range(4))] * 3
    assert gaps(orders, 1) == pytest.approx({0: 1 / 6, 4: 1 / 6})


@given(st.integers(2, 6), st.integers(2, 12))
def test_rounding_makes_no_windows(stages: int, micros: int) -> None:
    assume(micros >= stages)
    exact = gaps(plain(stages, micros), 0, 1.0, 2.0)
    assert gaps(plain(stages, micros), 0, 0.1, 0.2).keys() == exact.keys()


def test_a_large_pipeline_is_quick() -> None:
    started = time.process_time()
    assert idle_share(cut(64, 512, 4), 17) == pytest.approx(63 / (4 * 512 + 63))
    # Far above what it takes, far below a quadratic simulation.
    assert time.process_time() - started < 5.0
