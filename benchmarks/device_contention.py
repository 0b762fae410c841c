"""How much longer a thread that launches small kernels takes while a snapshot is submitted, by how that is done."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import xxhash

from benchmarks.device_jobs import Job, switches, synchronize
from benchmarks.device_systems import Batch, Plain

ROUNDS = 5
CHUNK_BYTES, REGISTERED_BYTES = 16 << 20, 64 << 20
"""Of a copy, and of a registration of a slot's memory, as ftckpt makes them."""
Way = Callable[[Any], Any]


class Contention:
    """A snapshot of the job in pinned memory, and the ways to submit it."""

    def __init__(self, job: Job) -> None:
        self.job, self.plain = job, Plain(job, tempfile.gettempdir())
        self.chunks = [
            pair
            for place, source in self.plain.pairs
            for pair in zip(place.split(CHUNK_BYTES), source.split(CHUNK_BYTES), strict=True)
        ]
        self._small = torch.zeros(64, device=job.device)
        self._pieces = [piece.numpy() for piece in self.plain.memory.split(CHUNK_BYTES)]

    def measure(self) -> dict[str, Any]:
        """A row for each way, and rates of the device."""
        out: dict[str, Any] = {
            "bytes": self.plain.nbytes, "num_copies": len(self.plain.pairs), "num_chunks": len(self.chunks)
        }  # fmt: skip
        ways: dict[str, Way] = {
            "nothing": lambda stream: None, "copies": self.plain.copies, "chunks, 3 events": self._with_events,
            "hashes, 4 threads": self._hashes,
        }  # fmt: skip
        if not self.job.on_cuda:
            return out | {name: self._row(name, way) for name, way in ways.items()}
        file, out["registering_gb_per_sec"] = _registered_file(self.plain.nbytes)
        try:
            for name, way in self._native_ways(file):
                ways[name] = way
        except Exception as error:  # noqa: BLE001 - an old driver has none of them
            out["no_native_ways"] = repr(error)
        out |= {name: self._row(name, way) for name, way in ways.items()}
        begin = time.perf_counter()
        for place, source in self.plain.pairs:
            source.copy_(place, non_blocking=True)
        synchronize(self.job)
        out["plain_to_device_secs"] = time.perf_counter() - begin
        for at in range(0, self.plain.nbytes, REGISTERED_BYTES):
            torch.cuda.cudart().cudaHostUnregister(file.data_ptr() + at)
        return out

    def _with_events(self, stream: Any) -> None:
        for place, source in self.chunks:
            for _ in range(3 if self.job.on_cuda else 0):
                torch.cuda.Event(enable_timing=True, blocking=True).record()
            place.copy_(source, non_blocking=True)

    def _hashes(self, stream: Any) -> None:
        def hash_each(first: int) -> None:
            for piece in self._pieces[first::4]:
                xxhash.xxh3_64_intdigest(piece)

        threads = [threading.Thread(target=hash_each, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _native_ways(self, file: torch.Tensor) -> Iterator[tuple[str, Way]]:
        """Ways of one call each: the driver's, into pinned memory and ``file``, and a graph's launch."""
        inside = []
        for place, source in self.chunks:
            begin = place.data_ptr() - self.plain.memory.data_ptr()
            end = begin + source.nbytes
            # No copy may cross registrations; those that would are left out.
            if begin // REGISTERED_BYTES == (end - 1) // REGISTERED_BYTES:
                inside.append((file[begin:end], source))
        yield "batch", Batch(self.plain.pairs)
        yield "batch, 16 MiB", Batch(self.chunks)
        yield "batch, registered tmpfs", Batch(inside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            self.plain.copies(None)
        yield "graph", lambda stream: graph.replay()

    def _row(self, name: str, way: Way) -> dict[str, float]:
        alone, beside, waits, submissions = list[float](), list[float](), list[int](), list[_Submission]()
        for _ in range(ROUNDS):
            alone.append(self._launch()[0])
            submissions.append(_Submission(way, self.plain.stream))
            submissions[-1].start()
            secs, waited = self._launch()
            submissions[-1].join()
            synchronize(self.job)
            beside.append(secs)
            waits.append(waited)
        longer = [b - a for a, b in zip(alone, beside, strict=True)]
        row = {
            "alone_ms": statistics.median(alone) * 1e3, "longer_ms": statistics.median(longer) * 1e3,
            "submit_wall_ms": statistics.median(one.wall_secs for one in submissions) * 1e3,
            "submit_cpu_ms": statistics.median(one.cpu_secs for one in submissions) * 1e3,
            "waits": statistics.median(waits),
        }  # fmt: skip
        if self.job.on_cuda and way != self._hashes and name != "nothing":
            nbytes = getattr(way, "nbytes", self.plain.nbytes)
            row["gb_per_sec"] = nbytes / statistics.median(one.device_ms() for one in submissions) / 1e6
        return row

    def _launch(self) -> tuple[float, int]:
        """Seconds of many small launches, and how often this thread had to wait."""
        begin, waited = time.perf_counter(), switches()
        for _ in range(20000 if self.job.on_cuda else 3000):
            self._small.add_(1)
        waited = switches() - waited
        synchronize(self.job)
        return time.perf_counter() - begin, waited


class _Submission(threading.Thread):
    """One snapshot, submitted by a thread."""

    def __init__(self, way: Way, stream: Any) -> None:
        super().__init__()
        self._way, self._stream = way, stream
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(0 if stream is None else 2)]
        self.wall_secs = self.cpu_secs = float("nan")

    def run(self) -> None:
        begin, cpu = time.perf_counter(), time.thread_time()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for event in self._events[:1]:
                event.record()
            self._way(self._stream)
            for event in self._events[1:]:
                event.record()
        self.wall_secs, self.cpu_secs = time.perf_counter() - begin, time.thread_time() - cpu

    def device_ms(self) -> float:
        """Milliseconds that the copies took on the device."""
        first, last = self._events
        return first.elapsed_time(last)


def _registered_file(nbytes: int) -> tuple[torch.Tensor, float]:
    """A file of tmpfs, registered in pieces as slots are, and the rate of registering it in GB/s."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as name:
        file = torch.from_file(name.name, shared=True, size=nbytes, dtype=torch.uint8)
    file.zero_()
    begin = time.perf_counter()
    for at in range(0, nbytes, REGISTERED_BYTES):
        torch.cuda.cudart().cudaHostRegister(file.data_ptr() + at, min(REGISTERED_BYTES, nbytes - at), 0)
    return file, nbytes / (time.perf_counter() - begin) / 1e9
