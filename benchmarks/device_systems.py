"""Systems that snapshot a job on a device: plain pinned copies, ftckpt's schedules, and peers."""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.boundary_jobs import restores_by_part
from benchmarks.device_jobs import synchronize
from benchmarks.systems import Dcp, LmResiliency, System, TorchCheckpointing

SETTLING_SECS = 90.0
SMP_SECS = 20.0
MOST_COMPARED_BYTES = 6 << 30
"""State that is compared after a restart; more takes too long."""


class Plain(System):
    """The limit: all tensors to pinned memory on a side stream; the fence is a wait of the device. Proves nothing."""

    def setup(self, batched: bool = False) -> None:
        if batched and not self.job.on_cuda:
            raise RuntimeError("needs a CUDA driver")
        tensors = [t.reshape(-1).view(torch.uint8) for t in self.job.tensors.values()]
        self.nbytes = sum(t.nbytes for t in tensors)
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.job.on_cuda)
        self.pairs = list(zip(self.memory.split([t.nbytes for t in tensors]), tensors, strict=True))
        self.stream = torch.cuda.Stream() if self.job.on_cuda else None
        self._submit: Callable[[Any], None] = Batch(self.pairs) if batched else self.copies
        self._submit_secs: list[float] = []

    def copies(self, stream: Any) -> None:
        for place, source in self.pairs:
            place.copy_(source, non_blocking=True)

    def save(self, iteration: int) -> None:
        if self.stream is None:
            return self.copies(None)
        self.stream.wait_stream(torch.cuda.current_stream())
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self._begin.record()
            begin = time.perf_counter()
            self._submit(self.stream)
            self._submit_secs.append(time.perf_counter() - begin)
            self._end.record()

    def fence(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_event(self._end)

    def notes(self) -> dict[str, Any]:
        if self.stream is None:
            return {}
        torch.cuda.synchronize()
        rate = self.nbytes / self._begin.elapsed_time(self._end) / 1e6
        begin = time.perf_counter()
        for place, source in self.pairs:
            source.copy_(place, non_blocking=True)
        torch.cuda.synchronize()
        to_device_secs = time.perf_counter() - begin
        submit_ms = statistics.median(self._submit_secs) * 1e3
        return {"gb_per_sec": rate, "submit_ms": submit_ms, "to_device_secs": to_device_secs}


class Batch:
    """All copies by one call of the driver (12.8 and later), made once: no Python between two of them, and no GIL."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        driver, num = ctypes.CDLL("libcuda.so.1"), len(pairs)
        self._without_fail = hasattr(driver, "cuMemcpyBatchAsync_v2")  # since 13.0 there is no failIdx
        self._call = driver.cuMemcpyBatchAsync_v2 if self._without_fail else driver.cuMemcpyBatchAsync
        self._targets = (ctypes.c_uint64 * num)(*[place.data_ptr() for place, _ in pairs])
        self._sources = (ctypes.c_uint64 * num)(*[source.data_ptr() for _, source in pairs])
        self._sizes = (ctypes.c_size_t * num)(*[source.nbytes for _, source in pairs])
        self._num = ctypes.c_size_t(num)
        # One CUmemcpyAttributes: sources in stream order, no hints of locations, overlapping compute.
        self._attributes, self._first = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 1), (ctypes.c_size_t * 1)(0)
        self._fail, self._pairs = ctypes.c_size_t(0), pairs

    def __call__(self, stream: torch.cuda.Stream) -> None:
        attributes = (ctypes.byref(self._attributes), self._first, ctypes.c_size_t(1))
        fail = () if self._without_fail else (ctypes.byref(self._fail),)
        handle = ctypes.c_void_p(stream.cuda_stream)
        code = self._call(self._targets, self._sources, self._sizes, self._num, *attributes, *fail, handle)
        if code:
            raise RuntimeError(f"cuMemcpyBatchAsync: error {code}")


class Ftckpt(System):
    """ftckpt with a snapshot in each iteration."""

    def setup(self, smp: bool = False, **settings: Any) -> None:
        import ftckpt

        os.makedirs(self.folder + "/store", exist_ok=True)
        # One rank alone has nothing to protect; storage that is asked for once in a million snapshots has an SMP run.
        settings |= {"persist": self.folder + "/store", "persist_interval": 1_000_000} if smp else {"protect": "none"}
        self._config = ftckpt.Config(
            enabled=True, job="bench-" + os.path.basename(self.folder), node="node0", arena=self.folder,
            replica_check_interval=0, overhead_budget=0.0, on_error="raise", **settings,
        )  # fmt: skip
        self._smp, self._rates = smp, list[tuple[float, int]]()
        self.checkpointer = self.job.attach(self._config)
        self.checkpointer.restore()

    def save(self, iteration: int) -> None:
        flight = self.checkpointer.capture.flight
        self.checkpointer.step(iteration)
        if flight is not None and flight.ended and flight.timed:
            secs = max(end for _, end, _ in flight.timed) - min(begin for begin, _, _ in flight.timed)
            self._rates.append((sum(nbytes for *_, nbytes in flight.timed) / max(secs, 1e-9), len(flight.timed)))

    def fence(self) -> None:
        self.checkpointer.fence()

    def settle(self) -> None:
        """Train until all slots have memory and are pinned, an SMP runs, and windows are known."""
        capture, begin = self.checkpointer.capture, time.perf_counter()
        slots = [*range(capture.arena.control.slots)]
        while capture.lacks_slots or capture.prepared(slots) != slots:
            self.job.iterate(self)
            if time.perf_counter() - begin > SETTLING_SECS:
                raise TimeoutError(f"slots are not pinned after {SETTLING_SECS:g} s")
        self._settling_secs = time.perf_counter() - begin
        begin, protection = time.perf_counter(), self.checkpointer.rank.protection
        while self._smp and not protection.smp_guards and time.perf_counter() - begin < SMP_SECS:
            time.sleep(0.05)
        self._has_smp = protection.smp_guards
        for _ in range(6):
            self.job.iterate(self)
        self._rates.clear()

    def notes(self) -> dict[str, Any]:
        numbers = {
            **self.checkpointer.numbers(),
            "settling_secs": self._settling_secs,
            "has_smp": float(self._has_smp),
        }
        if self._rates:
            numbers["gb_per_sec"] = statistics.median(rate for rate, _ in self._rates) / 1e9
            numbers["chunks"] = self._rates[-1][1]
        return numbers

    def restored(self) -> dict[str, Any]:
        """A restart in this process, every byte verified, and compared here with what was there before it."""
        import ftckpt

        self.job.iterate(self)
        self.checkpointer.fence()
        self.checkpointer.step(self.job.counters.iteration)
        is_small = sum(t.nbytes for t in self.job.tensors.values()) < MOST_COMPARED_BYTES
        before = {name: t.cpu() for name, t in self.job.tensors.items() if is_small}
        self.checkpointer.close(remove=False)
        self.job.detach()
        for tensor in self.job.tensors.values():
            tensor.zero_()
        events = Path(self.folder, "events")
        self.checkpointer = self.job.attach(ftckpt.Config(**{**self._config.__dict__, "events": str(events)}))
        synchronize(self.job)
        with restores_by_part(time.perf_counter, self.job.framework) as meter:
            begin = time.perf_counter()
            out: dict[str, Any] = {"restored_iteration": self.checkpointer.restore()}
            synchronize(self.job)
            out["restore_secs"] = time.perf_counter() - begin
        ((_, _, secs),) = meter.calls
        parts = {**meter.parts, "rest": secs - sum(meter.parts.values())}
        out["restore_parts_ms"] = {part: of * 1e3 for part, of in parts.items()}
        del self.job.tensors  # the optimizer has others
        out["compared"] = len(before)
        out["exact"] = all(torch.equal(t, self.job.tensors[name].cpu()) for name, t in before.items())
        for line in (json.loads(line) for path in events.glob("*.jsonl") for line in path.read_text().splitlines()):
            if line["event"] in ("loaded", "restored", "fetched"):
                out[line["event"]] = {k: v for k, v in line.items() if k.endswith(("secs", "bytes"))}
        return out

    def close(self) -> None:
        try:
            self.checkpointer.close(remove=True)
        finally:
            self.job.detach()


PEERS = (Dcp, LmResiliency, TorchCheckpointing)
SYSTEMS: dict[str, tuple[type[System], dict[str, Any]]] = {
    "nothing": (System, {}),
    "plain": (Plain, {}),
    "plain-batch": (Plain, {"batched": True}),
    "bubble": (Ftckpt, {}),
    "bubble-smp": (Ftckpt, {"smp": True}),
    "bubble-64": (Ftckpt, {"smp": True, "chunk_size": "64MiB"}),
    "stream": (Ftckpt, {"schedule": "stream"}),
    "sync": (Ftckpt, {"schedule": "sync"}),
    "dcp-stage": (Dcp, {"writes": False}),
    "dcp": (Dcp, {}),
    "lm-resiliency": (LmResiliency, {}),
    "torch_checkpointing": (TorchCheckpointing, {}),
}
