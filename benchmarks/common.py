"""What every benchmark shares: where and with what it ran, medians, tables, memory bandwidth, the JSON file."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ftckpt", "torch", "megatron-core", "numpy")


def environment(argv: Sequence[str], script: str) -> dict[str, Any]:
    """Hardware, versions, command, date and revision: what a number means nothing without."""
    return {
        "hardware": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "device": "none: CPU stand-in for CUDA",
            "load_average_at_start": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "command": shlex.join(["python", script, *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "revision": _revision(),
    }


def median_ms(secs: Iterable[float]) -> float:
    """The median of some seconds, in milliseconds; NaN of none."""
    values = list(secs)
    return statistics.median(values) * 1e3 if values else float("nan")


def bandwidth(rank: int, nbytes: int, rounds: int = 3) -> tuple[float, float]:
    """Bytes per second of a plain copy of ``nbytes``, the best of some rounds: of rank 0 while the others wait
    (0.0 on those), and of each rank while all copy."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    alone, together = [0.0], []
    dist.barrier()
    for _ in range(rounds if rank == 0 else 0):
        alone.append(nbytes / synchronous_secs([target], [source]))
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        dist.barrier()
        together.append(4 * nbytes / (time.perf_counter() - begin))
    return max(alone), max(together)


class CopyMeter:
    """Counts what really goes through ``copy_chunk``, with wall and CPU time of its thread."""

    def __init__(self) -> None:
        from ftckpt.capture import copier

        self.clear()
        self._copy_chunk = copier.copy_chunk
        copier.copy_chunk = self._measured

    def clear(self) -> None:
        """Begin anew; only while nothing is copied."""
        self.nbytes, self.secs, self.cpu_secs = 0, 0.0, 0.0

    def _measured(self, tensors: Any, copy: Any, *args: Any, **kwargs: Any) -> None:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        self._copy_chunk(tensors, copy, *args, **kwargs)
        self.secs += time.perf_counter() - begin
        self.cpu_secs += time.thread_time() - cpu_begin
        self.nbytes += sum(s.numel * tensors[s.piece].element_size() for s in copy.segments)


def synchronous(tensors: Sequence[torch.Tensor]) -> Callable[[], float]:
    """A copy into memory that was allocated and touched before; calling it returns the seconds it took."""
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    return lambda: synchronous_secs(targets, tensors)


def synchronous_secs(targets: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> float:
    """Copy; returns the seconds it took."""
    begin = time.perf_counter()
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)
    return time.perf_counter() - begin


@dataclass
class Snapshot:
    """How long one snapshot blocked the training thread of one rank, and where."""

    boundary_secs: float
    fence_secs: float = 0.0

    @property
    def secs(self) -> float:
        """In all."""
        return self.boundary_secs + self.fence_secs


def from_events(folder: Path, rank: int) -> tuple[int, list[Snapshot]]:
    """Bytes of the arena's files, and what each snapshot cost training."""
    arena_bytes, snapshots = 0, []
    for line in (folder / f"rank{rank}.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "arena":
            arena_bytes = sum(file.stat().st_size for file in Path(event["path"]).iterdir())
        elif event["event"] == "snapshot":
            snapshots.append(Snapshot(event["blocked_secs"]))
        elif event["event"] == "fence" and snapshots:
            snapshots[-1].fence_secs += event["blocked_secs"]
    return arena_bytes, snapshots


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their widest cell, the first to the left, numbers to the right."""
    lines = [heads, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        first, *rest = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]), flush=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the result, readable in a diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def _revision() -> str | None:
    """The commit, marked where tracked files of the measured code differ from it."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "ftckpt"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("-dirty" if changed else "")
