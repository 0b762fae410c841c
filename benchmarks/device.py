"""What a snapshot each iteration costs a GPT that really computes, on one device."""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import attach, print_table, read_events
from benchmarks.shares import blocked_secs
from ftckpt.config import Config
from tests.support.pool import run_ranks

FULL_SIZE = ["--layers", "24", "--hidden", "1024", "--heads", "16", "--seq", "512", "--global-batch", "16"]
"""About 300 million parameters: 3.6 GB of masters and moments, a sixth of the 0.4 s of an iteration on an H200."""
QUICK_SIZE = ["--layers", "2", "--hidden", "64", "--seq", "32", "--global-batch", "8"]
SCHEDULES = ("sync", "thread", "stream", "bubble")
# ``bubble`` finds its windows once four iterations have been measured; the first ones also pay for lazy set-up.
WARM_UP, MEASURED = 6, 10
RESTARTS = 5
TIMEOUT_SECS = 1800.0
MOST_SETTLING = 1000
"""Iterations until slots have their memory and are pinned."""
PLAIN_BYTES = 1 << 30
"""Memory that plain copies go through, larger than caches; a larger snapshot goes through it several times."""
MOST_RATIO = 1.005
MOST_BLOCKED_MS_PER_GB = 0.2
LEAST_RATE_SHARE = 0.95
MOST_RESTORE_RATIO = 3.0
"""A restart from memory, every byte verified, against a plain copy of its bytes from pinned memory to the device."""


