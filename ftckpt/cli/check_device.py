"""Whether snapshots come right from the device that is here: bits, registration and rate, by a job's own copier."""

from __future__ import annotations

import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import torch

from ftckpt.capture.affinity import cores_of_node, format_cores, num_nodes, numa_node_of
from ftckpt.capture.chunks import ChunkCopy, Segment, divided
from ftckpt.capture.copier import Copier, Flight
from ftckpt.capture.device_copier import DeviceCopier, make_copier
from ftckpt.cli.findings import FAILED, PASSED, CheckResult, Result, attempt, failed, passed, skipped, warned
from ftckpt.errors import in_words
from ftckpt.model.text import human
from ftckpt.schedule.bubbles import Always, Turn, Windows
from ftckpt.schedule.clock import Clock, make_clock

_AREA = "device"
_QUEUES = "GPU_MAX_HW_QUEUES" if torch.version.hip else "CUDA_DEVICE_MAX_CONNECTIONS"
_ROUNDS = 5
_FLIGHT_SECS = 60.0
"""For a flight to end: a copy that takes longer has come to a stop."""
_CHUNK_BYTES, _ALIGN_BYTES = 16 << 20, 64
_LEAST_SHARE = 0.8
"""Of the rate of a plain copy."""


def look_at_device(arena: Path, nbytes: int) -> Iterator[CheckResult]:
    """Each finding as it comes; ``nbytes`` of state are copied."""
    local, is_here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    # A launcher may have each rank see its own device alone.
    device = torch.device("cuda", local % torch.cuda.device_count()) if is_here else torch.device("cpu")
    known = attempt(_AREA, "device", partial(_known, device))
    yield known
    if known.state == FAILED:
        return
    if known.state == PASSED:
        yield attempt(_AREA, "NUMA", partial(_near, device))
    with ExitStack() as stack:
        try:
            bench = stack.enter_context(bench_on(arena, make_clock(device), nbytes))
        except Exception as error:  # noqa: BLE001 - whatever a driver or a kernel says is what the user must see
            text = f"no {human(nbytes)} of state and a slot for it at {arena}: {in_words(error)}"
            how = "name less by --size, enlarge /dev/shm (a container's: --shm-size), or free the device's memory"
            yield CheckResult(_AREA, "copies", FAILED, text, how)
            return
        for name, look in (("registration", _registered), ("exact copies", _exact), ("rate", _rate)):
            yield attempt(_AREA, name, partial(look, bench))


def _known(device: torch.device) -> Result:
    """Which device it is, and that this process can use it."""
    name = "CPU: none is here"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    queues = os.environ.get(_QUEUES, "as the driver has it")
    text = f"{name}, {stack}, torch {torch.__version__}, {_QUEUES} {queues}"
    return passed(text) if device.type == "cuda" else skipped(text)


def _near(device: torch.device) -> Result:
    """Whether this rank runs where its device is attached: across NUMA nodes copies and launches take longer."""
    own, node = os.sched_getaffinity(0), numa_node_of(device)
    there = cores_of_node(node)
    if num_nodes() < 2 or node is None or not there:
        return skipped("one NUMA node" if num_nodes() < 2 else "no cores are known to be near the device")
    text = f"cores {format_cores(own)} of this rank, {format_cores(there)} near the device on NUMA node {node}"
    figures = {"cores": float(len(own)), "near_cores": float(len(own & there))}
    if not own & there:
        how = (
            f"bind the rank to NUMA node {node}: torchrun --numa-binding node, srun --gpu-bind=closest, or "
            f"numactl --cpunodebind={node}"
        )
        return warned(f"{text}: not one is", how, **figures)
    return passed(text, **figures)


class Bench:
    """A state on the device, a slot in the arena's file system, and the copier between them."""

    def __init__(self, clock: Clock, copier: Copier, slot: torch.Tensor, state: list[torch.Tensor]) -> None:
        self.clock, self.copier, self.slot, self.state = clock, copier, slot, state
        self.copies = _plan(state)

    def flight(self, windows: Windows | None = None) -> Flight:
        """A snapshot that begins now."""
        flight = Flight(self.copies, self.slot, lambda: None, self.clock.mark())
        self.copier.start(self.state, flight, windows or Always())
        return flight

    def wait(self, flight: Flight) -> None:
        """Raises TimeoutError, or what the copy failed with."""
        if not flight.wait(_FLIGHT_SECS):
            raise TimeoutError(f"copies have not ended after {_FLIGHT_SECS:.0f} s")
        if flight.error is not None:
            raise flight.error

    def differing(self, wanted: Sequence[torch.Tensor]) -> int:
        """Bytes of the slot that are not those of ``wanted``, host tensors; it is empty for the next flight."""
        differing = sum(
            int((self.slot[s.offset : s.offset + s.nbytes] != _bytes_of(wanted[s.piece], s)).sum())
            for copy in self.copies
            for s in copy.segments
        )
        self.slot.zero_()
        return differing

    def synchronize(self) -> None:
        if self.clock.on_device:
            torch.cuda.synchronize(self.clock.device)


