"""Processes that a stood-in process spawns get the stand-in too, before they import anything else.

Megatron's checkpoint writers spawn: such a child starts a new interpreter and imports the training script again,
which fails without CUDA. Forked children have the stand-in from their parent.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
from collections.abc import Callable
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
# As `-c` starts the child, its sys.path need not hold this package yet: the parent's is passed on later.
_PROLOGUE = f"import sys; sys.path.append({_ROOT!r}); from ftckpt.testing import cpu; cpu.install(); "


def install_spawn() -> None:
    multiprocessing.spawn.get_command_line = _with_prologue(multiprocessing.spawn.get_command_line)


def _with_prologue(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def get_command_line(**kwargs: object) -> list[str]:
        line = original(**kwargs)
        if "-c" in line:  # not in a frozen program
            program = line.index("-c") + 1
            line[program] = _PROLOGUE + line[program]
        return line

    return get_command_line
