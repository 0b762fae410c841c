"""The cost of a snapshot per iteration on one device: ftckpt's schedules, its peers and plain copies.

    python benchmarks/device.py --out DIR

One process. Each system takes turns with ``off`` in blocks of iterations; the table has medians of pairs. README.md
describes its columns. The exit code is 1 if a goal is missed, with a line for each. It also runs on a CPU
(``--device cpu --tiny``), where its numbers mean nothing and no goal counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# First: if the working folder has another revision's ftckpt, that is measured.
sys.path.insert(0, os.getcwd())

import ftckpt
from benchmarks.common import ROOT, environment, print_table, scratch
from benchmarks.device_jobs import CASES, JOBS, Job
from benchmarks.device_systems import PEERS, SYSTEMS, Ftckpt
from benchmarks.systems import System

DEFAULT_SYSTEMS = "nothing,plain-batch,bubble-smp,bubble,lm-resiliency,dcp-stage,torch_checkpointing,plain"
"""Both cases of them take seven minutes of an H200."""
NOISE, OURS = "nothing", "bubble-smp"
MAX_RATIO = 1.005
HEADS = ["off_ms", "ratio", "q1..q3", "blocked", "most", "cpu", "launch+", "waits"]
HEADS += ["opt+", "wait+", "gap_b", "gap_f", "GB/s", "host_cpu+"]


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=default_device, help="default: %(default)s")
    for flag, default, text in (
        ("cases", "launch,compute", ",".join(CASES)),
        ("jobs", "plain", ",".join(JOBS)),
        ("systems", DEFAULT_SYSTEMS, ",".join(SYSTEMS)),
        ("rounds", 3, "of both blocks"),
        ("each", 4, "iterations of a block that count"),
        ("out", os.environ.get("OUT", "."), "folder for device.json"),
        ("budget-secs", 390.0, "each case has its part; systems that would begin later are left out"),
    ):
        kind, help_ = type(default), f"{text}; default: {default}"
        parser.add_argument("--" + flag, type=kind, default=default, help=help_)
    parser.add_argument("--tiny", action="store_true", help="one small case instead of --cases")
    return parser.parse_args(argv)


def machine_cpu_secs() -> float:
    """Seconds that all processes of this machine have run."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


class Side:
    """Iterations of one kind, ``off`` or with the system, and their processor time."""

    def __init__(self, system: System | None) -> None:
        self._system = system
        self.rows: list[dict[str, float]] = []
        self._machine_secs: list[float] = []
        self._process_secs: list[float] = []

    def run(self, job: Job, each: int) -> None:
        """One block; its first iteration does not count."""
        job.iterate(self._system)
        machine, process = machine_cpu_secs(), time.process_time()
        self.rows += [job.iterate(self._system) for _ in range(each)]
        self._machine_secs.append((machine_cpu_secs() - machine) / each)
        self._process_secs.append((time.process_time() - process) / each)
        if self._system is not None:
            self._system.fence()

    def cpu_ms(self) -> tuple[float, float]:
        """The machine's and this process's, per iteration."""
        return statistics.median(self._machine_secs) * 1e3, statistics.median(self._process_secs) * 1e3


