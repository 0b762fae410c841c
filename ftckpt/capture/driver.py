"""CUDA and HIP calls of the copiers that torch does not wrap: registration, batched copies, capture mode, streams.

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
    "cuda": (("libc10_cuda.so", "cuda"), ("libcuda.so", "cu")),  # the second if torch links the runtime statically
    "hip": (("libc10_hip.so", "hip"),),
}
"""A library in which to find the runtime that torch uses, and the prefix of its functions. The process may have
loaded another runtime, whose thread state is separate."""


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Sets the device for a background thread, where a call on the default device would create a context."""
    work_beside_captures()
    with torch.cuda.device(device):
        yield


def work_beside_captures() -> None:
    """Lets the calling thread register, copy and wait while another thread captures a graph.

    By default such calls fail and invalidate the graph: torch captures in global mode, which forbids them to all
    threads of the process except those in another mode. The mode is relaxed, not thread-local, because in any other
    mode a thread that waits for an event invalidates a graph of HIP.
    """
    exchange = exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_RELAXED)))


@lru_cache(maxsize=1)
def exchange_capture_mode() -> Any:
    """The function that sets a thread's capture mode in the runtime that torch uses; None if there is none."""
    found = _function("ThreadExchangeStreamCaptureMode", "ThreadExchangeStreamCaptureMode")
    if found is None and (torch.version.cuda or torch.version.hip):
        log.warning("ftckpt: cannot set the capture mode of copy threads; copies may invalidate graph captures")
    return found


_separate: dict[torch.device, torch.cuda.Stream] = {}


def separate_stream(device: torch.device) -> torch.cuda.Stream:
    """The process's copy stream on ``device``, shared with nobody; it is never destroyed.

    torch reuses a pool of 32 streams. One of them may also serve a communicator, whose collectives would wait for
    copies, or a graph capture, which would record them. It is the fallback if the runtime cannot create a stream.
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
    """A function of CUDA's runtime or driver, or of HIP's runtime, by its name without prefix; None if not found."""
    for library, prefix in _RUNTIMES["hip" if torch.version.hip else "cuda"]:
        with suppress(OSError, AttributeError):
            return getattr(loaded(library), prefix + (of_driver if prefix == "cu" else of_runtime))
    return None


def loaded(name: str) -> ctypes.CDLL:
    """A library already loaded in this process, by file name with or without a version.

    Lookups in it also find symbols of the libraries it is linked to.

    Raises:
        OSError: it is not loaded.
    """
    maps = Path("/proc/self/maps").read_text()
    for line in maps.splitlines() if f"/{name}" in maps else ():  # fast if absent: the file has thousands of lines
        path = line.split(maxsplit=5)[5] if line.count("/") else ""
        if path.rpartition("/")[2].startswith(name):
            return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    raise OSError(f"no library {name} is loaded")


class Call(NamedTuple):
    """The arguments of one batched copy: the addresses of three arrays of ``number`` words each."""

    targets: int
    sources: int
    sizes: int
    number: int


BatchCopy = Callable[[Call, int], int]
"""Enqueues the copies of a call on a stream, given its handle; returns the driver's error code, 0 for success."""


@lru_cache(maxsize=1)
def batch_copy() -> BatchCopy | None:
    """The driver's batched copy between host and device, which releases the interpreter lock; None before CUDA 12.8
    and for HIP."""
    number, word = ctypes.c_size_t, ctypes.c_void_p
    for name, more in (("cuMemcpyBatchAsync_v2", []), ("cuMemcpyBatchAsync", [word])):
        with suppress(OSError, AttributeError):
            function = getattr(loaded("libcuda.so"), name)
            function.argtypes = [word, word, word, number, word, word, number, *more, word]
            return partial(_copy_batch, function, more and [ctypes.byref(number())])
    return None


# CUmemcpyAttributes: sources are read in stream order, no location hints, and copies do not occupy multiprocessors
# (CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE). They apply from the first copy on.
_ATTRIBUTES, _FIRST = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 1), (ctypes.c_size_t * 1)(0)


def _copy_batch(function: Any, failed_at: Sequence[Any], call: Call, stream: int) -> int:
    return int(function(*call, _ATTRIBUTES, _FIRST, 1, *failed_at, stream))


def pin_pages(address: int, nbytes: int) -> bool:
    """Registers host memory; if it fails (a limit on locked memory, a sandbox), copies stay staged.

    "Already registered" is a failure too: the registration may belong to an older mapping, of other pages.
    """
    # 0 is cudaHostRegisterDefault: pinned, which is all that copies need.
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
    if code != 0:
        log.warning("ftckpt: registering host memory failed with error %d; copies are staged, slower", code)
    return code == 0


def unpin_pages(address: int) -> None:
    """Reverts one ``pin_pages``."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocates device memory for use on the current stream."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
