"""What ranks tell each other through the store of torch's default process group, when no collective can.

The store may be slow, frozen or gone: it is asked on a thread, and nobody waits for that longer than it says."""

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
"""How long a rank waits for the store at a stretch."""


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those that ask the store."""


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from torch while the interpreter ends is unwound, which C++ answers with abort."""
    for thread in list(_threads):
        thread.join(PATIENCE_SECS)


def job_store() -> Store:
    """The store of the job's attempt, which all ranks reach."""
    return dist.distributed_c10d._get_default_store()


class StoreCall(Generic[T]):
    """A call of the store on a thread of its own; ``value`` is what it returned, None if it failed."""

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
    """One notice, at ``name`` in the store."""

    def __init__(self, name: str) -> None:
        self._store = job_store()
        self._name = name
        self._lookup: StoreCall[str] | None = None

    def post(self, text: str) -> None:
        """Write the notice, if the store answers: otherwise the others find out by themselves."""
        if self._lookup is None or self._lookup.ended():
            StoreCall(lambda: self._store.set(self._name, text)).ended()

    def read(self) -> str:
        """What somebody posted, or that the store cannot be reached; "" if there is nothing, or no answer yet."""
        # One at a time: a store that does not answer must not collect threads.
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
