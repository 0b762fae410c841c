"""``ftckpt pin`` and ``ftckpt unpin``: checkpoints on storage that stay, whatever the job does."""

from __future__ import annotations

import argparse
from typing import Any

from ftckpt.commands.stored import found_at
from ftckpt.persist.commit import CheckpointName
from ftckpt.persist.retention import pin, unpin


def add_pin(commands: Any) -> None:
    """Add ``pin`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("pin", help="keep a checkpoint on storage: no job removes or replaces it")
    _add_arguments(parser)
    parser.set_defaults(run=run_pin)


def add_unpin(commands: Any) -> None:
    """Add ``unpin`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("unpin", help="let a checkpoint go as others do")
    _add_arguments(parser)
    parser.set_defaults(run=run_unpin)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("name", metavar="NAME", type=_name, help="as 'ftckpt list' prints it, or an iteration")


def _name(text: str) -> CheckpointName:
    name = CheckpointName(int(text)) if text.isdecimal() else CheckpointName.parse(text)
    if name is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a name such as iter_0000012 nor an iteration")
    return name


def run_pin(arguments: argparse.Namespace) -> int:
    """Pin it. Raises StorageError where there is none of that name."""
    is_void = pin(found_at(arguments.where)[0], arguments.name)
    print(f"{arguments.name} is pinned")
    if is_void:
        print("it is void, on its way out; 'ftckpt list' shows whether it stays")
    return 0


def run_unpin(arguments: argparse.Namespace) -> int:
    """Take the pin away; it goes with the next checkpoint if it is one too many."""
    was_pinned = unpin(found_at(arguments.where)[0], arguments.name)
    print(f"{arguments.name} is {'no longer' if was_pinned else 'not'} pinned")
    return 0
