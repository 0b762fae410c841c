"""Whether snapshots come right from the device that is here: by a job's own copier, in the worst legal orders."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.capture.copier import Copier, Flight, make_copier
from ftckpt.capture.device_copier import DeviceCopier
from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding, attempt
from ftckpt.windows.bubbles import Always, Turn, Windows
from ftckpt.windows.clock import Clock, make_clock
from ftckpt.windows.node_budget import NoBudget

_AREA = "device"
_SECS = 60.0
"""For a flight to end: a copy that takes longer has come to a stop."""
_CHUNK_BYTES = 16 << 20
_ROUNDS = 5
_LEAST_SHARE = 0.8
"""Of the rate of a plain copy."""
_MOST_SLOWER = 1.2
"""Of the time of compute beside copies: REFT measured 17 to 38 % beside a side stream."""


def look_at_device(arena: Path, mib: int) -> Iterator[Finding]:
    """Each finding as it comes; the state that is copied is ``mib`` MiB long."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock = make_clock(device)
    name = torch.cuda.get_device_name(clock.device) if clock.on_device else "CPU: none is here"
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    yield Finding(
        _AREA, "device", PASSED if clock.on_device else SKIPPED, f"{name}, {stack}, torch {torch.__version__}"
    )
    looks: tuple[tuple[str, Callable[[_Bench], Finding]], ...] = (
        ("exact copies", _exact), ("fence", _fenced), ("late windows", _late), ("copies while written", _overwritten),
        ("graph capture", _captured), ("rate", _rate), ("compute beside copies", _beside),
    )  # fmt: skip
    with _bench(arena, clock, mib << 20) as bench:
        yield bench.registered
        for name, look in looks:
            yield attempt(_AREA, name, lambda look=look: look(bench))  # type: ignore[misc]


class _Bench:
    """A state on the device, a slot in the arena's file system, and the copier between them."""

    def __init__(self, clock: Clock, copier: Copier, slot: torch.Tensor, state: list[torch.Tensor]) -> None:
        self.clock, self.copier, self.slot, self.state = clock, copier, slot, state
        self.copies = _plan(state)
        self.registered = Finding(_AREA, "registration", SKIPPED, "a CPU's memory needs none")

    def flight(self, windows: Windows | None = None) -> Flight:
        """Begun at this moment."""
        flight = Flight(self.copies, self.slot, lambda chunk: None, lambda: None, self.clock.mark())
        self.copier.start(self.state, flight, windows or Always())
        return flight

    def wait(self, flight: Flight) -> None:
        """Raises TimeoutError, or what the copy failed with."""
        if not flight.wait(_SECS):
            raise TimeoutError(f"copies have not ended after {_SECS:.0f} s")
        if flight.error is not None:
            raise flight.error

    def differing(self, wanted: Sequence[torch.Tensor]) -> int:
        """Bytes of the slot that are not those of ``wanted``, host tensors; it is empty for the next flight."""
        differing = sum(
            int((self.slot[s.offset : s.offset + s.nbytes] != _bytes(wanted[s.piece], s)).sum())
            for copy in self.copies
            for s in copy.segments
        )
        self.slot.zero_()
        return differing

    def on_host(self) -> list[torch.Tensor]:
        """The state as it is now."""
        return [tensor.cpu().clone() for tensor in self.state]

    def write(self) -> None:
        """As an optimizer does, in place and in the order of the current stream."""
        for tensor in self.state:
            tensor.add_(1)

    def synchronize(self) -> None:
        if self.clock.on_device:
            torch.cuda.synchronize(self.clock.device)


class _Held(Always):
    """No window comes before the fence hurries."""

    def __init__(self) -> None:
        self.held = threading.Event()

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        self.held.set()
        hurry.wait(_SECS)
        return Turn()


