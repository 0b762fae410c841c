"""Exit statuses of processes that are no children of this one: read from zombies before their parents reap them."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Set
from typing import NamedTuple

from ftckpt.memory.page import exit_status, pid_of
from ftckpt.memory.process import Process


class Exit(NamedTuple):
    """An exit: ``status`` as from ``os.waitpid``, 0 if unknown; ``time`` of its observation, in seconds since the
    epoch."""

    status: int
    time: float


def exit_now(owner: int) -> Exit:
    """The exit of a process that has ended, by its owner word."""
    return Exit(exit_status(owner), time.time())


class ExitWatch:
    """Records the exit statuses of processes by a thread that waits for them: launchers reap a process at once or
    within 0.1 s. Without pidfds there is no thread, and ``exit_of`` reads the zombie when it is called."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[int, Process]] = {}  # pidfd → owner, process; the thread closes ended ones
        self._known: frozenset[int] = frozenset()  # owners that are followed, or cannot be
        self.exits: dict[int, Exit] = {}
        self._thread: _WaitThread | None = None  # started, with its descriptors, for the first process

    def follow(self, owners: Set[int]) -> None:
        """Follow these live processes too, and forget the exits of all others."""
        for owner in list(self.exits):  # a copy: the thread adds entries
            if owner not in owners:
                del self.exits[owner]
        new, self._known = owners - self._known, frozenset(owners)
        for owner in new:
            process = Process.open(pid_of(owner), owner)
            if process is not None and process.fileno() >= 0:
                self._thread = self._thread or _WaitThread(self._taken)
                self.processes[process.fileno()] = owner, process
                self._thread.wait_for(process)

    def exit_of(self, owner: int) -> Exit:
        """The exit of a process that has ended."""
        return self.exits.get(owner) or exit_now(owner)

    def close(self) -> None:
        """Stop the thread and close all pidfds."""
        if self._thread is not None:
            self._thread.close()
        for _, process in self.processes.values():
            process.close()

    def _taken(self, fd: int) -> None:
        owner, process = self.processes.pop(fd)
        self.exits[owner] = exit_now(owner)
        process.close()  # only the thread closes: while the pidfd is open, its number is not reused


class _WaitThread:
    """A thread that calls ``ended`` with the pidfd of each process that exits; ``ended`` closes it."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._epoll, (self._bell, self._ring) = select.epoll(), os.pipe()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="smp-exits", daemon=True)
        self._thread.start()

    def wait_for(self, process: Process) -> None:
        """Wait for another process; a running epoll wait includes it at once."""
        self._epoll.register(process, select.EPOLLIN)

    def close(self) -> None:
        """Stop the thread; ``ended`` is not called after this returns."""
        os.close(self._ring)
        self._thread.join()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._bell:
                    return
                # Explicitly: a copy of the pidfd in a forked child would keep it registered after it is closed.
                self._epoll.unregister(fd)
                self._ended(fd)
