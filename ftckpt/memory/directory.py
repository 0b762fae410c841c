"""Where arenas live: ``{root}/ftckpt-{job}/{node}/{shard}.{digest}/``, and how they are found and cleaned."""

from __future__ import annotations

import errno
import os
import pwd
import re
import secrets
import shutil
import signal
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ftckpt.errors import ArenaError
from ftckpt.events import log
from ftckpt.memory.locks import JOB_LOCK_NAME, FileLock, JobLock, holder_of
from ftckpt.memory.log_archive import SmpLog, keep_logs, take_log
from ftckpt.memory.process import Process
from ftckpt.model.manifest import Manifest
from ftckpt.setting_checks import is_name

LOCK_NAME = "lock"
PINNING_NAME = "pinning.lock"
"""The lock by which a node's ranks take turns to pin their slots for their devices."""
PULSE_NAME = ".pulse"
"""The page through which a node's ranks and its SMP give signs of life."""
SMP_LOCK_NAME, SMP_SOCKET_NAME, SMP_STATE_NAME, SMP_LOG_NAME = "smp.lock", "smp.sock", "smp.json", "smp.log"
"""Of the node's SMP: its lock, its socket, its configuration, its log."""
TOLD_NAME = ".told"
"""A link to nowhere: how far warnings in the SMP's log have been told in a trainer's."""
WORD_NAME = ".word"
"""A link to nowhere: what the first rank of a node makes it say all others read, if they see the same directory."""
ENDS_NAME = ".ends"
"""How the last attempt has ended, see ``ftckpt.memory.end_notes``."""
LINEAGE_NAME = ".lineage"
"""The history that the node's snapshots belong to, see ``ftckpt.memory.lineage_file``."""
INTERVAL_NAME = ".interval"
"""A link to nowhere: how many iterations apart snapshots keep the budget, see ``ftckpt.memory.interval_file``."""
MIRROR_NAME = ".mirror"
"""Packages of shards of other nodes, which the SMP keeps."""
SMP_NAMES = (SMP_LOCK_NAME, SMP_SOCKET_NAME, SMP_STATE_NAME, SMP_LOG_NAME, TOLD_NAME, PULSE_NAME)
"""All files of the SMP in a node's directory, ``.mirror``, half-made ones and what lies in arenas apart."""
_END_SECS = 10.0
"""For an SMP to end; after half of it SIGKILL."""
NODE_NAMES = (PINNING_NAME, WORD_NAME, ENDS_NAME, LINEAGE_NAME, INTERVAL_NAME, JOB_LOCK_NAME)
"""All other files in a node's directory. What has none of these names, nor an arena's, is nobody's to remove."""
SHARD_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}"
"""Of names of shards: with digest and suffix one still is a file name, and never a path."""
_ARENA = re.compile(rf"{SHARD_PATTERN}\.[0-9a-f]{{8}}")
_HALF_MADE = f"{'[0-9a-f]' * 8}.new"
"""A pattern: the end of what ``fresh_name`` gives."""

_writing: set[str] = set()  # names under which threads of this process build something at the moment
_guard = threading.Lock()


@contextmanager
def fresh_name(path: Path) -> Iterator[Path]:
    """A name beside ``path`` that nobody else builds under; what still lies there at the end is deleted."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    with _guard:
        _writing.add(fresh.name)
    try:
        yield fresh
    finally:
        # In this order: while the file is there, no other thread takes it for one that a killed process left.
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        with _guard:
            _writing.discard(fresh.name)


def remove_half_made(directory: Path, name: str = "*") -> list[Path]:
    """Delete what killed processes left of files called ``name`` (a pattern); returns what that was.

    Only the process that builds such files may call this: others' names are not known to it.
    """
    with _guard:
        there = sorted(directory.glob(f".{name}.{_HALF_MADE}"))
        doomed = [path for path in there if path.name not in _writing and not _is_plain_dir(path)]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def node_directory(root: Path, job: str, node: str, *, makes: bool = True) -> Path:
    """The directory of one node's arenas, created 0700 if needed and ``makes``.

    Raises:
        ArenaError: an unusable name, an unwritable root, a symbolic link, or another user's directory; or it is not
            there.
    """
    node_dir = job_node_path(root, job, node)
    for directory in (node_dir.parent, node_dir):
        if not makes and not os.path.lexists(directory):
            raise ArenaError(f"{directory} is gone, as if the job had been cleaned")
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            pass  # a file or a dangling link: require_own says which
        except OSError as error:
            raise ArenaError(
                f"{directory}: cannot be created: {error.strerror}; "
                f"name a writable tmpfs with --ftckpt-arena instead of {root}"
            ) from None
        require_own(directory)
        directory.chmod(0o700)
    return node_dir


def job_node_path(root: Path, job: str, node: str) -> Path:
    """Where the arenas of ``node`` lie, whether they do or not. Raises ArenaError for an unusable name."""
    _require_name(is_name(job), job, "job")
    _require_name(is_name(node), node, "node")
    return root / f"ftckpt-{job}" / node


def arena_path(node_dir: Path, manifest: Manifest) -> Path:
    """Where the arena of ``manifest`` lies. Raises ArenaError for an unusable name of its shard."""
    _require_name(is_shard(manifest.shard), manifest.shard, "shard")
    return node_dir / f"{manifest.shard}.{manifest.digest.hex()[:8]}"


def is_shard(name: str) -> bool:
    """Whether a shard may be called so; it becomes part of file names."""
    return bool(re.fullmatch(SHARD_PATTERN, name))


def list_directories(path: Path) -> list[Path]:
    """Directories below ``path``, sorted; hidden ones, links and what a missing directory has are left out."""
    if not path.is_dir():
        return []
    return sorted(below for below in path.iterdir() if _is_plain_dir(below) and below.name[0] != ".")


def list_arenas(node_dir: Path) -> list[Path]:
    """Directories of complete arenas, sorted; temporary ones, and what is none of ftckpt's, are left out."""
    return [path for path in list_directories(node_dir) if _ARENA.fullmatch(path.name)]


