"""What protection takes from training beside busy cores: iterations, snapshots that are left out, the SMP's cores.

    python benchmarks/protection.py [--beside CHECKOUT] [--repeats 5] [--iterations 60] [--mib 96] [--json FILE]

Ranks of one node, one more than there are cores, compute all the time; each holds so much state. Runs take turns with
``--ftckpt-protect none`` and with default settings, which protect by node parity, and so does the ftckpt of another
``--beside`` checkout. An iteration counts from the barrier before it to the one behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parent.parent))  # behind PYTHONPATH, which names the ftckpt to measure

from benchmarks.common import environment, print_table, write_json
from ftckpt.config import Config
from ftckpt.group import Group
from ftckpt.job.checkpointer import Checkpointer
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.store.directory import SMP_LOCK_NAME, clean_job
from ftckpt.store.locks import holder_of

ROOT = Path(__file__).resolve().parent.parent
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


def rank_main(rank: int, ranks: int, folder: Path, settings: Mapping[str, Any], job: Mapping[str, int]) -> None:
    """One rank; rank 0 leaves what it has seen in ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    config = Config(enabled=True, job=folder.name, node="node", events=str(folder / "events"), **settings)
    state = State(rank, ranks, job["mib"] << 20)
    members = tuple(RankPlace({"dp": index}, "node") for index in range(ranks))
    checkpointer = Checkpointer(config, state, Topology(rank, members, {"dp": ranks}), Group(60.0))
    checkpointer.restore()
    left, product = torch.randn(512, 512), torch.empty(512, 512)
    lengths, used_secs, begun = [], 0.0, 0.0
    for iteration in range(1, WARM_UP + job["iterations"] + 1):
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
    if rank == 0:
        secs = time.time() - begun
        seen = {
            "iteration_secs": statistics.median(lengths[WARM_UP:]), "begun": begun, "secs": secs,
            "smp_cores": (smp_secs(checkpointer.node_dir) - used_secs) / secs,
        }  # fmt: skip
        (folder / "seen.json").write_text(json.dumps(seen))
    checkpointer.close()
    dist.destroy_process_group()


def smp_secs(node_dir: Path) -> float:
    """Processor time of the node's SMP; 0 where there is none."""
    lock = node_dir / SMP_LOCK_NAME
    pid = holder_of(lock) if lock.exists() else None
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(tree: Path, protect: str, job: Mapping[str, int], ranks: int) -> dict[str, float]:
    """One job with the ftckpt of ``tree``."""
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-bench-protection-"))
    settings = {"protect": protect}
    command = [sys.executable, str(Path(__file__).resolve()), "--rank"]
    environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    try:
        processes = [
            subprocess.Popen([*command, json.dumps([rank, ranks, str(folder), settings, job])], env=environ)
            for rank in range(ranks)
        ]
        if any([process.wait(600) for process in processes]):
            raise SystemExit(f"a rank failed: {tree}, protect {protect}")
        return result(folder, ranks)
    finally:
        clean_job(Path("/dev/shm"), folder.name)
        shutil.rmtree(folder)


def result(folder: Path, ranks: int) -> dict[str, float]:
    """What is counted of the iterations that count."""
    seen: dict[str, float] = json.loads((folder / "seen.json").read_text())
    lines = (folder / "events" / "rank0.jsonl").read_text().splitlines()
    counted = [event["event"] for event in map(json.loads, lines) if event["time"] >= seen["begun"]]
    for name, event in (("taken", "snapshot"), ("left_out", "skipped"), ("protected", "protected")):
        seen[name] = counted.count(event)
    return seen


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["--rank"]:
        rank, ranks, folder, settings, job = json.loads(argv[1])
        rank_main(rank, ranks, Path(folder), settings, job)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="another checkout of ftckpt, measured in turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--mib", type=int, default=96, help="state of a rank")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    trees = {"here": ROOT} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    ranks, job = len(os.sched_getaffinity(0)) + 1, {"mib": arguments.mib, "iterations": arguments.iterations}
    runs: dict[tuple[str, str], list[dict[str, float]]] = {
        (name, protect): [] for name in trees for protect in ("none", "auto")
    }
    for repeat in range(arguments.repeats):
        for case in list(runs)[:: 1 if repeat % 2 else -1]:
            runs[case].append(run(trees[case[0]], case[1], job, ranks))
    rows = [case_row(*case, runs[case], runs[case[0], "none"]) for case in runs]
    heads = ("ftckpt", "protect", "iteration ms", "to none (min-max)", "taken", "left out", "protected", "SMP cores")
    print_table(heads, rows)
    if arguments.json:
        cases = [{"ftckpt": name, "protect": protect, "runs": runs[name, protect]} for name, protect in runs]
        write_json(arguments.json, {"environment": environment(argv, "benchmarks/protection.py"), "cases": cases})
    return 0


def case_row(
    name: str, protect: str, runs: Sequence[Mapping[str, float]], alone: Sequence[Mapping[str, float]]
) -> list[str]:
    ratios = [run["iteration_secs"] / other["iteration_secs"] for run, other in zip(runs, alone, strict=True)]

    def middle(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    return [
        name, protect, f"{1e3 * middle('iteration_secs'):.0f}",
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
        *(f"{middle(key):.0f}" for key in ("taken", "left_out", "protected")), f"{middle('smp_cores'):.2f}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
