"""How long the network takes for a target: by its bytes and the rate that is allowed, or the one that is measured."""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.model.text import human_secs
from ftckpt.smp.link import NetworkLimit
from ftckpt.units import in_words

MARGIN = 4
"""A target may take this many times its forecast: training comes first on both sides, up to half of the time each."""


def too_slow(limit: NetworkLimit, nbytes: int, mtbf_secs: float) -> tuple[str, str] | None:
    """Why a target of ``nbytes`` cannot be protected before the next failure is due, and the remedy; None: it can."""
    secs = limit.secs(nbytes)
    if secs <= mtbf_secs:
        return None
    why = f"protecting one takes {human_secs(secs)}, and memory is lost once in {human_secs(mtbf_secs)}"
    return why, f"--ftckpt-network-rate {in_words(MARGIN * nbytes / mtbf_secs)}"


@dataclass
class Forecast:
    """The seconds that a target of ``due_bytes`` takes, by the rate at which the last ones came where that is lower.

    A rate is measured from the first to the last arrival: a node that sends nothing prolongs no deadline.
    """

    due_bytes: int
    limit: NetworkLimit
    mtbf_secs: float
    _first: tuple[float, int] | None = None
    _received: int = -1
    _measured_secs: float = 0.0

    def begin(self) -> None:
        """A target begins; what was measured of the one before it counts until more is known."""
        self._first, self._received = None, -1

    def note(self, received_bytes: int, now_secs: float) -> None:
        """``received_bytes``: a counter of all that came so far."""
        if self._received < 0:
            self._received = received_bytes
        if received_bytes == self._received:
            return
        self._received = received_bytes
        if self._first is None:
            self._first = now_secs, received_bytes
        else:
            since_secs, before = self._first
            self._measured_secs = (now_secs - since_secs) * self.due_bytes / (received_bytes - before)

    @property
    def wait_secs(self) -> float:
        """The time after which a target is given up, where that is longer than ``protect_timeout_secs``."""
        secs = max(self.limit.secs(self.due_bytes), self._measured_secs if self.due_bytes else 0.0)
        return min(MARGIN * secs, self.mtbf_secs)
