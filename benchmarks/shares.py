"""Bytes that each rank copies, and how long training stands still for it, against synchronous copies.

Tensor 2 x pipeline 2 x data 2, real compute, once with the distributed optimizer and once without it: only then
are there large replica sets. In turn, iteration by iteration: a snapshot by ftckpt, a synchronous copy of the
rank's full state, one of just the bytes that ftckpt copies, and nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import CopyMeter, attach, disk_bytes, median_ms, print_table, read_events, synchronous
from tests.support.pool import run_ranks

LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
RANKS = 8
MODES = ("with", "sync_copy", "sync_same_bytes", "without")
"""What happens at the boundary of iteration i: ``MODES[i % 4]``, so ftckpt's interval is 4."""
OPTIMIZERS = {"distributed": [], "non-distributed": ["--no-distributed-optimizer"]}
FULL_SIZE = ["--layers", "4", "--hidden", "512", "--seq", "32"]
QUICK_SIZE = ["--layers", "2", "--hidden", "64", "--seq", "32"]
CHUNK_MIB = 1
TIMEOUT_SECS = 300.0


@dataclass
class Report:
    """What one rank measured, one entry per repeat; ``blocked_secs`` begins with the snapshot that warms up."""

    expected_bytes: int
    derived_bytes: int
    full_bytes: int
    host_bytes: int = 0
    blocked_secs: list[float] = field(default_factory=list)
    bytes_copied: list[int] = field(default_factory=list)
    sync_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    iteration_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})


@dataclass(frozen=True)
class Share:
    """What this rank holds, and its part of it, from the descriptions of all ranks."""

    full: list[torch.Tensor]
    part: list[torch.Tensor]
    derived_bytes: int
    expected_bytes: int


