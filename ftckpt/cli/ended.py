"""``ftckpt ended``: whether the launcher run that FTCKPT_RUN names is over, for scripts that start a job again."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.memory.launch_record import RUN_VARIABLE, launcher_run


def add_ended(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "ended", help=f"print the exit code and the reason where the run that {RUN_VARIABLE} names is over"
    )
    parser.add_argument("--forget", action="store_true", help="remove what this machine knows of the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print ``CODE REASON``, or nothing where it may go on. Raises ConfigError where no run is named."""
    if not os.environ.get(RUN_VARIABLE):
        raise ConfigError(f"{RUN_VARIABLE} is not set: it names the run, in the environment of its ranks and of this")
    launched = launcher_run(os.environ)
    outcome = launched.read()
    if outcome.over:
        print(outcome.code, outcome.text)
    if arguments.forget:
        launched.remove()
    return 0
