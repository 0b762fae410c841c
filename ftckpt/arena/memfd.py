"""Memory of slots that no tmpfs limits: a memfd held by the SMP, found through a symbolic link in the arena.

The link ``slotN.safetensors`` points to ``/proc/PID/fd/N`` of the process that holds the memfd, so that any
reader opens a slot as before, and whoever deletes the link gives the memory up. A process that writes
an arena keeps its memfds open as well and hands them to the next SMP (``keep``) where the old one died: memory
is lost when no process is left that has it open.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftckpt.errors import ArenaError, FtckptError, UnsupportedError

Ask = Callable[[dict[str, Any]], object]
"""Asks the process that holds memfds (``ftckpt.smp.memfd.HeldMemory.answer``); raises FtckptError. Thread-safe."""

_LINK = re.compile(r"/proc/([1-9]\d*)/fd/(\d+)")
_HELD_NAME = re.compile(r"\.?(slot\d+\.safetensors|parity\.[a-z]+\.\d+)(\.[A-Za-z0-9._-]*)?")
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""The size never changes again: no reader gets a SIGBUS because of what another process did."""

_holders: dict[str, Ask] = {}  # directory of a node -> whom this process asks to hold what it creates there
_kept: dict[int, str] = {}  # memfds that this process has open -> their labels
_adopted: set[int] = set()  # those of _kept that keep() opened: this process does not map them
_guard = threading.Lock()


def use_memfds(node_dir: Path, ask: Ask) -> None:
    """From now on this process creates slots and parity under ``node_dir`` as memfds, and ``ask`` finds a holder.

    Raises:
        UnsupportedError: this host cannot do it.
    """
    if not hasattr(os, "memfd_create") or not os.path.exists(f"/proc/{os.getpid()}/fd"):
        raise UnsupportedError("memory: memfd needs Linux with /proc mounted; set memory to tmpfs")
    _holders[os.path.realpath(node_dir)] = ask


def stop_memfds(node_dir: Path) -> None:
    """Create plain files under ``node_dir`` again, and close what ``keep`` opened."""
    _holders.pop(os.path.realpath(node_dir), None)
    _close_adopted({})


def uses_memfds(node_dir: Path) -> bool:
    """Whether this process creates slots and parity under ``node_dir`` as memfds."""
    return os.path.realpath(node_dir) in _holders


def creates_memfd(path: Path) -> bool:
    """Whether the file ``path`` of an arena is to be a memfd; control blocks, locks and checks are plain files."""
    return bool(_holders) and _HELD_NAME.fullmatch(path.name) is not None and uses_memfds(path.parent.parent)


def label(path: Path) -> str:
    """The name of the memfd behind ``path``: it tells one slot from another when pids and descriptors repeat.

    A renamed arena and a file renamed when it is complete keep their labels.

    Raises:
        ArenaError: no file of this name is a memfd, or there is no such arena.
    """
    match = _HELD_NAME.fullmatch(path.name)
    if match is None:
        raise ArenaError(f"{path}: files of this name are not held as memfds")
    try:
        directory = os.stat(path.parent)
    except OSError as error:
        raise ArenaError(f"{path}: {error.strerror}") from None
    return f"ftckpt-{directory.st_dev:x}-{directory.st_ino:x}-{match[1]}"


