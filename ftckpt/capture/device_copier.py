"""Copies from a CUDA or ROCm device into host-registered slots on a side stream.

Slots are pinned in the background (``registration``). To a pinned slot, one driver call copies all chunks of a turn,
from arrays built before training (``copy_plan``). Without such a call, and for chunks that are not plain copies, each
tensor is a call. Copies to a slot that is not pinned go through one pinned staging buffer of a chunk's size. Parity
is computed in a few MiB of device memory.

Streams never wait for each other in a cycle: a stream only waits for events that are already recorded, so every wait
points back in submission order. The training thread records a gate's event before it passes it on; all copies are
submitted before the fence returns.

Nothing is used on the device for the first time while training runs (``warm_up``): loading a kernel or allocating
memory may wait for all work on the device while holding the driver's lock. That deadlocks if the work includes a
collective whose peer waits for a kernel that the training thread, blocked on the lock, has not launched.

State that an offloaded optimizer keeps in host memory is read when its chunk is submitted; the fence waits on the
host for that before the optimizer runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from ftckpt.capture.chunks import ChunkCopy, Segment, combine, divided, xor_onto, xor_parts
from ftckpt.capture.copier import (
    Copier,
    Cores,
    Flight,
    HostCopier,
    TellCopying,
    Worker,
    by_home,
    copy_chunk,
    copy_host_state,
    tell_nobody,
)
from ftckpt.capture.copy_plan import CopyPlan
from ftckpt.capture.driver import Call, batch_copy, device_buffer, on_device, separate_stream
from ftckpt.capture.registration import PIECE_BYTES, Registrar, Slot
from ftckpt.capture.volatile_memory import ALIGN_BYTES, VolatileMemory, aligned
from ftckpt.events import log
from ftckpt.host_memory import pinned_memory
from ftckpt.schedule.bubbles import Windows
from ftckpt.schedule.clock import Clock, DeviceClock, DeviceEvent

_XOR_BYTES = 8 << 20
"""Device memory in which parity is computed, a part at a time."""
_EVENTS = 2
"""Events per turn: start and end."""
_MORE_EVENTS = 8
"""Events for the boundary, staged copies, and a failure."""
_MOST_AHEAD = 64
"""Maximum number of chunks that are submitted and incomplete. A driver queues about a thousand calls of all streams;
then every calling thread blocks, the training thread included. A chunk takes a few calls."""
_AHEAD_POLL_SECS = 0.005
"""About the time a link needs for the bytes of one call."""
_SETTLED_AFTER = 2
"""Iterations after which training has loaded and allocated what it needs."""
_STAGED_BYTES_PER_SEC = 5e9
"""Rate of staged copies, for which training waits at the fence; 5 to 6 GB/s on an H200 with 16 cores."""
_MOST_STAGED_SECS, _MOST_STAGED_SHARE = 0.05, 0.05
"""A snapshot whose staged copies take longer, in seconds and as a fraction of an iteration, waits for a pinned slot
(pinning runs at 10 GB/s, concurrently with training)."""
_PINNED_WITHIN_SECS = 120.0
"""After training has settled for this long, a staged snapshot is better than none."""
_PIN_POLL_SECS = 0.005
_WARM_UP_SECS = 300.0
"""Deadline of the warm-up: the driver reads kernels from disk, and so do other ranks."""


class DeviceCopier:
    """Implements ``Copier`` on a side stream or, without ``own_stream``, on training's stream."""

    def __init__(
        self, clock: DeviceClock, own_stream: bool, registrar: Registrar | None = None, cores: Cores = None,
        tell_copying: TellCopying = tell_nobody,
    ) -> None:  # fmt: skip
        device = self._device = clock.device
        self._clock = clock
        self._under_way = _UnderWay(tell_copying)
        self._own_stream = own_stream
        current = torch.cuda.current_stream(device)
        self._stream = separate_stream(device) if own_stream else current
        self._registrar = registrar or Registrar(device, cores)
        context = partial(on_device, device)
        self._worker = Worker("ftckpt-copy", cores, context=context)
        # Waits for completed copies on the host, so that the first worker can submit the next ones meanwhile.
        self._finisher = Worker("ftckpt-finish", cores, yields=True, context=context)
        self._plan: CopyPlan | None = None
        self._flight: Flight | None = None
        self._boundaries = _Boundaries()
        self._device_bytes = 0
        self._volatile = VolatileMemory(self._device)
        self._staging: torch.Tensor | None = None
        self._mixed: torch.Tensor | None = None

    @property
    def in_graph(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Queues the slots' pages for pinning, see Registrar."""
        self._registrar.add(slots)

    def at_boundary(self) -> None:
        """Starts pinning at the boundary at which training has settled."""
        if self._boundaries.count():
            self._registrar.begin()

    def is_prepared(self, slot: Slot) -> bool:
        """See Copier: a snapshot that is expensive to stage waits until the slot is pinned, or cannot be."""
        return self.takes_fresh_slots or self._registrar.is_through(slot)

    @property
    def takes_fresh_slots(self) -> bool:
        staged_secs = self._device_bytes / _STAGED_BYTES_PER_SEC
        is_cheap = staged_secs <= max(_MOST_STAGED_SECS, _MOST_STAGED_SHARE * self._boundaries.iteration_secs)
        return is_cheap or time.monotonic() > self._boundaries.settled_at + _PINNED_WITHIN_SECS

    def pin_now(self, timeout_secs: float) -> bool:
        """Pins the slots without waiting for training to settle; returns whether it finished in time."""
        self._registrar.begin()
        deadline = time.monotonic() + timeout_secs
        while not self._registrar.idle and time.monotonic() < deadline:
            time.sleep(_PIN_POLL_SECS)
        return self._registrar.idle

    def reaches(self, slot: Slot) -> bool:
        """Whether the device may write to the entire slot; otherwise copies are staged."""
        return self._registrar.covers(slot, slot.numel())

    @property
    def has_plan(self) -> bool:
        """Whether copies are batched in driver calls."""
        return self._plan is not None

    def warm_up(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], volatile: Sequence[ChunkCopy]
    ) -> None:
        """See Copier. Computes all parity once and discards it: the kernels depend on each piece's alignment."""
        self._device_bytes = sum(copy.nbytes for copy in copies if by_home(tensors, copy)[1].segments)
        self._volatile.reserve(tensors, volatile)
        if self._own_stream and batch_copy() is not None:
            plan = CopyPlan(tensors, copies, self._device)
            self._plan = plan if any(map(plan.covers, range(len(copies)))) else None
        # Training may use another stream at the first boundary, which does not wait for this one.
        self._sleep_until_done(torch.cuda.current_stream(self._device))
        # On the thread and the stream of the copies: the driver's state is per thread and stream.
        self._worker.call(lambda: self._rehearse(tensors, [*copies, *volatile]), _WARM_UP_SECS)
        self._finisher.call(lambda: self._sleep_until_done(self._stream), _WARM_UP_SECS)

    def take(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Copies within the device, after the current stream's work; directly to the slot what exceeds the buffer."""
        stream = torch.cuda.current_stream(self._device)
        for copy in copies:
            left = copy_host_state(tensors, copy, slot)
            if not self._volatile.holds(copy.chunk):
                self._through_staging(tensors, left, slot, stream)  # the buffer is free: no flight is running
        self._volatile.take(tensors)

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """Starts a flight whose copies wait for the boundary: all work of the current stream so far."""
        # Recorded on this thread: recorded later, the event and the copies would follow the next iteration's work.
        boundary = self._event_behind(torch.cuda.current_stream(self._device))
        self._flight = flight
        self._worker.submit(lambda: self._fly(tensors, flight, boundary, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Enqueues a device-side wait, once every copy it waits for has been submitted."""
        flight.hurry.set()
        if not flight.submitted.wait(timeout_secs) or flight.error is not None:
            return False
        # Nothing to wait for on the device: all copies are complete, or none uses the device.
        if flight.ended or flight.last_copy is None:
            return flight.error is None
        if torch.cuda.is_current_stream_capturing():
            # A wait for work outside of the graph would invalidate it.
            flight.error = RuntimeError("the fence was called during a graph capture, where no stream can wait")
            return False
        # The host continues: the optimizer's kernels, enqueued after this wait, cannot overtake the copies.
        torch.cuda.current_stream(self._device).wait_event(flight.last_copy.raw)
        return True

    def stop(self) -> None:
        """Stops the threads and releases device memory, unless a copy hangs. Slots stay pinned."""
        self._registrar.halt()
        if self._worker.close():  # otherwise the finisher must still end its flight
            self._finisher.close()
        if self._at_rest:
            self._staging = self._mixed = self._plan = None
            self._volatile.let_go()

    def close(self) -> None:
        """Stops and unpins; if a copy hangs, the pages stay registered and their slots mapped."""
        self.stop()
        if self._at_rest:
            self._registrar.close()

    @property
    def _at_rest(self) -> bool:
        """Whether no copy is in flight."""
        return self._flight is None or self._flight.ended

    def _rehearse(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy]) -> None:
        with torch.cuda.stream(self._stream):
            self._clock.provide(_EVENTS * len(copies) + _MORE_EVENTS)
            self._stream.wait_event(self._event_behind(self._stream).raw)
            parts = [part for copy in copies for part in _parts(copy) if by_home(tensors, part)[1].segments]
            if not parts:
                return
            staging = self._staging_of(max(part.end - aligned(part.begin) for part in parts))
            for part in parts:
                if part.xor:
                    left = by_home(tensors, part)[1].segments
                    combine(tensors, left, self._mixed_buffer(), part.begin, part.end)
            first = by_home(tensors, parts[0])[1]
            begin = aligned(first.begin)
            if not first.xor:
                copy_chunk(tensors, first, staging, at=begin, non_blocking=True)
            if self._mixed is not None:
                # In both directions: the part of an XOR from host memory is read from the slot.
                few = ChunkCopy(0, (Segment(0, 0, ALIGN_BYTES, 0, ALIGN_BYTES),))
                copy_chunk([self._mixed], few, staging, non_blocking=True)
                copy_chunk([staging], few, self._mixed, non_blocking=True)
            tried = self._plan  # a reference until the device is done: a refusal clears ``_plan``
            if tried is not None:
                tried.gather()
                self._call(tried.trial(staging))
            self._sleep_until_done(self._stream)

    def _fly(self, tensors: Sequence[torch.Tensor], flight: Flight, boundary: DeviceEvent, windows: Windows) -> None:
        # Referenced until the flight has ended: a refused call clears ``_plan``, but the device may still use its
        # buffer.
        plan = self._plan
        try:
            with torch.cuda.stream(self._stream):
                self._require_no_graph()
                self._stream.wait_event(boundary.raw)
                self._submit_taken(flight)
                self._submit(tensors, flight, windows)
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = error
            flight.submitted.set()  # the fence has nothing to wait for: it drops the snapshot
            with suppress(RuntimeError), torch.cuda.stream(self._stream):
                self._come_to_rest(flight)  # an ended flight must not write
        flight.submitted.set()
        self._finisher.submit(lambda: self._end(flight, plan))

    @property
    def _in_scripts_graph(self) -> bool:
        """Whether work enqueued now would become part of a graph that the script captures on the shared stream."""
        return not self._own_stream and torch.cuda.is_current_stream_capturing()

    def _require_no_graph(self) -> None:
        if self._in_scripts_graph:
            raise RuntimeError("the script captures a graph on the copy stream: the copies would become part of it")

    def _come_to_rest(self, flight: Flight) -> None:
        if not self._in_scripts_graph:
            self._sleep_until_done(self._stream)
        elif flight.last_copy is not None:  # a stream that is being captured cannot be synchronized
            flight.last_copy.synchronize()

    def _submit_taken(self, flight: Flight) -> None:
        """Enqueues the buffered mutable state without waiting for a window: it is small."""
        for copy in flight.taken:
            if self._volatile.holds(copy.chunk):
                self._to_slot(*self._volatile.held(copy.chunk), flight.slot)
                flight.last_copy = self._event_behind(self._stream)

    def _submit(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        gate, ahead, at = None, deque[tuple[DeviceEvent, int]](), 0
        plan = self._plan if self._registrar.covers(flight.slot, flight.slot.numel()) else None
        sizes = plan.sizes if plan is not None else [copy.nbytes for copy in flight.copies]
        if plan is not None:
            plan.gather()
            # Even without a chunk after it, the flight of a dropped snapshot must not end before the gather.
            flight.last_copy = self._event_behind(self._stream)
        while at < len(sizes):
            # Before the turn is requested: after it, the wait would make the copy miss its window.
            self._wait_for_room(ahead, flight)
            stop = plan.stop(at) if plan is not None and plan.covers(at) else at + 1
            turn = windows.wait_turn(sizes[at:stop], flight.hurry)
            if flight.cancelled or flight.error is not None:
                break
            self._require_no_graph()
            if turn.gate is not None and turn.gate is not gate:
                # The training thread recorded the event before this turn, so the wait points back: no cycle.
                gate = turn.gate
                self._stream.wait_event(gate.raw)
            stop = at + turn.count
            ahead.append((self._enqueue(tensors, plan, flight, range(at, stop), sum(sizes[at:stop])), turn.count))
            at = stop

    def _wait_for_room(self, ahead: deque[tuple[DeviceEvent, int]], flight: Flight) -> None:
        """Waits until the device has completed the oldest turns; not if the fence waits for all of them anyway."""
        while sum(count for _, count in ahead) >= _MOST_AHEAD and not flight.hurry.is_set():
            if ahead[0][0].query():
                ahead.popleft()
            else:
                flight.hurry.wait(_AHEAD_POLL_SECS)

    def _enqueue(
        self, tensors: Sequence[torch.Tensor], plan: CopyPlan | None, flight: Flight, turn: range, nbytes: int
    ) -> DeviceEvent:
        """Enqueues the copies of one turn; returns the event after them."""
        self._under_way.begin()
        try:
            begin = self._event_behind(self._stream)
            if plan is not None and plan.covers(turn.start):
                for call in plan.calls(flight.slot, turn.start, turn.stop):
                    if not self._call(call):
                        raise RuntimeError(f"the driver refused a batch of {call.number} copies")
            else:
                for copy in flight.copies[turn.start : turn.stop]:
                    self._copy(tensors, copy, flight.slot)
            end = flight.last_copy = self._event_behind(self._stream)
        except BaseException:  # otherwise the finisher calls it
            self._under_way.end()
            raise
        self._finisher.submit(lambda: self._landed(flight, nbytes, begin, end))
        return end

    def _call(self, call: Call) -> bool:
        """Enqueues a call and returns whether the driver accepts it; otherwise copies are unbatched from now on."""
        copy_all = batch_copy()
        code = copy_all(call, self._stream.cuda_stream) if copy_all is not None else 0
        if code:
            self._plan = None
            log.warning("ftckpt: driver refuses batched copies (error %d); copies are made one by one, slower", code)
        return not code

    def _copy(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> None:
        if copy.xor:
            for part in xor_parts(copy, _XOR_BYTES):
                self._xor(tensors, part, slot)
        else:
            self._to_slot(tensors, copy_host_state(tensors, copy, slot), slot)

    def _end(self, flight: Flight, _held: CopyPlan | None) -> None:
        try:
            if flight.last_copy is not None:
                flight.last_copy.synchronize()
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = flight.error or error
        flight.end()

    def _landed(self, flight: Flight, nbytes: int, begin: DeviceEvent, end: DeviceEvent) -> None:
        try:
            end.synchronize()
            if flight.base is not None:
                flight.timed.append((flight.base.secs_until(begin), flight.base.secs_until(end), nbytes))
        except Exception as error:  # noqa: BLE001 - the fence reports it on the training thread
            flight.error = flight.error or error
        finally:
            self._under_way.end()

    def _xor(self, tensors: Sequence[torch.Tensor], part: ChunkCopy, slot: Slot) -> None:
        """Computes the XOR in device memory that only this stream uses, and copies it to the slot.

        Segments in host memory are combined now, into the slot, from which the device reads the result. If the device
        cannot access the slot, they are combined last, after a staged copy that completes before its call returns.
        """
        (here, left), registered = by_home(tensors, part), self._registrar.covers(slot, part.end)
        begin, end = part.begin, part.end
        first = bool(here.segments) and (registered or not left.segments)
        if first:
            slot[begin:end].zero_()
            xor_onto(tensors, here.segments, slot)
        if not left.segments:
            return
        mixed = self._mixed_buffer()
        if first:
            copy_chunk([slot], _within_registrations(_bytes(part, begin)), mixed, begin, non_blocking=True)
        combine(tensors, left.segments, mixed, begin, end, onto=first)
        if here.segments and not registered:
            self._through_staging([mixed], _bytes(part, 0), slot, self._stream)
            xor_onto(tensors, here.segments, slot)
        else:
            self._to_slot([mixed], _bytes(part, 0), slot)

    def _to_slot(self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot) -> None:
        if self._registrar.covers(slot, copy.end):
            copy_chunk(tensors, _within_registrations(copy), slot, non_blocking=True)
        else:
            self._through_staging(tensors, copy, slot, self._stream)

    def _through_staging(
        self, tensors: Sequence[torch.Tensor], copy: ChunkCopy, slot: Slot, stream: torch.cuda.Stream
    ) -> None:
        """Copies device → pinned buffer → slot, waiting for the device; ``stream`` must be the current one.

        The device never writes to slot pages that this copier has not registered itself: the driver refuses copies
        that cross into registered memory, and its record of an address may belong to an older mapping.
        """
        if not copy.segments:
            return
        begin = aligned(copy.segments[0].offset)
        staging = self._staging_of(copy.segments[-1].offset + copy.segments[-1].nbytes - begin)
        copy_chunk(tensors, copy, staging, at=begin, non_blocking=True)
        self._sleep_until_done(stream)
        for segment in copy.segments:
            # Per segment: the bytes between them may belong to another chunk, or come from host memory.
            staged = staging[segment.offset - begin :][: segment.nbytes]
            slot[segment.offset : segment.offset + segment.nbytes].copy_(staged)

    def _staging_of(self, size: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < size:
            self._staging = pinned_memory(size)
        return self._staging

    def _mixed_buffer(self) -> torch.Tensor:
        """The buffer for parity; one is enough, because the stream orders a part's copy before the next part."""
        if self._mixed is None:
            self._mixed = device_buffer(_XOR_BYTES, self._device)
        return self._mixed

    def _event_behind(self, stream: torch.cuda.Stream) -> DeviceEvent:
        """Records an event after all work of ``stream`` so far."""
        event = self._clock.events.take()
        event.record(stream)
        return event

    def _sleep_until_done(self, stream: torch.cuda.Stream) -> None:
        self._event_behind(stream).synchronize()


class _Boundaries:
    """The step boundaries so far: the last iteration's time, and when training has settled."""

    def __init__(self) -> None:
        self._number, self._last_at = 0, time.monotonic()
        self.iteration_secs, self.settled_at = 0.0, math.inf

    def count(self) -> bool:
        """Counts a boundary; returns whether training has settled at this one."""
        now = time.monotonic()
        self._last_at, self.iteration_secs = now, now - self._last_at
        self._number += 1
        if self._number != _SETTLED_AFTER:
            return False
        self.settled_at = now
        return True


class _UnderWay:
    """A thread-safe count of enqueued copies that are not complete; reports whether there are any."""

    def __init__(self, tell_copying: TellCopying) -> None:
        self._tell_copying = tell_copying
        self._number = 0
        self._guard = threading.Lock()

    def begin(self) -> None:
        with self._guard:
            self._number += 1
            self._tell_copying(True)

    def end(self) -> None:
        with self._guard:
            self._number -= 1
            if self._number == 0:
                self._tell_copying(False)


def _parts(copy: ChunkCopy) -> Iterable[ChunkCopy]:
    """Splits a chunk into the parts that are copied at a time."""
    return xor_parts(copy, _XOR_BYTES) if copy.xor else (copy,)


def _within_registrations(copy: ChunkCopy) -> ChunkCopy:
    """Splits segments at registration boundaries: drivers refuse copies that span two registrations."""
    return divided(copy, PIECE_BYTES)


def _bytes(part: ChunkCopy, start: int) -> ChunkCopy:
    """A copy of all bytes of ``part`` from one uint8 tensor, starting at its element ``start``."""
    nbytes = part.end - part.begin
    return ChunkCopy(part.chunk, (Segment(0, start, nbytes, part.begin, nbytes),))


def make_copier(
    clock: Clock,
    own_stream: bool = True,
    tell_copying: TellCopying = tell_nobody,
    *,
    cores: Cores = None,
    turns: Path | None = None,
    pins: bool = True,
) -> Copier:
    """Creates the copier for the clock's device; without ``own_stream``, copies queue behind training's work.

    ``turns`` and ``pins`` are passed to the Registrar.
    """
    if isinstance(clock, DeviceClock):
        return DeviceCopier(clock, own_stream, Registrar(clock.device, cores, turns, pins), cores, tell_copying)
    return HostCopier(cores, tell_copying)
