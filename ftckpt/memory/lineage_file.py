"""The lineage that a node's snapshots belong to: one small file in the node's directory.

The node's leader writes it at each start that changes it, before anybody trains and after what is not in its past was
voided. So every snapshot that a node holds is in the history of its file, whenever a process is killed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import xxhash

from ftckpt.errors import ArenaError
from ftckpt.memory.directory import LINEAGE_NAME, fresh_name
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage


def write_lineage(node_dir: Path, lineage: Lineage) -> None:
    """Replace the node's lineage. Raises ArenaError where the directory takes no file."""
    path, text = node_dir / LINEAGE_NAME, codec.encode(lineage)
    data = f"{xxhash.xxh3_64_hexdigest(text)} {text.decode()}".encode()
    try:
        if path.exists() and path.read_bytes() == data:  # a full tmpfs keeps no job from resuming
            return
        with fresh_name(path) as fresh:
            fresh.write_bytes(data)
            os.replace(fresh, path)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be written: {error.strerror}; free some memory of that tmpfs") from None


def mark_doubtful(node_dir: Path, after: int, until: int) -> Lineage:
    """Record that the node's snapshots between two iterations are in doubt; returns its lineage. Raises ArenaError as
    ``write_lineage``."""
    lineage = read_lineage(node_dir)
    if lineage.branches and after < until:
        lineage = lineage.doubt(after, until)
        write_lineage(node_dir, lineage)
    return lineage


def read_lineage(node_dir: Path) -> Lineage:
    """The node's lineage; unknown where there is none, or it is damaged."""
    try:
        checksum, _, text = (node_dir / LINEAGE_NAME).read_bytes().partition(b" ")
        if xxhash.xxh3_64_hexdigest(text).encode() == checksum:
            return codec.decode(text, Lineage)
    except (OSError, ValueError, TypeError, KeyError, json.JSONDecodeError):
        pass
    return UNKNOWN