@contextmanager
def bench_on(arena: Path, clock: Clock, nbytes: int) -> Iterator[Bench]:
    """A state of several types, large and small, of about ``nbytes``."""
    state = [
        torch.randn(nbytes // 8, device=clock.device), torch.randn(nbytes // 8, device=clock.device).bfloat16(),
        torch.arange(nbytes // 32, device=clock.device), torch.ones(3, device=clock.device),
    ]  # fmt: skip
    size = -(-sum(tensor.nbytes + _ALIGN_BYTES for tensor in state) // mmap.PAGESIZE) * mmap.PAGESIZE
    with tempfile.TemporaryFile(dir=arena) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        slot = torch.frombuffer(memoryview(mmap.mmap(file.fileno(), size)), dtype=torch.uint8)
        copier = make_copier(clock)
        try:
            bench = Bench(clock, copier, slot, state)
            copier.prepare([slot])
            copier.warm_up(state, bench.copies, ())
            yield bench
        finally:
            copier.close()


def _plan(state: Sequence[torch.Tensor]) -> list[ChunkCopy]:
    """Tensors end to end, in chunks."""
    whole, offset = [], 0
    for piece, tensor in enumerate(state):
        offset = -(-offset // _ALIGN_BYTES) * _ALIGN_BYTES
        whole.append(Segment(piece, 0, tensor.numel(), offset, tensor.nbytes))
        offset += tensor.nbytes
    segments = divided(ChunkCopy(0, tuple(whole)), _CHUNK_BYTES).segments
    by_chunk = groupby(segments, key=lambda segment: segment.offset // _CHUNK_BYTES)
    return [ChunkCopy(chunk, tuple(those)) for chunk, those in by_chunk]


def _bytes_of(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    return tensor.reshape(-1)[segment.start : segment.start + segment.numel].view(torch.uint8)


class NoWindow(Always):
    """No window opens before the fence hurries."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        self.is_asked.set()
        hurry.wait(_FLIGHT_SECS)
        return Turn(count=len(sizes))


def _registered(bench: Bench) -> Result:
    """How fast the driver pins the slot, and whether it does."""
    if not bench.clock.on_device:
        return skipped("a CPU's memory needs none")
    assert isinstance(bench.copier, DeviceCopier)
    begin = time.perf_counter()
    is_through = bench.copier.pin_now(_FLIGHT_SECS)
    secs = time.perf_counter() - begin
    if not is_through:
        return failed(f"the slot is not pinned after {secs:.0f} s", "see the driver's log")
    if not bench.copier.reaches(bench.slot):
        text = "the driver refused to pin the slot: copies are staged, slower, and wait for the device"
        how = "allow more locked memory: ulimit -l unlimited; of a container --ulimit memlock=-1"
        return warned(text, how)
    rate = bench.slot.numel() / secs
    return passed(f"pins {rate / 1e9:.1f} GB/s", secs=secs, bytes_per_sec=rate)


def _exact(bench: Bench) -> Result:
    """Whether snapshots have the bytes of their boundary, though the optimizer writes right behind the fence.

    Copies of every second one still wait for their window when the fence comes.
    """
    differing = 0
    for round_ in range(_ROUNDS):
        wanted = [tensor.cpu().clone() for tensor in bench.state]
        late = NoWindow() if round_ % 2 else None
        flight = bench.flight(late)
        if late is not None:
            late.is_asked.wait(_FLIGHT_SECS)
        if not bench.copier.fence(flight, _FLIGHT_SECS):
            raise TimeoutError(f"the fence did not come to pass: {flight.error}")
        for tensor in bench.state:
            tensor.add_(1)
        bench.wait(flight)
        bench.synchronize()
        differing += bench.differing(wanted)
    if differing:
        text = f"{differing} bytes of {_ROUNDS} snapshots are not those of the device"
        return failed(text, "do not use ftckpt here; report it, with the JSON")
    return passed(f"every byte of {_ROUNDS} snapshots is that of the device, whatever is written behind the fence")


def _rate(bench: Bench) -> Result:
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
    if isinstance(bench.copier, DeviceCopier):
        text += ", many copies a call" if bench.copier.has_plan else ", a call for each copy"
    figures = {"bytes_per_sec": rate, "plain_bytes_per_sec": limit}
    if rate < _LEAST_SHARE * limit:
        return warned(text, "see whether the rank's cores are near the device", **figures)
    return passed(text, **figures)
