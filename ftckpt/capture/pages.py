"""Pages of slots: there before the first copy needs them, and on which NUMA node they lie."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import torch

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""Numbers of the system call, which libc has no function for."""
_SAMPLED = 256
TOUCH_BYTES = 32 << 20
"""Pages that are touched between looks at whether there is more important work."""


def touch(slot: torch.Tensor, stop: Callable[[], bool]) -> None:
    """Read a byte of each page of ``slot``, 1-D and uint8, until ``stop`` says so; other threads run meanwhile."""
    for begin in range(0, slot.numel(), TOUCH_BYTES):
        if stop():
            return
        # A read is enough: at it the kernel clears a page that was only allocated, and maps it.
        slot.numpy()[begin : begin + TOUCH_BYTES : mmap.PAGESIZE].max()


def nodes_of(slot: torch.Tensor) -> Counter[int]:
    """Some pages of ``slot``, evenly spread, by their NUMA node; empty where the kernel does not say.

    Pages that this process has not touched yet are left out.
    """
    number = _MOVE_PAGES.get(platform.machine())
    step = max(1, slot.numel() // mmap.PAGESIZE // _SAMPLED) * mmap.PAGESIZE
    addresses = [slot.data_ptr() + offset for offset in range(0, slot.numel(), step)]
    if number is None or not addresses:
        return Counter()
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    nodes = (ctypes.c_int * len(addresses))()
    # Without nodes to move them to the call says where they are: a node, or an error of the one page.
    failed = _system_call()(number, 0, ctypes.c_ulong(len(addresses)), pages, None, nodes, 0)
    return Counter() if failed else Counter(node for node in nodes if node >= 0)


@lru_cache(maxsize=1)
def _system_call() -> ctypes._NamedFuncPointer:
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    return call
