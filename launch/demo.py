"""Kills ranks of a training job and shows that it comes back from memory, bit for bit.

Trains a small language model on text with 8 ranks as two torchrun agents, two simulated nodes; with
Megatron-core or with DeepSpeed. Once undisturbed and without ftckpt: the reference. Then with ftckpt and
with faults:

  rank     one rank is killed by SIGKILL in the middle of an iteration
  writing  one rank is killed while it writes a slot of its arena
  all      all eight ranks are killed at once
  node     a node is lost: its agent, its ranks, its snapshot management process and its memory; another joins

Every loss and the hashes of the final state of every rank must be those of the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.testing.faults import Fault
from ftckpt.timeline.model import Recording
from ftckpt.timeline.read import TimelineError, read_recording
from ftckpt.timeline.write import remove_timeline, write_timeline
from launch import demo_measure, demo_report
from launch.demo_frameworks import FRAMEWORKS, SMALL, Framework
from launch.demo_measure import Comparison, FaultCost, Strike
from launch.demo_run import DemoError, Run, Watch, execute
from launch.demo_scenes import SCENES, WORLD_SIZE, NodeLoss, marks_of, plan_faults, victims

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The demo's own arguments, and those that go to the framework's script."""
    parser = argparse.ArgumentParser(
        prog="demo.sh",
        description=__doc__,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="megatron", help="default: megatron")
    parser.add_argument("--scene", choices=list(SCENES), help="this fault alone; default: all of them in one run")
    parser.add_argument("--iterations", type=int, help="default: 48, with --scene 16")
    parser.add_argument("--out", type=Path, help=f"where the report goes; default: {_defaults('out')}")
    args, training = parser.parse_known_args(argv)
    args.framework = FRAMEWORKS[args.framework]
    args.out = args.out or args.framework.out
    args.iterations = args.iterations or (16 if args.scene else 48)
    args.scenes = [args.scene] if args.scene else list(SCENES)
    if args.iterations < 4 * len(args.scenes):
        parser.error("--iterations: at least four for each fault")
    return args, training


def _epilog() -> str:
    jobs = "\n".join(f"  {name:10s} {framework.job}" for name, framework in FRAMEWORKS.items())
    return f"jobs:\n{jobs}\n\nAny other argument, --hidden 256 for example, goes to launch/{_defaults('script')}.py."


def _defaults(field: str) -> str:
    return " or ".join(str(getattr(framework, field)) for framework in FRAMEWORKS.values())


class Teller:
    """Prints what happens in a run, one line each."""

    def __init__(self, run: str, iterations: int, faults: Mapping[str, Fault | NodeLoss], every: int = 1) -> None:
        self._run = run
        self._iterations = iterations
        self._faults = faults
        self._every = every
        self._killed_at: float | None = None
        self._restored: dict[str, set[int]] = {}

    def __call__(self, kind: str, found: dict[str, Any]) -> None:
        if kind == "iteration":
            number = found["iteration"]
            if number % self._every == 0 or number == self._iterations:
                self._say(f"iteration {number:3d}  loss {found['loss']:.4f}  {found['loss_hex']}")
        elif kind == "fault":
            self._killed_at = time.time()
            name = next(name for name, fault in self._faults.items() if fault is found["fault"])
            self._say("KILLED: " + SCENES[name].what.format(found["iteration"]))
            if "protected" in found:
                self._say(f"        the snapshot of iteration {found['protected']} is protected")
        elif found["event"] == "rebuilt":
            self._say(f"REBUILT: {', '.join(found['shards'])} from {', '.join(found['sources'])}")
        elif found["event"] == "restored" and self._killed_at is not None:
            self._came_back(found, time.time() - self._killed_at)

    def _came_back(self, found: Mapping[str, Any], secs: float) -> None:
        ranks = self._restored.setdefault(found["lineage"], set())
        ranks.add(found["rank"])
        if len(ranks) == WORLD_SIZE:
            snapshot = f"snapshot of iteration {found['iteration']} from memory"
            self._say(f"BACK: {snapshot}, {secs:.1f} s after the kill")

    def _say(self, text: str) -> None:
        print(f"{self._run:9s}  {text}", flush=True)


def train_both(
    args: argparse.Namespace, training: Sequence[str], faults: Mapping[str, Fault | NodeLoss]
) -> tuple[Run, Watch, Run, Watch]:
    """The reference and the run with faults."""
    training = [*training, "--iterations", str(args.iterations)]
    job = f"demo-{os.getpid()}-{time.time_ns() % 10**9}"
    reference = Run("reference", args.out / "reference", args.framework, training)
    settings = {**SMALL, "job": job}
    faulted = Run("faulted", args.out / "faulted", args.framework, training, settings, tuple(faults.values()))
    print(f"demo: {args.framework.title}: {args.framework.job}", flush=True)
    print(f"demo: reference run of {args.iterations} iterations, without ftckpt", flush=True)
    seen = execute(reference, job, Teller("reference", args.iterations, {}, every=5))
    print(f"demo: the same with ftckpt and {_count(len(faults))}: {', '.join(faults)}", flush=True)
    seen_faulted = execute(faulted, job, Teller("faulted", args.iterations, faults))
    return reference, seen, faulted, seen_faulted


