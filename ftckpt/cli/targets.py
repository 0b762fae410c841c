"""The meaning of what users name on the command line: jobs, memory and storage, by one rule.

A word is the name of a job that has memory on this machine, if there is one; else, as a text with a slash, it is a
path. A path of memory is a directory of jobs, of a job, of a node, or an arena. A path or URL of storage is what
``--ftckpt-persist`` names, a directory with exports next to the snapshots, or the folder of one checkpoint.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftckpt.cli.options import add_arena
from ftckpt.errors import ArenaError, StorageError
from ftckpt.memory.control_block import CONTROL_NAME
from ftckpt.memory.directory import SMP_LOCK_NAME, list_arenas, list_directories
from ftckpt.memory.launch_record import RUNS_PREFIX
from ftckpt.memory.slots import slot_name
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import OWNER_NAME, checkpoints
from ftckpt.persist.paths import locate
from ftckpt.persist.storage import Storage
from ftckpt.setting_checks import is_name

_PREFIX = "ftckpt-"
"""The prefix of a job's directory."""


class JobDirectory(NamedTuple):
    """A job with memory on this machine; ``is_open``: this process's user may read it."""

    job: str
    path: Path
    uid: int
    is_open: bool


def add_job(parser: argparse.ArgumentParser, *, is_optional: bool = False) -> None:
    """Adds the argument JOB, and ``--arena``."""
    text = "name of the job, or path of its directory" + is_optional * " (default: the only one on this machine)"
    parser.add_argument("job", metavar="JOB", nargs="?" if is_optional else None, default="", help=text)
    add_arena(parser)


def job_directory(root: Path, job: str) -> Path:
    """The directory of ``job`` on this machine, with one directory per node."""
    return root / f"{_PREFIX}{job}"


def jobs_in(root: Path) -> list[JobDirectory]:
    """The jobs on this machine, by name."""
    found: list[JobDirectory] = []
    for path in sorted(root.glob(f"{_PREFIX}*")):
        job = path.name.removeprefix(_PREFIX)
        # Any user may create files in a shared tmpfs: other names are not jobs, and are never printed. A directory of
        # launch records ends in the number of a user.
        if not is_name(job) or path.name.removeprefix(RUNS_PREFIX).isdigit():
            continue
        with suppress(OSError):  # the job has ended meanwhile
            is_open = os.access(path, os.R_OK | os.X_OK, effective_ids=True)
            if path.is_dir() and (not is_open or node_names(path)):
                found.append(JobDirectory(job, path, path.lstat().st_uid, is_open))
    return found


def node_names(job_dir: Path) -> list[str]:
    """Names of a job's nodes: directories with arenas or with the lock of an SMP."""
    names: list[str] = []
    with suppress(OSError):  # the job has ended meanwhile, or a directory in it is another user's
        for path in list_directories(job_dir):
            if is_name(path.name) and (list_arenas(path) or (path / SMP_LOCK_NAME).exists()):
                names.append(path.name)
    return names


def job_at(text: str, root: Path) -> tuple[Path, str]:
    """The arena root and the name of the job ``text``. Raises ArenaError if it is a path of something else."""
    if "/" not in text:
        return root, text
    path = Path(os.path.abspath(text))
    if not path.name.startswith(_PREFIX):
        raise ArenaError(_other(text, path, f"is not the directory of a job, such as {job_directory(root, 'NAME')}"))
    return path.parent, path.name.removeprefix(_PREFIX)


def unknown_job(root: Path, job: str) -> ArenaError:
    """The error for a job without memory under ``root``; names the jobs that have some."""
    jobs = ", ".join(one.job for one in jobs_in(root) if one.is_open) or "none"
    return ArenaError(f"no memory of job {job!r} under {root}; jobs there: {jobs}")


def memory_at(text: str, root: Path) -> Path | None:
    """The path of the memory that ``text`` names; None if it names something else."""
    if is_name(text) and (path := job_directory(root, text)).is_dir():
        return path
    path = Path(text)
    return path if "://" not in text and (jobs_in(path) or arenas_under(path)) else None


def arenas_under(path: Path) -> list[Path]:
    """Arenas of a job's, a node's or an arena's own directory."""
    below = list_directories(path)
    for level in ([path], below, [arena for node_dir in below for arena in list_directories(node_dir)]):
        if arenas := [one for one in level if (one / CONTROL_NAME).exists() or (one / slot_name(0)).exists()]:
            return arenas
    return []


def storage_at(text: str, root: Path) -> tuple[Storage, int | None]:
    """The storage that ``text`` names, and its iteration if it names a single checkpoint.

    Raises:
        StorageError: storage is unreadable, or the path has something else.
    """
    path, located = Path(text), locate(text)
    if "://" not in text and not path.exists():
        why = "does not exist" if "/" in text else f"is neither a path nor a job: {unknown_job(root, text)}"
        raise StorageError(f"{text} {why}", lasting=True)
    storage = open_storage(located.where)
    if "://" in text or storage.size(OWNER_NAME) is not None or checkpoints(storage) or not any(path.iterdir()):
        return storage, located.iteration
    raise StorageError(_other(text, path, "has no snapshots, and no checkpoint of another known kind"), lasting=True)


def _other(text: str, path: Path, otherwise: str) -> str:
    """A message about a path that has a checkpoint of another kind, or ``otherwise``."""
    # Imported late: torch takes seconds to load, and listing does not need it.
    from ftckpt.universal.formats import description

    return f"{text} {description(Path(locate(str(path)).where)) or otherwise}"
