"""Pieces of work as generators of the seconds to wait next, and what they wait for: quiet moments, their own limits.

A piece that yields 0 goes on at once. The loop of the caller stays free in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TypeVar

from ftckpt.errors import ProtectionUnavailableError

T = TypeVar("T")

Work = Generator[float, None, T]

_POLL_SECS = 0.01
"""Between two looks at what has no wake-up: a thread that works, ranks that copy."""


class Task:
    """A piece of work under way, or none; ``active`` is false once it has ended, or failed."""

    def __init__(self) -> None:
        self._work: Work[None] | None = None
        self._not_before = 0.0

    @property
    def active(self) -> bool:
        """Whether there is anything to go on with."""
        return self._work is not None

    @property
    def wait_secs(self) -> float:
        """Seconds until it wants to go on; 0: now."""
        return max(0.0, self._not_before - time.monotonic())

    def start(self, work: Work[None]) -> None:
        """Begin ``work``, in place of what was under way."""
        self.stop()
        self._work, self._not_before = work, 0.0

    def go_on(self) -> None:
        """Its next step; raises what the work raises, which has ended then."""
        # Put back only where it goes on: what has returned or raised is over.
        work, self._work = self._work, None
        if work is not None:
            with suppress(StopIteration):
                self._not_before = time.monotonic() + next(work)
                self._work = work

    def stop(self) -> None:
        """Give up what is under way; its generator is closed."""
        work, self._work = self._work, None
        if work is not None:
            work.close()


def within(work: Work[T], secs: float) -> Work[T]:
    """``work``, given up after ``secs``.

    Raises:
        ProtectionUnavailableError: it was given up.
    """
    deadline = time.monotonic() + secs
    try:
        while True:
            try:
                wait_secs = next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            yield wait_secs
            if time.monotonic() >= deadline:
                raise ProtectionUnavailableError(f"not done in {secs:g} s")
    finally:
        # Leases and requests of what was given up end here.
        work.close()


def in_thread(action: Callable[[], T]) -> Work[T]:
    """Run ``action`` beside the caller's loop; returns (as a generator) its result or raises its error.

    A generator that is closed leaves the thread to end by itself.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    # A daemon: whoever ends the SMP does not wait for a disk or a tmpfs.
    thread = threading.Thread(target=run, name="smp-work", daemon=True)
    thread.start()
    while thread.is_alive():
        yield _POLL_SECS
    if errors:
        raise errors[0]
    return result[0]


MOST_SECS = 0.5
"""Most that is waited at a stretch, and that is saved up, for others to be quiet."""
NETWORK_MOST_SECS = 2.0
"""The same for the network: as long as gradients are reduced, and far from deadlines of who waits for bytes."""


class Bucket:
    """A rate of bytes per second. Work is charged when it begins; the next has to wait until it is paid for.

    Any thread may call it.
    """

    def __init__(self, bytes_per_sec: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = bytes_per_sec
        self._clock = clock
        self._due = clock()
        self._guard = threading.RLock()

    def charge(self, nbytes: int) -> None:
        """Note that ``nbytes`` are being moved now."""
        if self._rate > 0:
            with self._guard:
                # Time in which nothing was moved is not saved up.
                self._due = max(self._due, self._clock()) + nbytes / self._rate

    def wait_secs(self) -> float:
        """Seconds until the rate allows more; 0: now."""
        return max(0.0, self._due - self._clock()) if self._rate > 0 else 0.0

    def reserve(self, nbytes: int, most_secs: float) -> float | None:
        """Charge ``nbytes`` that are moved after the seconds returned; None, and nothing charged, if later."""
        with self._guard:
            wait_secs = self.wait_secs()
            if wait_secs > most_secs:
                return None
            self.charge(nbytes)
            return wait_secs


class CooperativeYield(threading.local):
    """Lets others go first, but not for ever: at most as long as was worked, ``most_secs`` at a stretch.

    So work takes at most twice as long as with nobody else there (and ``most_secs``), however busy they are. Each
    thread counts by itself: what one of them waits is no work of another.

    Args:
        busy: whether others should go first now.
    """

    def __init__(
        self, busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic, most_secs: float = MOST_SECS
    ) -> None:
        self._busy = busy
        self._clock = clock
        self._most_secs = most_secs
        self._saved = most_secs
        self._since = clock()

    def wait(self) -> Iterator[float]:
        """Until nobody is busy, or the patience is used up. The time since the last call counts as work."""
        begun = self._clock()
        self._saved = min(self._most_secs, self._saved + begun - self._since)
        while self._busy() and self._clock() - begun < self._saved:
            yield _POLL_SECS
        self._since = self._clock()
        # What a late caller waited too long is made good by work before anybody is waited for again.
        self._saved = max(-self._most_secs, self._saved - (self._since - begun))


class Throttle:
    """What to do before each piece of work, in any thread: limits are of all threads together.

    Args:
        copying: whether ranks of the node copy state now.
        network: whether ranks of the node need the network now, as far as their phases tell.
        has_room: whether a transfer of so many seconds fits between what they send; None: nobody knows.
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
        self._copying = CooperativeYield(copying, clock, MOST_SECS)
        self._network = CooperativeYield(network, clock, NETWORK_MOST_SECS)

    def memory(self, nbytes: int) -> Iterator[float]:
        """Before ``nbytes`` of memory are read."""
        yield from _paid(self.read)
        self.read.charge(nbytes)
        yield from self._copying.wait()

    def receive(self, nbytes: int = 0) -> Iterator[float]:
        """Before something is requested over the network; what comes is charged to ``received`` when it is there."""
        yield from _paid(self.received)
        while not (yield from self._idle_network(nbytes)):  # an iteration at the most
            pass

    def send(self, nbytes: int) -> Generator[float, None, bool]:
        """Before ``nbytes`` are sent; False: not now, others have the next half second."""
        wait_secs = self._sent.reserve(nbytes, MOST_SECS)
        if wait_secs is None:
            return False
        if wait_secs > 0:
            yield wait_secs
        return (yield from self._idle_network(nbytes))

    def _idle_network(self, nbytes: int) -> Generator[float, None, bool]:
        need_secs = nbytes / self._network_rate if self._network_rate else 0.0
        begun = self._clock()
        while (has_room := self._has_room(need_secs)) is False:
            if self._clock() - begun >= NETWORK_MOST_SECS:
                return False
            yield _POLL_SECS
        if has_room is None:
            yield from self._network.wait()
        return True


def _paid(bucket: Bucket) -> Iterator[float]:
    while (left := bucket.wait_secs()) > 0:
        yield left
