"""What other jobs of this user hold in the memory that a job lacks: by name, with the command that removes it."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.config import Config
from ftckpt.model.text import human
from ftckpt.setting_checks import is_name
from ftckpt.store.locks import JOB_LOCK_NAME, holder_of
from ftckpt.store.memory import used_bytes

_PREFIX = "ftckpt-"
_MOST = 5
"""Jobs that are named, the largest."""


@dataclass(frozen=True)
class Leftover:
    """What one job has under an arena root on this machine; ``runs``: a live process holds its lock."""

    job: str
    nbytes: int
    runs: bool


def leftovers(root: Path, job: str) -> list[Leftover]:
    """What other jobs than ``job`` of this user have under ``root``, the largest first; those without memory not."""
    found = []
    with suppress(OSError):
        for path in root.iterdir():
            name = path.name.removeprefix(_PREFIX)
            if name in (path.name, job) or not is_name(name) or not _is_own(path):
                continue
            runs = any(holder_of(node / JOB_LOCK_NAME) is not None for node in path.iterdir())
            found.append(Leftover(name, used_bytes(path), runs))
    return sorted((one for one in found if one.nbytes), key=lambda one: (-one.nbytes, one.job))


def named(root: Path, job: str) -> str:
    """``leftovers`` in words, and how they are removed; empty where there are none."""
    there = leftovers(root, job)
    if not there:
        return ""
    arena = "" if str(root) == Config().arena else f" --arena {root}"
    words = [
        f"{one.job} {human(one.nbytes)} ({'it runs' if one.runs else f'ftckpt clean {one.job}{arena}'})"
        for one in there[:_MOST]
    ]
    if len(there) > _MOST:
        words.append(f"{len(there) - _MOST} more {human(sum(one.nbytes for one in there[_MOST:]))}")
    return f"other jobs of yours hold memory under {root}: {', '.join(words)}"


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        return path.lstat().st_uid == os.geteuid() and path.is_dir() and not path.is_symlink()
    return False
