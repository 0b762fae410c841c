"""Pieces of work as generators: they yield the seconds to wait before they go on, 0 to go on at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TypeVar

from ftckpt.errors import FtckptError

T = TypeVar("T")

Work = Generator[float, None, T]

_POLL_SECS = 0.01


class CannotError(FtckptError):
    """The target snapshot cannot be protected: a node that does not answer, no room, bad bytes. The text names it."""


class Running:
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
        work, self._work = self._work, None
        if work is not None:
            with suppress(StopIteration):
                self._not_before = time.monotonic() + next(work)
                self._work = work

    def stop(self) -> None:
        """Give it up."""
        work, self._work = self._work, None
        if work is not None:
            work.close()


def within(work: Work[T], secs: float) -> Work[T]:
    """``work``, given up after ``secs``.

    Raises:
        CannotError: it was given up.
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
                raise CannotError(f"not done in {secs:g} s")
    finally:
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

    thread = threading.Thread(target=run, name="smp-work", daemon=True)
    thread.start()
    while thread.is_alive():
        yield _POLL_SECS
    if errors:
        raise errors[0]
    return result[0]
