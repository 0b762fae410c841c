"""The option by which commands are told where the memory of jobs is."""

from __future__ import annotations

import argparse
from pathlib import Path

from ftckpt.config import Config


def add_arena(parser: argparse.ArgumentParser) -> None:
    """Add ``--arena``."""
    parser.add_argument("--arena", type=Path, default=Path(Config().arena), help="tmpfs (default: %(default)s)")
