"""What a snapshot costs: bytes that each rank copies, host memory, and how long training stands still.

Trains a GPT with Megatron-core, tensor 2 x pipeline 2 x data 2, eight processes on this machine, once with the
distributed optimizer and once with the replicated one. In turn, iteration by iteration: a snapshot by ftckpt, a
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
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "launch")]

from benchmarks.common import environment, median_ms, memcpy_rate, print_table, write_json
from ftckpt.testing.pool import run_ranks

LAYOUT = {"tp": 2, "pp": 2, "dp": 2}
RANKS = 8
MODES = ("with", "sync_copy", "sync_same_bytes", "without")
OPTIMIZERS = {"distributed": [], "replicated": ["--no-distributed-optimizer"]}
CHUNK_MIB = 1
MIB = 1 << 20
MEMCPY_BYTES = 64 * MIB
TIMEOUT_SECS = 300.0


@dataclass
class Report:
    """What one rank measured; every list of seconds has one entry per repeat."""

    bytes_copied: int = 0
    expected_bytes: int = 0
    derived_bytes: int = 0
    full_bytes: int = 0
    arena_bytes: int = 0
    first_blocked_secs: float = 0.0
    blocked_secs: list[float] = field(default_factory=list)
    sync_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    iteration_secs: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    copy_secs: list[float] = field(default_factory=list)
    copy_cpu_secs: list[float] = field(default_factory=list)
    memcpy_alone: float = 0.0
    memcpy_together: float = 0.0


class CopyMeter:
    """Counts what really goes through ``copy_chunk``, per snapshot, with wall and CPU time of its thread."""

    def __init__(self) -> None:
        from ftckpt.capture import copier

        self.nbytes, self.secs, self.cpu_secs = 0, 0.0, 0.0
        self._lock = threading.Lock()
        self._copy_chunk = copier.copy_chunk
        copier.copy_chunk = self._measured

    def take(self) -> tuple[int, float, float]:
        """Bytes, seconds and CPU seconds since the last call."""
        with self._lock:
            taken = self.nbytes, self.secs, self.cpu_secs
            self.nbytes, self.secs, self.cpu_secs = 0, 0.0, 0.0
        return taken

    def _measured(self, tensors: Any, copy: Any, *args: Any, **kwargs: Any) -> None:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        self._copy_chunk(tensors, copy, *args, **kwargs)
        with self._lock:
            self.secs += time.perf_counter() - begin
            self.cpu_secs += time.thread_time() - cpu_begin
            self.nbytes += sum(s.numel * tensors[s.piece].element_size() for s in copy.segments)


@dataclass(frozen=True)
class Share:
    """What this rank holds, and its part of it, from the descriptions of all ranks."""

    full: list[torch.Tensor]
    part: list[torch.Tensor]
    derived_bytes: int
    expected_bytes: int


def share_of(job: Any, objects: Mapping[str, Any], rank: int) -> Share:
    """Collective. A replica set is every rank that describes the same range of the same logical tensor."""
    from ftckpt.megatron.state import MegatronState

    described = MegatronState(job.model, job.optimizer, job.scheduler, objects).describe()
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


def synchronous(tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
    """A copy into memory that was allocated and touched before; calling it returns the seconds it took."""
    targets = [torch.zeros_like(tensor) for tensor in tensors]

    def copy() -> float:
        begin = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        return time.perf_counter() - begin

    return copy


def measure(rank: int, world_size: int, argv: Sequence[str], repeats: int, folder: Path) -> Report:
    """One rank's run: one round to warm up, ``repeats`` rounds of four iterations, one to end the last."""
    import train_gpt

    job = train_gpt.build(train_gpt.parse_args(argv))
    report = Report()
    report.memcpy_alone, report.memcpy_together = bandwidth(rank)
    meter = CopyMeter()
    checkpointer = attach(job, folder)
    share = share_of(job, {}, rank)
    report.full_bytes = sum(tensor.nbytes for tensor in share.full)
    report.derived_bytes, report.expected_bytes = share.derived_bytes, share.expected_bytes
    copies = {"sync_copy": synchronous(share.full), "sync_same_bytes": synchronous(share.part)}
    for iteration in range(1, len(MODES) * (repeats + 1) + 1):
        train_gpt.train_step(job) if iteration == 1 else None
        mode = MODES[(iteration - 1) % len(MODES)]
        dist.barrier()  # as after the optimizer step of a real job, all ranks begin to copy together
        begin = time.perf_counter()
        checkpointer.step(iteration - 1)  # takes one each time ``mode`` is "with", returns at once otherwise
        sync_secs = copies[mode]() if mode in copies else 0.0
        train_gpt.train_step(job)
        secs = time.perf_counter() - begin
        nbytes, copy_secs, copy_cpu_secs = meter.take()
        if iteration > len(MODES):
            report.iteration_secs[mode].append(secs)
            report.sync_secs[mode].append(sync_secs)
            if mode == "with":
                report.bytes_copied = max(nbytes, report.bytes_copied)
                report.copy_secs.append(copy_secs)
                report.copy_cpu_secs.append(copy_cpu_secs)
    report.arena_bytes = arena_bytes(folder, rank)
    dist.barrier()
    checkpointer.close()
    report.first_blocked_secs, *report.blocked_secs = blocked_secs(folder / "events", rank)
    return report
