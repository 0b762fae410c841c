"""Kills ranks of a training job and shows that it resumes from memory, bit for bit.

Trains a small language model with 8 ranks under two agents of ftckpt run, two simulated nodes, with Megatron-core or
DeepSpeed. First undisturbed and without ftckpt: the reference. Then with ftckpt and with faults:

  rank     one rank is killed by SIGKILL in the middle of an iteration
  writing  one rank is killed while it writes a slot of its arena
  all      all eight ranks are killed at once
  node     a node is lost: its agent, its ranks, its snapshot management process and its memory; another joins

Every loss and the hashes of the final state of every rank must equal the reference. Then, with Megatron-core, in runs
of their own:

  shrink   a node is lost without a replacement: the job continues with four ranks in another layout
  limit    time is up: the snapshot is flushed to storage, memory is emptied, and four ranks resume from there

Weights, masters and moments right after these restarts must equal the reference in every bit. The verdict is in
summary.json; ftckpt report describes each run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from ftckpt.cli.event_log import count
from ftckpt.cli.history import read_history
from ftckpt.cli.recovery import PARTS, Recovery
from ftckpt.model.text import aligned
from launch.demo_job import (
    FRAMEWORKS,
    LAYOUTS,
    LIMIT,
    NODES,
    RESHAPING,
    SCENES,
    SHRINK,
    SMALL,
    Framework,
    Run,
    Strike,
    execute,
)
from tests.support.processes import RunError

# An exception instead of the default: ``execute`` must end its processes and free their memory.
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MAX_NAMED = 20
_RESHAPING_ITERATIONS = 10
KINDS = ("weights", "masters", "moments", "steps", "learning rates", "RNG states")
_ROLES = {"weight": "weights", "master": "masters", "exp_avg": "moments", "exp_avg_sq": "moments", "step": "steps"}


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The demo's own arguments, and those of the framework's script."""

    def either(name: str) -> str:
        return " or ".join(str(getattr(framework, name)) for framework in FRAMEWORKS.values())

    jobs = "\n".join(f"  {name:10s} {framework.job}" for name, framework in FRAMEWORKS.items())
    epilog = f"jobs:\n{jobs}\n\nAny other argument, --hidden 256 for example, goes to launch/{either('script')}.py."
    how: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__, epilog=epilog, **how)
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="megatron", help="default: megatron")
    parser.add_argument("--scene", choices=list(SCENES), help="this fault alone; default: all of them")
    parser.add_argument("--iterations", type=int, help="default: 28, with --scene 16")
    parser.add_argument("--out", type=Path, help=f"where logs and the summary go; default: {either('out')}")
    args, training = parser.parse_known_args(argv)
    args.framework = FRAMEWORKS[args.framework]
    args.out = args.out or args.framework.out
    args.iterations = args.iterations or (16 if args.scene else 28)
    wanted = [name for name in SCENES if args.scene in (None, name)]
    args.scenes = [name for name in wanted if name not in RESHAPING]
    args.reshaping = [name for name in wanted if name in RESHAPING and args.framework.reshapes]
    if args.scene in RESHAPING and not args.reshaping:
        parser.error(f"--scene {args.scene}: the {args.framework.title} example keeps its layout; leave it out")
    if args.iterations < 4 * max(1, len(args.scenes)):
        parser.error("--iterations: at least four for each fault")
    return args, training


