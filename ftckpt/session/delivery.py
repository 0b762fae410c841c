"""Delivery of a value on a thread, for which training does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ftckpt.errors import in_words

T = TypeVar("T")

_END_SECS = 5.0
"""Maximum wait of an ending job for a delivery: an SMP starts within a second on an idle node."""


class Delivery(Generic[T]):
    """Delivers the latest value that is wanted, and retries until it is delivered.

    Args:
        deliver: raises if that fails.
        fail: receives each error, and whether it differs from the one before.
        pauses: the first and the longest pause between attempts in seconds; each is twice the one before.
    """

    def __init__(
        self, name: str, deliver: Callable[[T], None], fail: Callable[[Exception, bool], None],
        pauses: tuple[float, float],
    ) -> None:  # fmt: skip
        self._name, self._deliver, self._fail, self._pauses = name, deliver, fail, pauses
        self._guard = threading.Lock()
        self.wanted: T | None = None
        """The latest value; None: none yet."""
        self._thread: threading.Thread | None = None  # None: nothing is left to deliver
        self._settled = threading.Event()  # the latest value was delivered, or failed once
        self._over = threading.Event()
        self._wake = threading.Event()  # set by ``end`` and by a new value: do not pause
        self.problem = ""
        """Why the latest value could not be delivered."""

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called: nothing more is delivered."""
        return self._over.is_set()

    def want(self, value: T) -> None:
        """Deliver ``value`` as soon as possible; does not wait."""
        with self._guard:
            self.wanted, self.problem = value, ""
            self._settled.clear()
            self._wake.set()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._note(error)
            else:
                self._thread = thread

    def end(self, waits: bool = False) -> None:
        """Stop deliveries; with ``waits`` this waits up to a few seconds for the one in progress."""
        thread = self._thread if waits else None
        if thread is not None:
            self._settled.wait(_END_SECS)
        self._over.set()
        self._wake.set()
        if thread is not None:
            thread.join(_END_SECS if self._settled.is_set() else 0.0)

    def _run(self) -> None:
        pause_secs, longest_secs = self._pauses
        while not self.is_over:
            self._wake.clear()  # before the read: a later value must end the pause below
            value = self.wanted
            assert value is not None, "set before the thread starts"
            try:
                self._deliver(value)
            except Exception as error:  # noqa: BLE001 - promise 4: training continues without it
                self._note(error)
                self._settled.set()
                self._wake.wait(pause_secs)
                pause_secs = min(2 * pause_secs, longest_secs)
                continue
            with self._guard:
                if self.wanted is value:
                    self._thread, self.problem = None, ""
                    self._settled.set()
                    return

    def _note(self, error: Exception) -> None:
        before, self.problem = self.problem, in_words(error)
        self._fail(error, self.problem != before)
