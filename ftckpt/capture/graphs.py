"""Copies while training captures a graph of its device work."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, hipStreamCaptureModeThreadLocal
_CAPTURE_MODES = (
    (("libcuda.so.1",), "cuThreadExchangeStreamCaptureMode"),
    (tuple(f"libamdhip64.so{version}" for version in (".7", ".6", ".5", "")), "hipThreadExchangeStreamCaptureMode"),
)


def work_beside_captures() -> None:
    """Let the calling thread register, copy and wait while another thread captures a graph.

    By default a driver answers such calls with an error and spoils the graph as well: torch begins captures in
    the mode that forbids them to all threads of a process which do not say that they have no part in it.
    """
    exchange = exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


@lru_cache(maxsize=1)
def exchange_capture_mode() -> Any:
    """The driver's function that sets a thread's capture mode; None where it is not found."""
    libraries, function = _CAPTURE_MODES[bool(torch.version.hip)]
    for library in libraries:
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), function)
    return None
