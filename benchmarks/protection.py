"""What protection takes from training beside busy cores: iterations, snapshots that are left out, the SMP's cores.

    python benchmarks/protection.py [--repeats 5] [--iterations 60] [--mib 96] --json FILE

Ranks of one node, one more than there are cores, compute all the time; each holds so much state. Runs take turns with
``--ftckpt-protect none`` and with default settings, which protect by node parity. An iteration counts from the
barrier before it to the one after it.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.boundary import settings_of
from benchmarks.common import conclude, environment, parser_of, print_table, read_events
from ftckpt.config import Config
from ftckpt.group import Group
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.store.directory import SMP_LOCK_NAME
from ftckpt.store.locks import holder_of
from tests.support.pool import run_ranks

TIMEOUT_SECS = 600.0
WARM_UP = 10
"""Iterations that do not count: slots get their memory."""
MATMULS = 60
"""Of 512 by 512 in an iteration, some 8 ms each on a core that nobody else has."""


class State:
    """One tensor of this rank alone."""

    reshapes = False

    def __init__(self, rank: int, ranks: int, nbytes: int) -> None:
        self.own, self.iteration = torch.zeros(nbytes // 4), 0
        whole = Fragment.whole("own", "F32", (ranks, nbytes // 4), Box((rank, 0), (1, nbytes // 4)))
        self._described = Description((Piece(whole, self.own),), ())

    def describe(self) -> Description:
        return self._described

    def save_objects(self) -> dict[str, Any]:
        return {"iteration": self.iteration}

    def load_objects(self, objects: Any) -> None:
        self.iteration = objects["iteration"]

    def load_reshaped(self, objects: Any, iteration: int) -> None:
        raise NotImplementedError

    def finish_load(self) -> None: ...


def train(rank: int, ranks: int, settings: Mapping[str, Any], iterations: int, mib: int) -> dict[str, float]:
    """One rank; what it has seen of the iterations that count."""
    folder = Path(settings["arena"])
    config = Config(**settings, events=str(folder / "events" / "run"))
    state = State(rank, ranks, mib << 20)
    members = tuple(RankPlace({"dp": index}, "node") for index in range(ranks))
    checkpointer = Checkpointer(config, state, Topology(rank, members, {"dp": ranks}), Group(60.0))
    checkpointer.restore()
    left, product = torch.randn(512, 512), torch.empty(512, 512)
    lengths, used_secs, begun = [], 0.0, 0.0
    for iteration in range(1, WARM_UP + iterations + 1):
        if iteration == WARM_UP + 1:
            used_secs, begun = smp_secs(checkpointer.node_dir), time.time()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(MATMULS):
            torch.mm(left, left, out=product)
        checkpointer.fence()
        state.own.add_(1.0)
        state.iteration = iteration
        checkpointer.step(iteration)
        dist.barrier()
        lengths.append(time.perf_counter() - begin)
    smp_cores = (smp_secs(checkpointer.node_dir) - used_secs) / (time.time() - begun)
    checkpointer.close()
    counted = [event["event"] for event in read_events(folder, "run", rank) if event["time"] >= begun]
    events = {"taken": "snapshot", "left_out": "skipped", "protected": "protected"}
    return {
        "iteration_secs": statistics.median(lengths[WARM_UP:]), "smp_cores": smp_cores,
        **{name: counted.count(event) for name, event in events.items()},
    }  # fmt: skip


def smp_secs(node_dir: Path) -> float:
    """Processor time of the node's SMP; 0 where there is none."""
    lock = node_dir / SMP_LOCK_NAME
    pid = holder_of(lock) if lock.exists() else None
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(protect: str, iterations: int, mib: int) -> dict[str, float]:
    """One job; what its first rank has seen."""
    ranks = len(os.sched_getaffinity(0)) + 1
    with settings_of(Path("/dev/shm"), {"protect": protect}) as settings:
        results = run_ranks(train, ranks, settings, iterations, mib, timeout_secs=TIMEOUT_SECS, stand_in=False)
    seen: dict[str, float] = results[0].value
    return seen


def main(argv: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--mib", type=int, default=96, help="state of a rank")
    args = parser.parse_args(argv)
    about = environment(argv, "benchmarks/protection.py")
    runs: dict[str, list[dict[str, float]]] = {"none": [], "auto": []}
    for repeat in range(args.repeats):
        for protect in list(runs)[:: 1 if repeat % 2 else -1]:
            runs[protect].append(run(protect, args.iterations, args.mib))
    heads = ("protect", "iteration ms", "to none (min-max)", "taken", "left out", "protected", "SMP cores")
    print_table(heads, [case_row(protect, runs[protect], runs["none"]) for protect in runs])
    cases = [{"protect": protect, "runs": rows} for protect, rows in runs.items()]
    return conclude(args.json, {"benchmark": "protection", "environment": about, "cases": cases}, [])


def case_row(protect: str, runs: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]]) -> list[str]:
    ratios = [run["iteration_secs"] / other["iteration_secs"] for run, other in zip(runs, alone, strict=True)]

    def middle(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    return [
        protect, f"{1e3 * middle('iteration_secs'):.0f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        *(f"{middle(key):.0f}" for key in ("taken", "left_out", "protected")), f"{middle('smp_cores'):.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
