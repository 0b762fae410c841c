"""Runs of a scene, and what they logged, compared."""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftckpt.memory.directory import clean_job
from tests.probe.lines import Lines, compare, farthest, join
from tests.probe.program import Program
from tests.probe.runs import Run, layouts, loaded, restored, rows, train
from tests.probe.scenes import SAVED, Load, Scene
from tests.support.processes import ARENA, RunError
from tests.support.repository import ROOT

_CONVERT_SECS = 300.0


@dataclass
class Outcome:
    """The result of a scene: a row of the table."""

    name: str
    what: str
    restored: list[str] = field(default_factory=list)
    lines: str = ""
    problem: str = ""


class Check:
    """Runs scenes; undisturbed runs of equal flags are made once."""

    def __init__(
        self, program: Program, checkout: Path, work: Path, flags: Sequence[str], launcher: str = "torchrun"
    ) -> None:
        self._program, self._checkout, self._work, self._launcher = program, checkout, work, launcher
        self.cache = work / "cache"
        self._training = [flag for flag in flags if not flag.startswith("--ftckpt")]
        self._ftckpt = [flag for flag in flags if flag.startswith("--ftckpt")]
        self._references: dict[tuple[int, str, str, str], Run] = {}
        self._resumed_runs: dict[Path, Run] = {}

    def scene(self, name: str, scene: Scene) -> Outcome:
        """All runs of one scene."""
        outcome = Outcome(name, f"{scene.ranks} ranks: {scene.what}")
        try:
            if scene.loads:
                self._convert(name, scene, outcome)
            else:
                self._restart(name, scene, outcome)
        except RunError as error:
            outcome.problem = str(error)
        return outcome

    def _restart(self, name: str, scene: Scene, outcome: Outcome) -> None:
        """Resumes the disturbed run and compares it with the undisturbed one."""
        reference = self._reference(name, scene)
        with self._disturbed(name, scene) as (run, _):
            outcome.restored = restored(run)
        say(f"  restored from {', '.join(outcome.restored)}")
        expected = rows(reference)
        for source in outcome.restored:
            if source.startswith("storage"):
                join(expected, rows(self._resumed(name, scene, reference, int(source.split()[1]))))
        lines = rows(run)
        outcome.lines, outcome.problem = verdict(expected, lines, scene.rounding)
        if outcome.problem:
            again = self._train(f"{name}/again", scene, "once more undisturbed")
            outcome.problem += ", and so do two undisturbed runs" if compare(expected, rows(again))[1] else ""
        if not outcome.problem and not re.match(scene.source, outcome.restored[-1]):
            outcome.problem = f"restored from {outcome.restored[-1]}, not from {scene.source}"

    def _convert(self, name: str, scene: Scene, outcome: Outcome) -> None:
        """Converts and loads the memory of the disturbed run and a checkpoint of the undisturbed one."""
        reference = self._reference(name, replace(scene, flags=f"{scene.flags} {SAVED}"))
        expected, counts, problems = rows(reference), [], []
        with self._disturbed(name, scene) as (_, job):
            for what, directory in converted(job, reference, self._work / name / "converted"):
                for load in scene.loads:
                    run = self._load(f"{name}/{what}-{load.what}", scene, load, directory)
                    iteration = max(max(loaded(run), default=[]), default=0)
                    lines, problem = verdict(self._program.after(expected, iteration), rows(run), load.rounding)
                    if not problem and layouts(run) != [load.what]:
                        problem = f"trained in {layouts(run)}"
                    outcome.restored.append(f"{what} {iteration} in {load.what}")
                    say(f"  from {outcome.restored[-1]}: {lines} {problem}".rstrip())
                    counts.append(lines)
                    problems += [f"{outcome.restored[-1]}: {problem}"] if problem else []
        if problems:
            again = self._train(f"{name}/again", scene, "once more undisturbed")
            problems += ["two undisturbed runs differ"] if compare(expected, rows(again))[1] else []
        outcome.lines, outcome.problem = ", ".join(counts), "; ".join(problems)

    def _load(self, folder: str, scene: Scene, load: Load, directory: Path) -> Run:
        """The program alone, from what ftckpt convert wrote."""
        loading = ["--load", str(directory), "--exit-on-missing-checkpoint", *load.flags.split()]
        run = self._run(folder, replace(scene, ranks=load.ranks), [*self._training, *loading])
        return self._timed(run, f"without ftckpt in {load.what}, from what was converted")

    def _reference(self, name: str, scene: Scene) -> Run:
        key = (scene.ranks, scene.flags, scene.schedule, json.dumps(scene.deepspeed))
        if key not in self._references:
            self._references[key] = self._train(f"{name}/undisturbed", scene, "undisturbed")
        return self._references[key]

    def _resumed(self, name: str, scene: Scene, reference: Run, iteration: int) -> Run:
        """The program alone, from its own checkpoint."""
        saved = reference.storage / self._program.checkpoint.format(iteration)
        if saved not in self._resumed_runs:
            run = self._run(f"{name}/resumed{iteration}", scene, self._training)
            shutil.copytree(saved, run.storage / saved.name)
            file, names = self._program.newest
            (run.storage / file).write_text(names.format(iteration))
            self._resumed_runs[saved] = self._timed(run, "without ftckpt from the same checkpoint")
        return self._resumed_runs[saved]

    @contextmanager
    def _disturbed(self, name: str, scene: Scene) -> Iterator[tuple[Run, str]]:
        """A run that was killed, and its job's name; what it left in memory goes afterwards."""
        job = f"check-{secrets.token_hex(4)}"
        run = self._run(f"{name}/disturbed", scene, [])
        ours = ["--ftckpt", f"--ftckpt-job={job}", f"--ftckpt-events={run.events}"]
        more = scene.ftckpt.format(storage=run.storage).split()
        run.flags = [*self._training, *ours, *more, *self._ftckpt]
        try:
            yield self._timed(run, "under ftckpt, disturbed", job), job
        finally:
            clean_job(ARENA, job)

    def _train(self, folder: str, scene: Scene, what: str) -> Run:
        return self._timed(self._run(folder, scene, self._training), what)

    def _run(self, folder: str, scene: Scene, flags: Sequence[str]) -> Run:
        return Run(self._work / folder, self._program, scene, flags, self._launcher)

    def _timed(self, run: Run, what: str, job: str = "") -> Run:
        begin = time.monotonic()
        train(run, self._checkout, self.cache, job)
        say(f"  {what}: {time.monotonic() - begin:.0f} s")
        return run