@dataclass(frozen=True)
class Comparison:
    """``compared`` counts tensors by kind; ``differences`` names every loss and tensor that differs."""

    num_losses: int
    compared: dict[str, int] = field(default_factory=dict)
    differences: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether tensors were compared, and everything is equal."""
        return bool(self.compared) and not self.differences


def compare(reference: Run, faulted: Run) -> Comparison:
    """Compares every logged loss, also of iterations trained again, and all final hashes."""
    expected = {line["iteration"]: line["loss_hex"] for line in reference.lines}
    differences = [
        f"loss of iteration {line['iteration']}: {line['loss_hex']} is not {expected.get(line['iteration'])}"
        for line in faulted.lines
        if line["loss_hex"] != expected.get(line["iteration"])
    ]
    missing = sorted(expected.keys() - {line["iteration"] for line in faulted.lines})
    differences += [f"loss of iteration {iteration}: missing" for iteration in missing]
    hashes, others = read_hashes(reference.final), read_hashes(faulted.final)
    differences += [
        f"{name}: {others.get(name, 'missing')[:16]} is not {hashes.get(name, 'missing')[:16]}"
        for name in sorted(hashes.keys() | others.keys())
        if hashes.get(name) != others.get(name)
    ]
    counts = Counter(_kind(name.partition("/")[2]) for name in hashes)
    compared = {kind: counts[kind] for kind in KINDS} if hashes and faulted.lines else {}
    return Comparison(len(faulted.lines), compared, tuple(differences))


def read_hashes(folder: Path) -> dict[str, str]:
    """Every rank's hashes, by ``<coordinates>/<tensor>``."""
    return {
        f"{path.stem}/{name}": value
        for path in sorted(folder.glob("*.json"))
        for name, value in json.loads(path.read_text()).items()
    }


def _kind(tensor: str) -> str:
    if tensor.startswith("rng."):
        return "RNG states"
    if not tensor.startswith("optimizer"):
        return "weights"
    names = {"master": "masters", "step": "steps", "lr": "learning rates"}
    return names.get(tensor.rpartition(".")[2], "moments")


def compare_reshaped(reference: Run, run: Run, restart: Recovery) -> dict[str, Any]:
    """The findings of a run that continued in another layout: its logical tensors, compared right after the restart.

    Raises:
        RunError: nothing was reshaped, or a run has no digests of the iteration.
    """
    reshaped = [
        event
        for event in run.events
        if event["event"] == "loaded" and event["from"] and event["time"] > restart.struck_at
    ]
    if not reshaped:
        raise RunError(f"scene {run.name}: no rank reshaped anything after the fault")
    iteration = int(reshaped[0]["iteration"])
    expected, restored = _digest(reference.digests, iteration, False), _digest(run.digests, iteration, True)
    losses = {line["iteration"]: line["loss"] for line in reference.lines}
    off = [abs(line["loss"] - losses[line["iteration"]]) for line in run.lines if line["iteration"] > iteration]
    differences = sorted(key for key in {**expected, **restored} if expected.get(key) != restored.get(key))
    return {
        "scene": run.name,
        "from": reshaped[0]["from"],
        "to": reshaped[0]["to"],
        "bit_equal": bool(expected) and not differences,
        "iteration": iteration,
        "tensors_compared": dict(Counter(_ROLES.get(key.partition("/")[0], "others") for key in expected)),
        "differences": differences,
        "read_bytes": sum(event["read_bytes"] for event in reshaped),
        "received_bytes": sum(event["received_bytes"] for event in reshaped),
        "largest_difference_of_a_loss": max(off, default=0.0),
        "restart": asdict(restart),
    }


def _digest(path: Path, iteration: int, restored: bool) -> dict[str, Any]:
    for line in map(json.loads, path.read_text().splitlines()):
        if (line["iteration"], line["restored"]) == (iteration, restored):
            digest: dict[str, Any] = line["digest"]
            return digest
    raise RunError(f"{path} has no digest of iteration {iteration}")


