"""``python -m tests.probe PROGRAM CHECKOUT [--scene NAME|all] [--launcher NAME] [--ranks N] [--keep FOLDER] ...``."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.probe import megatron_deepspeed, megatron_lm
from tests.probe.check import Check, print_table, say
from tests.probe.runs import LAUNCHERS

PROGRAMS = {program.name: program for program in (megatron_lm.PROGRAM, megatron_deepspeed.PROGRAM)}


def main(argv: Sequence[str]) -> int:
    program = PROGRAMS[argv[0]]
    scenes = program.scenes
    parser = argparse.ArgumentParser(
        prog=f"run.sh {program.name}", description=program.about, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("checkout", type=Path, help=program.checkout)
    parser.add_argument("--scene", action="append", choices=[*scenes, "all"], help="may be given more than once")
    parser.add_argument("--launcher", choices=list(LAUNCHERS), default="torchrun", help="default: torchrun")
    parser.add_argument("--ranks", type=int, help="default: the scene's own")
    parser.add_argument("--keep", type=Path, help="a folder that keeps all logs")
    args, flags = parser.parse_known_args(argv[1:])
    names = list(scenes) if "all" in (args.scene or ()) else args.scene or [next(iter(scenes))]
    work = (args.keep or Path(tempfile.mkdtemp(prefix=f"probe-{program.name}-"))).resolve()
    check = Check(program, args.checkout.resolve(), work, flags, args.launcher)
    outcomes = []
    try:
        program.make_data(args.checkout.resolve(), check.cache)
        for number, name in enumerate(names, 1):
            scene = scenes[name] if args.ranks is None else replace(scenes[name], ranks=args.ranks)
            say(f"[{number}/{len(names)}] {name}: {scene.what}, {scene.ranks} ranks")
            outcome = check.scene(name, scene)
            outcomes.append(outcome)
            say(f"  lines equal: {outcome.lines or 'none'}" + (f"; {outcome.problem}" if outcome.problem else ""))
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)
        print_table(outcomes)
    return int(any(outcome.problem for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
