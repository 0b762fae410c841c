"""``ftckpt ended``: reports whether the launcher run named by FTCKPT_RUN is over, for scripts that restart jobs."""

from __future__ import annotations

import argparse
import os

from ftckpt.cli.answers import Answer, Lines
from ftckpt.errors import ConfigError
from ftckpt.memory.launch_record import RUN_VARIABLE, launcher_run


def add_ended(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument("--forget", action="store_true", help="remove this machine's record of the run")


def run_ended(arguments: argparse.Namespace) -> Lines:
    """Prints ``CODE REASON``, or nothing if the run may continue. Raises ConfigError if no run is named."""
    if not os.environ.get(RUN_VARIABLE):
        raise ConfigError(f"{RUN_VARIABLE} is not set: set it to the run's name, for its ranks and for this command")
    launched = launcher_run(os.environ)
    outcome = launched.read()
    if outcome.over:
        yield f"{outcome.code} {outcome.text}"
    if arguments.forget:
        launched.remove()
    yield Answer({"over": outcome.over, "code": outcome.code, "reason": outcome.text})
