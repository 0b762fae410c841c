"""System calls that a process and those it starts can no longer make, by a filter of the kernel."""

from __future__ import annotations

import ctypes
import struct

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
"""Numbers that are the same on every architecture: they are newer than the common table."""
_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def forbid(error: int, *numbers: int) -> None:
    """From now on these calls of this process, and of those it starts, fail with ``error``. There is no way back."""
    program = [(_LOAD, 0, 0, 0)]  # the number of the call
    for at, number in enumerate(numbers):
        program.append((_EQUAL, len(numbers) - at, 0, number))
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _MODE_FILTER, head, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")
