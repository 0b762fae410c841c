"""`torch.cuda` on a machine without a GPU, and tensors that are asked for on "cuda" made on the CPU.

One CPU "device", one stream on which everything has already happened, and the CPU generator as the device generator.
Factories and methods of tensors are replaced (rather than pushing a `TorchFunctionMode`): a mode is bound to the
thread that pushed it and slows every call down.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")


class CpuEvent:
    """An event on a device that never lags: recorded means done."""

    def __init__(self, enable_timing: bool = False, *_args: Any, **_kwargs: Any) -> None:
        self._enable_timing = enable_timing
        self.recorded_secs: float | None = None

    def record(self, stream: Any = None) -> None:
        self.recorded_secs = time.perf_counter()

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

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

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = CpuEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> CpuStream:
        _current.append(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        _current.pop()


_DEFAULT = CpuStream()
_current = [_DEFAULT]
"""The streams that were entered, the current one last."""


@contextlib.contextmanager
def _stream_context(stream: CpuStream | None) -> Iterator[None]:
    with stream or contextlib.nullcontext():
        yield


def _set_stream(stream: CpuStream) -> None:
    if stream is not None:
        _current[-1] = stream


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


def _nothing(*_args: Any, **_kwargs: Any) -> None: ...


def _zero(*_args: Any, **_kwargs: Any) -> int:
    return 0


@contextlib.contextmanager
def _null_context(*_args: Any, **_kwargs: Any) -> Iterator[None]:
    yield


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


_RNG: dict[str, Callable[..., Any]] = {
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": torch.seed,
    "seed_all": torch.seed,
    "initial_seed": torch.initial_seed,
    "get_rng_state": lambda device="cuda": torch.default_generator.get_state(),
    "set_rng_state": lambda new_state, device="cuda": torch.default_generator.set_state(new_state),
    "get_rng_state_all": lambda: [torch.default_generator.get_state()],
    "set_rng_state_all": lambda new_states: [torch.default_generator.set_state(state) for state in new_states],
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
    # The optimizers of torch 2.6 ask wherever a device is available.
    "is_current_stream_capturing": lambda: False,
    "default_generators": _Generators((torch.default_generator,)),
    **dict.fromkeys(("set_device", "init", "synchronize", "ipc_collect"), _nothing),
    **dict.fromkeys(("utilization", "power_draw", "temperature", "clock_rate"), _zero),
}

_MEMORY: dict[str, Any] = {
    "memory_summary": lambda device=None, abbreviated=False: "",
    "memory_stats": lambda device=None: collections.defaultdict(int),
    "mem_get_info": _mem_get_info,
    **dict.fromkeys(
        ("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), _nothing
    ),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used"),
        _zero,
    ),
}

_STREAM: dict[str, Any] = {
    "Stream": CpuStream,
    "ExternalStream": CpuStream,
    "Event": CpuEvent,
    "stream": _stream_context,
    "set_stream": _set_stream,
    "current_stream": lambda device=None: _current[-1],
    "default_stream": lambda device=None: _DEFAULT,
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


_FACTORIES = (
    "tensor", "as_tensor", "asarray", "empty", "zeros", "ones", "full", "rand", "randn", "randint",
    "randperm", "arange", "linspace", "logspace", "eye", "empty_strided", "tril_indices",
    "triu_indices", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
    "randint_like", "scalar_tensor",
)  # fmt: skip
_METHODS = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")


def on_cpu(device: Any) -> Any:
    """The CPU in place of a CUDA device; anything else unchanged. A bare number is a CUDA device."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_cuda = isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda"
    return CPU if is_number or is_cuda else device


def _device_keyword_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        # Page-locking needs a driver.
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (on_cpu(args[0]), *args[1:])
        if kwargs.get("device") is not None:
            kwargs["device"] = on_cpu(kwargs["device"])
        return original(self, *args, **kwargs)

    return to


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's optimizer asks for 'torch.cuda.FloatTensor' and the like by name."""

    @functools.wraps(original)
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def install_tensor() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _device_keyword_on_cpu(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _device_keyword_on_cpu(getattr(torch.Tensor, name)))
    replacements: dict[str, Callable[..., Any]] = {
        "to": _to(torch.Tensor.to),
        "type": _type(torch.Tensor.type),
        "cuda": lambda self, *_args, **_kwargs: self,
        "pin_memory": lambda self, device=None: self,
        "record_stream": _nothing,
    }
    for name, value in replacements.items():
        setattr(torch.Tensor, name, value)
