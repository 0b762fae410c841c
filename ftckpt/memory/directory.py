"""Directories of arenas, ``{root}/ftckpt-{job}/{node}/{shard}.{digest}/``: creation, listing, cleanup."""

from __future__ import annotations

import errno
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from ftckpt.errors import ArenaError
from ftckpt.events import log
from ftckpt.memory.atomic_files import UNFINISHED, remove_unfinished, replace_link
from ftckpt.memory.locks import JOB_LOCK_NAME, FileLock, JobLock, holder_of
from ftckpt.memory.process import Process
from ftckpt.memory.smp_log import SMP_LOG_NAME, TOLD_NAME, LogTail
from ftckpt.model.manifest import Manifest
from ftckpt.setting_checks import is_name

LOCK_NAME = "lock"
PINNING_NAME = "pinning.lock"
"""The lock that serializes the registration of slots with the devices of a node's ranks."""
PULSE_NAME = ".pulse"
"""The heartbeat page of a node's ranks and its SMP."""
SMP_LOCK_NAME, SMP_SOCKET_NAME, SMP_STATE_NAME = "smp.lock", "smp.sock", "smp.json"
"""The node's SMP: lock, socket, configuration."""
TOKEN_NAME = ".word"
"""A dangling link to a token that a node's first rank writes: ranks that read it share its directory."""
ENDS_NAME = ".ends"
"""Exit notes of the last attempt, see ``ftckpt.memory.end_notes``."""
LINEAGE_NAME = ".lineage"
"""The lineage of the node's snapshots, see ``ftckpt.memory.lineage_file``."""
INTERVAL_NAME = ".interval"
"""A dangling link whose target is the interval that keeps the budget, see ``ftckpt.session.attempt``."""
MIRROR_NAME = ".mirror"
"""The directory in which the SMP keeps packages of shards of other nodes."""
SMP_NAMES = (SMP_LOCK_NAME, SMP_SOCKET_NAME, SMP_STATE_NAME, SMP_LOG_NAME, TOLD_NAME, PULSE_NAME)
"""All files of the SMP in a node's directory, except ``.mirror``, unfinished files, and files in arenas."""
_MOST_WARNINGS = 16
"""Warnings of an SMP that are reported when its log is removed, the last ones."""
_END_SECS = 10.0
"""Deadline for an SMP to exit; SIGKILL follows after half of it."""
NODE_NAMES = (PINNING_NAME, TOKEN_NAME, ENDS_NAME, LINEAGE_NAME, INTERVAL_NAME, JOB_LOCK_NAME)
"""All other files in a node's directory. ftckpt deletes no file with another name, except in arenas."""
SHARD_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""Shard names: short enough for a file name with digest and suffix, and never a path."""
_ARENA = re.compile(rf"{SHARD_PATTERN}\.[0-9a-f]{{8}}")


def node_directory(root: Path, job: str, node: str, *, makes: bool = True) -> Path:
    """The directory of one node's arenas, created with mode 0700 if missing and ``makes``.

    Raises:
        ArenaError: an invalid name, an unwritable root, a symbolic link, another user's directory, or, without
            ``makes``, a missing directory.
    """
    node_dir = job_node_path(root, job, node)
    for directory in (node_dir.parent, node_dir):
        if not makes and not os.path.lexists(directory):
            raise ArenaError(f"{directory} does not exist; the job's memory may have been cleaned")
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            pass  # a file or a dangling link: require_own checks which
        except OSError as error:
            raise ArenaError(
                f"{directory}: cannot be created: {error.strerror}; "
                f"name a writable tmpfs with --ftckpt-arena instead of {root}"
            ) from None
        require_own(directory)
        directory.chmod(0o700)
    return node_dir


def job_node_path(root: Path, job: str, node: str) -> Path:
    """Path of the arenas of ``node``, which need not exist. Raises ArenaError for an invalid name."""
    _require_name(is_name(job), job, "job")
    _require_name(is_name(node), node, "node")
    return root / f"ftckpt-{job}" / node


def arena_path(node_dir: Path, manifest: Manifest) -> Path:
    """Path of the arena of ``manifest``, which need not exist. Raises ArenaError for an invalid shard name."""
    _require_name(is_shard(manifest.shard), manifest.shard, "shard")
    return node_dir / f"{manifest.shard}.{manifest.digest.hex()[:8]}"


def is_shard(name: str) -> bool:
    """Whether ``name`` is a valid shard name, which becomes part of file names."""
    return bool(re.fullmatch(SHARD_PATTERN, name))


def list_directories(path: Path) -> list[Path]:
    """Directories in ``path``, sorted, without hidden ones and links; none if ``path`` is missing."""
    if not path.is_dir():
        return []
    return sorted(below for below in path.iterdir() if _is_plain_dir(below) and below.name[0] != ".")


def list_arenas(node_dir: Path) -> list[Path]:
    """Directories of complete arenas, sorted, without temporary ones and foreign files."""
    return [path for path in list_directories(node_dir) if _ARENA.fullmatch(path.name)]


def remove_arena(path: Path) -> None:
    """Delete an arena. It is renamed first, so that a kill leaves no partial arena under its name."""
    doomed = path.with_name(f".{path.name}.gone-{os.getpid()}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Delete a directory; files that are deleted concurrently are no error."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)  # raises the error


def remove_stale(node_dir: Path, shard: str = "") -> list[Path]:
    """Delete arenas of ``shard``, or of all, that killed processes left partly created or removed; returns them.

    Raises:
        ArenaError: a live process is creating an arena of that shard.
    """
    removed = []
    for path in _temporaries(node_dir, shard):
        if not path.is_dir():
            continue
        # The process that creates an arena has its lock.
        with FileLock(path / LOCK_NAME, 0, f"a new arena {path.name}", "two ranks have the same shard name"):
            remove_tree(path)
        removed.append(path)
    return removed


def write_token(node_dir: Path) -> str:
    """Write a new random token into a node's directory, replacing any; returns it."""
    token = secrets.token_hex(16)
    replace_link(node_dir / TOKEN_NAME, token)
    return token


