"""Copies from a CUDA or ROCm device into host-registered slots on a side stream.

Slots are pinned in the background (``registration``). To one that is, the driver copies all that may be copied at a
time by one call, of arrays that are made before training (``copy_plan``). Where it has no such call, and for chunks
that are no plain copies, it is called for each tensor; to a slot that is not pinned copies go through one pinned
buffer of a chunk's size. Parity is made in a few MiB of the device's memory.

Streams never wait for each other in a circle: whoever makes one wait does so for an event that was recorded
before, so every wait points back in the order in which work was given to the device. For a gate the training
thread records the event before it hands it over; for the fence all copies are submitted before it returns.

Nothing is asked of the device for the first time while training runs (``warm_up``). Loading a kernel or allocating
memory may wait for all of the device's work, with a lock that every other call needs: for a collective's kernel that
waits for another rank, whose own waits for what the training thread, at that lock, has still to launch.

State that an offloaded optimizer keeps in host memory takes no detour: it is read when its chunk is submitted, and
the fence, which waits on the host for that, stands before the optimizer.
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

from ftckpt.capture.affinity import Locality
from ftckpt.capture.chunks import ChunkCopy, Segment, combine, divided, xor_onto, xor_parts
from ftckpt.capture.copier import (
    Copier,
    Cores,
    Flight,
    HostCopier,
    Slot,
    TellCopying,
    Worker,
    by_home,
    copy_chunk,
    copy_host_state,
    tell_nobody,
)
from ftckpt.capture.copy_plan import CopyPlan
from ftckpt.capture.driver import Call, batch_copy, device_buffer, on_device, separate_stream
from ftckpt.capture.registration import PIECE_BYTES, FarPages, Registrar
from ftckpt.capture.volatile_memory import ALIGN_BYTES, VolatileMemory, aligned
from ftckpt.events import log
from ftckpt.host_memory import pinned_memory
from ftckpt.schedule.bubbles import Windows
from ftckpt.schedule.clock import Clock, DeviceClock, DeviceEvent

_XOR_BYTES = 8 << 20
"""Parity is made in so much of the device's memory at a time."""
_EVENTS = 2
"""Of one turn: its begin and its end."""
_MORE_EVENTS = 8
"""The boundary, staged copies, a failure."""
_MOST_AHEAD = 64
"""Chunks that are submitted and not there yet. A driver takes about a thousand calls ahead of its device, of all
streams together; at one more each thread waits, the one that launches training's kernels too. A chunk is a few.
"""
_AHEAD_POLL_SECS = 0.005
"""About what a link takes for the bytes of one call."""
_SETTLED_AFTER = 2
"""Iterations: by then training has loaded and allocated what it needs."""
_STAGED_BYTES_PER_SEC = 5e9
"""Through the staging buffer, while training waits at the fence; on an H200 with 16 cores it was 5 to 6."""
_MOST_STAGED_SECS, _MOST_STAGED_SHARE = 0.05, 0.05
"""What takes longer, in seconds and of an iteration, waits until a slot is pinned: 10 GB/s, beside training."""
_PINNED_WITHIN_SECS = 120.0
"""Of training that has settled: past that a snapshot that is staged is better than none."""
_PIN_POLL_SECS = 0.005
_WARM_UP_SECS = 300.0
"""The driver reads kernels from disk, other ranks beside it."""


