"""A notice in the store of the job, by which a rank tells all that wait for it that it has given up.

torch sets no deadline to a call of a store whose host is frozen or cut off. So calls are made on a thread, and nobody
waits for that for long.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch.distributed as dist

_PATIENCE_SECS = 1.0
"""How long a rank waits for the store at a stretch."""


class Notice:
    """One notice, at ``name`` in the store of torch's default process group."""

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._name = name
        self._asking: _Call | None = None

    def post(self, text: str) -> None:
        """Write the notice, if the store answers: otherwise the others find out by themselves."""
        if self._asking is None or self._asking.ended():
            _Call(lambda: self._store.set(self._name, text)).ended()

    def read(self) -> str:
        """What somebody posted, or that the store cannot be reached; "" if there is nothing, or no answer yet."""
        self._asking = self._asking or _Call(self._ask)
        if not self._asking.ended():
            return ""
        told, self._asking = self._asking.told, None
        return told or ""

    def _ask(self) -> str:
        try:
            return self._store.get(self._name).decode() if self._store.check([self._name]) else ""
        except RuntimeError as error:
            return f"the job's store cannot be reached: {error}"


class _Call:
    """A call of the store on a thread of its own; ``told`` is what it returned."""

    def __init__(self, call: Callable[[], str | None]) -> None:
        self.told: str | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, name="ftckpt-store", daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Whether the call has ended, now or within moments."""
        self._thread.join(_PATIENCE_SECS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.told = self._call()
