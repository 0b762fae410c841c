"""The results of the ladder of schedules: JSON entries, tables, and the claims that do not hold."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import print_table
from benchmarks.ladder import AMPLE, RUNGS, SCARCE, Layout, Report, Rung, Turn
from ftckpt.schedule.iteration import IDLE

_SPILLS = ("forward", "backward", "fence")


def cases_of(layout: Layout, reports: Sequence[Report], interference: float) -> list[dict[str, Any]]:
    """The reports of all ranks, combined: one entry per rung except off."""
    off = iteration_secs(reports, RUNGS[0].name)
    shares = [statistics.median(share for *_, share in report.spans) for report in reports]
    common = {
        "layout": layout.name,
        "ranks": layout.ranks,
        "micro_batches": layout.micro_batches,
        "forward_ms": layout.forward_ms,
        "repeats": len(off),
        "interference": interference,
        "off_iteration_ms_median": statistics.median(off) * 1e3,
        "window_share_measured": statistics.median(share for report in reports for *_, share in report.spans),
        "window_share_measured_per_rank": shares,
        "window_share_model": layout.window_share,
    }
    return [{**common, **_case(rung, reports, off)} for rung in RUNGS[1:]]


def iteration_secs(reports: Sequence[Report], rung: str) -> list[float]:
    """The median iteration of each repeat; a job is as fast as its slowest rank."""
    repeats = zip(*([turn.secs for turn in report.turns if turn.rung == rung] for report in reports), strict=True)
    return [statistics.median(map(max, zip(*ranks, strict=True))) for ranks in repeats]


def _case(rung: Rung, reports: Sequence[Report], off: Sequence[float]) -> dict[str, Any]:
    assert rung.capacity is not None
    by_rank = [[turn for turn in report.turns if turn.rung == rung.name] for report in reports]
    turns, secs = [turn for mine in by_rank for turn in mine], iteration_secs(reports, rung.name)
    ratios = [with_it / without for with_it, without in zip(secs, off, strict=True)]
    nbytes = [mine[-1].nbytes for mine in by_rank]
    capacities = [_capacity(mine, round(rung.capacity * size)) for mine, size in zip(by_rank, nbytes, strict=True)]
    copied = [event for turn in turns for event in turn.copied]
    stalls = [event["stall_secs"] / event["secs"] for event in copied]
    shares = _shares(copied)
    if rung.schedule == "sync":  # copied between the boundary and the start of the schedule, while training waits
        shares = {"boundary": 1.0}
    blocked = [
        secs / event["secs"] for turn in turns for secs, event in zip(turn.blocked_secs, turn.copied, strict=True)
    ]
    return {
        "schedule": rung.schedule,
        "capacity_asked": rung.capacity,
        "settled": all(turn.settled for turn in turns),
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "iteration_ms_median": statistics.median(secs) * 1e3,
        "shares": shares,
        "shares_expected": _expected_shares(reports, capacities, nbytes),
        "share_in_windows": sum(shares.get(kind, 0.0) for kind in IDLE),
        "fence_stall_share": statistics.median(stalls),
        "fence_stall_share_max": max(stalls),
        "boundary_share": statistics.median(blocked),
        "bytes_per_rank": nbytes,
        "window_capacity_bytes": capacities,
        "capacity_over_bytes": statistics.median(c / n for c, n in zip(capacities, nbytes, strict=True)),
    }


def _capacity(turns: Sequence[Turn], otherwise: int) -> int:
    """The windows' capacity by one rank's plans, or the one for which the rate of copies was chosen."""
    planned = [event["window_capacity_bytes"] for turn in turns for event in turn.copied]
    known = [nbytes for nbytes in planned if nbytes is not None]
    return round(statistics.median(known)) if known else otherwise


def _shares(copied: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The share of all bytes of all ranks by kind of span."""
    moved: dict[str, int] = {}
    for event in copied:
        for kind, nbytes in event["moved_bytes"].items():
            moved[kind] = moved.get(kind, 0) + nbytes
    total = sum(moved.values())
    return {kind: nbytes / total for kind, nbytes in sorted(moved.items())}


def _expected_shares(reports: Sequence[Report], capacities: Sequence[int], nbytes: Sequence[int]) -> dict[str, float]:
    """The shares if windows are filled first, then forward steps, then backward steps, then the fence."""
    shares = {"windows": 0.0, "forward": 0.0, "backward": 0.0, "fence": 0.0}
    for report, capacity, size in zip(reports, capacities, nbytes, strict=True):
        rate = capacity / report.idle_secs()
        forward = rate * statistics.median(secs for _, secs, _, _ in report.spans)
        backward = rate * statistics.median(secs for _, _, secs, _ in report.spans)
        left = size
        for kind, room in (("windows", capacity), ("forward", forward), ("backward", backward), ("fence", left)):
            taken = min(left, room)
            shares[kind] += taken / sum(nbytes)
            left -= taken
    return shares


