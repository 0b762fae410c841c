"""The thread that copies, and the one that takes checksums."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Set

from ftckpt.capture.affinity import pin

Cores = Set[int] | None
"""Where background threads run; None: anywhere."""


class Worker:
    """One daemon thread, on some cores if they are given, that runs jobs one after the other."""

    def __init__(self, name: str, cores: Cores = None) -> None:
        self._cores = cores
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Run ``job``, which must not raise, on the thread."""
        self._jobs.put(job)

    @property
    def waits(self) -> bool:
        """Whether a job waits for the one that runs."""
        return not self._jobs.empty()

    def close(self, timeout_secs: float = 10.0) -> bool:
        """End the thread; False when it is stuck in a copy, and left to die with the process."""
        self._jobs.put(None)
        self._thread.join(timeout_secs)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pin(self._cores)
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and what it holds, such as the memory of a slot
