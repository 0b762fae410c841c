"""The cost of snapshots to a training job on the host: ftckpt and its peers, at the same frequencies.

    python benchmarks/cost.py --json FILE

Ranks train with each row's system in turn, a block of iterations each, on a host that has nothing else to do (idle)
and on one with as many spinning processes as cores (busy). Ratios compare complete iterations. FILE has each block
when it ends; the same command resumes. The exit code is 1 if a goal is missed, with a line for each. Nothing else
may run.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import cost_jobs
from benchmarks.common import Blocks, Tables, environment, parser_of, print_tables, quartiles, scratch, turns
from benchmarks.cost_jobs import SYSTEMS, Block
from benchmarks.systems import remove
from ftckpt.memory.directory import clean_job
from tests.support.pool import RankFailure, run_ranks

JOBS = ("plain", "megatron")
RANKS = 4
"""On one node, which protects them by itself: each has a partner, which a peer needs."""
TIMEOUT_SECS = 280.0
MAX_RATIO = {"idle": 1.01, "busy": 1.05}
"""An iteration with the default configuration / one without ftckpt."""
STORED_EVERY = 10
OFF, NOISE, DEFAULT = "off", "off again", "ftckpt"
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(100_000):\n        pass"


class Row(NamedTuple):
    """A line of the table; rows of a ``group`` save equally often and to the same place."""

    system: str
    options: dict[str, Any]
    group: str = ""
    is_stored: bool = False

    @property
    def every(self) -> int:
        return STORED_EVERY if self.group == "storage" else 1


STORED = {"interval": STORED_EVERY, "persist_interval": STORED_EVERY}
THREAD, PROCESS = {"process": False}, {"process": True}
ROWS: dict[str, Row] = {
    OFF: Row("off", {}),
    NOISE: Row("off", {}),
    "ftckpt, memory, auto": Row("ftckpt", {"protect": "none"}),
    "ftckpt, memory": Row("ftckpt", {"protect": "none", "interval": 1}),
    DEFAULT: Row("ftckpt", {}, "memory"),
    "ftckpt, each iteration": Row("ftckpt", {"interval": 1}, "memory"),
    "ftckpt, protected every 10": Row("ftckpt", {"interval": 1, "protect_interval": STORED_EVERY}),
    "ftckpt, and storage": Row("ftckpt", {"interval": 1, "persist_interval": STORED_EVERY}, is_stored=True),
    "torch.save": Row("torch.save", {}, "memory"),
    "DCP, thread": Row("DCP", THREAD, "memory"),
    "DCP, process": Row("DCP", PROCESS, "memory"),
    "DLRover": Row("DLRover", {}, "memory"),
    "lm-resiliency": Row("lm-resiliency", {}, "memory"),
    "torch_checkpointing": Row("torch_checkpointing", {}, "memory"),
    "ftckpt, storage": Row("ftckpt", STORED, "storage", True),
    "torch.save, storage": Row("torch.save", {}, "storage", True),
    "DCP, thread, storage": Row("DCP", THREAD, "storage", True),
    "DCP, process, storage": Row("DCP", PROCESS, "storage", True),
    "torch_checkpointing, storage": Row("torch_checkpointing", {}, "storage", True),
}
QUICK_ROWS = (OFF, NOISE, DEFAULT, "torch.save", "DLRover", "lm-resiliency", "ftckpt, storage")


class Sizes(NamedTuple):
    """State of a rank of the plain job; arguments of the Megatron job; the wait in which a device would compute;
    iterations of a block. All rows warm up until ``interval auto`` keeps its budget: memory gets faster with the age
    of a process."""

    mib: int
    script: tuple[str, ...]
    device_secs: float
    warm_up: int
    iterations: int


_BATCH = ("--micro-batch", "1", "--global-batch", str(RANKS), "--seq", "32")
FULL = Sizes(96, ("--layers", "4", "--hidden", "384", *_BATCH), 0.1, 200, 200)
QUICK = Sizes(6, ("--layers", "1", "--hidden", "64", *_BATCH), 0.01, 10, 10)


class Plan(NamedTuple):
    """A block to measure: ``repeat`` of a row, for a job, on a host with a load."""

    job: str
    load: str
    repeat: int
    row: str

    def __str__(self) -> str:
        return f"{self.job}, {self.load}, repeat {self.repeat + 1}, {self.row}"


def rows_of(job: str, rows: Sequence[str]) -> list[str]:
    """The rows of a job. Peers copy the same tensors in any framework: only the plain job has them."""
    return [row for row in rows if job == "plain" or ROWS[row].system in ("off", "ftckpt")]


def plans_of(jobs: Sequence[str], loads: Sequence[str], repeats: int, rows: Sequence[str]) -> list[Plan]:
    """All blocks, one of each row in turn; each repeat begins with another row."""
    return [
        Plan(job, load, repeat, row)
        for repeat in range(repeats)
        for job in jobs
        for load in loads
        for row in turns(rows_of(job, rows), 5 * repeat)
    ]


@contextlib.contextmanager
def load_of(kind: str) -> Iterator[None]:
    """``busy``: as many processes as cores spin, with the priority that ranks have."""
    cores = len(os.sched_getaffinity(0)) if kind == "busy" else 0
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(cores)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def run_block(
    plan: Plan, row: Row, sizes: Sizes, places: Sequence[Path], measure: Callable[..., Any] = cost_jobs.measure
) -> dict[str, Any]:
    """Starts the ranks once; the figures of the slowest of them, or the error. ``places``: a tmpfs, a disk."""
    name = f"bench-{uuid.uuid4().hex[:8]}"
    with scratch(*places) as (tmpfs, stored), cleaned(tmpfs, name):
        folder = stored if row.is_stored else tmpfs / "saved"
        counts = row.every, sizes.warm_up, sizes.iterations, sizes.mib, sizes.script, sizes.device_secs
        block = Block(plan.job, row.system, row.options, *counts, name, str(tmpfs), str(folder))
        options: dict[str, Any] = {"timeout_secs": TIMEOUT_SECS, "stand_in": plan.job in ("megatron", "deepspeed")}
        try:
            with load_of(plan.load):
                ranks = run_ranks(measure, RANKS, block, **options)
        except RankFailure as error:
            return {"error": str(error)[-2000:]}
    return block_of([rank.value for rank in ranks])


@contextlib.contextmanager
def cleaned(tmpfs: Path, name: str) -> Iterator[None]:
    """Removes everything of the job ``name`` at the end, also DLRover's files of that name."""
    try:
        yield
    finally:
        try:
            clean_job(tmpfs, name)
        finally:
            for left in (Path("/tmp/ckpt_sock") / name, *Path("/dev/shm").glob(f"*{name}*")):
                remove(left)
            os.sync()  # the next block must not wait for writes of this one


