"""How fast a rank may copy: the seam between the copier and the node that it shares."""

from __future__ import annotations

import threading
from typing import Protocol


class Budget(Protocol):
    """The node's budget for copies, as one rank sees it; see ``ftckpt.capture.node_budget``."""

    limited: bool
    """Whether ``pace`` holds copies back."""

    def start(self) -> None:
        """This rank copies from now on."""

    def stop(self) -> None:
        """It does not any more."""

    def pace(self, nbytes: int, begin: float, hurry: threading.Event) -> None:
        """Sleep until a copy that began at ``time.perf_counter()`` ``begin`` has taken the time it must."""

    def publish(self, bytes_per_sec: float) -> None:
        """What this rank measured."""

    def close(self) -> None:
        """Give up the place in it."""


class NoBudget:
    """Copies as fast as it goes."""

    limited = False

    def start(self) -> None:
        """See Budget."""

    def stop(self) -> None:
        """See Budget."""

    def pace(self, nbytes: int, begin: float, hurry: threading.Event) -> None:
        """See Budget."""

    def publish(self, bytes_per_sec: float) -> None:
        """See Budget."""

    def close(self) -> None:
        """See Budget."""