@contextmanager
def _bench(arena: Path, clock: Clock, nbytes: int) -> Iterator[_Bench]:
    state = [
        torch.randn(nbytes // 8, device=clock.device), torch.randn(nbytes // 8, device=clock.device).bfloat16(),
        torch.arange(nbytes // 32, device=clock.device), torch.ones(3, device=clock.device),
    ]  # fmt: skip
    size = -(-sum(tensor.nbytes + 64 for tensor in state) // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.TemporaryFile(dir=arena) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        slot = torch.frombuffer(memoryview(mmap.mmap(file.fileno(), size)), dtype=torch.uint8)
        copier = make_copier(clock, NoBudget())
        try:
            bench = _Bench(clock, copier, slot, state)
            copier.prepare([slot])
            copier.warm_up(state, bench.copies, [])
            if clock.on_device:
                bench.registered = _register(copier, size)
            yield bench
        finally:
            copier.close()


def _register(copier: Copier, nbytes: int) -> Finding:
    assert isinstance(copier, DeviceCopier)
    begin = time.perf_counter()
    is_pinned = copier.pin_now(_SECS)
    secs = time.perf_counter() - begin
    figures = {"secs": secs, "bytes_per_sec": nbytes / secs}
    if not is_pinned:
        return Finding(
            _AREA,
            "registration",
            FAILED,
            f"the slot is not pinned after {secs:.0f} s",
            "see the driver's log",
            figures,
        )
    return Finding(
        _AREA, "registration", PASSED, f"pins {nbytes / secs / 1e9:.1f} GB/s, in the background", "", figures
    )


def _plan(state: Sequence[torch.Tensor]) -> list[ChunkCopy]:
    """Tensors end to end, in chunks that cut them at elements."""
    copies: dict[int, list[Segment]] = {}
    offset = 0
    for piece, tensor in enumerate(state):
        item, done = tensor.element_size(), 0
        offset = -(-offset // 64) * 64
        while done < tensor.nbytes:
            chunk = (offset + done) // _CHUNK_BYTES
            nbytes = min(tensor.nbytes - done, (chunk + 1) * _CHUNK_BYTES - offset - done)
            copies.setdefault(chunk, []).append(Segment(piece, done // item, nbytes // item, offset + done, nbytes))
            done += nbytes
        offset += tensor.nbytes
    return [ChunkCopy(chunk, tuple(segments)) for chunk, segments in sorted(copies.items())]


def _bytes(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    return tensor.reshape(-1)[segment.start : segment.start + segment.numel].view(torch.uint8)


def _compared(name: str, differing: int, text: str) -> Finding:
    if differing:
        return Finding(
            _AREA, name, FAILED, f"{text}: {differing} bytes differ", "do not use ftckpt here; tell us, with the JSON"
        )
    return Finding(_AREA, name, PASSED, text)


def _exact(bench: _Bench) -> Finding:
    wanted = bench.on_host()
    for _ in range(_ROUNDS):
        bench.wait(bench.flight())
    return _compared("exact copies", bench.differing(wanted), "every byte of a snapshot is that of the device")


def _fenced(bench: _Bench) -> Finding:
    """The optimizer writes right behind the fence, which on a device is a wait of its own."""
    differing = 0
    for _ in range(_ROUNDS):
        wanted = bench.on_host()
        flight = bench.flight()
        if not bench.copier.fence(flight, _SECS):
            raise TimeoutError(f"the fence did not come to pass: {flight.error}")
        bench.write()
        bench.wait(flight)
        bench.synchronize()
        differing += bench.differing(wanted)
    return _compared("fence", differing, "what is written behind the fence is in no snapshot")


def _late(bench: _Bench) -> Finding:
    """All copies still wait for their window when the fence comes."""
    wanted, windows = bench.on_host(), _Held()
    flight = bench.flight(windows)
    windows.held.wait(_SECS)
    if not bench.copier.fence(flight, _SECS):
        raise TimeoutError(f"the fence did not come to pass: {flight.error}")
    bench.write()
    bench.wait(flight)
    bench.synchronize()
    return _compared("late windows", bench.differing(wanted), "copies that come late hold the optimizer up, not tear")


def _overwritten(bench: _Bench) -> Finding:
    """The counterproof: without a fence bytes that were written over do show, so that the others prove something."""
    wanted, windows = bench.on_host(), _Held()
    flight = bench.flight(windows)
    windows.held.wait(_SECS)
    bench.write()
    bench.synchronize()
    flight.hurry.set()
    bench.wait(flight)
    if bench.differing(wanted):
        return Finding(_AREA, "copies while written", PASSED, "without a fence it shows: these checks can fail")
    return Finding(
        _AREA, "copies while written", FAILED, "a write below a copy did not show: the checks above prove nothing",
        "tell us, with the JSON",
    )  # fmt: skip


def _captured(bench: _Bench) -> Finding:
    if not bench.clock.on_device:
        return Finding(_AREA, "graph capture", SKIPPED, "no device")
    wanted, graph = bench.on_host(), torch.cuda.CUDAGraph()
    work = torch.ones(1024, device=bench.clock.device)
    bench.synchronize()
    flight = bench.flight()
    with torch.cuda.graph(graph):
        work.add_(1)
    bench.wait(flight)
    graph.replay()
    bench.synchronize()
    return _compared("graph capture", bench.differing(wanted), "copies go on beside the capture of a graph")


def _rate(bench: _Bench) -> Finding:
    """Against a plain copy of the same bytes into the same kind of memory; both warm."""
    ours, plain = [], []
    whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in bench.state])
    place = torch.empty(whole.numel(), dtype=torch.uint8, pin_memory=bench.clock.on_device)
    for _ in range(_ROUNDS):
        bench.synchronize()
        begin = time.perf_counter()
        bench.wait(bench.flight())
        ours.append(whole.numel() / (time.perf_counter() - begin))
        begin = time.perf_counter()
        place.copy_(whole, non_blocking=True)
        bench.synchronize()
        plain.append(whole.numel() / (time.perf_counter() - begin))
    rate, limit = statistics.median(ours), statistics.median(plain)
    text = f"{rate / 1e9:.1f} GB/s; a plain copy {limit / 1e9:.1f} GB/s ({rate / limit:.0%})"
    figures = {"bytes_per_sec": rate, "plain_bytes_per_sec": limit}
    if rate < _LEAST_SHARE * limit:
        return Finding(_AREA, "rate", WARNED, text, "see whether the rank's cores are near the device", figures)
    return Finding(_AREA, "rate", PASSED, text, figures=figures)


def _beside(bench: _Bench) -> Finding:
    """Matrix products, alone and while snapshots are copied."""
    width = 4096 if bench.clock.on_device else 512  # some ms each, so that many are beside the copies
    left = torch.randn(width, width, device=bench.clock.device)

    def secs() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            left.mm(left)
        bench.synchronize()
        return time.perf_counter() - begin

    secs()
    alone, beside = [], []
    for _ in range(_ROUNDS):
        alone.append(secs())
        flight = bench.flight()
        beside.append(secs())
        bench.wait(flight)
    ratio = statistics.median(beside) / statistics.median(alone)
    text, figures = f"compute takes {ratio:.2f} times as long while copies run", {"ratio": ratio}
    if ratio > _MOST_SLOWER:
        how = "windows keep copies out of compute (--ftckpt-schedule bubble); --ftckpt-copy-gbps bounds them"
        return Finding(_AREA, "compute beside copies", WARNED, text, how, figures)
    return Finding(_AREA, "compute beside copies", PASSED, text, figures=figures)
