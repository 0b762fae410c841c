"""Processes that a stood-in process spawns get the stand-in too, before they import anything else.

Megatron's checkpoint writers spawn: such a child starts a new interpreter and imports the training script again,
which fails without CUDA. Forked children have the stand-in from their parent.

Such children outlive a parent that is killed, or that leaves without cleaning up, as ranks of tests do: these do not.
"""

from __future__ import annotations

import functools
import multiprocessing.spawn
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[3])
# As `-c` starts the child, its sys.path need not hold this package yet: the parent's is passed on later.
_PROLOGUE = (
    f"import sys; sys.path.append({_ROOT!r}); from tests.support import standin; standin.install(); "
    "from tests.support.standin import spawn; spawn.end_with({parent}); "
)
_POLL_SECS = 0.5


def install_spawn() -> None:
    multiprocessing.spawn.get_command_line = _with_prologue(multiprocessing.spawn.get_command_line)


def end_with(parent: int) -> None:
    """End this process once its parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECS)
        os._exit(1)

    threading.Thread(target=watch, name="ends-with-parent", daemon=True).start()


def _with_prologue(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def get_command_line(**kwargs: object) -> list[str]:
        line = original(**kwargs)
        if "-c" in line:  # not in a frozen program
            program = line.index("-c") + 1
            line[program] = _PROLOGUE.format(parent=os.getpid()) + line[program]
        return line

    return get_command_line