def measure(rank: int, world_size: int, size: Sequence[str], repeats: int, folder: Path) -> dict[str, Any]:
    """The only rank's run; lists have one entry per repeat."""
    import train_gpt

    warnings.filterwarnings("ignore", module="megatron")
    if not dist.is_initialized():
        store = dist.FileStore(str(folder / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    job = train_gpt.build(train_gpt.parse_args(["--micro-batch", "4", *size]))
    measured: dict[str, Any] = {name: [] for name in ("off", *SCHEDULES, "settling_secs", "blocked_ms_per_gb")}
    rates: list[float] = []
    for repeat in range(repeats):
        measured["off"].append(statistics.median(train(job)))
        for schedule in SCHEDULES:
            name = name_of(schedule, repeat)
            checkpointer = attach(job, folder, name, schedule=schedule, overhead_budget=0.0)
            settling_secs = settle(job, checkpointer)
            measured[schedule].append(statistics.median(train(job, checkpointer)))
            checkpointer.close(remove=(schedule, repeat) != (SCHEDULES[-1], repeats - 1))
            detach(job)
            events = read_events(folder, name, rank)
            measured["copied_bytes"] = next(e["copied_bytes"] for e in reversed(events) if e["event"] == "plan")
            if schedule == "sync":
                # Without the first, which warms up.
                rates += [rate_of(e["copies"]) for e in events if e["event"] == "timeline"][1:]
            if schedule == "bubble":
                blocked = statistics.median(blocked_secs(events)[-MEASURED:])
                measured["blocked_ms_per_gb"].append(blocked * 1e12 / measured["copied_bytes"])
                measured["settling_secs"].append(settling_secs)
    measured["bytes_per_sec"] = statistics.median(rates)
    measured["plain_bytes_per_sec"] = plain_rate(measured["copied_bytes"], Config().chunk_bytes)
    return measured


def train(job: Any, checkpointer: Any = None) -> list[float]:
    """Seconds of the iterations that count, boundary to boundary."""
    import train_gpt

    secs = []
    for _ in range(WARM_UP + MEASURED):
        begin = time.perf_counter()
        if checkpointer is not None:
            checkpointer.step(job.iteration)
        train_gpt.train_step(job)
        # Without it the time would be that of queueing the kernels.
        torch.cuda.synchronize()
        secs.append(time.perf_counter() - begin)
    return secs[WARM_UP:]


def detach(job: Any) -> None:
    """ftckpt off: hooks and all."""
    import ftckpt.megatron

    ftckpt.megatron.remove()
    job.checkpointer = None


def settle(job: Any, checkpointer: Any) -> float:
    """Train until all slots have their memory and a snapshot finds them prepared; seconds that this took."""
    import train_gpt

    begin, capture = time.perf_counter(), checkpointer.capture
    slots = range(capture.arena.control.slots)
    for _ in range(MOST_SETTLING):
        if not capture.lacks_slots and capture.prepared(slots) == [*slots]:
            return time.perf_counter() - begin
        checkpointer.step(job.iteration)
        train_gpt.train_step(job)
        torch.cuda.synchronize()
    raise TimeoutError(f"slots are not prepared after {MOST_SETTLING} iterations")


def restarted(rank: int, world_size: int, size: Sequence[str], name: str, folder: Path) -> dict[str, float]:
    """A start of the job that is in memory as ``name``: seconds of ``restore()``, and of plain copies of as much."""
    import train_gpt

    warnings.filterwarnings("ignore", module="megatron")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    job = train_gpt.build(train_gpt.parse_args(["--micro-batch", "4", *size]))
    # The first collective of a group connects it, which training would wait for as well.
    train_gpt.train_step(job)
    torch.cuda.synchronize()
    checkpointer = attach(job, folder, name)
    torch.cuda.synchronize()
    assert checkpointer.whole is not None, "there was nothing to restore"
    checkpointer.close(remove=False)
    events = read_events(folder, name, rank)
    secs = next(event["blocked_secs"] for event in reversed(events) if event["event"] == "restored")
    nbytes = next(event["needed_bytes"] for event in reversed(events) if event["event"] == "loaded")
    return {"restore": secs, "plain": nbytes / plain_rate(nbytes, Config().chunk_bytes, to_device=True)}


def name_of(schedule: str, repeat: int) -> str:
    """Of a job."""
    return f"{schedule}-{repeat}"


def rate_of(copies: Sequence[Sequence[float]]) -> float:
    """Bytes per second from the begin of a snapshot's first copy to the end of its last."""
    secs = max(end for _, end, _ in copies) - min(begin for begin, _, _ in copies)
    return sum(nbytes for *_, nbytes in copies) / secs


def plain_rate(total_bytes: int, chunk_bytes: int, rounds: int = 5, to_device: bool = False) -> float:
    """Bytes per second of plain copies of ``total_bytes`` between the device and pinned memory, chunk by chunk."""
    on_device, on_host = (
        torch.ones(min(total_bytes, PLAIN_BYTES), dtype=torch.uint8, **where)
        for where in ({"device": torch.cuda.current_device()}, {"pin_memory": True})
    )
    source, target = (on_host, on_device) if to_device else (on_device, on_host)
    chunks = list(zip(source.split(chunk_bytes), target.split(chunk_bytes), strict=True))
    rates = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(max(1, round(total_bytes / PLAIN_BYTES))):
            for part, place in chunks:
                place.copy_(part, non_blocking=True)
        torch.cuda.synchronize()
        secs = time.perf_counter() - begin
        rates.append(max(1, round(total_bytes / PLAIN_BYTES)) * source.numel() / secs)
    return statistics.median(rates)


def run_case(args: argparse.Namespace, stand_in: bool = False) -> dict[str, Any]:
    """One job in a process of its own; returns its entry in ``device``. ``stand_in``: without a device, for tests."""
    size = QUICK_SIZE if args.quick else FULL_SIZE
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-benchmark-", dir=args.arena.absolute()))
    try:
        options = {"timeout_secs": TIMEOUT_SECS, "stand_in": stand_in, "init_process_group": stand_in}
        (result,) = run_ranks(measure, 1, size, args.repeats, folder, **options)
        name, restarts = name_of(SCHEDULES[-1], args.repeats - 1), []
        for _ in range(RESTARTS):
            (folder / "store").unlink(missing_ok=True)
            restarts.append(run_ranks(restarted, 1, size, name, folder, **options)[0].value)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return case_of({**result.value, "restarts": restarts}, size)


def case_of(measured: Mapping[str, Any], size: Sequence[str]) -> dict[str, Any]:
    """What was measured, put together."""
    ratios = {
        schedule: [with_it / off for with_it, off in zip(measured[schedule], measured["off"], strict=True)]
        for schedule in SCHEDULES
    }
    restore_secs = {side: [one[side] for one in measured["restarts"]] for side in ("restore", "plain")}
    return {
        "layout": "tp1 pp1 dp1", "model": list(size), "repeats": len(measured["off"]),
        "off_iteration_ms_median": statistics.median(measured["off"]) * 1e3,
        "ratio_median": {schedule: statistics.median(values) for schedule, values in ratios.items()},
        "ratio_min": {schedule: min(values) for schedule, values in ratios.items()},
        "ratio_max": {schedule: max(values) for schedule, values in ratios.items()},
        "bytes_per_rank": [measured["copied_bytes"]],
        "blocked_ms_per_gb": statistics.median(measured["blocked_ms_per_gb"]),
        "bytes_per_sec": measured["bytes_per_sec"], "plain_bytes_per_sec": measured["plain_bytes_per_sec"],
        "settling_secs": measured["settling_secs"], "restarts": restore_secs,
        "restore_secs": statistics.median(restore_secs["restore"]),
        "restore_ratio": statistics.median(restore_secs["restore"]) / statistics.median(restore_secs["plain"]),
        "iteration_secs": {name: measured[name] for name in ("off", *SCHEDULES)},
    }  # fmt: skip


def show(case: Mapping[str, Any]) -> None:
    """Print the case."""
    print(
        f"\none device, {case['repeats']} repeats, {case['bytes_per_rank'][0] / 1e9:.2f} GB per snapshot, "
        f"iteration {case['off_iteration_ms_median']:.1f} ms with ftckpt off"
    )
    names = ("ratio_median", "ratio_min", "ratio_max")
    rows = [[schedule, *(f"{case[name][schedule]:.4f}" for name in names)] for schedule in SCHEDULES]
    print_table(["schedule", "ratio to off", "min", "max"], rows)
    rate, plain = case["bytes_per_sec"], case["plain_bytes_per_sec"]
    print(f"training thread blocked: {case['blocked_ms_per_gb']:.3f} ms per GB")
    print(f"device to slot: {rate / 1e9:.1f} GB/s; a plain pinned copy {plain / 1e9:.1f} GB/s: {rate / plain:.1%}")
    settling = statistics.median(case["settling_secs"])
    print(f"slots have their memory and are pinned {settling:.2f} s after the start, beside training")
    print(f"restore() {case['restore_secs']:.3f} s: {case['restore_ratio']:.1f} times a plain copy to the device")


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The claims that do not hold, a line each."""
    problems = []
    for case in cases:
        ratio, share = case["ratio_median"]["bubble"], case["bytes_per_sec"] / case["plain_bytes_per_sec"]
        if ratio > MOST_RATIO:
            problems.append(f"device: an iteration takes {ratio:.4f}x as long, more than {MOST_RATIO}")
        blocked = case["blocked_ms_per_gb"]
        if blocked > MOST_BLOCKED_MS_PER_GB:
            problems.append(f"device: training is blocked {blocked:.2f} ms/GB, more than {MOST_BLOCKED_MS_PER_GB}")
        if share < LEAST_RATE_SHARE:
            problems.append(f"device: copies run at {share:.1%} of a plain one, below {LEAST_RATE_SHARE:.0%}")
        if (restore := case["restore_ratio"]) > MOST_RESTORE_RATIO:
            problems.append(f"device: a restart takes {restore:.1f}x a plain copy, more than {MOST_RESTORE_RATIO}")
    return problems
