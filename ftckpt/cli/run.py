"""``ftckpt run``: a torchrun-compatible launcher whose workers are forked from a preloaded process."""

from __future__ import annotations

import argparse
import traceback
from typing import Any


def add_run(commands: Any) -> None:
    """Adds the command to the parser of ``ftckpt``."""
    text = "start a job with torchrun's own arguments; restarts import nothing"
    parser = commands.add_parser("run", help=text, add_help=False, prefix_chars="\0")  # torchrun parses all arguments
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the job. Errors of torchrun end this process with the same status as torchrun."""
    from ftckpt.runner.agent import launch

    try:
        launch(arguments.words)
    except OSError:  # not an error of ftckpt, which ``main`` would print as one line
        traceback.print_exc()
        return 1
    return 0
