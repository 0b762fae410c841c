"""Kills ranks of a training job and shows that it comes back from memory, bit for bit.

Trains a small language model on text with 8 ranks as two torchrun agents, two simulated nodes; with
Megatron-core or with DeepSpeed. Once undisturbed and without ftckpt: the reference. Then with ftckpt and
with faults:

  rank     one rank is killed by SIGKILL in the middle of an iteration
  writing  one rank is killed while it writes a slot of its arena
  all      all eight ranks are killed at once
  node     a node is lost: its agent, its ranks, its snapshot management process and its memory; another joins

Every loss and the hashes of the final state of every rank must be those of the reference. At last, with
Megatron-core, a run of its own:

  shrink   a node is lost and nothing takes its place: the job goes on with four ranks in another layout

Weights, masters and moments right after that restart must be those of the reference, in every bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.testing.faults import Fault
from ftckpt.timeline.model import Recording
from ftckpt.timeline.read import TimelineError, read_recording
from ftckpt.timeline.write import remove_timeline, write_timeline
from launch import demo_measure, demo_report, demo_shrink
from launch.demo_frameworks import FRAMEWORKS, SMALL
from launch.demo_measure import FaultCost, Strike
from launch.demo_processes import DemoError
from launch.demo_run import Run, Watch, execute
from launch.demo_scenes import SCENE_OF, SCENES, SHRINK, WORLD_SIZE, NodeLoss, marks_of, plan_faults, victims
from launch.demo_shrink import Reshape
from launch.demo_summary import summarize, table

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
    parser.add_argument("--scene", choices=list(SCENE_OF), help="this fault alone; default: all of them")
    parser.add_argument("--iterations", type=int, help="default: 48, with --scene 16")
    parser.add_argument("--out", type=Path, help=f"where the report goes; default: {_defaults('out')}")
    args, training = parser.parse_known_args(argv)
    args.framework = FRAMEWORKS[args.framework]
    args.out = args.out or args.framework.out
    args.iterations = args.iterations or (16 if args.scene else 48)
    args.scenes = [name for name in SCENES if args.scene in (None, name)]
    args.shrink = args.framework.reshapes and args.scene in (None, SHRINK)
    if args.scene == SHRINK and not args.shrink:
        parser.error(f"--scene {SHRINK}: a {args.framework.title} job does not restart in another layout")
    if args.iterations < 4 * max(1, len(args.scenes)):
        parser.error("--iterations: at least four for each fault")
    return args, training


def _epilog() -> str:
    jobs = "\n".join(f"  {name:10s} {framework.job}" for name, framework in FRAMEWORKS.items())
    return f"jobs:\n{jobs}\n\nAny other argument, --hidden 256 for example, goes to launch/{_defaults('script')}.py."


def _defaults(field: str) -> str:
    return " or ".join(str(getattr(framework, field)) for framework in FRAMEWORKS.values())


class Teller:
    """Prints what happens in a run, one line each."""

    def __init__(
        self,
        run: str,
        iterations: int,
        faults: Mapping[str, Fault | NodeLoss],
        every: int = 1,
        come_back: int = WORLD_SIZE,
    ) -> None:
        self._run = run
        self._iterations = iterations
        self._faults = faults
        self._come_back = come_back
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
            self._say("KILLED: " + SCENE_OF[name].what.format(found["iteration"]))
            if "protected" in found:
                self._say(f"        the snapshot of iteration {found['protected']} is protected")
        elif found["event"] == "rebuilt":
            self._say(f"REBUILT: {', '.join(found['shards'])} from {', '.join(found['sources'])}")
        elif found["event"] == "reshaped" and found["rank"] == 0:
            self._say(
                f"RESHAPED: the snapshot of iteration {found['iteration']} from {found['from']} to {found['to']}"
            )
        elif found["event"] == "restored" and self._killed_at is not None:
            self._came_back(found, time.time() - self._killed_at)

    def _came_back(self, found: Mapping[str, Any], secs: float) -> None:
        ranks = self._restored.setdefault(found["lineage"], set())
        ranks.add(found["rank"])
        if len(ranks) == self._come_back:
            snapshot = f"snapshot of iteration {found['iteration']} from memory"
            self._say(f"BACK: {snapshot}, {secs:.1f} s after the kill")

    def _say(self, text: str) -> None:
        print(f"{self._run:9s}  {text}", flush=True)


def train_reference(args: argparse.Namespace, training: Sequence[str], job: str) -> tuple[Run, Watch]:
    """Undisturbed and without ftckpt."""
    training = [*training, "--iterations", str(args.iterations)]
    run = Run("reference", args.out / "reference", args.framework, training, digested=args.shrink)
    print(f"demo: {args.framework.title}: {args.framework.job}", flush=True)
    print(f"demo: reference run of {args.iterations} iterations, without ftckpt", flush=True)
    return run, execute(run, job, Teller("reference", args.iterations, {}, every=5))


def train_faulted(
    args: argparse.Namespace, training: Sequence[str], job: str, faults: Mapping[str, Fault | NodeLoss]
) -> tuple[Run, Watch]:
    """The same with ftckpt and with faults."""
    training = [*training, "--iterations", str(args.iterations)]
    run = Run(
        "faulted", args.out / "faulted", args.framework, training, {**SMALL, "job": job}, tuple(faults.values())
    )
    print(f"demo: the same with ftckpt and {_count(len(faults))}: {', '.join(faults)}", flush=True)
    return run, execute(run, job, Teller("faulted", args.iterations, faults))


def train_shrunk(
    args: argparse.Namespace, training: Sequence[str], job: str, reference: tuple[Run, Watch]
) -> Reshape:
    """A shorter one that loses a node for good.

    Raises:
        DemoError: it did not go on in another layout.
    """
    iterations = min(args.iterations, demo_shrink.ITERATIONS)
    training = [*training, "--iterations", str(iterations)]
    run, loss = demo_shrink.plan(args.framework, training, args.out / SHRINK, job)
    print(f"demo: {iterations} iterations in {' or '.join(demo_shrink.LAYOUTS)}, and 1 fault: {SHRINK}", flush=True)
    watch = execute(run, job, Teller(SHRINK, iterations, {SHRINK: loss}, come_back=WORLD_SIZE // 2))
    (cost,) = costs_of({SHRINK: loss}, watch)
    return demo_shrink.conclude(cost, watch, reference[1].lines, reference[0], run)


def costs_of(faults: Mapping[str, Fault | NodeLoss], watch: Watch) -> list[FaultCost]:
    """What each fault cost.

    Raises:
        DemoError: a fault did not happen, or the job did not come back from it as it should have.
    """
    seen = {"events": watch.events, "lines": watch.lines, "gone": watch.gone}
    try:
        return [demo_measure.fault_cost(strike_of(name, fault), **seen) for name, fault in faults.items()]
    except ValueError as error:
        raise DemoError(str(error)) from error


def strike_of(name: str, fault: Fault | NodeLoss) -> Strike:
    """The fault as its markers tell it."""
    marks = marks_of(fault)
    if marks is None:
        raise ValueError(f"fault {name} did not happen")
    told, killed_at = marks[0], max(float(mark["time"]) for mark in marks)
    ranks = victims(fault) if isinstance(fault, Fault) else told["ranks"]
    return Strike(name, SCENE_OF[name].point, told["iteration"], ranks, killed_at, frozenset(told.get("shards", ())))


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
    exact, reshape = summary["bit_exact"], summary["reshape"]
    report.write_text(demo_report.render(summary, draw_timeline(out) if exact is not None else None))
    for difference in [*summary["differences"], *(reshape or {}).get("differences", [])][:20]:
        print(f"demo: {difference}")
    verdicts: dict[str, Any] = {"framework": summary["framework"]}
    if reshape:
        verdicts["bit_equal"] = reshape["bit_equal"]
        verdict = "bit-equal" if reshape["bit_equal"] else f"NOT bit-equal, {len(reshape['differences'])} differences"
        where = f"from {reshape['from']} to {reshape['to']} in iteration {reshape['iteration']}"
        print(f"demo: reshaped {where}: {verdict}, report in {report}")
    if exact is not None:
        verdicts |= {"faults": len(summary["faults"]), "bit_exact": exact}
        verdict = "bit-exact" if exact else f"NOT bit-exact, {len(summary['differences'])} differences"
        print(f"demo: {verdict}, {_count(len(summary['faults']))} survived, report in {report}")
    print(json.dumps(verdicts))
    return 0 if exact is not False and (reshape is None or reshape["bit_equal"]) else 1


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args, training = parse_args(argv)
    for signum in _INTERRUPTS:
        signal.signal(signum, _interrupt)
    try:
        return conclude(train_all(argv, args, training), args.out)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130


def train_all(argv: Sequence[str], args: argparse.Namespace, training: Sequence[str]) -> dict[str, Any]:
    """All runs, and what they have shown.

    Raises:
        DemoError: a run failed, or a fault did not do what it is there for.
    """
    job = f"demo-{os.getpid()}-{time.time_ns() % 10**9}"
    reference, seen = train_reference(args, training, job)
    comparison, seen_faulted, costs, reshape = None, None, [], None
    if args.scenes:
        faults = plan_faults(args.scenes, args.iterations, args.out / "faulted")
        faulted, seen_faulted = train_faulted(args, training, job, faults)
        comparison = demo_measure.compare(seen.lines, seen_faulted.lines, reference.final, faulted.final)
        costs = costs_of(faults, seen_faulted)
    if args.shrink:
        reshape = train_shrunk(args, training, job, (reference, seen))
    print(table([*costs, *([reshape.cost] if reshape else [])]), flush=True)
    return summarize(argv, args.framework, comparison, costs, reference=seen, faulted=seen_faulted, reshape=reshape)


def _interrupt(*_: object) -> NoReturn:
    for signum in _INTERRUPTS:  # a second one must not disturb the cleaning up
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