HEADS = ["schedule", "capacity/bytes", "ratio to off", "min", "max", "windows %"]
HEADS += ["forward %", "backward %", "fence %", "stall %", "boundary %"]


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table of one layout."""
    first = cases[0]
    print(
        f"\n{first['layout']}, {first['micro_batches']} micro-batches, {first['repeats']} repeats; iteration "
        f"{first['off_iteration_ms_median']:.0f} ms with ftckpt off; windows {first['window_share_measured']:.1%} of "
        f"it, {first['window_share_model']:.1%} in the model"
    )
    rows = []
    for case in cases:
        ratios = [f"{case[name]:.3f}" for name in ("ratio_median", "ratio_min", "ratio_max")]
        moved = [case["share_in_windows"], *(case["shares"].get(kind, 0.0) for kind in _SPILLS)]
        blocked = [f"{100 * case[name]:.2f}" for name in ("fence_stall_share", "boundary_share")]
        shares = [f"{100 * share:.1f}" for share in moved]
        rows.append([case["schedule"], f"{case['capacity_over_bytes']:.2f}", *ratios, *shares, *blocked])
    print_table(HEADS, rows)


WINDOW_SHARE_OFF, SPILL_OFF = 0.10, 0.10
MIN_IN_WINDOWS, MAX_STALL, MAX_IN_FENCE = 0.90, 0.01, 0.03
NAIVE_MAX_IN_WINDOWS, NAIVE_MIN_COST = 0.75, 0.02


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims that do not hold, a line each."""
    problems = []
    for name in dict.fromkeys(case["layout"] for case in cases):
        mine = {(case["schedule"], case["capacity_asked"]): case for case in cases if case["layout"] == name}
        ample, scarce, naive = mine["bubble", AMPLE], mine["bubble", SCARCE], mine["stream", AMPLE]
        found = [*_ample_problems(ample), *_spill_problems(scarce), *_naive_problems(ample, naive)]
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def _ample_problems(case: Mapping[str, Any]) -> Iterator[str]:
    measured, model = case["window_share_measured"], case["window_share_model"]
    if abs(measured - model) > WINDOW_SHARE_OFF * model:
        yield f"windows are {measured:.1%} of the schedule, more than {WINDOW_SHARE_OFF:.0%} off {model:.1%}"
    if not case["settled"]:
        yield "windows were not measured before the iterations that count"
    if case["share_in_windows"] < MIN_IN_WINDOWS:
        yield (
            f"{case['share_in_windows']:.1%} of the bytes were copied in windows with room for "
            f"{case['capacity_over_bytes']:.2f}x of them, fewer than {MIN_IN_WINDOWS:.0%}"
        )
    if case["fence_stall_share"] > MAX_STALL:
        yield f"the fence stalls {case['fence_stall_share']:.2%}, more than {MAX_STALL:.0%}"


def _spill_problems(case: Mapping[str, Any]) -> Iterator[str]:
    """Windows and forward steps must be full before bytes are copied elsewhere, at a higher cost."""
    expected = case["shares_expected"]
    moved = {"windows": case["share_in_windows"], **{kind: case["shares"].get(kind, 0.0) for kind in _SPILLS}}
    for kind in ("windows", "forward"):
        if moved[kind] < expected[kind] - SPILL_OFF:
            yield f"{kind} took {moved[kind]:.1%} of the bytes and have room for {expected[kind]:.1%}"
    for kind, more in (("backward", SPILL_OFF), ("fence", MAX_IN_FENCE)):
        if moved[kind] > expected[kind] + more:
            yield f"{kind} took {moved[kind]:.1%} of the bytes and should have {expected[kind]:.1%}"


def _naive_problems(ample: Mapping[str, Any], naive: Mapping[str, Any]) -> Iterator[str]:
    if naive["share_in_windows"] > NAIVE_MAX_IN_WINDOWS:
        yield f"{naive['share_in_windows']:.1%} of the copies without windows fall into them: a weak comparison"
    cost = naive["ratio_median"] - ample["ratio_median"]
    if naive["interference"] > 0 and cost <= NAIVE_MIN_COST:
        yield f"copies without windows cost {cost:+.2%} of an iteration more: not clearly worse"
