"""Bytes that each rank copies for a snapshot, counted where they are copied, against its share of the state.

Tensor 2 x pipeline 2 x data 2, once with the distributed optimizer and once without it: only then are there large
replica sets.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.common import attach, print_table
from tests.support.pool import run_ranks

LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
RANKS = 8
OPTIMIZERS = {"distributed": [], "non-distributed": ["--no-distributed-optimizer"]}
FULL_SIZE = ["--layers", "4", "--hidden", "512", "--seq", "32"]
QUICK_SIZE = ["--layers", "2", "--hidden", "64", "--seq", "32"]
CHUNK_MIB = 1
"""Small: the check of bytes is as sharp as a chunk."""
TIMEOUT_SECS = 300.0


class Report(NamedTuple):
    """Bytes of one rank: of its state, of its share, of weights that follow from masters, and of each snapshot."""

    full: int
    expected: int
    derived: int
    copied: list[int]


class CopyMeter:
    """Counts the bytes that really go through ``copy_chunk``."""

    def __init__(self) -> None:
        from ftckpt.capture import copier

        self.nbytes = 0
        self._copy_chunk = copier.copy_chunk
        # In the module: every schedule calls it by its name there.
        copier.copy_chunk = self._measured

    def _measured(self, tensors: Any, copy: Any, *args: Any, **kwargs: Any) -> None:
        self._copy_chunk(tensors, copy, *args, **kwargs)
        self.nbytes += sum(s.numel * tensors[s.piece].element_size() for s in copy.segments)


def share_of(job: Any) -> Report:
    """Collective. A replica set is every rank that describes the same range of the same logical tensor."""
    from ftckpt.megatron.state import MegatronState

    described = MegatronState(job.model, job.optimizer, job.scheduler, {}).describe()
    raw = [piece for piece in described.stepped if not follows_from_master(piece)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, [json.dumps(piece.fragment.to_json()) for piece in raw])
    count = Counter(name for names in gathered for name in names)
    mine = zip(gathered[dist.get_rank()], raw, strict=True)
    expected = sum(piece.fragment.nbytes / count[name] for name, piece in mine)
    expected += sum(piece.fragment.nbytes for piece in described.volatile)
    others = sum(p.fragment.nbytes for p in described.stepped if not p.fragment.key.startswith("weight/"))
    weights = sum(parameter.nbytes for chunk in job.model for parameter in chunk.parameters())
    derived = sum(p.fragment.nbytes for p in described.stepped) - sum(p.fragment.nbytes for p in raw)
    return Report(weights + others, round(expected), derived, [])


def follows_from_master(piece: Any) -> bool:
    """Whether rounding the fp32 master gives the weight, bit for bit."""
    if piece.derived_from is None:
        return False
    rounded = piece.derived_from.to(piece.tensor.dtype)
    # As integers: NaN differs from itself, and 0.0 equals -0.0.
    return torch.equal(rounded.view(torch.int16), piece.tensor.view(torch.int16))


def measure(rank: int, world_size: int, argv: Sequence[str], rounds: int, folder: Path) -> Report:
    """One rank's run, with a snapshot in each iteration."""
    import train_gpt

    warnings.filterwarnings("ignore", module="megatron")
    job = train_gpt.build(train_gpt.parse_args(argv))
    meter = CopyMeter()
    checkpointer = attach(job, folder, "shares", chunk_size=f"{CHUNK_MIB}MiB", objects_size="1MiB")
    report = share_of(job)
    for _ in range(rounds):
        train_gpt.train_step(job)
        meter.nbytes = 0
        checkpointer.step(job.iteration)
        checkpointer.fence()
        if checkpointer.begun == job.iteration:  # without a free slot it is left out
            report.copied.append(meter.nbytes)
    dist.barrier()
    checkpointer.close()
    return report


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
    """What the ranks measured, put together; of each rank the snapshot that is off by most."""
    counts = [max(r.copied, key=lambda nbytes, r=r: abs(nbytes - r.expected)) for r in reports]  # type: ignore[misc]
    return {
        "layout": LAYOUT, "optimizer": optimizer, "rounds": len(reports[0].copied), "chunk_bytes": CHUNK_MIB << 20,
        "full_bytes_per_rank": [r.full for r in reports], "bytes_per_rank": counts,
        "expected_bytes_per_rank": [r.expected for r in reports],
        "derived_bytes_per_rank": [r.derived for r in reports],
        "max_difference_bytes": max(abs(count - r.expected) for count, r in zip(counts, reports, strict=True)),
    }  # fmt: skip


def show(case: Mapping[str, Any]) -> None:
    """Print one case: a line per rank, and the sums."""
    print(f"\n{case['optimizer']} optimizer, tp2 pp2 dp2, {case['rounds']} snapshots; MB are 10^6 bytes")
    columns = [case[f"{name}_per_rank"] for name in ("full_bytes", "bytes", "expected_bytes", "derived_bytes")]
    ranks = [*zip(*columns, strict=True)]
    lines = [(f"rank {rank}", row) for rank, row in enumerate(ranks)] + [("sum", tuple(map(sum, columns)))]
    cells = [[name, *(f"{nbytes / 1e6:.3f}" for nbytes in row), str(row[1] - row[2])] for name, row in lines]
    print_table(["", "state MB", "copied MB", "expected MB", "derived MB", "off by B"], cells)


def verdict(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """What breaks the promise of the bytes; empty where all is well."""
    return [
        f"{case['optimizer']} optimizer: a rank is off by {case['max_difference_bytes']} bytes, more than one chunk"
        for case in cases
        if not case["max_difference_bytes"] <= case["chunk_bytes"]
    ]