def remove_arena(path: Path) -> None:
    """Delete an arena. It is renamed first, so that a kill half-way leaves nothing that looks whole."""
    doomed = path.with_name(f".{path.name}.gone-{os.getpid()}")
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return
    remove_tree(doomed)


def remove_tree(path: Path) -> None:
    """Delete a directory; files that vanish meanwhile are no error."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        shutil.rmtree(path)  # what is in the way is raised


def remove_stale(node_dir: Path, shard: str = "") -> list[Path]:
    """Delete what killed processes left half-created or half-removed for ``shard``, or for all; returns what it was.

    Raises:
        ArenaError: a live process is creating an arena there right now.
    """
    removed = []
    for path in _temporaries(node_dir, shard):
        if not path.is_dir():
            continue
        # Whoever creates one holds its lock.
        with FileLock(path / LOCK_NAME, 0, f"a new arena {path.name}", "two ranks hold the same shard"):
            remove_tree(path)
        removed.append(path)
    return removed


def leave_word(node_dir: Path) -> str:
    """Leave a new word in a node's directory, in place of any before; returns it."""
    word = secrets.token_hex(16)
    (node_dir / WORD_NAME).unlink(missing_ok=True)
    # In the name that a link leads to: a file's bytes would need a page, and the tmpfs may be full to the last one.
    (node_dir / WORD_NAME).symlink_to(word)
    return word


def read_word(node_dir: Path) -> str:
    """What the last ``leave_word`` has left; empty where there is none."""
    try:
        return os.readlink(node_dir / WORD_NAME)
    except OSError:
        return ""


def refuse_renamed(node_dir: Path, nodes: Collection[str]) -> None:
    """Raise ArenaError for arenas under a node name that is not in ``nodes``: they would be lost without a word."""
    for other in sorted(node_dir.parent.iterdir()):
        if other.name not in nodes and other.is_dir() and list_arenas(other):
            raise ArenaError(
                f"{other} holds snapshots of this job under the node name {other.name!r}, which no rank has now: "
                f"start with --ftckpt-node {other.name}, or remove them with 'ftckpt clean JOB'"
            )


def wait_for_writer(arena: Path, deadline_secs: float) -> None:
    """Raise ArenaError for an arena that a process of an earlier attempt still writes after ``deadline_secs``."""
    if (arena / LOCK_NAME).exists():
        lock_arena(arena, deadline_secs).release()


def lock_arena(arena: Path, deadline_secs: float) -> FileLock:
    """Become the one process that writes the arena.

    Raises:
        ArenaError: still held by another process (named by pid) after ``deadline_secs``.
    """
    remedy = "wait for it or end it; two ranks of one job must not share an arena"
    return FileLock(arena / LOCK_NAME, deadline_secs, f"arena {arena.name}", remedy)


def remove_job_if_empty(root: Path, job: str, node: str) -> bool:
    """Delete the node's directory, and the job's, if no arena is left; whether the node's is gone.

    The process that holds the job's lock calls this; for any other it does nothing while the lock is held. An SMP
    that serves there yet has nothing to guard any more: it is ended, and its log kept where it warned of something.
    """
    node_dir = job_node_path(root, job, node)
    if node_dir.is_dir():
        # Asked, not tried: ranks that end at once would take each other's tries for the job's lock, and make it anew.
        is_held = holder_of(node_dir / JOB_LOCK_NAME) not in (None, os.getpid())
        if _beside_own_files(node_dir) or is_held or not end_smp(node_dir, _END_SECS):
            return False
        smp_log = take_log(node_dir / SMP_LOG_NAME, job, node)
        is_gone = _remove_node(node_dir)
        keep_logs([smp_log])
        return is_gone
    with suppress(OSError):  # another node of this host was first, or is not done
        node_dir.parent.rmdir()
    return True


def _beside_own_files(node_dir: Path) -> list[Path]:
    """Arenas in a node's directory, whole or not, and what is none of ftckpt's."""
    own = {*NODE_NAMES, MIRROR_NAME, *SMP_NAMES}
    there = [path for path in sorted(node_dir.iterdir()) if path.name not in own]
    return [path for path in there if _is_plain_dir(path) or not path.match(f".*.{_HALF_MADE}")]