def block_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all ranks, combined: a job is as fast as its slowest rank."""
    steps = list(zip(*(rank["rows"] for rank in ranks), strict=True))
    return {
        "iteration_secs": max(rank["secs"] for rank in ranks) / len(steps),
        "cpu_secs": sum(rank["cpu_secs"] for rank in ranks) / len(steps),
        "memory_bytes": sum(rank["memory_bytes"] for rank in ranks),
        "network_bytes": max(rank["network_bytes"] for rank in ranks) / len(steps),
        "snapshots": sum(all(taken for *_, taken in step) for step in steps),
        "state_bytes": sum(rank["nbytes"] for rank in ranks),
        "stored_secs": ranks[0]["stored_secs"],
        **ranks[0]["notes"],
        "iterations": [round(max(secs for secs, *_ in step), 6) for step in steps],
        "blocked": [round(max(blocked for _, blocked, _ in step), 6) for step in steps],
    }


def missing_package(row: str) -> str:
    """The package that a row needs and that is not installed, or ""."""
    package = SYSTEMS[ROWS[row].system].package
    with contextlib.suppress(PackageNotFoundError):
        return "" if not package or version(package) else package
    return package


def figures_of(blocks: Sequence[Mapping[str, Any]], job: str, load: str, row: str) -> dict[str, Any]:
    """Medians over the repeats of a row; ratios are to ``off`` of the same repeat."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {row: {}, OFF: {}}
    for block in blocks:
        if (block["job"], block["load"]) == (job, load) and block["row"] in found and "error" not in block:
            found[block["row"]][block["repeat"]] = block
    mine, pairs = [*found[row].values()], [(found[row][at], found[OFF][at]) for at in found[row] if at in found[OFF]]
    if not pairs:
        return {}
    quarters = quartiles([block["iteration_secs"] / off["iteration_secs"] for block, off in pairs])
    snapshots = sum(block["snapshots"] for block in mine)
    blocked_secs = sum(sum(block["blocked"]) for block in mine)
    stored = [secs for block in mine for secs in block["stored_secs"]]
    return {
        "ratio": quarters.median,
        "ratio_quarter": quarters.first,
        "ratio_three_quarters": quarters.third,
        "iteration_ms": statistics.median(block["iteration_secs"] for block in mine) * 1e3,
        "blocked_ms": blocked_secs / snapshots * 1e3 if snapshots else None,
        "cpu_ms": statistics.median(block["cpu_secs"] for block in mine) * 1e3,
        "cpu_ms_more": statistics.median(block["cpu_secs"] - off["cpu_secs"] for block, off in pairs) * 1e3,
        "memory_bytes_more": statistics.median(block["memory_bytes"] - off["memory_bytes"] for block, off in pairs),
        "stored_secs": statistics.median(stored) if stored else None,
        "snapshots": snapshots,
        "iterations": sum(len(block["blocked"]) for block in mine),
        "protected": sum(block.get("protected", 0) for block in mine),
    }


