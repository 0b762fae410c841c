"""The option by which commands are told of the host memory of a node."""

from __future__ import annotations

import argparse

from ftckpt.config import GIB
from ftckpt.errors import ConfigError
from ftckpt.units import sized


def add_node_memory(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--node-memory``, in bytes, None where it is not given; ``text`` is what ``--help`` says of it."""
    parser.add_argument("--node-memory", type=_node_bytes, metavar="SIZE", help=text)


def _node_bytes(text: str) -> int:
    """As ``memory_limit`` is written: a number alone is in GiB."""
    try:
        nbytes = sized(text, GIB) * GIB
    except ValueError:
        nbytes = 0.0
    if not 1 <= nbytes < 1 << 60:
        raise ConfigError(f"--node-memory: {text!r} is no memory of a node; give a size such as 512GiB")
    return int(nbytes)
