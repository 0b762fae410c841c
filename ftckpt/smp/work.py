"""Work as generators that yield the seconds to wait next, and the limits on it: busy ranks and byte rates.

A generator that yields 0 continues at once. Between steps the caller's loop can do other work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

Work = Generator[float, None, T]

_POLL_SECS = 0.01
"""Interval for polling conditions without a wake-up: a running thread, copying ranks."""


class Task:
    """At most one running generator; ``active`` is false once it has ended or failed."""

    def __init__(self) -> None:
        self._work: Work[None] | None = None
        self._not_before = 0.0

    @property
    def active(self) -> bool:
        """Whether work is left."""
        return self._work is not None

    @property
    def wait_secs(self) -> float:
        """Seconds until the next step is due; 0: now."""
        return max(0.0, self._not_before - time.monotonic())

    def start(self, work: Work[None]) -> None:
        """Start ``work``; earlier work is stopped."""
        self.stop()
        self._work, self._not_before = work, 0.0

    def run_step(self) -> None:
        """Run the next step; raises the error of the work, which has then ended."""
        # Put back only if it yields: work that has returned or raised is over.
        work, self._work = self._work, None
        if work is not None:
            with suppress(StopIteration):
                self._not_before = time.monotonic() + next(work)
                self._work = work

    def stop(self) -> None:
        """Cancel the work: its generator is closed."""
        work, self._work = self._work, None
        if work is not None:
            work.close()


class Tasks:
    """The tasks of an SMP and their order: checksums and encoding take turns, step by step, so that neither starves;
    scrubbing is not urgent and runs while no other task is active."""

    def __init__(self) -> None:
        self.check, self.encode, self.scrub = Task(), Task(), Task()
        self._turns = deque((self.check, self.encode))

    @property
    def active(self) -> bool:
        """Whether a task is active, even if it waits."""
        return self.scrub.active or any(task.active for task in self._turns)

    def next(self) -> Task | None:
        """The active task whose step is due next, perhaps after a wait; None if none is active."""
        self._turns.rotate(-1)
        active = [task for task in self._turns if task.active] or [self.scrub] * self.scrub.active
        return min(active, key=lambda task: task.wait_secs, default=None)

    def stop(self) -> None:
        """Cancel all."""
        for task in (*self._turns, self.scrub):
            task.stop()


def in_thread(action: Callable[[], T]) -> Work[T]:
    """Run ``action`` in a thread; the generator returns its result or raises its error. Closing the generator
    does not stop the thread."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    # A daemon: the end of the SMP does not wait for a disk or a tmpfs.
    thread = threading.Thread(target=run, name="smp-work", daemon=True)
    thread.start()
    while thread.is_alive():
        yield _POLL_SECS
    if errors:
        raise errors[0]
    return result[0]


MAX_SECS = 0.5
"""Longest single wait for busy ranks, and the largest balance of time to wait."""
MAX_NETWORK_SECS = 2.0
"""The same for the network: as long as a gradient reduction, and far below deadlines of requests for bytes."""


class Bucket:
    """A limit in bytes per second. A transfer is charged at its start, and the next one waits until that is paid off.

    Any thread may call it.
    """

    def __init__(self, bytes_per_sec: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_sec
        self._clock = clock
        self._due = clock()
        self._guard = threading.RLock()

    def charge(self, nbytes: int) -> None:
        """Charge ``nbytes`` that are moved now."""
        if self._rate > 0:
            with self._guard:
                # Idle time gives no credit.
                self._due = max(self._due, self._clock()) + nbytes / self._rate

    def wait_secs(self) -> float:
        """Seconds until the rate allows more; 0: now."""
        return max(0.0, self._due - self._clock()) if self._rate > 0 else 0.0

    def reserve(self, nbytes: int, max_secs: float) -> float | None:
        """Charge ``nbytes`` to be moved after the returned seconds; None, and no charge, beyond ``max_secs``."""
        with self._guard:
            wait_secs = self.wait_secs()
            if wait_secs > max_secs:
                return None
            self.charge(nbytes)
            return wait_secs


class CooperativeYield(threading.local):
    """Waits while others are busy, for at most as long as was worked before, and ``max_secs`` at a time.

    So work takes at most twice its undisturbed time (plus ``max_secs``), however busy others are. Each thread has
    its own balance: the wait of one thread is not work of another.

    Args:
        busy: whether others need the resource now.
    """

    def __init__(
        self, busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic, max_secs: float = MAX_SECS
    ) -> None:
        self._busy = busy
        self._clock = clock
        self._max_secs = max_secs
        self._saved = max_secs
        self._since = clock()

    def wait(self) -> Iterator[float]:
        """Wait until nobody is busy or the balance is used up. The time since the last call counts as work."""
        begun = self._clock()
        self._saved = min(self._max_secs, self._saved + begun - self._since)
        while self._busy() and self._clock() - begun < self._saved:
            yield _POLL_SECS
        self._since = self._clock()
        # A caller that resumed late has overdrawn the balance, and first pays that off by work.
        self._saved = max(-self._max_secs, self._saved - (self._since - begun))


class Throttle:
    """Waits before each piece of work, in any thread. The byte rates are shared by all threads.

    Args:
        copying: whether ranks of the node copy state now.
        network: whether ranks of the node need the network now, according to their phases.
        has_room: whether a transfer of so many seconds fits between the ranks' transfers; None: unknown.
        smp_rate: bytes per second read of the node's memory; 0: no limit.
        network_rate: bytes per second received, and as many sent; 0: no limit.
    """

    def __init__(
        self,
        copying: Callable[[], bool],
        network: Callable[[], bool],
        smp_rate: float = 0.0,
        network_rate: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        has_room: Callable[[float], bool | None] = lambda need_secs: None,
    ) -> None:
        self._has_room, self._network_rate, self._clock = has_room, network_rate, clock
        self.read = Bucket(smp_rate, clock)
        self.received = Bucket(network_rate, clock)
        self._sent = Bucket(network_rate, clock)
        self._copying = CooperativeYield(copying, clock, MAX_SECS)
        self._network = CooperativeYield(network, clock, MAX_NETWORK_SECS)

    def memory(self, nbytes: int) -> Iterator[float]:
        """Wait before ``nbytes`` of memory are read."""
        yield from _paid(self.read)
        self.read.charge(nbytes)
        yield from self._copying.wait()

    def receive(self, nbytes: int = 0) -> Iterator[float]:
        """Wait before a request over the network; the caller charges ``received`` when the bytes have arrived."""
        yield from _paid(self.received)
        while not (yield from self._idle_network(nbytes)):  # at most one iteration
            pass

    def send(self, nbytes: int) -> Generator[float, None, bool]:
        """Wait before ``nbytes`` are sent; False: do not send them, the rate or the network has no room soon."""
        wait_secs = self._sent.reserve(nbytes, MAX_SECS)
        if wait_secs is None:
            return False
        if wait_secs > 0:
            yield wait_secs
        return (yield from self._idle_network(nbytes))

    def _idle_network(self, nbytes: int) -> Generator[float, None, bool]:
        need_secs = nbytes / self._network_rate if self._network_rate else 0.0
        begun = self._clock()
        while (has_room := self._has_room(need_secs)) is False:
            if self._clock() - begun >= MAX_NETWORK_SECS:
                return False
            yield _POLL_SECS
        if has_room is None:
            yield from self._network.wait()
        return True


def _paid(bucket: Bucket) -> Iterator[float]:
    while (left := bucket.wait_secs()) > 0:
        yield left
