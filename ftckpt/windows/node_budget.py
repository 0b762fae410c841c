"""A node's copy budget: its ranks share PCIe, memory bandwidth and cores, and divide a rate among them.

They do so without collectives, through ``.budget`` in the node's directory: a page of shared memory with one
64-byte entry per rank, indexed by the rank's place on the node. An entry is eight native 64-bit words,
of which three are used:

* 0: owner: pid in the low 22 bits, above them the process's start time in clock ticks since boot
* 1: inode of the owner's pid namespace: pids of another namespace say nothing here
* 2: until this CLOCK_MONOTONIC time in ns the owner copies, unless it says so again; 0: it does not copy

Readers take no lock, and each entry has one writer. A word is never seen half-written (``store.page``), and no two
must agree: a reader that sees an old one beside a new one is wrong by one rank for one read. For the same reason
a file needs no header: zeros, entries of dead processes and foreign bytes all name no live owner whose lease is
running, and each rank overwrites its own entry as a whole.

This module imports neither torch nor multiprocessing.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Protocol

from ftckpt.store.directory import BUDGET_NAME
from ftckpt.store.page import map_page, owner_lives, owner_word, pid_namespace, private_page


class Budget(Protocol):
    """The node's budget for copies, as one rank sees it; see ``ftckpt.windows.node_budget``."""

    limited: bool
    """Whether ``pace`` makes copies wait."""

    def start(self) -> None:
        """This rank copies from now on."""

    def stop(self) -> None:
        """It does not any more."""

    def pace(self, nbytes: int, begin: float, hurry: threading.Event) -> None:
        """Sleep until a copy that began at ``time.perf_counter()`` ``begin`` has taken the time it must."""

    def share(self, bytes_per_sec: float) -> float:
        """What is left of a rate of copies while all ranks of the node copy, in bytes/s."""

    def close(self) -> None:
        """Give up the place in it."""


class NoBudget:
    """Copies as fast as it goes."""

    limited = False

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pace(self, nbytes: int, begin: float, hurry: threading.Event) -> None: ...

    def share(self, bytes_per_sec: float) -> float:
        return bytes_per_sec

    def close(self) -> None: ...


MAX_PLACES = 255
"""Ranks of one node: as many as its page of signs of life (``store.pulse``) has places for."""

_ENTRY_WORDS = 8
_OWNER, _NAMESPACE, _UNTIL_NS = range(3)

_LEASE_NS = 500_000_000
"""A rank that neither paces nor stops for this long does not copy: it waits, is stopped, or is gone."""
_ALIVE_NS = 50_000_000
"""How long it is believed that an owner lives."""
_SLICE_SECS = 0.05
"""Longest sleep before the other ranks are looked at again."""
_SLACK_SECS = 0.0005
"""A shorter sleep is not worth a context switch: it is added to the next one."""
_CREDIT_SECS = 0.02
"""Most that a sleep which the scheduler made too long is taken off the next ones."""
_LONGEST_SECS = 60.0
"""Longest that one chunk waits."""
_GAP_SECS = 0.005
"""Chunks no further apart than this follow each other."""


