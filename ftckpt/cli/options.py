"""Options that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.units import size

_MAX_BYTES = 1 << 60


def add_arena(parser: argparse.ArgumentParser) -> None:
    """Adds ``--arena``, the directory of all jobs' shared memory."""
    parser.add_argument("--arena", type=Path, default=Path(Config().arena), help="tmpfs (default: %(default)s)")


def size_of(option: str, minimum: str = "1B") -> Callable[[str], int]:
    """A parser of sizes, in bytes, for ``option``; raises ConfigError for a malformed size or one out of range."""

    def read(text: str) -> int:
        try:
            nbytes = size(text)
        except ValueError as error:
            raise ConfigError(f"{option}: {error}") from None
        if not size(minimum) <= nbytes <= _MAX_BYTES:
            raise ConfigError(f"{option}: {text} is out of range; the least is {minimum}")
        return nbytes

    return read


def add_node_memory(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds ``--node-memory``, in bytes, by default None, with ``text`` as its help."""
    parser.add_argument("--node-memory", type=size_of("--node-memory"), metavar="SIZE", help=text)