def measure(job: Job, system: System, rounds: int, each: int) -> dict[str, Any]:
    """Blocks of ``off`` and of the system in turn, compared by pairs of iterations."""
    off, on = Side(None), Side(system)
    for number in range(rounds):
        for side in (off, on) if number % 2 == 0 else (on, off):
            side.run(job, each)
    pairs = list(zip(on.rows, off.rows, strict=True))
    ratios = sorted(with_it["total"] / without["total"] for with_it, without in pairs)
    more = {key: statistics.median(a[key] - b[key] for a, b in pairs) for key in on.rows[0]}
    waits = more.pop("waits", 0.0)
    blocked = [row["save"] + row["fence"] for row in on.rows]
    (machine_on, process_on), (machine_off, process_off) = on.cpu_ms(), off.cpu_ms()
    return {
        "ratio": statistics.median(ratios),
        "ratio_quarter": ratios[len(ratios) // 4],
        "ratio_three_quarters": ratios[-1 - len(ratios) // 4],
        "off_ms": statistics.median(row["total"] for row in off.rows) * 1e3,
        "more_ms": {key: secs * 1e3 for key, secs in more.items()},
        "waits_more": waits,
        "blocked_ms": statistics.median(blocked) * 1e3,
        "blocked_ms_most": max(blocked) * 1e3,
        "blocked_cpu_ms": statistics.median(row["blocked_cpu"] for row in on.rows) * 1e3,
        "machine_cpu_ms_more": machine_on - machine_off,
        "process_cpu_ms_more": process_on - process_off,
        "notes": system.notes(),
        "totals_ms": {
            name: [round(row["total"] * 1e3, 3) for row in side.rows] for name, side in (("off", off), ("on", on))
        },
    }


def run_system(job: Job, name: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one system; if it fails, its error."""
    kind, options = SYSTEMS[name]
    system, row = None, dict[str, Any]()
    try:
        system = kind(job, folder, **options)
        for _ in range(3):  # systems allocate at the first ones
            job.iterate(system)
        system.settle()
        row = measure(job, system, args.rounds, args.each)
        if isinstance(system, Ftckpt) and name in ("bubble", "bubble-smp"):
            row |= system.restored()
    except Exception as error:  # noqa: BLE001 - a peer that fails is a row
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    try:
        if system is not None:
            system.close()
    except Exception as error:  # noqa: BLE001
        row["close_error"] = repr(error)[:200]
    del system
    gc.collect()
    shutil.rmtree(folder, ignore_errors=True)
    return row


class Run:
    """All jobs, cases and systems of the command; ``device.json`` has each row when it is measured."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self._args, self._folder, self._begin_secs = args, folder, time.monotonic()
        self._device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        self.rows: dict[str, dict[str, Any]] = {}
        about = environment(sys.argv[1:], "benchmarks/device.py")
        package = os.path.relpath(ftckpt.__path__[0], ROOT)
        self._out = {"benchmark": "device", "environment": about, "package": package, "rows": self.rows}

    def measure(self) -> None:
        cases = ["tiny"] if self._args.tiny else self._args.cases.split(",")
        pairs = [(kind, case) for kind in self._args.jobs.split(",") for case in cases]
        for number, (kind, case) in enumerate(pairs, 1):
            self._measure_case(kind, case, self._args.budget_secs * number / len(pairs))
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure_case(self, kind: str, case: str, until_secs: float) -> None:
        job = JOBS[kind](case, self._device)
        gigabytes = sum(t.nbytes for t in job.tensors.values()) / 1e9
        self.rows[f"{kind}/{case}/job"] = {"error": f"{gigabytes:.3f} GB, {job.num_micros} micro-batches"}
        for number, name in enumerate(self._args.systems.split(",")):
            if kind == "megatron" and SYSTEMS[name][0] not in (System, Ftckpt):
                continue
            key, begin = f"{kind}/{case}/{name}", time.monotonic()
            if begin - self._begin_secs < until_secs:
                row = run_system(job, name, f"{self._folder}/{kind}{case}{number}", self._args)
            else:
                row = {"error": "left out: no time"}
            self.rows[key] = row | {"took_secs": time.monotonic() - begin}
            print(key, json.dumps({k: v for k, v in self.rows[key].items() if k != "totals_ms"}), flush=True)
            self.write()

    def write(self) -> None:
        Path(self._args.out, "device.json").write_text(json.dumps(self._out, indent=1) + "\n")


def missed(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A line per missed goal; systems that did not run are not compared."""
    lines = []
    for place in dict.fromkeys(key.rpartition("/")[0] for key in rows):
        found = {name: row for name in SYSTEMS if "ratio" in (row := rows.get(f"{place}/{name}", {}))}
        if OURS not in found:
            lines.append(f"{place}: {OURS} did not run")
            continue
        ours, noise = found[OURS], found.get(NOISE, {"ratio_three_quarters": 0.0})
        if ours["ratio"] > max(MAX_RATIO, noise["ratio_three_quarters"]):
            lines.append(f"{place}: an iteration takes {ours['ratio']:.4f}, more than {MAX_RATIO}")
        if not ours.get("exact"):
            lines.append(f"{place}: the restored state differs")
        lines += [
            f"{place}: {OURS} blocks {ours['blocked_ms']:.2f} ms, {name} {row['blocked_ms']:.2f}"
            for name, row in found.items()
            if SYSTEMS[name][0] in PEERS and ours["blocked_ms"] >= row["blocked_ms"]
        ]
    return lines


def show(rows: dict[str, dict[str, Any]]) -> None:
    """Prints the table, the errors of rows without numbers, and the parts of restores."""
    lines = []
    for key, row in rows.items():
        if "ratio" not in row:
            print(f"{key}: {row.get('error', '?')[:70]}")
            continue
        more, notes = row["more_ms"], row["notes"]
        numbers = [row["blocked_ms"], row["blocked_ms_most"], row["blocked_cpu_ms"], more.get("launch", 0.0)]
        numbers += [row["waits_more"]]
        numbers += [more.get(name, 0.0) for name in ("optimizer", "wait", "gap_boundary", "gap_fence")]
        quartiles = f"{row['ratio_quarter']:.3f}..{row['ratio_three_quarters']:.3f}"
        texts = [f"{row['off_ms']:.1f}", f"{row['ratio']:.4f}", quartiles, *(f"{number:.2f}" for number in numbers)]
        lines.append([key, *texts, f"{notes.get('gb_per_sec', 0.0):.1f}", f"{row['machine_cpu_ms_more']:.0f}"])
    print_table(["job/case/system", *HEADS], lines)
    for key, row in rows.items():
        if "restored" in row:
            parts = (f"{part} {secs * 1e3:.1f}" for part, secs in row["restored"]["part_secs"].items())
            print(f"{key}: restore {row['restore_secs'] * 1e3:.1f} ms: {', '.join(parts)}")


def main(argv: list[str]) -> int:
    """Measures and prints the table; returns the exit code."""
    args = parse_args(argv)
    on_cuda = args.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
        if "megatron" in args.jobs:
            from tests import standin

            standin.install()
    begin = time.monotonic()
    with scratch(Path("/dev/shm")) as [folder]:
        store = dist.FileStore(f"{folder}/rendezvous", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo", store=store, rank=0, world_size=1)
        run = Run(args, str(folder))
        try:
            run.measure()
        finally:
            run.write()
    show(run.rows)
    print(f"{time.monotonic() - begin:.0f} s")
    lines = [] if args.tiny else missed(run.rows)
    for line in lines:
        print(f"MISSED: {line}", file=sys.stderr)
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
