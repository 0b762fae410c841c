"""`torch.cuda` on a machine without a GPU: the functions and classes a Megatron run asks for.

One CPU "device", one stream on which everything has already happened, and the CPU generator in
the place of the device generator.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


class CpuEvent:
    """An event on a device that is never behind: recorded means done."""

    def __init__(self, enable_timing: bool = False, *_args: Any, **_kwargs: Any) -> None:
        self._enable_timing = enable_timing
        self.recorded_secs: float | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded_secs = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds, as the real one."""
        if self.recorded_secs is None or end_event.recorded_secs is None:
            raise RuntimeError("both events must be recorded before their distance is asked for")
        return (end_event.recorded_secs - self.recorded_secs) * 1e3


class CpuStream:
    """A stream whose work is finished as soon as it has been submitted."""

    device = CPU
    device_index = 0
    cuda_stream = 0
    priority = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._outer: list[CpuStream] = []

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> CpuStream:
        self._outer.append(_streams.current)
        _streams.current = self
        return self

    def __exit__(self, *_exc: object) -> None:
        _streams.current = self._outer.pop()


class _Streams:
    def __init__(self) -> None:
        self.default = CpuStream()
        self.current = self.default


_streams = _Streams()


@contextlib.contextmanager
def _stream_context(stream: CpuStream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def _set_stream(stream: CpuStream) -> None:
    if stream is not None:
        _streams.current = stream


class _Generators(tuple[torch.Generator, ...]):
    """Whatever the index ("the current device" is no integer here), the CPU generator."""

    __slots__ = ()

    def __getitem__(self, _index: Any) -> Any:
        return torch.default_generator


def _total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _device_count() -> int:
    # Launchers put one rank on each device.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _device_properties(_device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="CPU stand-in",
        major=8,
        minor=0,
        multi_processor_count=os.cpu_count() or 1,
        total_memory=_total_memory_bytes(),
        is_integrated=False,
        warp_size=32,
    )


def _mem_get_info(_device: Any = None) -> tuple[int, int]:
    free_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return free_bytes, _total_memory_bytes()


def _memory_stats(_device: Any = None) -> dict[str, int]:
    return collections.defaultdict(int)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(_device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, _device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [torch.default_generator.get_state()]


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        torch.default_generator.set_state(state)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


@contextlib.contextmanager
def _null_context(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


_RNG: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": torch.seed,
    "seed_all": torch.seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda device="cuda": _get_rng_state(),
    "set_rng_state": lambda new_state, device="cuda": _set_rng_state(new_state),
    "get_rng_state_all": _get_rng_state_all,
    "set_rng_state_all": _set_rng_state_all,
}

_DEVICE: dict[str, Any] = {
    # Megatron refuses to start without these.
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "device_count": _device_count,
    # Passed on as the `device=` of every buffer, so it is the device itself and no number.
    "current_device": lambda: CPU,
    "get_device_name": lambda device=None: "CPU stand-in",
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": _device_properties,
    "get_arch_list": lambda: [],
    "device": _null_context,
    "set_device": _nothing,
    "init": _nothing,
    "synchronize": _nothing,
    # The optimizers of torch 2.6 ask wherever a device is available.
    "is_current_stream_capturing": lambda: False,
    "ipc_collect": _nothing,
    "utilization": _zero,
    "power_draw": _zero,
    "temperature": _zero,
    "clock_rate": _zero,
    "default_generators": _Generators((torch.default_generator,)),
}

_MEMORY: dict[str, Any] = {
    "empty_cache": _nothing,
    "reset_peak_memory_stats": _nothing,
    "reset_max_memory_allocated": _nothing,
    "reset_max_memory_cached": _nothing,
    "memory_allocated": _zero,
    "max_memory_allocated": _zero,
    "memory_reserved": _zero,
    "max_memory_reserved": _zero,
    "device_memory_used": _zero,
    "memory_summary": lambda device=None, abbreviated=False: "",
    "memory_stats": _memory_stats,
    "mem_get_info": _mem_get_info,
}

_STREAM: dict[str, Any] = {
    "Stream": CpuStream,
    "ExternalStream": CpuStream,
    "Event": CpuEvent,
    "stream": _stream_context,
    "set_stream": _set_stream,
    "current_stream": lambda device=None: _streams.current,
    "default_stream": lambda device=None: _streams.default,
}

_NVTX: dict[str, Any] = {"range_push": _zero, "range_pop": _zero, "mark": _nothing, "range": _null_context}


def install_cuda() -> None:
    for table in (_RNG, _DEVICE, _MEMORY, _STREAM):
        for name, value in table.items():
            setattr(torch.cuda, name, value)
    for module, table in ((torch.cuda.random, _RNG), (torch.cuda.memory, _MEMORY), (torch.cuda.nvtx, _NVTX)):
        for name, value in table.items():
            setattr(module, name, value)
    torch.cuda.streams.Stream = CpuStream  # type: ignore[misc,assignment]
    torch.cuda.streams.Event = CpuEvent  # type: ignore[misc,assignment]
    # torch built for CUDA says that there is an accelerator: its data loader would pin memory on it.
    torch.accelerator.is_available = lambda: False
    # Deferred calls (Megatron sets generator states through them) then run at once, also for
    # those who imported `_lazy_call` before this.
    torch.cuda._initialized = True
    # torch built for CUDA would put them off in a child of a process that has counted devices.
    torch.cuda._is_in_bad_fork = lambda: False
