"""Bytes that flushes write to storage with and without increments, for a small MoE model and a LoRA.

    python benchmarks/increments.py --json FILE

One process trains on the CPU with AdamW and flushes every ``--interval`` iterations. The MoE model has ``--experts``
experts per layer, and each token takes one of the first ``--reached``. The LoRA trains rank 8 on frozen layers.
Without increments: ``persist_keep`` 1, which switches them off. The first two flushes are always complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common import conclude, environment, parser_of, print_table, scratch

WIDTH, LAYERS, TOKENS = 256, 4, 64
CHUNK = "64KiB"


class Experts(nn.Module):
    """A layer of experts of which a token takes one; those that none takes get no gradient."""

    def __init__(self, experts: int, reached: int) -> None:
        super().__init__()
        self.reached, self.router = reached, nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x)[:, : self.reached].softmax(-1)
        best, chosen = weights.max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            mine = chosen == number
            out[mine] = best[mine, None] * self.experts[number](x[mine])
        return x + out


class Adapted(nn.Module):
    """A frozen layer and its low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4 * WIDTH).requires_grad_(False)
        self.down = nn.Linear(4 * WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = x + self.down(self.base(x).relu()) + self.b(self.a(x))
        return adapted


def train(options: argparse.Namespace) -> None:
    """The process of a job: prints the bytes of each flush as JSON."""
    import ftckpt.torch

    config = ftckpt.Config(
        enabled=True, job=f"increments-{os.getpid()}", arena=str(options.arena),
        persist=str(options.place / "stored"), persist_interval=options.interval, persist_keep=options.keep,
        events=str(options.place / "events"), chunk_size=CHUNK, protect="none", interval=1, overhead_budget=0.0,
    )  # fmt: skip
    dist.init_process_group("gloo", store=dist.FileStore(str(options.place / "store"), 1), rank=0, world_size=1)
    torch.manual_seed(1)
    layers = [Experts(options.experts, options.reached) if options.job == "moe" else Adapted() for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-3)
    checkpointer = ftckpt.torch.attach(model, optimizer, None, {}, config)
    assert checkpointer is not None
    checkpointer.restore()
    iteration, flushed = 0, set[int]()
    while len(flushed) < options.flushes:
        iteration += 1
        optimizer.zero_grad(set_to_none=True)
        x = torch.randn(TOKENS, WIDTH)
        (model(x) - x.roll(1, 1)).square().mean().backward()
        optimizer.step()
        checkpointer.step(iteration)
        if checkpointer.persisted is not None:
            flushed.add(checkpointer.persisted.iteration)
        time.sleep(0.01)  # the SMP has a core
    checkpointer.close()
    lines = [json.loads(line) for path in (options.place / "events").glob("*.jsonl") for line in path.open()]
    found = sorted((one["iteration"], one["bytes"], one["secs"]) for one in lines if one["event"] == "flushed")
    print(json.dumps(found[: options.flushes]))


def measured(options: argparse.Namespace, job: str, keep: int, place: Path, arena: Path) -> dict[str, Any]:
    """The flushes of one job."""
    command = [sys.executable, __file__, *sys.argv[1:], "--job", job, "--keep", str(keep)]
    command += ["--place", str(place), "--arena", str(arena)]
    (place / "stored").mkdir(parents=True)
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    flushes = json.loads(done.stdout.splitlines()[-1])
    on_disk = sum(file.stat().st_size for file in (place / "stored").rglob("*") if file.is_file())
    shutil.rmtree(place)
    later = [nbytes for _, nbytes, _ in flushes[2:]]
    return {
        "job": job, "keep": keep, "bytes": [nbytes for _, nbytes, _ in flushes],
        "later_bytes": sum(later) / len(later), "secs": [secs for _, _, secs in flushes], "on_disk": on_disk,
    }  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__, arena=True, disk="where storage is")
    parser.add_argument("--interval", type=int, default=20)
    parser.add_argument("--flushes", type=int, default=8)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--reached", type=int, default=2)
    for name in ("--job", "--place"):
        parser.add_argument(name, type=Path if name == "--place" else str, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=int, default=3, help="persist_keep with increments")
    options = parser.parse_args()
    if options.job:
        train(options)
        return 0
    if options.quick:
        options.flushes = 4
    rows, cells = [], []
    with scratch(options.disk, options.arena) as (disk, arena):
        for job in ("moe", "lora"):
            on, off = (measured(options, job, keep, disk / f"{job}{keep}", arena) for keep in (options.keep, 1))
            rows += [on, off]
            sizes = [f"{one['later_bytes'] / 1e6:.2f} MB" for one in (off, on)]
            cells.append(
                [job, *sizes, f"{off['later_bytes'] / on['later_bytes']:.1f}", f"{on['on_disk'] / 1e6:.1f} MB"]
            )
    print_table(["job", "without, per flush", "with", "times fewer", "on disk with"], cells)
    missed = [f"{row[0]}: as many bytes" for row in cells if float(row[3]) < 1.5]
    content = {"environment": environment(sys.argv[1:], "benchmarks/increments.py"), "rows": rows}
    return conclude(options.json, content, missed, options.quick)


if __name__ == "__main__":
    sys.exit(main())