class DeviceCopier:
    """See ``ftckpt.capture.copier.Copier`` for the contract of each method.

    Copies go to a side stream, or behind training's own work on its stream.
    """

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
        self._registrar = registrar or Registrar(device, Locality(cores), None, None)
        context = partial(on_device, device)
        self._worker = Worker("ftckpt-copy", cores, context=context)
        # What the host is to know of copies that are there, so that those behind them are submitted meanwhile.
        self._finisher = Worker("ftckpt-finish", cores, yields=True, context=context)
        self._plan: CopyPlan | None = None
        self._flight: Flight | None = None
        self._num_boundaries = 0
        self._bounded_at, self._iteration_secs = time.monotonic(), 0.0
        self._settled_at = math.inf
        self._device_bytes = 0
        self._volatile = VolatileMemory(self._device)
        self._staging: torch.Tensor | None = None
        self._mixed: torch.Tensor | None = None

    @property
    def in_graph(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Pin the slots' pages, see Registrar."""
        self._registrar.add(slots)

    def at_boundary(self) -> None:
        """Training has settled at some boundary: from then on pages are pinned."""
        now = time.monotonic()
        self._bounded_at, self._iteration_secs = now, now - self._bounded_at
        self._num_boundaries += 1
        if self._num_boundaries == _SETTLED_AFTER:
            self._settled_at = now
            self._registrar.begin()

    def is_prepared(self, slot: Slot) -> bool:
        """See Copier: what is dear to be staged waits for the slot to be pinned, if it can be."""
        return self.takes_fresh_slots or self._registrar.is_through(slot)

    @property
    def takes_fresh_slots(self) -> bool:
        staged_secs = self._device_bytes / _STAGED_BYTES_PER_SEC
        is_cheap = staged_secs <= max(_MOST_STAGED_SECS, _MOST_STAGED_SHARE * self._iteration_secs)
        return is_cheap or time.monotonic() > self._settled_at + _PINNED_WITHIN_SECS

    def pin_now(self, timeout_secs: float) -> bool:
        """Pin them, without waiting for training to settle; whether that was through within the time."""
        self._registrar.begin()
        deadline = time.monotonic() + timeout_secs
        while not self._registrar.idle and time.monotonic() < deadline:
            time.sleep(_PIN_POLL_SECS)
        return self._registrar.idle

    def reaches(self, slot: Slot) -> bool:
        """Whether the device may write to all of the slot; elsewhere copies are staged."""
        return self._registrar.covers(slot, slot.numel())

    @property
    def has_plan(self) -> bool:
        """Whether the driver is given many copies by one call."""
        return self._plan is not None

    def warm_up(
        self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], volatile: Sequence[ChunkCopy]
    ) -> None:
        """All parity is made once and not kept: which kernels it takes follows from where each piece lies."""
        self._device_bytes = sum(copy.nbytes for copy in copies if by_home(tensors, copy)[1].segments)
        self._volatile.reserve(tensors, volatile)
        if self._own_stream and batch_copy() is not None:
            plan = CopyPlan(tensors, copies, self._device)
            self._plan = plan if any(map(plan.covers, range(len(copies)))) else None
        # Training may be on another stream at the first boundary: what was tried out must not come behind that.
        self._sleep_until_done(torch.cuda.current_stream(self._device))
        # On the thread and on the stream of the copies themselves: to both the driver ties what it makes.
        self._worker.call(lambda: self._rehearse(tensors, [*copies, *volatile]), _WARM_UP_SECS)
        self._finisher.call(lambda: self._sleep_until_done(self._stream), _WARM_UP_SECS)

    def take(self, tensors: Sequence[torch.Tensor], copies: Sequence[ChunkCopy], slot: Slot) -> None:
        """Within the device, behind all that the current stream has; to the slot what has no room there."""
        stream = torch.cuda.current_stream(self._device)
        for copy in copies:
            left = copy_host_state(tensors, copy, slot)
            if not self._volatile.holds(copy.chunk):
                self._through_staging(tensors, left, slot, stream)  # no flight uses the staging buffer now
        self._volatile.take(tensors)

    def start(self, tensors: Sequence[torch.Tensor], flight: Flight, windows: Windows) -> None:
        """The side stream first waits for the boundary: all that the current stream has by now."""
        # Here and now: recorded later it would stand behind work of the next iteration, and copies with it.
        boundary = self._event_behind(torch.cuda.current_stream(self._device))
        self._flight = flight
        self._worker.submit(lambda: self._fly(tensors, flight, boundary, windows))

    def fence(self, flight: Flight, timeout_secs: float) -> bool:
        """Enqueue a device-side wait, once every copy it waits for has been submitted."""
        flight.hurry.set()
        if not flight.submitted.wait(timeout_secs) or flight.error is not None:
            return False
        # Nothing to wait for on the device: all copies have arrived, or none had anything for it to do.
        if flight.ended or flight.last_copy is None:
            return flight.error is None
        if torch.cuda.is_current_stream_capturing():
            # A wait for work outside of the graph would spoil it.
            flight.error = RuntimeError("the fence stands inside a graph capture, where no stream can be made wait")
            return False
        # The host goes on: the optimizer's kernels, enqueued behind this wait, cannot overtake the copies.
        torch.cuda.current_stream(self._device).wait_event(flight.last_copy.raw)
        return True

    def stop(self) -> None:
        """Nothing of the device's memory is held afterwards, unless it does not come to rest. Slots stay pinned."""
        self._registrar.halt()
        if self._worker.close():  # otherwise its flight has still to end
            self._finisher.close()
        if self._at_rest:
            self._staging = self._mixed = self._plan = None
            self._volatile.let_go()

    def close(self) -> None:
        """Stop and unpin; where the device does not come to rest the pages stay registered and their slots mapped."""
        self.stop()
        if self._at_rest:
            self._registrar.close()

    @property
    def _at_rest(self) -> bool:
        """True if no copy is in flight."""
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
                # Both ways: what is in host memory is taken up from the slot.
                few = ChunkCopy(0, (Segment(0, 0, ALIGN_BYTES, 0, ALIGN_BYTES),))
                copy_chunk([self._mixed], few, staging, non_blocking=True)
                copy_chunk([staging], few, self._mixed, non_blocking=True)
            tried = self._plan  # held until the device is done: a refusal lets go of it
            if tried is not None:
                tried.gather()
                self._call(tried.trial(staging))
            self._sleep_until_done(self._stream)

    def _fly(self, tensors: Sequence[torch.Tensor], flight: Flight, boundary: DeviceEvent, windows: Windows) -> None:
        # Held until the flight has ended: a call that is refused lets go of it, and the device may still read and
        # write its buffer.
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
                self._come_to_rest(flight)  # an ended flight writes nothing any more
        flight.submitted.set()
        self._finisher.submit(lambda: self._end(flight, plan))

    @property
    def _in_scripts_graph(self) -> bool:
        """Whether what is enqueued now would be replayed with a graph of the script, which shares its stream."""
        return not self._own_stream and torch.cuda.is_current_stream_capturing()

    def _require_no_graph(self) -> None:
        if self._in_scripts_graph:
            raise RuntimeError("the script captures a graph on the stream of its copies: they would be part of it")

    def _come_to_rest(self, flight: Flight) -> None:
        if not self._in_scripts_graph:
            self._sleep_until_done(self._stream)
        elif flight.last_copy is not None:  # of a stream that is captured no more can be asked
            flight.last_copy.synchronize()

    def _submit_taken(self, flight: Flight) -> None:
        """At once: it is small, and the next boundary takes it anew."""
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
            # No chunk may follow: the flight of a snapshot that is dropped ends behind this, not before.
            flight.last_copy = self._event_behind(self._stream)
        while at < len(sizes):
            # Before a turn is asked for: behind it the copy would come too late for the window that it was given.
            self._wait_for_room(ahead, flight)
            stop = plan.stop(at) if plan is not None and plan.covers(at) else at + 1
            turn = windows.wait_turn(sizes[at:stop], flight.hurry)
            if flight.cancelled or flight.error is not None:
                break
            self._require_no_graph()
            if turn.gate is not None and turn.gate is not gate:
                # The event was recorded by the training thread before this turn: the wait points back, no circle.
                gate = turn.gate
                self._stream.wait_event(gate.raw)
            stop = at + turn.count
            ahead.append((self._enqueue(tensors, plan, flight, range(at, stop), sum(sizes[at:stop])), turn.count))
            at = stop

    def _wait_for_room(self, ahead: deque[tuple[DeviceEvent, int]], flight: Flight) -> None:
        """Until the device has come to the oldest of what is ahead; not where the fence waits for all of it."""
        while sum(count for _, count in ahead) >= _MOST_AHEAD and not flight.hurry.is_set():
            if ahead[0][0].query():
                ahead.popleft()
            else:
                flight.hurry.wait(_AHEAD_POLL_SECS)

    def _enqueue(
        self, tensors: Sequence[torch.Tensor], plan: CopyPlan | None, flight: Flight, turn: range, nbytes: int
    ) -> DeviceEvent:
        """Returns what stands behind the copies of the chunks of one turn."""
        self._under_way.begin()
        try:
            begin = self._event_behind(self._stream)
            if plan is not None and plan.covers(turn.start):
                for call in plan.calls(flight.slot, turn.start, turn.stop):
                    if not self._call(call):
                        raise RuntimeError(f"the driver refused a call of {call.number} copies")
            else:
                for copy in flight.copies[turn.start : turn.stop]:
                    self._copy(tensors, copy, flight.slot)
            end = flight.last_copy = self._event_behind(self._stream)
        except BaseException:  # ``stop`` waits until no copy is under way
            self._under_way.end()
            raise
        self._finisher.submit(lambda: self._landed(flight, nbytes, begin, end))
        return end

    def _call(self, call: Call) -> bool:
        """Whether the driver takes it; otherwise copies go one by one from now on."""
        copy_all = batch_copy()
        code = copy_all(call, self._stream.cuda_stream) if copy_all is not None else 0
        if code:
            self._plan = None
            log.warning("ftckpt: driver refuses many copies per call (error %d): they go one by one, slower", code)
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
        """Make the XOR in device memory that this stream alone uses, and copy it to the slot.

        What is in host memory is read now, as ever: into the slot, from where the device takes it up. Where the
        device cannot, it comes last, behind a staged copy that is in the slot when its call returns.
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
        """Device → pinned buffer → slot, waiting for the device; ``stream`` is the thread's current one.

        The device never writes to a slot's pages that this copier has not registered itself: the driver
        refuses copies that cross into registered memory, and may know the address from an older mapping.
        """
        if not copy.segments:
            return
        begin = aligned(copy.segments[0].offset)
        staging = self._staging_of(copy.segments[-1].offset + copy.segments[-1].nbytes - begin)
        copy_chunk(tensors, copy, staging, at=begin, non_blocking=True)
        self._sleep_until_done(stream)
        for segment in copy.segments:
            # By segments: what lies between them may be another chunk's, or come from host memory.
            staged = staging[segment.offset - begin :][: segment.nbytes]
            slot[segment.offset : segment.offset + segment.nbytes].copy_(staged)

    def _staging_of(self, size: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < size:
            self._staging = pinned_memory(size)
        return self._staging

    def _mixed_buffer(self) -> torch.Tensor:
        """One will do: what makes the next part in it comes behind the copy of this part on the same stream."""
        if self._mixed is None:
            self._mixed = device_buffer(_XOR_BYTES, self._device)
        return self._mixed

    def _event_behind(self, stream: torch.cuda.Stream) -> DeviceEvent:
        """Behind all that ``stream`` has by now."""
        event = self._clock.events.take()
        event.record(stream)
        return event

    def _sleep_until_done(self, stream: torch.cuda.Stream) -> None:
        self._event_behind(stream).synchronize()


class _UnderWay:
    """Counts copies that the device has been given and that have not landed; several threads do."""

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
    """What is copied at a time."""
    return xor_parts(copy, _XOR_BYTES) if copy.xor else (copy,)


def _within_registrations(copy: ChunkCopy) -> ChunkCopy:
    """The same bytes in segments that each lie in one registration: drivers refuse copies across two."""
    return divided(copy, PIECE_BYTES)


def _bytes(part: ChunkCopy, start: int) -> ChunkCopy:
    """All bytes of ``part`` from one tensor of bytes, where the first is at ``start``."""
    nbytes = part.end - part.begin
    return ChunkCopy(part.chunk, (Segment(0, start, nbytes, part.begin, nbytes),))


def make_copier(
    clock: Clock,
    own_stream: bool = True,
    tell_copying: TellCopying = tell_nobody,
    *,
    locality: Locality = Locality(),  # noqa: B008 - frozen
    turns: Path | None = None,
    tell_far: FarPages | None = None,
    pins: bool = True,
) -> Copier:
    """The copier for the clock's device; without an ``own_stream`` copies queue behind training's work.

    ``turns``, ``tell_far`` and ``pins`` are a Registrar's.
    """
    if isinstance(clock, DeviceClock):
        registrar = Registrar(clock.device, locality, turns, tell_far, pins)
        return DeviceCopier(clock, own_stream, registrar, locality.cores, tell_copying)
    return HostCopier(locality.cores, tell_copying)
