"""Notices between ranks through the store of torch's default process group, for when no collective is possible.

The store may be slow or unreachable, so it is called on a thread, and every wait for that has a deadline."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

T = TypeVar("T")

PATIENCE_SECS = 1.0
"""Maximum time for which a rank waits for the store at once."""


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Threads that call the store."""


@atexit.register
def _end_threads() -> None:
    """Joins threads at exit: one that returns from torch during finalization is unwound, on which C++ aborts."""
    for thread in list(_threads):
        thread.join(PATIENCE_SECS)


def job_store() -> Store:
    """The store of the job's attempt, shared by all ranks."""
    return dist.distributed_c10d._get_default_store()


class StoreCall(Generic[T]):
    """A call of the store on its own thread; ``value`` is the result, None if it failed."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.value: T | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="ftckpt-store", daemon=True)
        _threads.add(self._thread)
        self._thread.start()

    def ended(self, patience_secs: float = PATIENCE_SECS) -> bool:
        """Whether the call has ended, now or within ``patience_secs``."""
        self._thread.join(patience_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.value = self._call()


class Notice:
    """A notice under the key ``name`` in the store."""

    def __init__(self, name: str) -> None:
        self._store = job_store()
        self._name = name
        self._lookup: StoreCall[str] | None = None

    def post(self, text: str) -> None:
        """Writes the notice, if the store responds; otherwise the other ranks rely on their own deadlines."""
        if self._lookup is None or self._lookup.ended():
            StoreCall(lambda: self._store.set(self._name, text)).ended()

    def read(self) -> str:
        """The posted text, or an error text if the store is unreachable; empty: none, or no response yet."""
        # One lookup at a time: an unresponsive store must not accumulate threads.
        self._lookup = self._lookup or StoreCall(self._look_up)
        if not self._lookup.ended():
            return ""
        text, self._lookup = self._lookup.value, None
        return text or ""

    def _look_up(self) -> str:
        try:
            return self._store.get(self._name).decode() if self._store.check([self._name]) else ""
        except RuntimeError as error:
            return f"the job's store cannot be reached: {error}"
