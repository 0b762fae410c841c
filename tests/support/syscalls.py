"""System calls that fail, as under an old kernel or the filter of an old container runtime."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import NoReturn

PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
"""The same on every architecture: they came after the tables were joined."""
_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def fails_with(error: int) -> Callable[..., NoReturn]:
    """A call of the system that gives this error, to be put in the place of one."""

    def fail(*args: object, **_: object) -> NoReturn:
        raise OSError(error, os.strerror(error), *(str(one) for one in args[:1] if isinstance(one, os.PathLike)))

    return fail


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
