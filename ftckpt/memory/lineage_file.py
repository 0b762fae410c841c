"""The lineage of a node's snapshots: one small file in the node's directory.

The node's leader writes it at each start that changes it, after snapshots outside the lineage are invalidated and
before any rank trains. So at any kill every snapshot of the node belongs to the lineage in its file.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from ftckpt.errors import ArenaError
from ftckpt.memory.atomic_files import replace_file
from ftckpt.memory.directory import LINEAGE_NAME
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage


def write_lineage(node_dir: Path, lineage: Lineage) -> None:
    """Replace the node's lineage. Raises ArenaError if the file cannot be written."""
    path, text = node_dir / LINEAGE_NAME, codec.encode(lineage)
    data = f"{xxhash.xxh3_64_hexdigest(text)} {text.decode()}".encode()
    try:
        if path.exists() and path.read_bytes() == data:  # a full tmpfs keeps no job from resuming
            return
        replace_file(path, data)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be written: {error.strerror}; free some memory of that tmpfs") from None


def mark_doubtful(node_dir: Path, after: int, until: int) -> Lineage:
    """Record that the node's snapshots between two iterations are doubtful; returns the lineage. Raises ArenaError as
    ``write_lineage``."""
    lineage = read_lineage(node_dir)
    if lineage.branches and after < until:
        lineage = lineage.doubt(after, until)
        write_lineage(node_dir, lineage)
    return lineage


def read_lineage(node_dir: Path) -> Lineage:
    """The node's lineage; ``UNKNOWN`` if the file is missing or corrupt."""
    try:
        checksum, _, text = (node_dir / LINEAGE_NAME).read_bytes().partition(b" ")
        if xxhash.xxh3_64_hexdigest(text).encode() == checksum:
            return codec.decode(text, Lineage)
    except (OSError, ValueError, TypeError, KeyError, json.JSONDecodeError):
        pass
    return UNKNOWN
