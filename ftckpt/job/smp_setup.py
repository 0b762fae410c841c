"""The thread of a node's leader that starts its SMP and tells it what to do, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ftckpt.errors import in_words

_AGAIN_SECS = 10.0
"""Behind a failure: each attempt costs a process start on a node that trains."""
_LAST_SECS = 5.0
"""A job that ends waits so long for an SMP that is starting, which takes one where cores are free."""


class SmpSetup:
    """What an SMP is to be told: the last word counts, and is said again until it was heard.

    Args:
        tell: starts the SMP where none runs and tells it; raises where it could not.
        fail: is told what it raised.
    """

    def __init__(self, tell: Callable[[Mapping[str, Any]], None], fail: Callable[[Exception], None]) -> None:
        self._tell, self._fail = tell, fail
        self._guard = threading.Lock()
        self._wanted: Mapping[str, Any] | None = None
        self._thread: threading.Thread | None = None  # None: nothing is left to be told
        self._settled = threading.Event()  # it was told, or could not be
        self._over = threading.Event()
        self._wake = threading.Event()  # it is over, or something else is wanted: no time to rest
        self.problem = ""
        """Why it could not be told what was wanted last."""

    @property
    def is_over(self) -> bool:
        """Whether the job has ended meanwhile: nothing more is to be said."""
        return self._over.is_set()

    def want(self, description: Mapping[str, Any]) -> None:
        """Have the SMP do what ``description`` says, as soon as it can be told."""
        with self._guard:
            self._wanted, self.problem = description, ""
            self._settled.clear()
            self._wake.set()
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name="ftckpt-smp-setup", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self.problem = in_words(error)
                self._fail(error)
            else:
                self._thread = thread

    def end(self) -> None:
        """Say nothing more, but what is being said: an SMP that is starting is waited for, for a moment."""
        thread = self._thread
        if thread is not None:
            self._settled.wait(_LAST_SECS)
        self._over.set()
        self._wake.set()
        if thread is not None:
            thread.join(_LAST_SECS if self._settled.is_set() else 0.0)

    def _run(self) -> None:
        while not self.is_over:
            self._wake.clear()  # before it is read: what comes behind that wakes
            wanted = self._wanted
            assert wanted is not None, "set before the thread starts"
            try:
                self._tell(wanted)
            except Exception as error:  # noqa: BLE001 - promise 4: without an SMP training goes on
                self.problem = in_words(error)
                self._fail(error)
                self._settled.set()
                self._wake.wait(_AGAIN_SECS)
                continue
            with self._guard:
                if self._wanted is wanted:
                    self._thread, self.problem = None, ""
                    self._settled.set()
                    return
