"""What the ladder of schedules showed: JSON entries, tables, and which of its claims do not hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import print_table
from benchmarks.ladder import AMPLE, RUNGS, SCARCE, Layout, Report, Rung, Turn
from ftckpt.schedule.iteration import IDLE


def cases_of(layout: Layout, reports: Sequence[Report], interference: float) -> list[dict[str, Any]]:
    """What the ranks saw, put together: one entry per rung but off."""
    off = iteration_secs(reports, RUNGS[0].name)
    shares = [statistics.median(share for *_, share in report.spans) for report in reports]
    common = {
        "layout": layout.name, "ranks": layout.ranks, "micro_batches": layout.micro_batches,
        "forward_ms": layout.forward_ms, "repeats": len(off), "interference": interference,
        "off_iteration_ms_median": statistics.median(off) * 1e3,
        "window_share_measured": statistics.median(share for report in reports for *_, share in report.spans),
        "window_share_measured_per_rank": shares,
        "window_share_model": layout.window_share,
    }  # fmt: skip
    return [{**common, **_case(rung, reports, off)} for rung in RUNGS[1:]]


def iteration_secs(reports: Sequence[Report], rung: str) -> list[float]:
    """The median iteration of each repeat; a job is as fast as its slowest rank."""
    repeats = zip(*([turn.secs for turn in report.turns if turn.rung == rung] for report in reports), strict=True)
    return [statistics.median(map(max, zip(*ranks, strict=True))) for ranks in repeats]


def _case(rung: Rung, reports: Sequence[Report], off: Sequence[float]) -> dict[str, Any]:
    assert rung.capacity is not None
    turns = [[turn for turn in report.turns if turn.rung == rung.name] for report in reports]
    secs = iteration_secs(reports, rung.name)
    ratios = [with_it / without for with_it, without in zip(secs, off, strict=True)]
    nbytes = [mine[-1].nbytes for mine in turns]
    capacities = [
        _window_capacity(mine, round(rung.capacity * size)) for mine, size in zip(turns, nbytes, strict=True)
    ]
    copied = [event for mine in turns for turn in mine for event in turn.copied]
    stalls = [event["stall_secs"] / event["secs"] for event in copied]
    shares = _shares(copied)
    if rung.schedule == "sync":  # the bytes move between the boundary and the schedule's begin, but training waits
        shares = {"boundary": 1.0}
    blocked = [
        secs / event["secs"]
        for mine in turns
        for turn in mine
        for secs, event in zip(turn.blocked_secs, turn.copied, strict=True)
    ]
    return {
        "schedule": rung.schedule, "capacity_asked": rung.capacity,
        "settled": all(turn.settled for mine in turns for turn in mine),
        "ratio_median": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "iteration_ms_median": statistics.median(secs) * 1e3,
        "shares": shares, "shares_expected": _expected_shares(reports, capacities, nbytes),
        "share_in_windows": sum(shares.get(kind, 0.0) for kind in IDLE),
        "fence_stall_share": statistics.median(stalls), "fence_stall_share_max": max(stalls),
        "boundary_share": statistics.median(blocked),
        "bytes_per_rank": nbytes, "window_capacity_bytes": capacities,
        "capacity_over_bytes": statistics.median(c / n for c, n in zip(capacities, nbytes, strict=True)),
        "host_bytes": max(turn.host_bytes for mine in turns for turn in mine),
    }  # fmt: skip


def _window_capacity(turns: Sequence[Turn], otherwise: int) -> int:
    """What one rank's plans say; what the rate of copies was chosen for where there is no plan."""
    planned = [event["window_capacity_bytes"] for turn in turns for event in turn.copied]
    known = [nbytes for nbytes in planned if nbytes is not None]
    return round(statistics.median(known)) if known else otherwise


