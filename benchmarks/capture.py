"""What a snapshot costs: bytes that each rank copies, host memory, and how long training stands still.

Trains a GPT with Megatron-core, tensor 2 x pipeline 2 x data 2, eight processes on this machine, once with the
distributed optimizer and once without it. In turn, iteration by iteration: a snapshot by ftckpt, a
synchronous copy of the rank's full state, a synchronous copy of just the bytes that ftckpt copies, and nothing.

Exits with 1 where a rank copies more or less than its share: the bytes of each replica set divided by its size,
without weights that follow from fp32 masters. That figure comes from what the ranks hold, not from ftckpt's plan.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "launch"))

from benchmarks.common import (
    CopyMeter,
    Snapshot,
    bandwidth,
    environment,
    from_events,
    median_ms,
    print_table,
    synchronous,
    write_json,
)
from ftckpt.testing.pool import run_ranks

LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
RANKS = 8
MODES = ("with", "sync_copy", "sync_same_bytes", "without")
"""What happens at the boundary of iteration i: ``MODES[i % 4]``, so ftckpt's interval is 4."""
OPTIMIZERS = {"distributed": [], "non-distributed": ["--no-distributed-optimizer"]}
CHUNK_MIB = 1
MIB = 1 << 20
MEMCPY_BYTES = 64 * MIB
TIMEOUT_SECS = 300.0


@dataclass
class Report:
    """What one rank measured, one entry per repeat; ``snapshots`` begins with the one that warms up."""

    expected_bytes: int
    derived_bytes: int
    full_bytes: int
    memcpy_alone: float
    memcpy_together: float
    arena_bytes: int = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    bytes_copied: list[int] = field(default_factory=list)
    sync_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    iteration_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    copy_secs: list[float] = field(default_factory=list)
    copy_cpu_secs: list[float] = field(default_factory=list)

    def add(self, mode: str, secs: float, sync_secs: float, meter: CopyMeter) -> None:
        """One iteration that began with ``mode``."""
        self.iteration_secs[mode].append(secs)
        self.sync_secs[mode].append(sync_secs)
        if mode == "with":
            self.bytes_copied.append(meter.nbytes)
            self.copy_secs.append(meter.secs)
            self.copy_cpu_secs.append(meter.cpu_secs)


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
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    names = [[json.dumps(fragment) for fragment in fragments] for fragments in held]
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
    return torch.equal(rounded.view(torch.int16), piece.tensor.view(torch.int16))


def measure(rank: int, world_size: int, argv: Sequence[str], repeats: int, folder: Path) -> Report:
    """One rank's run: a round of four iterations to warm up, then ``repeats`` rounds that count."""
    import train_gpt

    warnings.filterwarnings("ignore", module="megatron")
    job = train_gpt.build(train_gpt.parse_args(argv))
    alone, together = bandwidth(rank, MEMCPY_BYTES)
    meter = CopyMeter()
    checkpointer = attach(job, folder)
    share = share_of(job, rank)
    full_bytes = sum(tensor.nbytes for tensor in share.full)
    report = Report(share.expected_bytes, share.derived_bytes, full_bytes, alone, together)
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
        secs = time.perf_counter() - begin
        if turn >= len(MODES):
            report.add(mode, secs, sync_secs, meter)
        meter.clear()
    report.arena_bytes, report.snapshots = from_events(folder / "events", rank)
    dist.barrier()
    checkpointer.close()
    return report


def attach(job: Any, folder: Path) -> Any:
    """ftckpt on, with small chunks: the check of bytes is as sharp as a chunk."""
    import ftckpt.megatron
    from ftckpt.config import Config

    config = Config(
        enabled=True, job="benchmark", node="node", arena=str(folder), events=str(folder / "events"),
        interval=len(MODES), chunk_mib=CHUNK_MIB, objects_mib=1, replica_check_interval=0, on_error="raise",
    )  # fmt: skip
    objects = {"data": job.data, "progress": job.progress}
    job.checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
    job.checkpointer.restore()
    return job.checkpointer


