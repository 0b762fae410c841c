"""Systems that snapshot a job on a device: plain pinned copies, ftckpt's schedules, and peers."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_jobs import synchronize
from benchmarks.jobs import has_smp
from benchmarks.systems import Dcp, LmResiliency, System, TorchCheckpointing
from tests.support.event_logs import read_events

SETTLING_SECS = 90.0
SMP_SECS = 20.0
MAX_COMPARED_BYTES = 6 << 30
"""State that is compared after a restart; more takes too long."""


class Plain(System):
    """The limit: all tensors to pinned memory on a side stream; the fence is a wait of the device. No safety."""

    def setup(self, batched: bool = False) -> None:
        tensors = [t.reshape(-1).view(torch.uint8) for t in self.job.tensors.values()]
        self.nbytes = sum(t.nbytes for t in tensors)
        self.memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=self.job.on_cuda)
        self.pairs = list(zip(self.memory.split([t.nbytes for t in tensors]), tensors, strict=True))
        self.stream = torch.cuda.Stream() if self.job.on_cuda else None
        self._submit: Callable[[Any], None] = self._batched() if batched else self._copies
        self._submit_secs: list[float] = []

    def _copies(self, stream: Any) -> None:
        for place, source in self.pairs:
            place.copy_(source, non_blocking=True)

    def _batched(self) -> Callable[[Any], None]:
        """All copies as one call of the driver, prepared once: no Python and no GIL between two of them."""
        from ftckpt.capture.driver import Call, batch_copy

        copy = batch_copy()
        if copy is None:
            raise RuntimeError("needs a CUDA driver of 12.8 or later")
        addresses = [(place.data_ptr(), source.data_ptr(), source.nbytes) for place, source in self.pairs]
        arrays = torch.tensor(addresses, dtype=torch.int64).T.contiguous()

        def submit(stream: torch.cuda.Stream) -> None:
            call = Call(*(row.data_ptr() for row in arrays), len(self.pairs))
            if code := copy(call, stream.cuda_stream):
                raise RuntimeError(f"cuMemcpyBatchAsync: error {code}")

        return submit

    def save(self, iteration: int) -> None:
        if self.stream is None:
            return self._copies(None)
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


class Ftckpt(System):
    """ftckpt with a snapshot in each iteration."""

    def setup(self, smp: bool = False, **settings: Any) -> None:
        import ftckpt

        os.makedirs(self.folder + "/store", exist_ok=True)
        # A single rank has nothing to protect; storage that is used once in a million snapshots starts an SMP.
        settings |= {"persist": self.folder + "/store", "persist_interval": 1_000_000} if smp else {"protect": "none"}
        settings |= {"job": "bench-" + os.path.basename(self.folder), "node": "node0", "arena": self.folder}
        settings |= {"enabled": True, "replica_check_interval": 0, "overhead_budget": 0.0, "on_error": "raise"}
        self._config = ftckpt.Config(**settings)
        self._smp, self._rates = smp, list[tuple[float, int]]()
        self.checkpointer = self.job.start(self._config)

    def save(self, iteration: int) -> None:
        flight = self.checkpointer.capture.flight
        self.checkpointer.step(iteration)
        if flight is not None and flight.ended and flight.timed:
            secs = max(end for _, end, _ in flight.timed) - min(begin for begin, _, _ in flight.timed)
            self._rates.append((sum(nbytes for *_, nbytes in flight.timed) / max(secs, 1e-9), len(flight.timed)))

    def fence(self) -> None:
        self.checkpointer.fence()

    def settle(self) -> None:
        """Trains until all slots have memory and are pinned, an SMP runs, and windows are known."""
        capture, begin = self.checkpointer.capture, time.perf_counter()
        slots = [*range(capture.arena.control.slots)]
        while capture.lacks_slots or capture.prepared(slots) != slots:
            self.job.iterate(self)
            if time.perf_counter() - begin > SETTLING_SECS:
                raise TimeoutError(f"slots are not pinned after {SETTLING_SECS:g} s")
        self._settling_secs, begin = time.perf_counter() - begin, time.perf_counter()
        while self._smp and not has_smp(self.checkpointer) and time.perf_counter() - begin < SMP_SECS:
            time.sleep(0.05)
        self._has_smp = self._smp and has_smp(self.checkpointer)
        for _ in range(6):
            self.job.iterate(self)
        self._rates.clear()

    def notes(self) -> dict[str, Any]:
        settled = {"settling_secs": self._settling_secs, "has_smp": float(self._has_smp)}
        numbers = {**self.checkpointer.numbers(), **settled}
        if self._rates:
            numbers["gb_per_sec"] = statistics.median(rate for rate, _ in self._rates) / 1e9
            numbers["chunks"] = self._rates[-1][1]
        return numbers

    def restored(self) -> dict[str, Any]:
        """A restart in this process, with every byte verified, and compared here with the state before it."""
        import ftckpt

        self.job.iterate(self)
        self.checkpointer.fence()
        self.checkpointer.step(self.job.iteration)
        is_small = sum(t.nbytes for t in self.job.tensors.values()) < MAX_COMPARED_BYTES
        before = {name: t.cpu() for name, t in self.job.tensors.items() if is_small}
        self.checkpointer.close(remove=False)
        self.job.detach()
        for tensor in self.job.tensors.values():
            tensor.zero_()
        events = Path(self.folder, "events")
        self.checkpointer = self.job.attach(ftckpt.Config(**{**self._config.__dict__, "events": str(events)}))
        synchronize(self.job)
        begin = time.perf_counter()
        out: dict[str, Any] = {"restored_iteration": self.checkpointer.restore()}
        synchronize(self.job)
        out["restore_secs"] = time.perf_counter() - begin
        del self.job.tensors  # the optimizer has others
        out["compared"] = len(before)
        out["exact"] = all(torch.equal(t, self.job.tensors[name].cpu()) for name, t in before.items())
        for line in read_events(events):
            if line["event"] in ("loaded", "restored", "fetched"):
                out[line["event"]] = {name: value for name, value in line.items() if name.endswith(("secs", "bytes"))}
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
    "stream": (Ftckpt, {"schedule": "stream"}),
    "dcp-stage": (Dcp, {"writes": False}),
    "lm-resiliency": (LmResiliency, {}),
    "torch_checkpointing": (TorchCheckpointing, {}),
}
