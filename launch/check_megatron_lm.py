"""Trains Megatron-LM's own pretrain_gpt.py on CPU ranks twice per scene, undisturbed and under ftckpt with ranks
killed, and compares what both log: losses, learning rates, consumed samples, gradient norms, loss scales, norms of
the parameters, validation losses. Everything but times must be equal to the last digit.

Where a checkpoint on storage is newer than memory, Megatron-LM goes on by itself: then the lines must be those of a
run without ftckpt that begins at the same checkpoint.

Flags that are not listed here join those of the scenes; --ftckpt-name=value goes to the disturbed runs alone.
"""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftckpt.arena.directory import clean_job
from launch.demo_run import ARENA
from launch.megatron_lm_run import CheckError, Lines, Run, restored, rows, train
from launch.megatron_lm_scenes import SCENES, Scene


@dataclass
class Outcome:
    """What a scene came to: a table's row."""

    name: str
    what: str
    restored: list[str] = field(default_factory=list)
    lines: str = ""
    problem: str = ""


def compare(expected: Lines, actual: Lines) -> tuple[int, list[str]]:
    """The number of iterations or evaluations of which only what is expected was logged, and all other lines."""
    wrong = [key for key in {**expected, **actual} if not set() < actual.get(key, set()) <= expected.get(key, set())]
    shown = [
        f"{sign} {row}"
        for key in wrong
        for sign, side in (("-", expected), ("+", actual))
        for row in side.get(key, ())
    ]
    return len(expected.keys() - set(wrong)), shown


class Check:
    """Runs scenes; undisturbed runs of equal flags are made once."""

    def __init__(self, checkout: Path, work: Path, flags: Sequence[str]) -> None:
        self._checkout, self._work = checkout, work
        self._cache = work / "cache"
        self._training = [flag for flag in flags if not flag.startswith("--ftckpt")]
        self._ftckpt = [flag for flag in flags if flag.startswith("--ftckpt")]
        self._references: dict[tuple[int, str, str], Run] = {}
        self._resumed_runs: dict[Path, Run] = {}

    def scene(self, name: str, scene: Scene) -> Outcome:
        """All runs of one scene."""
        outcome = Outcome(name, f"{scene.ranks} ranks: {scene.what}")
        try:
            reference = self._reference(name, scene)
            run = self._disturbed(name, scene)
            outcome.restored = restored(run)
            say(f"  restored from {', '.join(outcome.restored)}")
            expected = rows(reference)
            for source in outcome.restored:
                if source.startswith("storage"):
                    _join(expected, rows(self._resumed(name, scene, reference, int(source.split()[1]))))
            outcome.lines, outcome.problem = self._verdict(name, scene, expected, run)
            if not outcome.problem and not outcome.restored[-1].startswith(scene.source):
                outcome.problem = f"restored from {outcome.restored[-1]}, not from {scene.source}"
        except CheckError as error:
            outcome.problem = str(error)
        return outcome

    def _verdict(self, name: str, scene: Scene, expected: Lines, run: Run) -> tuple[str, str]:
        """How many lines are identical, and what is wrong, if anything is."""
        same, wrong = compare(expected, rows(run))
        lines = f"{same} of {len(expected)}"
        for line in wrong:
            say(f"  {line}")
        if not wrong:
            return lines, ""
        again = self._train(f"{name}/again", scene, "once more undisturbed")
        steady = not compare(expected, rows(again))[1]
        return lines, "the logs differ" if steady else "the logs differ, and so do two undisturbed runs"

    def _reference(self, name: str, scene: Scene) -> Run:
        key = (scene.ranks, scene.flags, scene.schedule)
        if key not in self._references:
            self._references[key] = self._train(f"{name}/undisturbed", scene, "undisturbed")
        return self._references[key]

    def _resumed(self, name: str, scene: Scene, reference: Run, iteration: int) -> Run:
        """Megatron-LM alone, from its own checkpoint."""
        saved = reference.storage / f"iter_{iteration:07d}"
        if saved not in self._resumed_runs:
            run = Run(self._work / name / f"resumed{iteration}", scene, self._training)
            shutil.copytree(saved, run.storage / saved.name)
            run.tracker.write_text(str(iteration))
            self._resumed_runs[saved] = self._timed(run, "without ftckpt from the same checkpoint")
        return self._resumed_runs[saved]

    def _disturbed(self, name: str, scene: Scene) -> Run:
        job = f"check-{secrets.token_hex(4)}"
        run = Run(self._work / name / "disturbed", scene, [])
        ours = ["--ftckpt", f"--ftckpt-job={job}", f"--ftckpt-events={run.events}", *scene.ftckpt.split()]
        run.flags = [*self._training, *ours, *self._ftckpt]
        try:
            return self._timed(run, "under ftckpt, disturbed", job)
        finally:
            clean_job(ARENA, job)

    def _train(self, folder: str, scene: Scene, what: str) -> Run:
        return self._timed(Run(self._work / folder, scene, self._training), what)

    def _timed(self, run: Run, what: str, job: str = "") -> Run:
        begin = time.monotonic()
        train(run, self._checkout, self._cache, job)
        say(f"  {what}: {time.monotonic() - begin:.0f} s")
        return run


def _join(expected: Lines, more: Lines) -> None:
    for key, lines in more.items():
        expected[key] = expected.get(key, set()) | lines


def say(text: str) -> None:
    print(text, flush=True)


def tell(outcomes: Sequence[Outcome]) -> None:
    """The table."""
    head = ("scene", "what", "restored from iteration", "identical lines", "")
    table = [head, *((o.name, o.what, ", ".join(o.restored), o.lines, o.problem or "ok") for o in outcomes)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="check_megatron_lm.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("checkout", type=Path, help="a checkout of Megatron-LM, core_v0.16.1")
    parser.add_argument("--scene", action="append", choices=[*SCENES, "all"], help="may be given more than once")
    parser.add_argument("--ranks", type=int, help="default: the scene's own")
    parser.add_argument("--keep", type=Path, help="a folder that keeps all logs")
    args, flags = parser.parse_known_args(argv)
    names = list(SCENES) if "all" in (args.scene or ()) else args.scene or ["gpt"]
    work = args.keep or Path(tempfile.mkdtemp(prefix="check-megatron-lm-"))
    check = Check(args.checkout.resolve(), work.resolve(), flags)
    outcomes = []
    try:
        for number, name in enumerate(names, 1):
            scene = SCENES[name] if args.ranks is None else replace(SCENES[name], ranks=args.ranks)
            say(f"[{number}/{len(names)}] {name}: {scene.what}, {scene.ranks} ranks")
            outcomes.append(check.scene(name, scene))
            say(
                f"  {outcomes[-1].lines} lines identical"
                + (f"; {outcomes[-1].problem}" if outcomes[-1].problem else "")
            )
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)
        tell(outcomes)
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
