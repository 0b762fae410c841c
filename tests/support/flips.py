"""Flips single bits of files."""

from __future__ import annotations

from pathlib import Path

from ftckpt.memory.arena import Arena
from ftckpt.memory.slots import slot_name


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Turn one bit of a file round; a second call turns it back."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def flip_slot(arena: Arena, slot: int, at: int) -> None:
    """Turn one bit of a slot round."""
    flip(arena.path / slot_name(slot), at, 2)