def _shares(copied: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of all bytes of all ranks, by kind of span."""
    moved: dict[str, int] = {}
    for event in copied:
        for kind, nbytes in event["moved_bytes"].items():
            moved[kind] = moved.get(kind, 0) + nbytes
    total = sum(moved.values())
    return {kind: nbytes / total for kind, nbytes in sorted(moved.items())}


def _expected_shares(reports: Sequence[Report], capacities: Sequence[int], nbytes: Sequence[int]) -> dict[str, float]:
    """Where the bytes go if windows are filled first, then forward steps, then backward steps, then the fence."""
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


def show(cases: Sequence[Mapping[str, Any]]) -> None:
    """The table of one layout."""
    first = cases[0]
    print(
        f"\n{first['layout']}, {first['micro_batches']} micro-batches, {first['repeats']} repeats; iteration "
        f"{first['off_iteration_ms_median']:.0f} ms with ftckpt off; windows {first['window_share_measured']:.1%} of "
        f"it, {first['window_share_model']:.1%} in the model"
    )
    heads = [
        "schedule", "capacity/bytes", "ratio to off", "min", "max", "windows %", "forward %", "backward %", "fence %",
        "stall %", "boundary %", "MB per rank", "host MB",
    ]  # fmt: skip
    rows = []
    for case in cases:
        shares = case["shares"]
        moved = [case["share_in_windows"], *(shares.get(kind, 0.0) for kind in ("forward", "backward", "fence"))]
        rows.append(
            [
                case["schedule"], f"{case['capacity_over_bytes']:.2f}",
                *(f"{case[name]:.3f}" for name in ("ratio_median", "ratio_min", "ratio_max")),
                *(f"{share:.1%}".rstrip("%") for share in moved),
                f"{100 * case['fence_stall_share']:.2f}", f"{100 * case['boundary_share']:.2f}",
                f"{statistics.mean(case['bytes_per_rank']) / 1e6:.2f}", f"{case['host_bytes'] / 1e6:.1f}",
            ]
        )  # fmt: skip
    print_table(heads, rows)


@dataclass(frozen=True)
class Bounds:
    """What the claims are held to; shares are of 1."""

    window_share_off: float = 0.10
    least_in_windows: float = 0.90
    most_stall: float = 0.01
    spill_off: float = 0.10
    most_in_fence: float = 0.03
    naive_most_in_windows: float = 0.75
    naive_least_cost: float = 0.02


QUICK_BOUNDS = Bounds(0.3, 0.75, 0.03, 0.2, 0.1, 0.85, 0.0)
"""For a machine that does other things meanwhile and for few repeats."""


def verdict(cases: Sequence[Mapping[str, Any]], bounds: Bounds) -> list[str]:
    """The claims that do not hold, a line each."""
    problems = []
    for name in dict.fromkeys(case["layout"] for case in cases):
        mine = {(case["schedule"], case["capacity_asked"]): case for case in cases if case["layout"] == name}
        ample, naive = mine["bubble", AMPLE], mine["stream", AMPLE]
        in_layout = [
            *_window_problems(ample, bounds), *_ample_problems(ample, bounds),
            *_spill_problems(mine["bubble", SCARCE], bounds), *_naive_problems(ample, naive, bounds),
        ]  # fmt: skip
        problems += [f"{name}: {problem}" for problem in in_layout]
    return problems


def _window_problems(case: Mapping[str, Any], bounds: Bounds) -> list[str]:
    measured, model = case["window_share_measured"], case["window_share_model"]
    if abs(measured - model) <= bounds.window_share_off * model:
        return []
    return [f"windows are {measured:.1%} of the schedule, more than {bounds.window_share_off:.0%} off {model:.1%}"]


def _ample_problems(case: Mapping[str, Any], bounds: Bounds) -> list[str]:
    problems = []
    if not case["settled"]:
        problems.append("windows were not measured before the iterations that count")
    if case["share_in_windows"] < bounds.least_in_windows:
        problems.append(
            f"{case['share_in_windows']:.1%} of the bytes were copied in windows with room for "
            f"{case['capacity_over_bytes']:.2f}x of them, fewer than {bounds.least_in_windows:.0%}"
        )
    if case["fence_stall_share"] > bounds.most_stall:
        problems.append(f"the fence stalls {case['fence_stall_share']:.2%}, more than {bounds.most_stall:.0%}")
    return problems


def _spill_problems(case: Mapping[str, Any], bounds: Bounds) -> list[str]:
    """Windows and forward steps must take what they can: then only the rest is where it is dearer."""
    shares, expected, problems = case["shares"], case["shares_expected"], []
    moved = {"windows": case["share_in_windows"], **{k: shares.get(k, 0.0) for k in ("forward", "backward", "fence")}}
    for kind in ("windows", "forward"):
        if moved[kind] < expected[kind] - bounds.spill_off:
            problems.append(f"{kind} took {moved[kind]:.1%} of the bytes and have room for {expected[kind]:.1%}")
    for kind, more in (("backward", bounds.spill_off), ("fence", bounds.most_in_fence)):
        if moved[kind] > expected[kind] + more:
            problems.append(f"{kind} took {moved[kind]:.1%} of the bytes and should have {expected[kind]:.1%}")
    return problems


def _naive_problems(ample: Mapping[str, Any], naive: Mapping[str, Any], bounds: Bounds) -> list[str]:
    problems = []
    if naive["share_in_windows"] > bounds.naive_most_in_windows:
        problems.append(f"copies without windows lie in them by {naive['share_in_windows']:.1%}: a weak comparison")
    cost = naive["ratio_median"] - ample["ratio_median"]
    if naive["interference"] > 0 and cost <= bounds.naive_least_cost:
        problems.append(f"copies without windows cost {cost:+.2%} of an iteration more: not clearly worse")
    return problems
