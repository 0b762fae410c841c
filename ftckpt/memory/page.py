"""A page of shared memory in a node's directory, and words in it that name a live process.

CPython stores and loads an item of a native ``Q`` memoryview with one 8-byte ``memcpy``, which compilers turn into
one instruction, and a mapping is aligned, so that a word is never seen half-written.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

PAGE_BYTES = 16384
"""256 entries of 64 bytes, a cache line each: no two writers share one."""
_PID_BITS = 22
"""PID_MAX_LIMIT of 64-bit Linux."""
_CORE_FLAG = 0x80


def map_page(path: Path, num_bytes: int = PAGE_BYTES) -> memoryview:
    """The words of the page, which is created (0600) or completed (never cut: others may have it mapped).

    Raises:
        OSError: no room, not permitted, or not a plain file.
    """
    # O_NONBLOCK: something else than a plain file under this name must not block the open.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a plain file; remove it")
        # Whoever created it may have had another umask.
        os.fchmod(fd, 0o600)
        # Not ftruncate, which would cut what others have mapped, and leave holes: a store to either may be a SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        return memoryview(mmap.mmap(fd, num_bytes)).cast("Q")
    finally:
        os.close(fd)


def private_page(num_bytes: int = PAGE_BYTES) -> memoryview:
    """Words that no other process sees, for who cannot have the page."""
    return memoryview(bytearray(num_bytes)).cast("Q")


def owner_word(pid: int) -> int:
    """Pid (low 22 bits) and start time as one word; 0 for a process that has ended and waits for its parent.

    Raises:
        OSError, ValueError: no such process, or not readable.
    """
    state, word, _ = _stat(pid)
    return 0 if state in (b"Z", b"X", b"x") else word


def exit_status(owner: int) -> int:
    """How the process named by an owner's word has ended, as ``os.waitpid`` gives it without the flag of a core file,
    while it waits for its parent; 0 where that cannot be seen: before and behind, and where this process may not look
    into that one."""
    try:
        state, word, status = _stat(pid_of(owner))
    except (OSError, ValueError):
        return 0
    return status & ~_CORE_FLAG if state == b"Z" and word == owner else 0


def _stat(pid: int) -> tuple[bytes, int, int]:
    """State, owner word and exit status of a process. Raises OSError, ValueError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # Behind the name: field 3 of proc(5), the state, is first, field 22, the start time, is number 19.
        fields = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
    if len(fields) < 20:
        raise ValueError(f"/proc/{pid}/stat cannot be read")
    # A pid comes back; a pid with the time at which its process began does not.
    word = (int(fields[19]) << _PID_BITS | pid) & (1 << 64) - 1
    return fields[0], word, int(fields[49]) if len(fields) > 49 else 0


def pid_of(owner: int) -> int:
    """The pid in an owner's word."""
    return owner & (1 << _PID_BITS) - 1


def pid_namespace() -> int:
    """Inode of this process's pid namespace: pids of another one say nothing here."""
    return os.stat("/proc/self/ns/pid").st_ino


def owner_lives(owner: int) -> bool:
    """Whether the process named by an owner's word of this pid namespace lives; where that is not known, it does."""
    if owner == 0:
        return False
    try:
        return owner_word(pid_of(owner)) == owner
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return True
