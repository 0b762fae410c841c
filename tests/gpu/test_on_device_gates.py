"""Copies during training on a real CUDA or ROCm device: gates, measured times, throughput, graph captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from ftckpt.capture import driver, registration
from ftckpt.schedule.bubbles import Always, Bubbles, Turn, WindowPlan
from ftckpt.schedule.clock import DeviceClock, Moment
from ftckpt.schedule.iteration import IterationForecast
from tests.gpu.device_states import Landings, assert_holds, plan, prepared, shared_slot
from tests.gpu.fake_device import SECS
from tests.gpu.real_device import MIB, cycles_for, needs_device, sleep, state
from tests.support.waiting import until

pytestmark = needs_device


class HandedOver:
    """Every turn waits until the training thread has handed a gate over."""

    def __init__(self) -> None:
        self.gate: Moment = None
        self.given = threading.Event()

    def give(self, gate: Moment) -> None:
        self.gate = gate
        self.given.set()

    def wait_turn(self, sizes: Sequence[int], hurry: threading.Event) -> Turn:
        assert self.given.wait(SECS)
        return Turn(self.gate)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_a_gated_copy_starts_when_the_device_reaches_its_window(
    gated: bool, registered: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long kernel, although the side stream is idle. Without a gate the copy overtakes the kernel."""
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot, clock, windows = shared_slot(size), DeviceClock(device), HandedOver()
    if not registered:
        monkeypatch.setattr(registration, "pin_pages", lambda address, nbytes: False)
    with prepared([slot], device) as copier:
        cycles = cycles_for(0.5)
        base = clock.mark()
        seen = Landings(copies, slot, base)
        copier.start(tensors, seen.flight, windows)
        sleep(cycles)
        gate = clock.mark()
        windows.give(gate if gated else None)
        if registered:
            assert seen.flight.submitted.wait(SECS)
            assert not gate.query(), "the host waited for the device"
        seen.wait()
        torch.cuda.synchronize()
        reached = clock.secs(base, gate)
    assert reached is not None and reached > 0.2
    begins = [begin for begin, _, _ in seen.flight.timed]
    assert len(begins) == len(copies)
    assert (min(begins) >= reached) == gated
    assert_holds(slot, copies, tensors)


def test_measured_times_lie_inside_their_windows(device: torch.device) -> None:
    """The host has passed the iteration before the device starts it."""
    kinds, secs = ("start", "forward", "window", "backward", "window", "fence"), (0.0, 0.2, 0.2, 0.2, 0.2, 0.0)
    tensors = [torch.ones(80 * MIB // 4, device=device)]
    copies, size = plan(tensors, 16 * MIB)
    slot, clock, bubbles = shared_slot(size), DeviceClock(device), Bubbles(queued=True)
    unit = 16 * MIB
    with prepared([slot], device) as copier:
        cycles = cycles_for(0.2)
        torch.cuda.synchronize()
        sleep(cycles)
        marks = [clock.mark()]
        seen = Landings(copies, slot, marks[0])
        # By this rate a window takes three chunks; they are copied in far less time.
        bubbles.begin(5 * unit, WindowPlan.of(IterationForecast(kinds, secs), 3 * unit / 0.2, unit))
        bubbles.enter(0, kinds[0], marks[0])
        copier.start(tensors, seen.flight, bubbles)
        for place in range(1, 6):
            marks.append(clock.mark())
            bubbles.enter(place, kinds[place], marks[place])
            if secs[place]:
                sleep(cycles)
        assert seen.flight.submitted.wait(SECS)
        assert copier.fence(seen.flight, SECS)
        assert not marks[1].query(), "the host waited for the device"
        seen.wait()
        torch.cuda.synchronize()
        edges = [clock.secs(marks[0], mark) or 0.0 for mark in marks]
    inside = [
        [place for place in (2, 4) if edges[place] <= begin < end <= edges[place + 1]]
        for begin, end, _ in sorted(seen.flight.timed)
    ]
    assert inside == [[2], [2], [2], [4], [4]], (edges, seen.flight.timed)


def test_registered_copies_are_as_fast_as_pinned_ones(device: torch.device) -> None:
    tensors = [torch.ones(512 * MIB, dtype=torch.uint8, device=device)]
    copies, size = plan(tensors, 64 * MIB)
    slot, clock = shared_slot(size), DeviceClock(device)
    pinned = torch.empty(tensors[0].numel(), dtype=torch.uint8, pin_memory=True)
    plain, ours = [], []
    with prepared([slot], device) as copier:
        for _ in range(5):
            torch.cuda.synchronize()
            base = clock.mark()
            pinned.copy_(tensors[0], non_blocking=True)
            end = clock.mark()
            torch.cuda.synchronize()
            plain.append(clock.secs(base, end) or 0.0)
            base = clock.mark()
            seen = Landings(copies, slot, base)
            copier.start(tensors, seen.flight, Always())
            seen.wait()
            timed = seen.flight.timed
            ours.append(max(end for _, end, _ in timed) - min(begin for begin, _, _ in timed))
    rates = [tensors[0].numel() / min(secs) / 1e9 for secs in (ours, plain)]
    assert rates[0] >= 0.9 * rates[1], f"{rates[0]:.1f} GB/s, pinned {rates[1]:.1f} GB/s"


@contextmanager
def flights_without_end(device: torch.device, registered: bool) -> Iterator[list[Landings]]:
    """One snapshot after the other, while the body runs; yields those that began."""
    tensors = state(device)
    copies, size = plan(tensors, 16 * MIB)
    slot, begun, stop = shared_slot(size), list[Landings](), threading.Event()
    with prepared([slot] if registered else [], device) as copier:
        stream = torch.cuda.Stream(device)

        def fly() -> None:
            driver.work_beside_captures()
            with torch.cuda.device(device), torch.cuda.stream(stream):
                while not stop.is_set():
                    begun.append(Landings(copies, slot))
                    copier.start(tensors, begun[-1].flight, Always())
                    begun[-1].wait()

        thread = threading.Thread(target=fly, daemon=True)
        thread.start()
        try:
            yield begun
        finally:
            stop.set()
            thread.join(SECS)


@pytest.mark.parametrize("registered", [True, False])
def test_copies_do_not_spoil_the_capture_of_a_graph(registered: bool, device: torch.device) -> None:
    """Captures forbid many calls to all other threads of a process, copies and waits among them."""
    with flights_without_end(device, registered) as begun:
        data = torch.zeros(1000, device=device)
        for _ in range(10):
            graph, before = torch.cuda.CUDAGraph(), len(begun)
            with torch.cuda.graph(graph):
                assert DeviceClock(device).mark() is None
                for _ in range(10):
                    data.add_(1)
                until(lambda: len(begun) >= before + 3, "flights", SECS)  # noqa: B023
            graph.replay()
        torch.cuda.synchronize()
        assert int(data[0]) == 100
    assert all(seen.flight.error is None for seen in begun)
    assert len(begun) > 20
