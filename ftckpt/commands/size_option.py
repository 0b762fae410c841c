"""Options that take a size, such as ``--node-memory 512GiB``."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ftckpt.errors import ConfigError
from ftckpt.units import size

_MAX_BYTES = 1 << 60


def size_of(option: str, minimum: str = "1B") -> Callable[[str], int]:
    """What reads a size of ``minimum`` or more, in bytes; ConfigError, which names the ``option``, for any other."""

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
    """Add ``--node-memory``, in bytes, None where it is not given; ``text`` is what ``--help`` says of it."""
    parser.add_argument("--node-memory", type=size_of("--node-memory"), metavar="SIZE", help=text)
