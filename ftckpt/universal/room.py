"""A bound on the memory of all workers together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """``nbytes`` that several threads divide among them."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._total = nbytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Wait until ``nbytes`` are left, and have them inside. Whoever has some waits for nobody, so that this ends.

        Raises:
            ValueError: so many never are.
        """
        if nbytes > self._total:
            raise ValueError(f"{nbytes} bytes of {self._total}")
        with self._changed:
            self._changed.wait_for(lambda: self._left >= nbytes)
            self._left -= nbytes
        try:
            yield
        finally:
            with self._changed:
                self._left += nbytes
                self._changed.notify_all()