def costs_of(run: Run) -> list[Recovery]:
    """The cost of each fault of a run, from its events.

    Raises:
        RunError: a fault has no restart of its own that trained, or a lost shard was not rebuilt.
    """
    restarts = read_history(run.folder).restarts
    if len(restarts) != len(run.strikes) or not all(restart.trained for restart in restarts):
        names = ", ".join(restart.name for restart in restarts) or "none"
        raise RunError(f"{run.name}: restarts are {names}, not one for each fault")
    restarts = [
        _since(replace(one, name=strike.name), min(mark["time"] for mark in strike.marks()))
        for strike, one in zip(run.strikes, restarts, strict=True)
    ]
    for strike, restart in zip(run.strikes, restarts, strict=True):
        lost = set(strike.marks()[0].get("shards", ())) - set(restart.rebuilt_shards)
        if lost:
            raise RunError(f"fault {strike.name}: {', '.join(sorted(lost))} were lost and not rebuilt")
    return restarts


def _since(restart: Recovery, killed_at: float) -> Recovery:
    """``restart`` from the kill on: before it ranks may have waited for the demo, without an event."""
    gone_at = max(killed_at, restart.struck_at + restart.parts["detect"])
    joined_at = restart.struck_at + restart.parts["detect"] + restart.parts["rejoin"]
    parts = {**restart.parts, "detect": gone_at - killed_at, "rejoin": joined_at - gone_at}
    return replace(restart, struck_at=killed_at, parts=parts)


def cost_table(restarts: Sequence[Recovery]) -> str:
    """The costs in text."""
    rows = [
        ("fault", "killed at", "restored", "lost", "source", *(part.replace("-", " ") for part in PARTS), "total")
    ]
    for one in restarts:
        numbers = (str(one.iteration), str(one.restored_iteration), str(one.iterations_lost))
        secs = (*one.parts.values(), one.total_secs)
        rows.append((one.name, *numbers, one.source, *(f"{value:.2f} s" for value in secs)))
    return aligned(rows, 0)


@dataclass
class Findings:
    """The findings so far; ``runs`` has those that were started, the reference first."""

    runs: list[Run] = field(default_factory=list)
    comparison: Comparison | None = None
    faults: list[Recovery] = field(default_factory=list)
    reshapes: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


