"""Checks of copies from the local device: exactness, registration of host memory, and rate, with a job's copier."""

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
# The median of five: another process may disturb one or two.
_ROUNDS = 5
_FLIGHT_SECS = 60.0
"""Deadline of a flight: a slower copy counts as stuck."""
# The default of --ftckpt-chunk-size, and the alignment of fragments in a slot.
_CHUNK_BYTES, _ALIGN_BYTES = 16 << 20, 64
_LEAST_SHARE = 0.8
"""Share of a plain copy's rate below which the rate check warns."""


def device_checks(arena: Path, nbytes: int) -> Iterator[CheckResult]:
    """Runs the device checks with ``nbytes`` of state, and yields each result when it is available."""
    local, is_here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.is_available()
    # With a launcher that hides the other devices, each rank sees one device, of index 0.
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
        except Exception as error:  # noqa: BLE001 - the user must see any error of a driver or a kernel
            text = f"cannot allocate {human(nbytes)} of state and a slot for it in {arena}: {in_words(error)}"
            how = "lower --size, enlarge /dev/shm (of a container: --shm-size), or free the device's memory"
            yield CheckResult(_AREA, "copies", FAILED, text, how)
            return
        for name, check in (("registration", _registered), ("exact copies", _exact), ("rate", _rate)):
            yield attempt(_AREA, name, partial(check, bench))


def _known(device: torch.device) -> Result:
    """The device's name and software; fails if this process cannot use it."""
    name = "CPU: no GPU found"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    queues = os.environ.get(_QUEUES, "at the driver's default")
    text = f"{name}, {stack}, torch {torch.__version__}, {_QUEUES} {queues}"
    return passed(text) if device.type == "cuda" else skipped(text)


def _near(device: torch.device) -> Result:
    """Whether this rank runs on its device's NUMA node: from another one, copies and launches are slower."""
    own, node = os.sched_getaffinity(0), numa_node_of(device)
    there = cores_of_node(node)
    if num_nodes() < 2 or node is None or not there:
        return skipped("one NUMA node" if num_nodes() < 2 else "the device's NUMA node is unknown")
    text = f"cores {format_cores(own)} of this rank, {format_cores(there)} near the device on NUMA node {node}"
    figures = {"cores": float(len(own)), "near_cores": float(len(own & there))}
    if not own & there:
        how = (
            f"bind the rank to NUMA node {node}: torchrun --numa-binding node, srun --gpu-bind=closest, or "
            f"numactl --cpunodebind={node}"
        )
        return warned(f"{text}: none in common", how, **figures)
    return passed(text, **figures)


class Bench:
    """State on the device, a slot in the arena's file system, and a copier from one to the other."""

    def __init__(self, clock: Clock, copier: Copier, slot: torch.Tensor, state: list[torch.Tensor]) -> None:
        self.clock, self.copier, self.slot, self.state = clock, copier, slot, state
        self.copies = _plan(state)

    def flight(self, windows: Windows | None = None) -> Flight:
        """Starts a snapshot."""
        flight = Flight(self.copies, self.slot, lambda: None, self.clock.mark())
        self.copier.start(self.state, flight, windows or Always())
        return flight

    def wait(self, flight: Flight) -> None:
        """Waits for the copies. Raises TimeoutError, or the error of the copier."""
        if not flight.wait(_FLIGHT_SECS):
            raise TimeoutError(f"copies did not finish within {_FLIGHT_SECS:.0f} s")
        if flight.error is not None:
            raise flight.error

    def differing(self, wanted: Sequence[torch.Tensor]) -> int:
        """Counts the bytes of the slot that differ from the host tensors ``wanted``, and clears the slot."""
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
    """A bench with large and small tensors of several types, about ``nbytes``."""
    on = clock.device
    state = [torch.randn(nbytes // 8, device=on), torch.randn(nbytes // 8, device=on).bfloat16()]
    state += [torch.arange(nbytes // 32, device=on), torch.ones(3, device=on)]
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
    """Copies of all tensors into one slot, one after the other, in chunks."""
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
    """Windows of which none opens before the fence."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        self.is_asked.set()
        hurry.wait(_FLIGHT_SECS)
        return Turn(count=len(sizes))


def _registered(bench: Bench) -> Result:
    """Whether the driver pins the slot, and how fast."""
    if not bench.clock.on_device:
        return skipped("not needed for a CPU")
    assert isinstance(bench.copier, DeviceCopier)
    begin = time.perf_counter()
    is_through = bench.copier.pin_now(_FLIGHT_SECS)
    secs = time.perf_counter() - begin
    if not is_through:
        return failed(f"the driver did not pin the slot within {secs:.0f} s", "see the driver's log")
    if not bench.copier.reaches(bench.slot):
        text = "the driver refused to pin the slot: copies are staged, so they are slower and wait for the device"
        how = "allow more locked memory: ulimit -l unlimited; for a container --ulimit memlock=-1"
        return warned(text, how)
    rate = bench.slot.numel() / secs
    return passed(f"pins {rate / 1e9:.1f} GB/s", secs=secs, bytes_per_sec=rate)


def _exact(bench: Bench) -> Result:
    """Whether snapshots have the bytes of their step boundary although the state is written right after the fence.

    In every second snapshot no copy has started when the fence is reached.
    """
    differing = 0
    for round_ in range(_ROUNDS):
        wanted = [tensor.cpu().clone() for tensor in bench.state]
        late = NoWindow() if round_ % 2 else None
        flight = bench.flight(late)
        if late is not None:
            late.is_asked.wait(_FLIGHT_SECS)
        if not bench.copier.fence(flight, _FLIGHT_SECS):
            raise TimeoutError(f"the fence failed: {flight.error}")
        for tensor in bench.state:
            tensor.add_(1)
        bench.wait(flight)
        bench.synchronize()
        differing += bench.differing(wanted)
    if differing:
        text = f"{differing} bytes of {_ROUNDS} snapshots differ from the device's"
        return failed(text, "do not use ftckpt on this machine; report this with the output of --json")
    return passed(f"all bytes of {_ROUNDS} snapshots equal the device's, with writes right after the fence")


def _rate(bench: Bench) -> Result:
    """Compares the rate to a plain copy of the same bytes into the same kind of memory, both after a warm-up."""
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
        text += ", batched copies" if bench.copier.has_plan else ", one call per copy"
    figures = {"bytes_per_sec": rate, "plain_bytes_per_sec": limit}
    if rate < _LEAST_SHARE * limit:
        return warned(text, "check that the rank's cores are near the device", **figures)
    return passed(text, **figures)