class NodeBudget:
    """One rank's (or, with ``place=None``, an observer's) view of its node's copy budget.

    ``pace`` belongs to the thread that copies; the rest may be called from any. None of them raises: where the
    page cannot be used ``problem`` says why, and this rank copies as if it were alone, without a limit.
    """

    def __init__(
        self, place: int | None, places: int, limit_bytes_per_sec: float, page: memoryview | None = None,
        problem: str | None = None,
    ) -> None:  # fmt: skip
        self.place = place
        self.places = places
        self.limit = max(limit_bytes_per_sec, 1.0) if limit_bytes_per_sec > 0 else 0.0
        """Bytes/s for the whole node, heeded while ``limited``; 0: none."""
        self.problem = problem
        """Why there is no common budget, for an event; None where there is one."""
        self.limited = self.limit > 0 and problem is None
        self._words = page if page is not None else private_page()
        self._owner = owner_word(os.getpid()) if page is not None else 0
        self._namespace = pid_namespace() if page is not None else 0
        self._believed: dict[int, tuple[int, int, bool]] = {}
        self._under_way = 0
        self._guard = threading.Lock()
        self._due = self._paced = 0.0
        if place is not None:
            _clear(self._words, place, self._owner)

    @classmethod
    def open(cls, directory: Path, place: int | None, places: int, limit_bytes_per_sec: float) -> NodeBudget:
        """Join the budget of the node whose arenas lie in ``directory``; never raises, see ``problem``.

        Args:
            place: index of this rank among the ``places`` ranks of the node; None: copies nothing, only looks.
            limit_bytes_per_sec: what all ranks of the node may copy together, in bytes/s; 0: no limit.
        """
        try:
            if not 0 <= (place or 0) < places <= MAX_PLACES:
                raise OSError(f"place {place} of {places}, the most is {MAX_PLACES}")
            return cls(place, places, limit_bytes_per_sec, map_page(directory / BUDGET_NAME))
        except (OSError, ValueError) as error:
            problem = f"{directory / BUDGET_NAME}: no copy budget is shared: {error}"
            return cls(None if place is None else 0, 1, limit_bytes_per_sec, problem=problem)

    def start(self) -> None:
        """This rank copies from now on, until as many calls of ``stop``, or half a second without a sign of life."""
        with self._guard:
            # Copies that failed were never stopped: they count until the lease has run out.
            self._under_way = self._under_way + 1 if self._leased(self.place or 0) else 1
            self._renew()

    def stop(self) -> None:
        """What the last ``start`` began is copied, or waits for a window; more calls than starts do nothing."""
        with self._guard:
            self._under_way = max(0, self._under_way - 1)
            if self._under_way == 0:
                self._store(_UNTIL_NS, 0)

    def copying(self) -> int:
        """Live ranks of the node that copy now."""
        return self._others() + (self.place is not None and self._leased(self.place))

    def pace(self, nbytes: int, begin: float, hurry: threading.Event) -> None:
        """Called after each chunk: sleep until ``nbytes`` fit this rank's share of the limit since ``begin``.

        The share is taken anew every 50 ms. Returns at once without a limit or when ``hurry`` is set, and
        after a minute at the latest.

        Args:
            begin: ``time.monotonic()`` or ``time.perf_counter()`` (the same clock on Linux) before the copy.
        """
        self._renew()
        if self.limited:
            self._slow_down(nbytes, begin, hurry)
        with self._guard:
            if self._under_way == 0:  # stopped by another thread meanwhile
                self._store(_UNTIL_NS, 0)

    def share(self, bytes_per_sec: float) -> float:
        """See Budget. Ranks in step copy at the same time."""
        return min(bytes_per_sec, self.limit / self.places) if self.limited else bytes_per_sec

    def close(self) -> None:
        """Leave the budget; a thread that still paces does so alone and without a limit."""
        self.limited, self.places = False, 0
        # Swapped before the entry is cleared: a late store of another thread must not claim the place again.
        page, self._words = self._words, private_page()  # the mapping goes with the last thread that reads it
        if self.place is not None:
            _clear(page, self.place, 0)

    def _slow_down(self, nbytes: int, begin: float, hurry: threading.Event) -> None:
        # Between chunks that follow each other lies what the scheduler took; a longer gap is an idle one.
        credit = _CREDIT_SECS if begin - self._paced < _GAP_SECS else 0.0
        since, left = max(self._due, begin - credit), float(nbytes)
        while True:
            rate, now = self.limit / (1 + self._others()), time.monotonic()
            # When the rest would be done at the rate of this moment: other ranks begin and end while it waits.
            self._due = since + left / rate
            wait = min(self._due, begin + _LONGEST_SECS) - now
            if hurry.is_set() or wait <= _SLACK_SECS:
                break
            hurry.wait(min(wait, _SLICE_SECS))
            now = time.monotonic()
            since, left = now, left - rate * (now - since)
            self._renew()
        self._due, self._paced = min(self._due, now + _SLACK_SECS), now  # what was hurried is not owed later

    def _renew(self) -> None:
        # All of it, each time: whatever was in a broken file, or another process wrote, lasts one chunk.
        self._store(_OWNER, self._owner)
        self._store(_NAMESPACE, self._namespace)
        self._store(_UNTIL_NS, time.monotonic_ns() + _LEASE_NS)

    def _store(self, word: int, value: int) -> None:
        if self.place is not None:
            self._words[self.place * _ENTRY_WORDS + word] = value

    def _load(self, word: int, place: int) -> int:
        return self._words[place * _ENTRY_WORDS + word]

    def _others(self) -> int:
        # Asked before each piece of an SMP's work, and hardly anybody ever copies: one look at all places first.
        untils = self._words[_UNTIL_NS : self.places * _ENTRY_WORDS : _ENTRY_WORDS].tolist()
        claimed = (place for place, until in enumerate(untils) if until and place != self.place)
        return sum(self._leased(place) and self._alive(place) for place in claimed)

    def _leased(self, place: int) -> bool:
        until = self._load(_UNTIL_NS, place)  # of a process that stopped without a word it runs out by itself
        # The clock is read last: a lease that is longer than a lease was never given.
        return until != 0 and 0 < until - time.monotonic_ns() <= _LEASE_NS

    def _alive(self, place: int) -> bool:
        """Whether the owner of an entry lives; believed for a while, as the answer costs a system call or two."""
        owner, now = self._load(_OWNER, place), time.monotonic_ns()
        believed = self._believed.get(place)
        if believed is not None and believed[0] == owner and now - believed[1] < _ALIVE_NS:
            return believed[2]
        # Of a process in another namespace only the lease tells.
        alive = owner != 0 and (self._load(_NAMESPACE, place) != self._namespace or owner_lives(owner))
        self._believed[place] = owner, now, alive
        return alive


def _clear(page: memoryview, place: int, owner: int) -> None:
    # The lease goes first and the owner comes last: in between the entry is nobody's who copies.
    for word, value in ((_UNTIL_NS, 0), (_NAMESPACE, 0), (_OWNER, owner)):
        page[place * _ENTRY_WORDS + word] = value
