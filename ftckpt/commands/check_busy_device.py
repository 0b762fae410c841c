"""What copies do while kernels keep the device busy: whom they wait for, and who waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment
from ftckpt.commands.check_queues import QUEUES
from ftckpt.commands.device_bench import FLIGHT_SECS, Bench, bytes_of
from ftckpt.commands.findings import FAILED, PASSED, SKIPPED, WARNED, Finding
from ftckpt.windows.bubbles import Always, Turn
from ftckpt.windows.clock import Moment

_AREA = "device"
_TELL = "do not use ftckpt here; tell us, with the JSON"
_BUSY_SECS = 0.5
_MOST_WAITED_SHARE = 0.5
"""Of the time for which the device is busy: whoever waited for it has waited for all of that."""
_BUSY_TO_COPIES = 4.0
"""For how much longer a kernel on another stream runs than a snapshot takes alone."""
_CALIBRATION_CYCLES = 1_000_000
_POLL_SECS = 0.001
_XOR_BYTES = 4 << 20


def keep_busy(bench: Bench, secs: float) -> None:
    """The current stream of the device does nothing else for about so long; a CPU has done all it was given."""
    if bench.clock.on_device:
        torch.cuda._sleep(round(cycles_per_sec() * secs))  # type: ignore[no-untyped-call]


@lru_cache(maxsize=1)
def cycles_per_sec() -> float:
    """Of ``torch.cuda._sleep`` on this device."""
    millis = 0.0
    for _ in range(2):  # the first loads the kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
        end.record()
        end.synchronize()
        millis = begin.elapsed_time(end)
    return _CALIBRATION_CYCLES * 1e3 / millis


def _taken(bench: Bench) -> Finding:
    """State that changes elsewhere than in the optimizer: copied at the boundary, and written right behind it."""
    wanted, volatile = bench.on_host(), bench.volatile
    keep_busy(bench, _BUSY_SECS)
    begin = time.perf_counter()
    bench.copier.take(bench.state, volatile, bench.slot)
    flight = bench.flight(copies=(), taken=volatile)
    waited_secs = time.perf_counter() - begin
    bench.write()
    bench.wait(flight)
    bench.synchronize()
    differing = bench.differing(wanted, volatile)
    wrong = f"{differing} bytes of a boundary are of later" if differing else ""
    return _judged("boundary", wrong, "what is written behind a boundary is not in its snapshot", waited_secs)


def _sealed(bench: Bench) -> Finding:
    """A seal says that the bytes are there; until the device has come to the copies they are not."""
    wanted = bench.on_host()
    keep_busy(bench, _BUSY_SECS)
    base, busy = bench.clock.mark(), bench.clock.mark()
    begin = time.perf_counter()
    flight = bench.flight()
    waited_secs = time.perf_counter() - begin
    early = False
    while not early and time.perf_counter() - begin < FLIGHT_SECS:
        ended = flight.ended  # in this order: what has ended by now has ended before the next look at the device
        if bench.clock.secs(base, busy) is not None:
            break
        early = ended
        time.sleep(_POLL_SECS)
    bench.wait(flight)
    differing = bench.differing(wanted)
    wrong = f"{differing} bytes of a sealed snapshot are not there" if differing else ""
    if early:
        wrong = "a snapshot was sealed before the device had copied it"
    return _judged("seal", wrong, "a snapshot counts when the device has copied it, not before", waited_secs)


def _held_back(bench: Bench) -> Finding:
    """The optimizer waits for copies on the device; the host, which has more to enqueue, does not."""
    wanted = bench.on_host()
    keep_busy(bench, _BUSY_SECS)
    begin = time.perf_counter()
    flight = bench.flight()
    if not bench.copier.fence(flight, FLIGHT_SECS):
        raise TimeoutError(f"the fence did not come to pass: {flight.error}")
    waited_secs = time.perf_counter() - begin
    bench.write()
    bench.wait(flight)
    bench.synchronize()
    differing = bench.differing(wanted)
    wrong = f"{differing} bytes were written over" if differing else ""
    text = "copies that the device is late with hold the optimizer up on the device"
    return _judged("fence, busy", wrong, text, waited_secs)


class _Handed(Always):
    """Leave to copy from a gate on that is handed over while the copier waits for it."""

    def __init__(self) -> None:
        self._gate: Moment = None
        self._given = threading.Event()

    def give(self, gate: Moment) -> None:
        self._gate = gate
        self._given.set()

    def wait_turn(self, nbytes: int, hurry: threading.Event) -> Turn:
        self._given.wait(FLIGHT_SECS)
        return Turn(self._gate)


def _gated(bench: Bench) -> Finding:
    """The host tells of a window long before the device comes to it."""
    wanted, windows = bench.on_host(), _Handed()
    flight = bench.flight(windows)
    keep_busy(bench, _BUSY_SECS)
    gate = bench.clock.mark()
    windows.give(gate)
    bench.wait(flight)
    bench.synchronize()
    opens = bench.clock.secs(flight.base, gate)
    early = sum(begin < opens for begin, _, _ in flight.timed) if opens is not None else 0
    if opens is None or len(flight.timed) != len(bench.copies):
        raise RuntimeError(f"the device has timed {len(flight.timed)} of {len(bench.copies)} copies")
    wrong = f"{early} of {len(bench.copies)} copies began before their window" if early else ""
    if differing := bench.differing(wanted):
        wrong = f"{differing} bytes differ"
    return _judged("windows", wrong, "copies begin when the device comes to their window, whatever the host is at")


def _beside_a_kernel(bench: Bench) -> Finding:
    """A kernel on another stream, as a collective's that waits for other ranks, holds no snapshot up."""
    name = "busy streams"
    if not bench.clock.on_device:
        return Finding(_AREA, name, SKIPPED, "no device")
    begin = time.perf_counter()
    bench.wait(bench.flight())
    busy_secs = max(_BUSY_SECS, _BUSY_TO_COPIES * (time.perf_counter() - begin))
    bench.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(bench.clock.device)):  # type: ignore[no-untyped-call]
        base = bench.clock.mark()
        keep_busy(bench, busy_secs)
        busy = bench.clock.mark()
    begin = time.perf_counter()
    bench.wait(bench.flight())
    secs, waited = time.perf_counter() - begin, bench.clock.secs(base, busy) is not None
    bench.synchronize()
    text = f"a snapshot took {secs * 1e3:.0f} ms beside a kernel of {busy_secs * 1e3:.0f} ms on another stream"
    if waited:
        how = (
            "it waited for that kernel, and so does a fence for a collective of other ranks; a larger "
            f"{QUEUES}, or none, helps where the framework asks for no other"
        )
        return Finding(_AREA, name, WARNED, text, how)
    return Finding(_AREA, name, PASSED, text)