def _remove_node(node_dir: Path) -> bool:
    """Delete the files of a node's directory, those of the SMP, and the directories; whether the node's is gone."""
    try:
        remove_smp_files(node_dir)
        # The job's lock goes last: until then no other attempt takes the directory for its own.
        for name in NODE_NAMES:
            (node_dir / name).unlink(missing_ok=True)
        node_dir.rmdir()
    except OSError:  # an arena was created meanwhile
        return False
    with suppress(OSError):  # another node of this host was first, or is not done
        node_dir.parent.rmdir()
    return True


def clean_job(root: Path, job: str, tell: Callable[[str], None] = log.info) -> list[Path]:
    """Delete every arena of ``job`` on this node and end its SMPs; returns the arenas that were deleted. What is none
    of ftckpt's stays. ``tell`` is called with where the logs of SMPs are kept that warned of something, and with what
    stays.

    Raises:
        ArenaError: a live process holds a lock of the job, an SMP does not end, or the directory belongs to another
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
    logs: list[SmpLog] = []
    with ExitStack() as locks:
        locks.callback(keep_logs, logs, tell)  # behind the locks, and where something cannot be removed, too
        # All locks before the first file goes: nothing is deleted of a job of which one process lives.
        for node_dir in node_dirs:
            require_own(node_dir)
            locks.enter_context(JobLock(node_dir, 0))
        for path in arenas + temporaries:
            remedy = "end that process first"
            locks.enter_context(FileLock(path / LOCK_NAME, 0, f"arena {path.name}", remedy))
        for node_dir in node_dirs:  # no trainer lives: none would miss it, and none starts it anew
            if not end_smp(node_dir, _END_SECS):
                raise ArenaError(f"the SMP of {node_dir} does not end, or runs in another container; end it first")
        logs += [take_log(node_dir / SMP_LOG_NAME, job, node_dir.name) for node_dir in node_dirs]
        for path in arenas:
            remove_arena(path)
        _remove_found(job_dir, node_dirs)
    for path in others:
        tell(f"ftckpt: {path} was not made by ftckpt, and stays")
    return arenas


def _remove_found(job_dir: Path, nodes: Collection[Path]) -> None:
    """Delete what ftckpt keeps in the directories of these nodes, by the process that holds all the job's locks.

    Whoever waits for such a lock starts when its file is gone. So these go last, and what is in the directories by
    then is that start's.
    """
    for node_dir in nodes:
        for temporary in _temporaries(node_dir, ""):
            remove_tree(temporary)
        remove_smp_files(node_dir)
        for name in NODE_NAMES:
            if name != JOB_LOCK_NAME:
                (node_dir / name).unlink(missing_ok=True)
    for node_dir in nodes:
        (node_dir / JOB_LOCK_NAME).unlink(missing_ok=True)
        _remove_empty(node_dir)
    _remove_empty(job_dir)


def _remove_empty(directory: Path) -> None:
    """Delete it, unless somebody has made something in it, or has deleted it, meanwhile."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def end_smp(node_dir: Path, deadline_secs: float) -> bool:
    """End the SMP that holds the lock of ``node_dir``, by SIGTERM, then SIGKILL; whether none runs there now."""
    lock, deadline = node_dir / SMP_LOCK_NAME, time.monotonic() + deadline_secs
    # The lock names the SMP, not a file with a pid in it: those repeat, and a killed process leaves its file behind.
    while (pid := holder_of(lock)) is not None and pid != os.getpid():
        if time.monotonic() >= deadline:
            return False
        process = Process.open(pid)
        if process is None:
            time.sleep(0.02)  # it ended just now, or is of another container
            continue
        with process:
            if holder_of(lock) == pid:  # asked again: before it was opened the pid may have gone to another process
                process.send(signal.SIGTERM)
                if not process.gone(deadline_secs / 2):
                    process.send(signal.SIGKILL)
                    process.gone(deadline - time.monotonic())
    return True


def remove_smp_files(node_dir: Path) -> None:
    """Delete what SMPs keep in ``node_dir`` beside the arenas; none must run."""
    for name in SMP_NAMES:
        (node_dir / name).unlink(missing_ok=True)
    remove_half_made(node_dir)
    if _is_plain_dir(node_dir / MIRROR_NAME):
        remove_tree(node_dir / MIRROR_NAME)


def require_own(path: Path) -> None:
    """Refuse (ArenaError) a symbolic link, what is no directory, and a directory of another user."""
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
    """For people."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _is_plain_dir(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _temporaries(node_dir: Path, shard: str) -> list[Path]:
    """Hidden ``.{shard}.{digest}.{new|gone}-{pid}`` directories; those of every shard if it is empty."""
    pattern = re.compile(rf"\.{re.escape(shard) or '.+'}\.[0-9a-f]{{8}}\.(new|gone)-[0-9]+")
    return sorted(p for p in node_dir.iterdir() if pattern.fullmatch(p.name) and _is_plain_dir(p))


def _require_name(is_one: bool, name: str, what: str) -> None:
    if not is_one:
        raise ArenaError(f"{what}: {name!r} is not a name; use letters, digits and . _ -")