def create_memfd(path: Path, nbytes: int, reserve: Callable[[int], None]) -> int:
    """A new memfd of ``nbytes`` with the link ``path`` to it; ``reserve`` allocates its pages. The caller closes it.

    Raises:
        ArenaError: ``path`` exists, or the SMP does not hold it.
        MemoryBudgetError: raised by ``reserve``.
    """
    if os.path.lexists(path):
        raise ArenaError(f"{path}: exists")
    ask = _holders[os.path.realpath(path.parent.parent)]
    give_back_unlinked(path.parent.parent)  # or what was freed a moment ago could still be in the way
    fd = os.memfd_create(label(path), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        reserve(fd)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        _hand_over(ask, path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memfd(path: Path, writable: bool) -> int:
    """Follow the link ``path``: to the memfd made for it and to nothing else. The caller closes the descriptor.

    Raises:
        ArenaError: not a link to a memfd of this slot and this user, or nobody has it open any more.
    """
    try:
        target = os.readlink(path)
    except OSError as error:
        raise ArenaError(f"{path}: cannot be opened: {error.strerror}") from None
    match = _LINK.fullmatch(target)
    if match is None:
        raise ArenaError(f"{path}: is a symbolic link to {target}, not to the memory of a slot; remove it")
    lost = f"{path}: lost: process {match[1]}, which held its memory, has ended or does not hold it any more"
    try:
        return open_checked(target, label(path), writable)
    except FileNotFoundError:
        raise ArenaError(lost) from None
    except OSError as error:
        text = "only processes of one user in one container reach it"
        raise ArenaError(f"{path}: cannot be opened: {error.strerror}; {text}") from None
    except ArenaError as error:
        raise ArenaError(f"{lost} ({error})") from None


def open_checked(target: str, name: str, writable: bool) -> int:
    """Open ``/proc/PID/fd/N`` if it is the sealed memfd ``name`` of this user.

    Raises:
        ArenaError: it is something else.
        OSError: the process or the descriptor is gone, or access is denied.
    """
    # Looked at before it is opened: opening a pipe or a device that has the number now would have effects.
    if _memfd_name(os.readlink(target)) != name:
        raise ArenaError(f"it is {os.readlink(target)!r} now")
    fd = os.open(target, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if _memfd_name(os.readlink(f"/proc/self/fd/{fd}")) != name:
            raise ArenaError("it is something else now")
        _require_sealed(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_sealed(fd: int) -> None:
    status = os.fstat(fd)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS or not stat.S_ISREG(status.st_mode):
        raise ArenaError("it is not a memfd of fixed size")
    if status.st_uid != os.geteuid():
        raise ArenaError(f"it belongs to uid {status.st_uid}")


def remember(fd: int) -> int:
    """Keep a descriptor of ``fd`` for ``keep``, if it is a memfd; the number for ``forget``, or -1."""
    name = _memfd_name(os.readlink(f"/proc/self/fd/{fd}"))
    if name is None:
        return -1
    with _guard:
        kept = os.dup(fd)
        _kept[kept] = name
    return kept


def forget(kept: int) -> None:
    """Close what ``remember`` kept; -1 does nothing."""
    with _guard:
        if _kept.pop(kept, None) is not None:
            os.close(kept)
        _adopted.discard(kept)


def keep(node_dir: Path) -> int:
    """Hand what this process writes under ``node_dir`` to the SMP again where the process that held it died.

    Returns how many files that were. Cheap where nothing is to be done, and safe to call from a thread: call it
    often. Parity of the arenas that this process writes is kept open, too: the SMP that made it may die.

    Raises:
        FtckptError: memory could not be handed over; the next call tries again.
    """
    ask = _holders.get(os.path.realpath(node_dir))
    if ask is None:
        return 0
    mine = _kept_labels()
    written = {name.rpartition("-")[0] for fd, name in mine.items() if fd not in _adopted}
    links = {label(path): path for path in _links(node_dir, written)}
    handed = 0
    for name, path in sorted(links.items()):  # parity first: an SMP that finds slots without it makes it anew
        found = _identity(path)
        fds = [fd for fd, kept_name in mine.items() if kept_name == name]
        if found is None:
            handed += _hand_over_kept(ask, path, fds)
        elif found not in [_identity_of(fd) for fd in fds]:
            _adopt(path, name)
    _close_adopted(links)
    return handed


def give_back_unlinked(node_dir: Path) -> None:
    """Have the SMP close memory under ``node_dir`` that no link names any more, now and not a moment later."""
    ask = _holders.get(os.path.realpath(node_dir))
    if ask is not None:
        with suppress(FtckptError):  # whoever needs the memory sees for himself whether it is there
            ask({"request": "memfd_sweep"})


def _hand_over(ask: Ask, path: Path, fd: int) -> None:
    ask({"request": "memfd", "link": f"{path.parent.name}/{path.name}", "pid": os.getpid(), "fd": fd})
    if _identity(path) != _identity_of(fd):
        raise ArenaError(
            f"{path}: the SMP holds it, but it cannot be reached through /proc: start the SMP and the trainers "
            "in one container (one pid namespace), or set memory to tmpfs"
        )


def _hand_over_kept(ask: Ask, path: Path, fds: list[int]) -> int:
    for kept in fds:
        with _guard:
            if kept not in _kept:
                continue
            fd = os.dup(kept)
        try:
            _hand_over(ask, path, fd)
        finally:
            os.close(fd)
        return 1
    return 0


def _adopt(path: Path, name: str) -> None:
    with suppress(ArenaError):
        fd = open_memfd(path, writable=True)
        with _guard:
            _kept[fd] = name
            _adopted.add(fd)


def _close_adopted(links: dict[str, Path]) -> None:
    """Close what was adopted and is not what the link of that name leads to any more."""
    for fd, name in _kept_labels().items():
        named = _identity(links[name]) if name in links else (0, 0)
        if fd in _adopted and named not in (None, _identity_of(fd)):
            forget(fd)


def _links(node_dir: Path, written: set[str]) -> list[Path]:
    """Links of complete files in arenas whose labels begin with one of ``written``."""
    found = []
    with suppress(OSError):
        for arena in node_dir.iterdir():
            with suppress(OSError, ArenaError):
                if written and arena.is_dir() and label(arena / "parity.node.0").rpartition("-")[0] in written:
                    found += [path for path in arena.iterdir() if _is_held(path)]
    return found


def _kept_labels() -> dict[int, str]:
    with _guard:
        return dict(_kept)


def _is_held(path: Path) -> bool:
    return path.name[0] != "." and _HELD_NAME.fullmatch(path.name) is not None and path.is_symlink()


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of what the link leads to, if that is the memfd made for it."""
    try:
        if _memfd_name(os.readlink(os.readlink(path))) != label(path):
            return None
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identity_of(fd: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _memfd_name(text: str) -> str | None:
    match = re.fullmatch(r"/memfd:(ftckpt-\S+) \(deleted\)", text)
    return match[1] if match else None
