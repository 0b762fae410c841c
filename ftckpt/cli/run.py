"""``ftckpt run``: starts a job as torchrun does, and again after a failure from processes that have imported all."""

from __future__ import annotations

import argparse
import traceback
from typing import Any


def add_run(commands: Any) -> None:
    """Add the sub-command to the parser of ``ftckpt``."""
    parser = commands.add_parser(
        "run", help="start a job with torchrun's own arguments; restarts import nothing",
        add_help=False, prefix_chars="\0",  # every word is torchrun's
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the job; what torchrun raises ends this process as it ends torchrun."""
    from ftckpt.runner.agent import launch

    try:
        launch(arguments.words)
    except OSError:  # which is none of ftckpt's
        traceback.print_exc()
        return 1
    return 0