def missed(tables: Tables) -> list[str]:
    """A line per missed goal; peers that did not run are not compared."""
    lines = []
    for place, table in tables.items():
        ours, noise, goal = table.get(DEFAULT), table.get(NOISE), MAX_RATIO[place.rpartition("/")[2]]
        if ours and noise and ours["ratio"] > max(goal, noise["ratio_three_quarters"]):
            quarters = f"{noise['ratio_quarter']:.3f} to {noise['ratio_three_quarters']:.3f}"
            lines.append(f"{place}: an iteration takes {ours['ratio']:.3f}, more than {goal}; off again {quarters}")
        for mine in (name for name in (DEFAULT, "ftckpt, storage") if name in table):
            if (blocked := table[mine].get("blocked_ms")) is None:
                lines.append(f"{place}: {mine}: " + ("no snapshot was taken" if table[mine] else "not measured"))
                continue
            peers = [name for name, row in ROWS.items() if row.group == ROWS[mine].group and row.system != "ftckpt"]
            others = {peer: table.get(peer, {}).get("blocked_ms") for peer in peers}
            lines += [
                f"{place}: {mine} blocks {blocked:.2f} ms a snapshot, {peer} {other:.2f}"
                for peer, other in others.items()
                if other is not None and blocked >= other
            ]
    return lines


HEADS = ["snapshots", "protected", "iteration ms", "to off", "quartiles", "blocked ms"]
HEADS += ["cpu ms", "more", "memory MB", "stored s"]


def cells(found: Mapping[str, Any], _: Any) -> list[str]:
    """A line of the table."""
    optional = {
        name: "" if (value := found[name]) is None else f"{value:.2f}" for name in ("blocked_ms", "stored_secs")
    }
    counts = [f"{found['snapshots']}/{found['iterations']}", str(found["protected"])]
    quarters = f"{found['ratio_quarter']:.3f}..{found['ratio_three_quarters']:.3f}"
    times = [f"{found['iteration_ms']:.1f}", f"{found['ratio']:.3f}", quarters, optional["blocked_ms"]]
    costs = [f"{found['cpu_ms']:.1f}", f"{found['cpu_ms_more']:+.1f}", f"{found['memory_bytes_more'] / 1e6:+.0f}"]
    return [*counts, *times, *costs, optional["stored_secs"]]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes the file; returns the exit code."""
    parser = parser_of(__doc__, arena=True, disk="where storage rows save")
    parser.add_argument("--repeats", type=int, help="default: 5, 2 with --quick")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, help="default: all, plain with --quick")
    parser.add_argument("--loads", nargs="+", choices=list(MAX_RATIO), default=list(MAX_RATIO), help="default: all")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help="default: all, or some with --quick")
    text = f"of a block, after as many of warm-up (default: {FULL.iterations}, which interval auto needs to settle)"
    parser.add_argument("--iterations", type=int, help=text)
    args = parser.parse_args(argv)
    sizes, repeats = (QUICK, 2) if args.quick else (FULL, 5)
    if args.iterations:
        sizes = sizes._replace(warm_up=args.iterations, iterations=args.iterations)
    jobs = args.jobs or (["plain"] if args.quick else JOBS)
    rows = args.rows or list(QUICK_ROWS if args.quick else ROWS)
    reasons = {row: f"{package} is not installed" for row in rows if (package := missing_package(row))}
    about = environment(argv, "benchmarks/cost.py", {one.package for one in SYSTEMS.values() if one.package})
    head = {"benchmark": "cost", "environment": about, "sizes": {**sizes._asdict(), "script": [*sizes.script]}}
    run = Blocks(args.json, {**head, "ranks": RANKS})
    plans = plans_of(jobs, args.loads, args.repeats or repeats, [row for row in rows if row not in reasons])

    def measure(plan: Plan) -> dict[str, Any]:
        return run_block(plan, ROWS[plan.row], sizes, (args.arena.absolute(), args.disk.absolute()))

    measure(plans[0])  # not counted: after a pause of the machine a block is up to 4 % faster
    run.measure(plans, measure, lambda block: f"iteration {block['iteration_secs'] * 1e3:.1f} ms")
    tables = {
        f"{job}/{load}": {row: figures_of(run.content["blocks"], job, load, row) for row in rows_of(job, rows)}
        for job in jobs
        for load in args.loads
    }
    print_tables(tables, HEADS, cells, reasons)
    return run.conclude(tables, reasons, missed(tables), args.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