def share_of(job: Any, rank: int) -> Share:
    """Collective. A replica set is every rank that describes the same range of the same logical tensor."""
    from ftckpt.megatron.state import MegatronState

    described = MegatronState(job.model, job.optimizer, job.scheduler, {}).describe()
    raw = [p for p in described.stepped if not follows_from_master(p)]
    mine = [p.fragment.to_json() for p in raw]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    names = [[json.dumps(fragment) for fragment in fragments] for fragments in gathered]
    count = Counter(name for rank_names in names for name in rank_names)
    part, expected = [], sum(p.fragment.nbytes for p in described.volatile)
    for name, piece in zip(names[rank], raw, strict=True):
        place, places = sum(name in before for before in names[:rank]), count[name]
        numel = piece.tensor.numel()
        part.append(piece.tensor[numel * place // places : numel * (place + 1) // places])
        expected += piece.fragment.nbytes / places
    weights = [parameter.data for chunk in job.model for parameter in chunk.parameters()]
    others = [p.tensor for p in described.stepped if not p.fragment.key.startswith("weight/")]
    derived = sum(p.fragment.nbytes for p in described.stepped) - sum(p.fragment.nbytes for p in raw)
    return Share([*weights, *others], part, derived, round(expected))


def follows_from_master(piece: Any) -> bool:
    """Whether rounding the fp32 master gives the weight, bit for bit."""
    if piece.derived_from is None:
        return False
    rounded = piece.derived_from.to(piece.tensor.dtype)
    # As integers: NaN differs from itself, and 0.0 equals -0.0.
    return torch.equal(rounded.view(torch.int16), piece.tensor.view(torch.int16))


def measure(rank: int, world_size: int, argv: Sequence[str], repeats: int, folder: Path) -> Report:
    """One rank's run: a round of four iterations to warm up, then ``repeats`` rounds that count."""
    import train_gpt

    warnings.filterwarnings("ignore", module="megatron")
    job = train_gpt.build(train_gpt.parse_args(argv))
    meter = CopyMeter()
    # Small chunks: the check of bytes is as sharp as a chunk.
    settings = {"interval": len(MODES), "chunk_size": f"{CHUNK_MIB}MiB", "objects_size": "1MiB"}
    checkpointer = attach(job, folder, "shares", **settings)
    share = share_of(job, rank)
    report = Report(share.expected_bytes, share.derived_bytes, sum(tensor.nbytes for tensor in share.full))
    copies = {"sync_copy": synchronous(share.full), "sync_same_bytes": synchronous(share.part)}
    while job.iteration < len(MODES):
        train_gpt.train_step(job)
    for turn in range(len(MODES) * (repeats + 1)):
        mode = MODES[job.iteration % len(MODES)]
        dist.barrier()  # ranks come to a boundary together: none copies while others still compute
        begin = time.perf_counter()
        checkpointer.step(job.iteration)
        sync_secs = copies[mode]() if mode in copies else 0.0
        train_gpt.train_step(job)
        if turn >= len(MODES):
            report.iteration_secs[mode].append(time.perf_counter() - begin)
            report.sync_secs[mode].append(sync_secs)
            report.bytes_copied += [meter.nbytes] if mode == "with" else []
        meter.nbytes = 0
    report.blocked_secs = blocked_secs(read_events(folder, "shares", rank))
    dist.barrier()
    report.host_bytes = disk_bytes(folder / "arena") if rank == 0 else 0
    dist.barrier()
    checkpointer.close()
    return report


def blocked_secs(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """How long each snapshot made one rank's training wait, at the boundary and at the fence."""
    snapshots: list[float] = []
    for event in events:
        if event["event"] == "snapshot":
            snapshots.append(event["blocked_secs"])
        elif event["event"] == "fence" and snapshots:
            snapshots[-1] += event["blocked_secs"]
    return snapshots


def run_case(optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job; returns its entry in ``shares``."""
    argv = ["--tp", str(LAYOUT["tp"]), "--pp", str(LAYOUT["pp"]), *OPTIMIZERS[optimizer]]
    argv += [*(QUICK_SIZE if args.quick else FULL_SIZE), "--global-batch", "8", "--micro-batch", "2"]
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-benchmark-", dir=args.arena.absolute()))
    try:
        results = run_ranks(measure, RANKS, argv, args.rounds, folder, timeout_secs=TIMEOUT_SECS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return case_of(optimizer, [result.value for result in results])


def case_of(optimizer: str, reports: Sequence[Report]) -> dict[str, Any]:
    """What the ranks measured, put together."""
    counts = [max(r.bytes_copied, key=lambda n, e=r.expected_bytes: abs(n - e)) for r in reports]
    differences = [count - r.expected_bytes for count, r in zip(counts, reports, strict=True)]
    sync = {mode: median_ms(s for r in reports for s in r.sync_secs[mode]) for mode in MODES[1:3]}
    blocked = median_ms(secs for r in reports for secs in r.blocked_secs[1:])
    return {
        "layout": LAYOUT, "optimizer": optimizer, "repeats": len(reports[0].bytes_copied),
        "chunk_bytes": CHUNK_MIB << 20,
        "full_bytes_per_rank": [r.full_bytes for r in reports],
        "bytes_per_rank": counts,
        "expected_bytes_per_rank": [r.expected_bytes for r in reports],
        "derived_bytes_per_rank": [r.derived_bytes for r in reports],
        "max_difference_bytes": max(map(abs, differences)),
        "host_bytes": sum(r.host_bytes for r in reports),
        "blocked_ms_median": blocked,
        "first_blocked_ms_median": median_ms(r.blocked_secs[0] for r in reports),
        "sync_copy_ms_median": sync["sync_copy"],
        "sync_same_bytes_ms_median": sync["sync_same_bytes"],
        "blocked_over_sync_copy": blocked / sync["sync_copy"],
        "blocked_over_sync_same_bytes": blocked / sync["sync_same_bytes"],
        # A job is as fast as its slowest rank.
        "iteration_ms_median": {
            mode: median_ms(map(max, zip(*(r.iteration_secs[mode] for r in reports), strict=True)))
            for mode in MODES
        },
    }  # fmt: skip


def show(case: Mapping[str, Any]) -> None:
    """Print one case: a line per rank, the sums, the times."""
    print(f"\n{case['optimizer']} optimizer, tp2 pp2 dp2, {case['repeats']} repeats; MB are 10^6 bytes")
    names = ("full_bytes", "bytes", "expected_bytes", "derived_bytes")
    columns = [case[f"{name}_per_rank"] for name in names]
    rows = []
    for name, (full, copied, expected, derived) in [
        *((f"rank {rank}", row) for rank, row in enumerate(zip(*columns, strict=True))),
        ("sum", tuple(map(sum, columns))),
    ]:
        sizes = [f"{nbytes / 1e6:.3f}" for nbytes in (full, copied, expected)]
        rows.append([name, *sizes, str(copied - expected), f"{derived / 1e6:.3f}"])
    print_table(["", "state MB", "copied MB", "expected MB", "off by B", "derived MB"], rows)
    iteration = case["iteration_ms_median"]
    rows = [
        ["ftckpt", case["blocked_ms_median"], iteration["with"]],
        ["synchronous copy of the full state", case["sync_copy_ms_median"], iteration["sync_copy"]],
        ["synchronous copy of the same bytes", case["sync_same_bytes_ms_median"], iteration["sync_same_bytes"]],
        ["nothing", 0.0, iteration["without"]],
    ]
    print_table(["median", "blocked ms", "iteration ms"], [[n, f"{b:.2f}", f"{i:.1f}"] for n, b, i in rows])
    print(
        f"blocked, against a synchronous copy: {case['blocked_over_sync_copy']:.3f} of the full state's, "
        f"{case['blocked_over_sync_same_bytes']:.3f} of the same bytes'; first snapshot, with the proof of replicas: "
        f"{case['first_blocked_ms_median']:.0f} ms; host memory {case['host_bytes'] / 1e6:.1f} MB"
    )


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise of the bytes; empty where all is well."""
    return [
        f"{case['optimizer']} optimizer: a rank is off by {case['max_difference_bytes']} bytes, more than one chunk"
        for case in cases
        if not case["max_difference_bytes"] <= case["chunk_bytes"]
    ]