def _parity(bench: Bench) -> Finding:
    """Made on the device, of two parts of the state."""
    first, second = bench.state[0], bench.state[1]
    nbytes = min(_XOR_BYTES, first.nbytes, second.nbytes)
    segments = [Segment(piece, 0, nbytes // bench.state[piece].element_size(), 0, nbytes) for piece in (0, 1)]
    copies = [ChunkCopy(0, tuple(segments), xor=True)]
    bench.copier.warm_up(bench.state, copies, ())
    parts = [bytes_of(tensor, part) for tensor, part in zip(bench.on_host(), segments, strict=False)]
    flight = bench.flight(copies=copies)
    if not bench.copier.fence(flight, FLIGHT_SECS):
        raise TimeoutError(f"the fence did not come to pass: {flight.error}")
    bench.write()
    bench.wait(flight)
    bench.synchronize()
    differing = int((bench.slot[:nbytes] != reduce(torch.bitwise_xor, parts)).sum())
    bench.slot.zero_()
    wrong = f"{differing} bytes of it differ" if differing else ""
    return _judged("parity", wrong, "that of the boundary, made where the state is")


def _judged(name: str, wrong: str, text: str, waited_secs: float = 0.0) -> Finding:
    figures = {"waited_secs": waited_secs} if waited_secs else {}
    if wrong:
        return Finding(_AREA, name, FAILED, wrong, _TELL, figures)
    if waited_secs > _MOST_WAITED_SHARE * _BUSY_SECS:
        text = f"{text}; but the host waited {waited_secs * 1e3:.0f} ms for the device"
        return Finding(_AREA, name, WARNED, text, "see whether the slot is pinned (registration, above)", figures)
    return Finding(_AREA, name, PASSED, text, figures=figures)


LOOKS: Sequence[tuple[str, Callable[[Bench], Finding]]] = (
    ("boundary", _taken), ("seal", _sealed), ("fence, busy", _held_back), ("windows", _gated),
    ("busy streams", _beside_a_kernel), ("parity", _parity),
)  # fmt: skip
"""By name, what is looked at; those that a device alone can do are skipped where there is none."""
