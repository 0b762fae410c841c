"""What a copier asks of CUDA or HIP beside streams and copies: memory, pinned pages, and leave to work beside graphs.

ROCm builds of torch keep the CUDA names.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftckpt.events import log

_RELAXED = 2  # cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed
_NON_BLOCKING = 1  # cudaStreamNonBlocking, CU_STREAM_NON_BLOCKING, hipStreamNonBlocking
_RUNTIMES = {
    "cuda": (("libc10_cuda.so", "cuda"), ("libcuda.so", "cu")),  # torch may have a runtime of its own within it
    "hip": (("libc10_hip.so", "hip"),),
}
"""By library of torch, with what it is linked to, and what its functions begin with: another runtime of the process
has threads of its own to it."""


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """For background threads: a call on another than the current device would open a context there."""
    work_beside_captures()
    with torch.cuda.device(device):
        yield


def work_beside_captures() -> None:
    """Let the calling thread register, copy and wait while another thread captures a graph.

    By default a driver answers such calls with an error and spoils the graph as well: torch begins captures in
    the mode that forbids them to all threads of a process which do not say that they have no part in it. Relaxed, not
    thread-local: HIP spoils a graph by a thread that waits for an event in any other mode.
    """
    exchange = exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


@lru_cache(maxsize=1)
def exchange_capture_mode() -> Any:
    """The function that sets a thread's capture mode in the runtime that torch uses; None where there is none."""
    found = _function("ThreadExchangeStreamCaptureMode", "ThreadExchangeStreamCaptureMode")
    if found is None and (torch.version.cuda or torch.version.hip):
        log.warning("ftckpt: the runtime of torch cannot be asked: copies may spoil graphs that training captures")
    return found


_separate: dict[torch.device, torch.cuda.Stream] = {}


def separate_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of this process's copies on ``device``, which nobody else is given; it is never destroyed.

    Those of torch are 32, handed out in turn: one of them may come to be a communicator's, whose collectives would
    wait behind copies, or one that training captures, with our copies in its graph. One of them is it where the
    runtime cannot be asked.
    """
    create, made = _function("StreamCreateWithFlags", "StreamCreate"), ctypes.c_void_p()
    if device not in _separate and create is not None:
        with torch.cuda.device(device):
            if create(ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING)) == 0 and made.value:
                _separate[device] = torch.cuda.ExternalStream(made.value, device)  # type: ignore[no-untyped-call]
    if device in _separate:
        return _separate[device]
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _function(of_runtime: str, of_driver: str) -> Any:
    """One of CUDA's runtime or driver, or of HIP's runtime, by its name without what that begins with, if any."""
    for library, prefix in _RUNTIMES["hip" if torch.version.hip else "cuda"]:
        with suppress(OSError, AttributeError):
            return getattr(loaded(library), prefix + (of_driver if prefix == "cu" else of_runtime))
    return None


def loaded(name: str) -> ctypes.CDLL:
    """The library of this process whose file is called ``name``, or that with a version; it is never loaded.

    What is looked up in it is found in what it is linked to as well.

    Raises:
        OSError: there is none.
    """
    maps = Path("/proc/self/maps").read_text()
    for line in maps.splitlines() if f"/{name}" in maps else ():  # each restart asks, of some thousand lines
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    raise OSError(f"no library {name} is loaded")


class Call(NamedTuple):
    """What one call of the driver copies: addresses of arrays of ``number`` words, targets, sources and sizes."""

    targets: int
    sources: int
    sizes: int
    number: int


BatchCopy = Callable[[Call, int], int]
"""Enqueues the copies of a call on a stream, by its handle, and returns the driver's error, 0 for none."""


@lru_cache(maxsize=1)
def batch_copy() -> BatchCopy | None:
    """The driver's call for many copies between host and device, which does not hold the interpreter's lock; None
    where there is none: before CUDA 12.8, and for HIP."""
    number, word = ctypes.c_size_t, ctypes.c_void_p
    for name, more in (("cuMemcpyBatchAsync_v2", []), ("cuMemcpyBatchAsync", [word])):
        with suppress(OSError, AttributeError):
            function = getattr(loaded("libcuda.so"), name)
            function.argtypes = [word, word, word, number, word, word, number, *more, word]
            return partial(_copy_batch, function, more and [ctypes.byref(number())])
    return None


# CUmemcpyAttributes: sources are read in the order of the stream, nothing is said of where both lie, and copies leave
# the multiprocessors alone (CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE). They count from the first copy on.
_ATTRIBUTES, _FIRST = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 1), (ctypes.c_size_t * 1)(0)


def _copy_batch(function: Any, failed_at: Sequence[Any], call: Call, stream: int) -> int:
    return int(function(*call, _ATTRIBUTES, _FIRST, 1, *failed_at, stream))


def pin_pages(address: int, nbytes: int) -> bool:
    """Register host memory; after a refusal (a limit on locked memory, a sandbox) copies stay staged.

    "Already registered" is a refusal too: it may be an older mapping's registration, of other pages.
    """
    # 0 is cudaHostRegisterDefault: pinned, which is all that copies need.
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        log.warning("ftckpt: registering host memory failed with error %d; copies are staged, slower", code)
    return code == 0


def unpin_pages(address: int) -> None:
    """Undo one ``pin_pages``."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of the device, for use on the current stream."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