def refuse_renamed(node_dir: Path, nodes: Collection[str]) -> None:
    """Raise ArenaError for arenas under a node name that is not in ``nodes``: they would be silently lost."""
    for other in sorted(node_dir.parent.iterdir()):
        if other.name not in nodes and other.is_dir() and list_arenas(other):
            raise ArenaError(
                f"{other} has snapshots of this job under the node name {other.name!r}, which no rank has now: "
                f"start with --ftckpt-node {other.name}, or remove them with 'ftckpt clean JOB'"
            )


def wait_for_writer(arena: Path, deadline_secs: float) -> None:
    """Raise ArenaError if a process of an earlier attempt still has the arena's lock after ``deadline_secs``."""
    if (arena / LOCK_NAME).exists():
        lock_arena(arena, deadline_secs).release()


def lock_arena(arena: Path, deadline_secs: float) -> FileLock:
    """Acquire the arena's writer lock.

    Raises:
        ArenaError: another process, named by pid, still has it after ``deadline_secs``.
    """
    remedy = "wait for it or end it; two ranks of one job must not share an arena"
    return FileLock(arena / LOCK_NAME, deadline_secs, f"arena {arena.name}", remedy)


def remove_job_if_empty(root: Path, job: str, node: str, tell: Callable[[str], None] = log.warning) -> bool:
    """Delete the node's directory, and the job's, if no arena is left; returns whether the node's is gone.

    Only the process that has the job's lock can do this; for any other it does nothing while the lock is taken. An
    SMP that still runs has no arena to protect: it is stopped, and ``tell`` receives its warnings.
    """
    node_dir = job_node_path(root, job, node)
    if node_dir.is_dir():
        # Queried, not acquired: ranks that end simultaneously would mistake each other's attempts for the job's lock.
        is_held = holder_of(node_dir / JOB_LOCK_NAME) not in (None, os.getpid())
        if _beside_own_files(node_dir) or is_held or not end_smp(node_dir, _END_SECS):
            return False
        _tell_warnings(node_dir, tell)
        try:
            return _remove_node(node_dir)
        except OSError:  # the job has ended well: ``ftckpt clean`` removes the rest, and raises
            return False
    with suppress(OSError):  # deleted by another node name of this host, or not empty
        node_dir.parent.rmdir()
    return True


def _beside_own_files(node_dir: Path) -> list[Path]:
    """Arenas in a node's directory, complete or not, and foreign files."""
    own = {*NODE_NAMES, MIRROR_NAME, *SMP_NAMES}
    there = [path for path in sorted(node_dir.iterdir()) if path.name not in own]
    return [path for path in there if _is_plain_dir(path) or not path.match(f".*.{UNFINISHED}")]


def _remove_node(node_dir: Path) -> bool:
    """Delete a node's files, the SMP's files, and the directories; returns whether the node's directory is gone: an
    arena may be created concurrently. Raises OSError."""
    remove_smp_files(node_dir)
    # The job's lock goes last: until then no other attempt can use the directory.
    for name in NODE_NAMES:
        (node_dir / name).unlink(missing_ok=True)
    if not _remove_empty(node_dir):
        return False
    _remove_empty(node_dir.parent)  # other node names of this host may have files there
    return True


