"""A page of shared memory in a node's directory, and owner words, which identify a process.

CPython stores and loads an item of a native ``Q`` memoryview by one 8-byte ``memcpy``, which compilers turn into one
instruction. Mappings are aligned, so no reader sees a word half-written.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

_PID_BITS = 22
"""PID_MAX_LIMIT of 64-bit Linux."""
# Of wait(2): the kernel sets it if the process has dumped core.
_CORE_FLAG = 0x80


def map_page(path: Path, num_bytes: int) -> memoryview:
    """Map the page as 64-bit words; the file is created (0600) or extended, never truncated.

    Raises:
        OSError: the file system is full, not permitted, or not a plain file.
    """
    # O_NONBLOCK: a FIFO with this name must not block the open.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError("not a plain file; remove it")
        # The process that created it may have had another umask.
        os.fchmod(fd, 0o600)
        # Not ftruncate, which could shorten a file that is mapped elsewhere and leaves holes: stores would SIGBUS.
        os.posix_fallocate(fd, 0, num_bytes)
        return memoryview(mmap.mmap(fd, num_bytes)).cast("Q")
    finally:
        os.close(fd)


def private_page(num_bytes: int) -> memoryview:
    """Private words, a substitute if the page cannot be mapped."""
    return memoryview(bytearray(num_bytes)).cast("Q")


def owner_word(pid: int) -> int:
    """Pid (low 22 bits) and start time of a process as one word; 0 for a zombie.

    Raises:
        OSError, ValueError: no such process, or not readable.
    """
    state, word, _ = _stat(pid)
    return 0 if state in (b"Z", b"X", b"x") else word


def exit_status(owner: int) -> int:
    """Exit status of the zombie identified by an owner word, as from ``os.waitpid`` without the core dump flag.

    0 if it is not visible: the process still runs, has been reaped, or may not be inspected by this one."""
    try:
        state, word, status = _stat(pid_of(owner))
    except (OSError, ValueError):
        return 0
    return status & ~_CORE_FLAG if state == b"Z" and word == owner else 0


def _stat(pid: int) -> tuple[bytes, int, int]:
    """State, owner word and exit status of a process. Raises OSError, ValueError."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # After the name: index 0 is field 3 of proc(5), the state; index 19 is field 22, the start time.
        fields = file.read().rpartition(b")")[2].split()  # the name may contain any characters
    if len(fields) < 20:
        raise ValueError(f"/proc/{pid}/stat cannot be read")
    # Pids are reused; a pid together with its start time is not.
    word = (int(fields[19]) << _PID_BITS | pid) & (1 << 64) - 1
    return fields[0], word, int(fields[49]) if len(fields) > 49 else 0


def pid_of(owner: int) -> int:
    """The pid in an owner word."""
    return owner & (1 << _PID_BITS) - 1


def pid_namespace() -> int:
    """Inode of this process's pid namespace; pids of other namespaces have no meaning in it."""
    return os.stat("/proc/self/ns/pid").st_ino


def owner_lives(owner: int) -> bool:
    """Whether the process identified by an owner word of this pid namespace lives; true if that is unknown."""
    if owner == 0:
        return False
    try:
        return owner_word(pid_of(owner)) == owner
    except (FileNotFoundError, ProcessLookupError):
        return False
    except (OSError, ValueError):
        return True
