"""Batons that killed processes have left in the build directories of torch's extensions.

``torch.utils.cpp_extension`` compiles an operator while it holds a baton: a file ``lock`` in the operator's build
directory, created with O_EXCL and open until it is deleted. Whoever else needs the operator waits until the file has
gone, without a word and without a deadline. A process that is killed while it compiles (DeepSpeed's operators take
minutes) leaves the file, and each later start waits for ever. Inductor and Triton lock with ``flock`` or rename files
that are complete: a kill leaves nothing there.

A baton does not say whose it is. While it is held its owner has the file open, and what compiles for it, ninja, has
the build directory as its own: a baton of this user for which no process has either, on a file system that no other
machine reaches, belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.events import log
from ftckpt.store.memory import mount_of

_NAME = "lock"
_SETTLE_SECS = 1.0
"""A baton is closed before its file is deleted: one that nobody has open may be about to go."""
_LOCK_SECS, _POLL_SECS = 10.0, 0.05
"""For others who look at the same baton."""
_LONG_SECS = 300.0
"""Somebody who compiles for longer is worth a line."""
_LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"})
_OF_ONE_CONTAINER = "overlay"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""PROC_PID_INIT_INO: processes of all containers of the machine are seen from there."""


@dataclass(frozen=True)
class Baton:
    """A baton that is there: ``inode`` is its device and number, ``age_secs`` how long it has been there."""

    path: Path
    inode: tuple[int, int]
    uid: int
    age_secs: float

    @property
    def operator(self) -> str:
        """The name of what is compiled."""
        return self.path.parent.name


@dataclass(frozen=True)
class _Doubt:
    """Why a baton may be somebody's; ``pid`` where it is known whose."""

    text: str
    pid: int | None = None


def release_orphans(
    env: Mapping[str, str] = os.environ, proc: Path = Path("/proc"), settle_secs: float = _SETTLE_SECS
) -> None:
    """Delete the batons whose owners are dead, and say of the others why they stay.

    Every rank calls this before anything may be compiled: when it returns, none waits for a baton that was there
    before and can be known to be nobody's. Takes a moment where no baton is.
    """
    for baton in _batons(_build_roots(env)):
        try:
            doubt = _release(baton, proc, settle_secs)
            if doubt is not None and env.get("LOCAL_RANK", "0") == "0":  # once for a machine
                _tell(baton, doubt)
        except OSError as error:
            log.warning("ftckpt: %s: cannot be looked at or deleted: %s", baton.path, error.strerror)


def _build_roots(env: Mapping[str, str]) -> list[Path]:
    """Where torch builds extensions: as ``torch.utils.cpp_extension`` and ``torch._appdirs`` find it."""
    if "TORCH_EXTENSIONS_DIR" in env:
        return [Path(env["TORCH_EXTENSIONS_DIR"])]
    cache = env.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(cache).expanduser() / "torch_extensions"
    # By version of Python and by accelerator, which only torch knows.
    return sorted(path for path in root.glob("*") if path.is_dir())


def _batons(roots: Iterable[Path]) -> Iterator[Baton]:
    for root in roots:
        for path in sorted(root.glob(f"*/{_NAME}")):
            baton = _baton_at(path)
            if baton is not None:
                yield baton


def _baton_at(path: Path) -> Baton | None:
    with suppress(OSError):
        status = path.lstat()
        age_secs = max(0.0, time.time() - status.st_mtime)
        return Baton(path, (status.st_dev, status.st_ino), status.st_uid, age_secs)
    return None


def _release(baton: Baton, proc: Path, settle_secs: float) -> _Doubt | None:
    """Delete the baton if it is nobody's; otherwise why it may be somebody's."""
    doubt = _far(baton, proc)
    if doubt is not None:
        return doubt
    directory = os.open(baton.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # One at a time of all ranks and jobs: a second one would take away the baton of whoever compiles by then.
        if not _locked(directory):
            return _Doubt("another process looks whose it is")
        doubt = _near(baton, proc)
        if doubt is None and _is_there(baton):
            time.sleep(settle_secs)
            doubt = _near(baton, proc)
        if doubt is None and _is_there(baton):
            baton.path.unlink()
            log.warning(
                "ftckpt: %s: a process was killed %s ago while it compiled %s, and every start would have waited for "
                "it: deleted", baton.path, _duration(baton.age_secs), baton.operator,
            )  # fmt: skip
    finally:
        os.close(directory)
    return doubt


def _locked(directory: int) -> bool:
    deadline = time.monotonic() + _LOCK_SECS
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECS)
        else:
            return True


def _is_there(baton: Baton) -> bool:
    now = _baton_at(baton.path)
    return now is not None and now.inode == baton.inode


def _far(baton: Baton, proc: Path) -> _Doubt | None:
    """Whether somebody may hold the baton whose processes cannot be seen from here."""
    if baton.uid != os.geteuid():
        return _Doubt(f"it belongs to another user (uid {baton.uid})")
    kind = mount_of(baton.path.parent, proc).kind
    if kind not in _LOCAL:
        return _Doubt(f"it lies on {kind}, where a process of another machine may hold it")
    if not _sees_all(proc) and kind != _OF_ONE_CONTAINER:
        return _Doubt("a process of another container may hold it")
    return None


def _near(baton: Baton, proc: Path) -> _Doubt | None:
    """The live process that has the baton open, or its directory as its own; or one that cannot be looked at."""
    directory = _identity(baton.path.parent)
    for process in proc.iterdir():
        if not process.name.isdigit() or (process.name == "1" and _sees_all(proc)):
            continue  # the machine's own init compiles nothing, and nobody may look at it
        try:
            if process.stat().st_uid != baton.uid or _is_zombie(process):
                continue
            held = any(_leads_to(fd, baton.path.name, baton.inode) for fd in (process / "fd").iterdir())
            if held or _leads_to(process / "cwd", baton.path.parent.name, directory):
                return _Doubt(f"process {process.name} compiles", int(process.name))
        except PermissionError:
            return _Doubt(f"process {process.name}, which cannot be looked at, may hold it")
        except OSError:  # it has ended
            continue
    return None


def _is_zombie(process: Path) -> bool:
    # Behind the name of the program, which is in parentheses and may hold anything. What it had open is closed.
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[:1] == ["Z"]


def _leads_to(link: Path, name: str, inode: tuple[int, int] | None) -> bool:
    # By its name first, which only a rename changes: to follow each link would hang this start at a dead file server.
    return os.path.basename(_link(link)) == name and _identity(link) == inode


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _tell(baton: Baton, doubt: _Doubt) -> None:
    if doubt.pid is None:
        log.warning(
            "ftckpt: %s has been there for %s: %s. Whoever needs %s waits until it has gone; if nobody compiles, "
            "delete it: rm %s", baton.path, _duration(baton.age_secs), doubt.text, baton.operator, baton.path,
        )  # fmt: skip
    elif baton.age_secs > _LONG_SECS:
        log.warning("ftckpt: %s for %s: %s", doubt.text, _duration(baton.age_secs), baton.path)


def _duration(secs: float) -> str:
    return f"{secs:.0f} s" if secs < 120 else f"{secs / 60:.0f} min" if secs < 7200 else f"{secs / 3600:.0f} h"


def _sees_all(proc: Path) -> bool:
    """Whether this process sees those of all containers of the machine."""
    return _link(proc / "self" / "ns" / "pid") == _FIRST_PID_NAMESPACE


def _link(path: Path) -> str:
    # What has gone since it was listed leads nowhere; what may not be read is for the caller to judge.
    with suppress(FileNotFoundError):
        return os.readlink(path)
    return ""
