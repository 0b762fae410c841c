"""Exit statuses of processes that are no children of this one: read from zombies before their parents reap them."""

from __future__ import annotations

import threading
import time
from collections.abc import Set
from typing import NamedTuple

from ftckpt.memory.page import exit_status, pid_of
from ftckpt.memory.process import Process

_WAIT_SECS = 1e6
"""Duration of one wait for an exit, below the kernel's maximum."""


class Exit(NamedTuple):
    """An exit: ``status`` as from ``os.waitpid``, 0 if unknown; ``time`` of its observation, in seconds since the
    epoch."""

    status: int
    time: float


def exit_now(owner: int) -> Exit:
    """The exit of a process that has ended, by its owner word."""
    return Exit(exit_status(owner), time.time())


class ExitWatch:
    """Records the exit statuses of processes, by a thread for each that waits for its exit: launchers reap a process
    at once or within 0.1 s. Without pidfds there are no threads, and ``exit_of`` reads the zombie when called."""

    def __init__(self) -> None:
        self.exits: dict[int, Exit] = {}
        self._known: frozenset[int] = frozenset()  # owners that are followed, or cannot be
        self._waiting: set[int] = set()  # owners whose threads wait: one that withdraws and comes back has one still

    def follow(self, owners: Set[int]) -> None:
        """Follow these live processes too, and forget the exits of all others."""
        for owner in list(self.exits):  # a copy: the threads add entries
            if owner not in owners:
                del self.exits[owner]
        new, self._known = owners - self._known, frozenset(owners)
        for owner in new - self._waiting:
            process = Process.open(pid_of(owner), owner)
            if process is not None and process.fileno() >= 0:
                thread = threading.Thread(target=self._wait, args=(owner, process), name="smp-exit", daemon=True)
                self._waiting.add(owner)
                try:
                    thread.start()
                except RuntimeError:  # no memory for a thread: as without a pidfd
                    process.close()
                    self._waiting.discard(owner)

    def exit_of(self, owner: int) -> Exit:
        """The exit of a process that has ended."""
        return self.exits.get(owner) or exit_now(owner)

    def _wait(self, owner: int, process: Process) -> None:
        with process:
            while not process.gone(_WAIT_SECS):
                pass
            self.exits[owner] = exit_now(owner)
        self._waiting.discard(owner)