def _remove_empty(directory: Path) -> bool:
    """Delete a directory unless it has files; returns whether it is gone. Raises OSError."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        return error.errno == errno.ENOENT
    return True


def clean_job(root: Path, job: str, tell: Callable[[str], None] = log.info) -> list[Path]:
    """Delete every arena of ``job`` on this machine and stop its SMPs; returns the deleted arenas.

    Foreign files stay. ``tell`` receives a line for each of them, and for each warning of an SMP.

    Raises:
        ArenaError: a live process has a lock of the job, an SMP does not exit, or the directory belongs to another
            user.
    """
    _require_name(is_name(job), job, "job")
    job_dir = root / f"ftckpt-{job}"
    if not job_dir.is_symlink() and not job_dir.exists():
        return []
    require_own(job_dir)
    node_dirs = [path for path in list_directories(job_dir) if is_name(path.name)]
    arenas = [path for node_dir in node_dirs for path in list_arenas(node_dir)]
    temporaries = [path for node_dir in node_dirs for path in _temporaries(node_dir, "")]
    others = [path for path in sorted(job_dir.iterdir()) if path not in node_dirs]
    others += [p for node_dir in node_dirs for p in _beside_own_files(node_dir) if p not in arenas + temporaries]
    with ExitStack() as locks:
        # All locks are acquired before the first deletion: no file is deleted while a process of the job lives.
        _stop_processes(locks, node_dirs, arenas + temporaries)
        for node_dir in node_dirs:
            _tell_warnings(node_dir, tell)  # they go with the log
        for path in arenas:
            remove_arena(path)
        # All arenas of the job are gone: a process that starts on one node finds none under another node's name.
        for node_dir in node_dirs:
            for temporary in _temporaries(node_dir, ""):
                remove_tree(temporary)
            _remove_node(node_dir)
        _remove_empty(job_dir)
    for path in others:
        tell(f"ftckpt: kept {path}: ftckpt did not create it")
    return arenas


def _tell_warnings(node_dir: Path, tell: Callable[[str], None]) -> None:
    for warning in LogTail(node_dir).new_warnings()[-_MOST_WARNINGS:]:
        tell(f"ftckpt: SMP of node {node_dir.name}: {warning}")


def _stop_processes(locks: ExitStack, node_dirs: Collection[Path], arenas: Collection[Path]) -> None:
    """Lock a job on these nodes and its arenas, and stop its SMPs; raises as ``clean_job``."""
    for node_dir in node_dirs:
        require_own(node_dir)
        locks.enter_context(JobLock(node_dir, 0))
    for path in arenas:
        locks.enter_context(FileLock(path / LOCK_NAME, 0, f"arena {path.name}", "end that process first"))
    for node_dir in node_dirs:  # no trainer lives that needs the SMP or would restart it
        if not end_smp(node_dir, _END_SECS):
            raise ArenaError(f"the SMP of {node_dir} does not end, or runs in another container; end it first")


def end_smp(node_dir: Path, deadline_secs: float) -> bool:
    """Stop the SMP that has the lock of ``node_dir`` by SIGTERM, then SIGKILL; returns whether none runs now."""
    lock, deadline = node_dir / SMP_LOCK_NAME, time.monotonic() + deadline_secs
    # The lock identifies the SMP. A pid file could be stale, and pids are reused.
    while (pid := holder_of(lock)) is not None and pid != os.getpid():
        if time.monotonic() >= deadline:
            return False
        process = Process.open(pid)
        if process is None:
            time.sleep(0.02)  # it exited just now, or is in another container
            continue
        with process:
            if holder_of(lock) == pid:  # checked again: the pid may have been reused before the process was opened
                process.send(signal.SIGTERM)
                if not process.gone(deadline_secs / 2):
                    process.send(signal.SIGKILL)
                    process.gone(deadline - time.monotonic())
    return True


def remove_smp_files(node_dir: Path) -> None:
    """Delete the files of SMPs in ``node_dir`` outside the arenas; no SMP may run."""
    for name in SMP_NAMES:
        (node_dir / name).unlink(missing_ok=True)
    remove_unfinished(node_dir)
    if _is_plain_dir(node_dir / MIRROR_NAME):
        remove_tree(node_dir / MIRROR_NAME)


def require_own(path: Path) -> None:
    """Raise ArenaError unless ``path`` is a directory of this user and no symbolic link."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise ArenaError(f"{path} is a symbolic link; remove it")
    if not stat.S_ISDIR(status.st_mode):
        raise ArenaError(f"{path} is not a directory; remove it")
    if status.st_uid != os.geteuid():
        raise ArenaError(
            f"{path} belongs to {user_name(status.st_uid)}, not to {user_name(os.geteuid())}; "
            "give the job another name with --ftckpt-job, or have the owner remove it"
        )


def user_name(uid: int) -> str:
    """The name and number of a user, for messages."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _is_plain_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _temporaries(node_dir: Path, shard: str) -> list[Path]:
    """Hidden ``.{shard}.{digest}.{new|gone}-{pid}`` directories; of every shard if ``shard`` is empty."""
    pattern = re.compile(rf"\.{re.escape(shard) or '.+'}\.[0-9a-f]{{8}}\.(new|gone)-[0-9]+")
    return sorted(p for p in node_dir.iterdir() if pattern.fullmatch(p.name) and _is_plain_dir(p))


def _require_name(is_one: bool, name: str, what: str) -> None:
    if not is_one:
        raise ArenaError(f"{what}: {name!r} is not a valid name; use letters, digits and . _ -")
