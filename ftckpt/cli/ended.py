"""``ftckpt ended``: reports whether the launcher run named by FTCKPT_RUN is over, for scripts that restart jobs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.memory.launch_record import RUN_VARIABLE, launcher_run


def add_ended(commands: Any) -> None:
    """Adds the command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "ended", help=f"print the exit code and the reason if the run named by {RUN_VARIABLE} is over"
    )
    parser.add_argument("--forget", action="store_true", help="remove this machine's record of the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints ``CODE REASON``, or nothing if the run may continue. Raises ConfigError if no run is named."""
    if not os.environ.get(RUN_VARIABLE):
        raise ConfigError(f"{RUN_VARIABLE} is not set: set it to the run's name, for its ranks and for this command")
    launched = launcher_run(os.environ)
    outcome = launched.read()
    if outcome.over:
        print(outcome.code, outcome.text)
    if arguments.forget:
        launched.remove()
    return 0