def costs_of(faults: Mapping[str, Fault | NodeLoss], watch: Watch) -> list[FaultCost]:
    """What each fault cost."""
    seen = {"events": watch.events, "lines": watch.lines, "gone": watch.gone}
    return [demo_measure.fault_cost(strike_of(name, fault), **seen) for name, fault in faults.items()]


def strike_of(name: str, fault: Fault | NodeLoss) -> Strike:
    """The fault as its markers tell it."""
    marks = marks_of(fault)
    if marks is None:
        raise ValueError(f"fault {name} did not happen")
    told, killed_at = marks[0], max(float(mark["time"]) for mark in marks)
    ranks = victims(fault) if isinstance(fault, Fault) else told["ranks"]
    return Strike(name, SCENES[name].point, told["iteration"], ranks, killed_at, frozenset(told.get("shards", ())))


def table(costs: Sequence[FaultCost]) -> str:
    """The costs in text."""
    parts = [part.replace("-", " ") for part in demo_measure.PARTS]
    heads = ("fault", "killed at", "restored", "lost", "source", *parts, "total")
    rows: list[tuple[str, ...]] = [heads]
    for cost in costs:
        numbers = (str(cost.iteration), str(cost.restored_iteration), str(cost.iterations_lost))
        secs = (*cost.parts.values(), cost.total_secs)
        rows.append((cost.name, *numbers, cost.source, *(f"{value:.2f} s" for value in secs)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join("  ".join(line) for line in lines)


def summarize(
    argv: Sequence[str],
    framework: Framework,
    comparison: Comparison,
    costs: Sequence[FaultCost],
    *,
    reference: Watch,
    faulted: Watch,
) -> dict[str, Any]:
    """Everything that the report shows."""
    return {
        "framework": framework.title,
        "job": framework.job,
        "bit_exact": comparison.bit_exact,
        "differences": list(comparison.differences),
        "num_losses_compared": comparison.num_losses,
        "num_tensors_compared": comparison.tensors,
        "faults": [{**asdict(cost), "total_secs": cost.total_secs} for cost in costs],
        "reference": _losses(reference),
        "faulted": _losses(faulted),
        "blocked_secs": {
            str(iteration): asdict(blocked)
            for iteration, blocked in demo_measure.blocked_by_iteration(faulted.events).items()
        },
        "run_secs": {"reference": reference.secs, "faulted": faulted.secs},
        "command": shlex.join(["launch/demo.sh", *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "versions": _versions(framework.packages),
        "hardware": _hardware(),
    }


def _losses(watch: Watch) -> dict[str, Any]:
    secs = [line["time"] for line in watch.lines]
    return {
        "losses": [[line["iteration"], line["loss"], line["loss_hex"]] for line in watch.lines],
        "median_iteration_secs": statistics.median(secs) if secs else None,
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _hardware() -> dict[str, Any]:
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes,
        "device": os.environ.get("FTCKPT_DEVICE", "cpu"),
    }


def _count(num: int) -> str:
    return f"{num} fault{'s' * (num != 1)}"


def draw_timeline(out: Path) -> Recording | None:
    """Write picture and trace of one iteration of the run with faults; None where none can be drawn."""
    try:
        recording = read_recording(out / "faulted")
    except TimelineError as error:
        remove_timeline(out)  # of an earlier run
        print(f"demo: no timeline: {error}", file=sys.stderr)
        return None
    write_timeline(recording, out)
    return recording


def conclude(summary: Mapping[str, Any], out: Path) -> int:
    """Write the report and print the verdict; returns the exit code."""
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    report = out / "report.html"
    report.write_text(demo_report.render(summary, draw_timeline(out)))
    exact = summary["bit_exact"]
    for difference in summary["differences"][:20]:
        print(f"demo: {difference}")
    verdict = "bit-exact" if exact else f"NOT bit-exact, {len(summary['differences'])} differences"
    print(f"demo: {verdict}, {_count(len(summary['faults']))} survived, report in {report}")
    print(json.dumps({"framework": summary["framework"], "faults": len(summary["faults"]), "bit_exact": exact}))
    return 0 if exact else 1


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args, training = parse_args(argv)
    for signum in _INTERRUPTS:
        signal.signal(signum, _interrupt)
    faults = plan_faults(args.scenes, args.iterations, args.out / "faulted")
    try:
        reference, seen, faulted, seen_faulted = train_both(args, training, faults)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130
    comparison = demo_measure.compare(seen.lines, seen_faulted.lines, reference.final, faulted.final)
    try:
        costs = costs_of(faults, seen_faulted)
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    print(table(costs), flush=True)
    summary = summarize(argv, args.framework, comparison, costs, reference=seen, faulted=seen_faulted)
    return conclude(summary, args.out)


def _interrupt(*_: object) -> NoReturn:
    for signum in _INTERRUPTS:  # a second one must not disturb the cleaning up
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