def converted(job: str, reference: Run, folder: Path) -> Iterator[tuple[str, Path]]:
    """Checkpoints for Megatron-LM: a name, and the directory for ``--load``.

    The newest snapshot of ``job``, and the oldest checkpoint of ``reference``, that one by way of the universal form.

    Raises:
        RunError: a conversion failed.
    """
    arenas = ARENA / f"ftckpt-{job}"
    _convert(arenas, folder / "snapshot", "megatron-dist")
    yield "snapshot", folder / "snapshot"
    saved = sorted(path for path in reference.storage.glob("iter_*") if path.is_dir())
    if not saved:
        raise RunError(f"{reference.storage} has no checkpoint")
    _convert(saved[0], folder / "universal", "universal")
    _convert(folder / "universal", folder / "checkpoint", "megatron-dist")
    yield "checkpoint", folder / "checkpoint"


def _convert(source: Path, destination: Path, to: str) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "ftckpt.cli.main",
        "convert",
        str(source),
        str(destination),
        "--to",
        to,
        "--verify",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_CONVERT_SECS, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise RunError(f"ftckpt convert --to {to}: exit code {done.returncode}: {' '.join(last)}")
    origin = done.stdout.partition("\n")[0].removeprefix("source").strip()
    say(f"  {origin}, converted to {to}: {time.monotonic() - begin:.0f} s")


def verdict(expected: Lines, actual: Lines, rounding: float) -> tuple[str, str]:
    """How many lines are as expected and how far off, and what is wrong, if anything is."""
    same, wrong = compare(expected, actual, rounding)
    for line in wrong:
        say(f"  {line}")
    off = f" within {farthest(expected, actual):.1e}" if rounding and not wrong else ""
    if not expected:
        return "0 of 0", "there is nothing to compare"
    return f"{same} of {len(expected)}{off}", "the logs differ" if wrong else ""


def say(text: str) -> None:
    print(text, flush=True)


def print_table(outcomes: Sequence[Outcome]) -> None:
    """The table."""
    head = ("scene", "what", "restored from iteration", "equal lines", "")
    table = [head, *((o.name, o.what, ", ".join(o.restored), o.lines, o.problem or "ok") for o in outcomes)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