def run_case(optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    """One job; returns its entry in ``cases``."""
    argv = ["--tp", str(LAYOUT["tp"]), "--pp", str(LAYOUT["pp"]), *OPTIMIZERS[optimizer]]
    argv += ["--layers", str(args.layers), "--hidden", str(args.hidden), "--seq", str(args.seq)]
    argv += ["--global-batch", "8", "--micro-batch", "2"]
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-benchmark-", dir=args.arena.absolute()))
    try:
        results = run_ranks(measure, RANKS, argv, args.repeats, folder, timeout_secs=TIMEOUT_SECS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return case_of(optimizer, [result.value for result in results], args.repeats)


def case_of(optimizer: str, reports: Sequence[Report], repeats: int) -> dict[str, Any]:
    """What the ranks measured, put together."""
    counts = [max(r.bytes_copied, key=lambda n, e=r.expected_bytes: abs(n - e)) for r in reports]
    differences = [count - r.expected_bytes for count, r in zip(counts, reports, strict=True)]
    snapshots = [snapshot for r in reports for snapshot in r.snapshots[1:]]
    blocked = median_ms(snapshot.secs for snapshot in snapshots)
    sync = {mode: median_ms(s for r in reports for s in r.sync_secs[mode]) for mode in MODES[1:3]}
    copy_secs = [secs for r in reports for secs in r.copy_secs]
    return {
        "layout": LAYOUT, "optimizer": optimizer, "repeats": repeats, "chunk_bytes": CHUNK_MIB * MIB,
        "full_bytes_per_rank": [r.full_bytes for r in reports],
        "bytes_per_rank": counts,
        "expected_bytes_per_rank": [r.expected_bytes for r in reports],
        "max_difference_bytes": max(map(abs, differences)),
        "derived_bytes": sum(r.derived_bytes for r in reports),
        "derived_bytes_per_rank": [r.derived_bytes for r in reports],
        "arena_bytes_per_rank": [r.arena_bytes for r in reports],
        "blocked_ms_median": blocked,
        "boundary_ms_median": median_ms(snapshot.boundary_secs for snapshot in snapshots),
        "fence_ms_median": median_ms(snapshot.fence_secs for snapshot in snapshots),
        "first_blocked_ms_median": median_ms(r.snapshots[0].secs for r in reports),
        "sync_copy_ms_median": sync["sync_copy"],
        "sync_same_bytes_ms_median": sync["sync_same_bytes"],
        "ratio": blocked / sync["sync_copy"],
        "ratio_same_bytes": blocked / sync["sync_same_bytes"],
        # A job is as fast as its slowest rank.
        "iteration_ms_median": {
            mode: median_ms(map(max, zip(*(r.iteration_secs[mode] for r in reports), strict=True)))
            for mode in MODES
        },
        "copy_ms_median": median_ms(copy_secs),
        "copy_cpu_ms_median": median_ms(secs for r in reports for secs in r.copy_cpu_secs),
        "copy_gb_per_sec": statistics.mean(counts) / statistics.median(copy_secs) / 1e9,
        "memcpy_gb_per_sec_alone": reports[0].memcpy_alone / 1e9,
        "memcpy_gb_per_sec_together": statistics.median(r.memcpy_together for r in reports) / 1e9,
    }  # fmt: skip


def show(case: Mapping[str, Any]) -> None:
    """Print one case: a line per rank, the sums, the times."""
    columns = ("full_bytes", "bytes", "expected_bytes", "derived_bytes", "arena_bytes")
    values = [case[f"{name}_per_rank"] for name in columns]
    print(f"\n{case['optimizer']} optimizer, tp2 pp2 dp2, {case['repeats']} repeats; MB are 10^6 bytes")
    rows = []
    for name, (full, copied, expected, derived, arena) in [
        *((f"rank {rank}", row) for rank, row in enumerate(zip(*values, strict=True))),
        ("sum", tuple(map(sum, values))),
    ]:
        sizes = [f"{nbytes / 1e6:.3f}" for nbytes in (full, copied, expected)]
        rows.append([name, *sizes, str(copied - expected), f"{derived / 1e6:.3f}", f"{arena / 1e6:.3f}"])
    print_table(["", "state MB", "copied MB", "expected MB", "off by B", "derived MB", "arena MB"], rows)
    iteration = case["iteration_ms_median"]
    rows = [
        ["ftckpt", case["blocked_ms_median"], iteration["with"]],
        ["synchronous copy of the full state", case["sync_copy_ms_median"], iteration["sync_copy"]],
        ["synchronous copy of the same bytes", case["sync_same_bytes_ms_median"], iteration[MODES[2]]],
        ["nothing", 0.0, iteration["without"]],
    ]
    print_table(["median", "blocked ms", "iteration ms"], [[n, f"{b:.2f}", f"{i:.1f}"] for n, b, i in rows])
    together = case["memcpy_gb_per_sec_together"]
    print(
        f"blocked, against a synchronous copy: {case['ratio']:.3f} of the full state's, "
        f"{case['ratio_same_bytes']:.3f} of the same bytes'; {case['boundary_ms_median']:.2f} ms at the boundary, "
        f"{case['fence_ms_median']:.2f} ms at the fence\n"
        f"first snapshot, with the proof of replicas: {case['first_blocked_ms_median']:.0f} ms\n"
        f"physical limit: memcpy {case['memcpy_gb_per_sec_alone']:.2f} GB/s for one rank alone, {together:.2f} GB/s "
        f"each for {RANKS} at once\n"
        f"copy thread: {case['copy_gb_per_sec']:.2f} GB/s, {case['copy_gb_per_sec'] / together:.0%} of the latter, "
        f"{case['copy_ms_median']:.1f} ms per snapshot, of which {case['copy_cpu_ms_median']:.1f} ms on a core"
    )


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise of the bytes; empty where all is well."""
    return [
        f"{case['optimizer']}: a rank is off by {case['max_difference_bytes']} bytes, more than one chunk"
        for case in cases
        if not case["max_difference_bytes"] <= case["chunk_bytes"]
    ]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--arena", type=Path, default=Path("/dev/shm"), help="a tmpfs for the arenas")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run both cases; returns the exit code."""
    args = parse_args(argv)
    if args.repeats < 1:
        print("--repeats: at least 1", file=sys.stderr)
        return 2
    where = environment(argv, "benchmarks/capture.py")
    cases = []
    for optimizer in OPTIMIZERS:
        cases.append(run_case(optimizer, args))
        show(cases[-1])
    write_json(args.json, {"benchmark": "capture", "environment": where, "cases": cases})
    hardware = where["hardware"]
    print(f"\n{RANKS} ranks share {hardware['cores']} cores ({hardware['cpu']}): copying takes them from training")
    problems = verdict(cases)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
