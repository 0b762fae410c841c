"""How processes end of which this one is not the parent: seen between a death and the moment at which the parent
takes what the kernel has of it."""

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
    """``status`` is what ``os.waitpid`` gives, 0 where nobody could see it; ``time``, in seconds since the epoch, is
    when that was."""

    status: int
    time: float


def exit_now(owner: int) -> Exit:
    """Of a process, by its owner word, that has ended."""
    return Exit(exit_status(owner), time.time())


class ExitWatch:
    """A thread waits for the end of each process that is followed: launchers take what is left of one at once, or
    within a tenth of a second. Without pidfds there is none, and ``exit_of`` sees what is left when it is asked."""

    def __init__(self) -> None:
        self.processes: dict[int, tuple[int, Process]] = {}  # owners, by pidfd; the thread closes what it has taken
        self._known: frozenset[int] = frozenset()  # owners that are followed, or cannot be
        self.exits: dict[int, Exit] = {}
        self._thread: _WaitThread | None = None  # nothing is open before there is a process

    def follow(self, owners: Set[int]) -> None:
        """These live, and no others are asked for any more."""
        for owner in list(self.exits):  # a copy: the thread adds to it
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
        """Of a process that has ended."""
        return self.exits.get(owner) or exit_now(owner)

    def close(self) -> None:
        """Follow none any more."""
        if self._thread is not None:
            self._thread.close()
        for _, process in self.processes.values():
            process.close()

    def _taken(self, fd: int) -> None:
        owner, process = self.processes.pop(fd)
        self.exits[owner] = exit_now(owner)
        process.close()  # by the thread alone: while it is open no other one has its number


class _WaitThread:
    """The thread; ``ended`` is called with the pidfd of each process, which it has to close."""

    def __init__(self, ended: Callable[[int], None]) -> None:
        self._epoll, (self._bell, self._ring) = select.epoll(), os.pipe()
        self._epoll.register(self._bell, select.EPOLLIN)
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="smp-exits", daemon=True)
        self._thread.start()

    def wait_for(self, process: Process) -> None:
        """A thread that waits already sees it, too."""
        self._epoll.register(process, select.EPOLLIN)

    def close(self) -> None:
        """Returns when nothing more is called."""
        os.close(self._ring)
        self._thread.join()
        self._epoll.close()
        os.close(self._bell)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll():
                if fd == self._bell:
                    return
                # By hand: a copy in a process that was forked meanwhile would keep it, and tell of it again.
                self._epoll.unregister(fd)
                self._ended(fd)
