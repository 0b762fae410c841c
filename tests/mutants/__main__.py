"""``python -m tests.mutants [--only NAME] [--jobs N]``: which breakages does no test see?

Exit status: 0 all are red, 1 some survive, 2 a mutant does not apply, or its test is red without it
or skipped.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from tests.mutants import ROOT, Mutant, read_mutants
from tests.support.repository import repository_files

TEST_SECS = 300
MEMORY_BYTES = 8 << 30
RED, SURVIVED, BROKEN = "red", "SURVIVED", "BROKEN"


def copy_tree(destination: Path) -> None:
    """The files that git knows or would take, as they are in the working tree."""
    for path in repository_files():
        copy = destination / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)


def run_tests(tree: Path, selections: Sequence[str], *options: str) -> tuple[bool, str]:
    """Whether the tests pass in ``tree``, and what pytest printed. A run that hangs has not passed."""
    # No bytecode: a mutated file may have the size and the second of the original, for which a cache would be taken.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "", *options, *selections]
    try:
        run = subprocess.run(
            command,
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=TEST_SECS * len(selections),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"not done after {TEST_SECS} s"
    return run.returncode == 0, run.stdout


class Trial:
    """Copies of the repository, one for each thread, and what came of the mutants that were tried there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._local = threading.local()

    def tree(self) -> Path:
        """This thread's copy."""
        if not hasattr(self._local, "tree"):
            self._local.tree = Path(tempfile.mkdtemp(dir=self._folder))
            copy_tree(self._local.tree)
        return self._local.tree

    def run(self, mutant: Mutant) -> tuple[Mutant, str, str, float]:
        """The mutant, what came of it, details, and the seconds it took."""
        begin, tree = time.monotonic(), self.tree()
        try:
            text = mutant.apply(tree)
        except (OSError, ValueError) as error:
            return mutant, BROKEN, str(error), 0.0
        try:
            passed, output = run_tests(tree, [mutant.test], "-x", "-rs")
        finally:
            (tree / mutant.file).write_text(text)
        # A test that this machine cannot run says nothing of the mutant; ``-rs`` prints what it lacks.
        outcome = RED if not passed else SURVIVED if " passed" in output else BROKEN
        return mutant, outcome, output, time.monotonic() - begin


def red_without(mutants: Sequence[Mutant], trial: Trial, jobs: int) -> dict[str, str]:
    """Tests that fail in an unbroken copy, or select nothing: their results on mutants mean nothing."""
    selections = list(dict.fromkeys(mutant.test for mutant in mutants))
    passed, output = run_tests(trial.tree(), selections, "-n", str(jobs), "--dist", "loadfile")
    if passed:
        return {}
    failed = [line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    # Each by itself again: one that is red beside others alone says enough. None is named where one does not exist.
    suspects = [one for one in selections if any(test.startswith(one) for test in failed)] or selections
    outcomes = {selection: run_tests(trial.tree(), [selection], "-x") for selection in suspects}
    return {selection: output for selection, (passed, output) in outcomes.items() if not passed}


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants that ``argv`` selects; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which breakages does no test see?")
    parser.add_argument("--only", metavar="NAME", action="append", help="a name or a pattern such as 'seal-*'")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="mutants at the same time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants, try nothing")
    arguments = parser.parse_args(argv)
    patterns = arguments.only or ["*"]
    mutants = [m for m in read_mutants() if any(fnmatch.fnmatch(m.name, pattern) for pattern in patterns)]
    if not mutants:
        parser.error(f"--only: no mutant is called {', '.join(patterns)}; --list shows their names")
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name:44s} {mutant.promise:18s} {mutant.why}")
        return 0
    return _try_all(mutants, arguments.jobs)


def _try_all(mutants: Sequence[Mutant], jobs: int) -> int:
    counts = dict.fromkeys((RED, SURVIVED, BROKEN), 0)
    with tempfile.TemporaryDirectory(prefix="ftckpt-mutants-") as name:
        trial = Trial(Path(name))
        print(f"{len(mutants)} mutants; their tests without them first", flush=True)
        unsound = red_without(mutants, trial, jobs)
        with ThreadPoolExecutor(jobs) as pool:
            sound = [mutant for mutant in mutants if mutant.test not in unsound]
            results = [(m, BROKEN, unsound[m.test], 0.0) for m in mutants if m.test in unsound]
            for mutant, outcome, details, secs in chain(results, pool.map(trial.run, sound)):
                counts[outcome] += 1
                print(f"{outcome:9s}{mutant.name:44s}{secs:6.1f} s", flush=True)
                if outcome != RED:
                    end = "\n    ".join(details.splitlines()[-4:])
                    print(f"    {mutant.why}\n    {mutant.test}\n    {end}", flush=True)
    print(", ".join(f"{count} {outcome.lower()}" for outcome, count in counts.items()))
    return 2 if counts[BROKEN] else 1 if counts[SURVIVED] else 0


if __name__ == "__main__":
    # A bound that is broken takes memory without end: a process's own shall fail before the machine's does.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.exit(main())