def train_all(args: argparse.Namespace, training: Sequence[str], found: Findings) -> None:
    """All runs; fills ``found``.

    Raises:
        RunError: a run failed, or a fault had no effect.
    """
    job = f"demo-{os.getpid()}-{time.time_ns() % 10**9}"
    iterations, framework = args.iterations, args.framework
    length = ["--iterations", str(iterations)]
    print(f"demo: {framework.title}: {framework.job}", flush=True)
    print(f"demo: reference run of {iterations} iterations, without ftckpt", flush=True)
    digested = _RESHAPING_ITERATIONS if args.reshaping else None
    folder = args.out / "reference"
    reference = Run("reference", folder, framework, [*training, *length], digested=digested)
    found.runs.append(reference)
    execute(reference, job)
    if args.scenes:
        folder = args.out / "faulted"
        parts = len(args.scenes) + 1
        strikes = [
            Strike(name, iterations * (index + 1) // parts, (folder / f"fired-{name}").resolve())
            for index, name in enumerate(args.scenes)
        ]
        print(f"demo: the same with ftckpt and {count(len(strikes), 'fault')}: {', '.join(args.scenes)}", flush=True)
        faulted = Run("faulted", folder, framework, [*training, *length], {**SMALL, "job": job}, strikes)
        found.runs.append(faulted)
        execute(faulted, job)
        found.faults += costs_of(faulted)
        found.comparison = compare(reference, faulted)
    for name in args.reshaping:
        run = reshaping_run(name, args, training, job)
        if storage := run.ftckpt.get("persist"):
            shutil.rmtree(storage, ignore_errors=True)  # of an earlier demo
            Path(storage).mkdir(parents=True)
        found.runs.append(run)
        execute(run, job)
        found.reshapes.append(compare_reshaped(reference, run, costs_of(run)[-1]))
    restarts = [Recovery(**reshape["restart"]) for reshape in found.reshapes]
    print(cost_table([*found.faults, *restarts]), flush=True)


def summarize(framework: Framework, found: Findings) -> dict[str, Any]:
    """All findings as JSON."""
    compared = found.comparison or Comparison(0)
    return {
        "failure": found.failure,
        "framework": framework.title,
        "job": framework.job,
        "bit_exact": found.comparison.equal if found.comparison else None,
        "differences": list(compared.differences),
        "num_losses_compared": compared.num_losses,
        "num_tensors_compared": compared.compared,
        "faults": [{**asdict(cost), "total_secs": cost.total_secs} for cost in found.faults],
        "reshapes": found.reshapes,
        "run_secs": {run.name: run.secs for run in found.runs},
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def reshaping_run(name: str, args: argparse.Namespace, training: Sequence[str], job: str) -> Run:
    """A shorter run that loses a node without replacement, or all memory."""
    iterations = min(args.iterations, _RESHAPING_ITERATIONS)
    folder = args.out / name
    strike = Strike(name, iterations // 2, (folder / f"fired-{name}").resolve())
    settings = {**SMALL, "job": job, "layouts": ",".join(LAYOUTS)}
    if name == LIMIT:
        settings["persist"] = str((args.out / "storage").resolve())
    print(f"demo: {iterations} iterations in {' or '.join(LAYOUTS)}, and 1 fault: {name}", flush=True)
    length = ["--iterations", str(iterations)]
    # In the scene limit all nodes end at once: until then none may be missing.
    least_nodes = 1 if name == SHRINK else len(NODES)
    return Run(name, folder, args.framework, [*training, *length], settings, [strike], least_nodes, digested=0)


def conclude(summary: dict[str, Any], runs: Sequence[Run], out: Path, argv: Sequence[str]) -> int:
    """Write the summary and print the verdict; returns the exit code."""
    summary["command"] = shlex.join(["launch/demo.sh", *argv])
    shown = runs[min(1, len(runs) - 1)].folder
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    exact, reshapes = summary["bit_exact"], summary["reshapes"]
    differences = [difference for reshape in reshapes for difference in reshape["differences"]]
    for difference in [*summary["differences"], *differences][:_MAX_NAMED]:
        print(f"demo: {difference}")
    verdicts: dict[str, Any] = {"framework": summary["framework"]}
    if summary["failure"]:
        verdicts["failure"] = summary["failure"].partition("\n")[0]
        print(f"demo: {summary['failure']}", file=sys.stderr)
    for reshape in reshapes:
        verdict = "bit-equal" if reshape["bit_equal"] else f"NOT bit-equal, {_differ(reshape)}"
        where = f"from {reshape['from']} to {reshape['to']} in iteration {reshape['iteration']}"
        print(f"demo: {reshape['scene']}: reshaped {where}: {verdict}")
    bit_equal = all(reshape["bit_equal"] for reshape in reshapes)
    if reshapes:
        verdicts["bit_equal"] = bit_equal
    if exact is not None:
        num = len(summary["faults"])
        verdicts |= {"faults": num, "bit_exact": exact}
        verdict = "bit-exact" if exact else f"NOT bit-exact, {_differ(summary)}"
        print(f"demo: {verdict}, {count(num, 'fault')} survived; see ftckpt report {shown}")
    print(json.dumps(verdicts))
    return 0 if exact is not False and bit_equal and not summary["failure"] else 1


def _differ(verdict: dict[str, Any]) -> str:
    return f"{len(verdict['differences'])} differences"


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    args, training = parse_args(argv)
    for signum in _INTERRUPTS:
        signal.signal(signum, _interrupt)
    try:
        found = Findings()
        try:
            train_all(args, training, found)
        except RunError as error:
            found.failure = str(error)
        return conclude(summarize(args.framework, found), found.runs, args.out, argv)
    except KeyboardInterrupt:
        print("demo: interrupted; everything it started has been stopped", file=sys.stderr)
        return 130


def _interrupt(*_: object) -> NoReturn:
    for signum in _INTERRUPTS:  # a second one must not disturb the cleaning up
        signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
