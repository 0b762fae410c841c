"""What an SMP tells of its node to those who ask what a restart would take."""

from __future__ import annotations

import base64
import time
import zlib
from collections import deque
from typing import Any

from ftckpt.errors import SmpError
from ftckpt.memory.heartbeat import HeartbeatGauge, RankHeartbeat
from ftckpt.memory.page import pid_of
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId
from ftckpt.restore.inventory import NodeProtection

_MOST_BYTES = 64 << 20
"""Of what is unpacked: hundreds of times what a node of eight large arenas has."""
_REMEMBERED = 32


def packed(protection: NodeProtection) -> str:
    """As text of a reply; groups of large arenas repeat themselves."""
    return base64.b64encode(zlib.compress(codec.encode(protection), 1)).decode()


def unpacked(text: str) -> NodeProtection:
    """Inverse of ``packed``.

    Raises:
        SmpError: it is none.
    """
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        return codec.decode(data, NodeProtection)
    except (ValueError, zlib.error) as error:
        raise SmpError(f"what it says protects the snapshot is unusable: {error}") from None


def rank_report(pulse: RankHeartbeat) -> dict[str, Any]:
    """Where a rank is: ``iteration`` is that of its last boundary, ``secs`` count from its last heartbeat; and its
    ``counts`` by ``HeartbeatGauge``."""
    return {
        "rank": pulse.rank if pulse.rank >= 0 else None,
        "place": pulse.place,
        "pid": pid_of(pulse.owner),
        "iteration": pulse.iteration,
        "phase": pulse.phase,
        "secs": round(max(0, time.monotonic_ns() - pulse.beat_ns) / 1e9, 3),
        "lives": pulse.lives,
        "counts": {count.label: pulse.counts[count] for count in HeartbeatGauge},
    }


class MarkHistory:
    """Which snapshots a mark of this node's arenas has named, and when, by looks ``look_secs`` apart."""

    def __init__(self, look_secs: float) -> None:
        self._look_secs = look_secs
        self._seen: deque[tuple[float, SnapshotId]] = deque(maxlen=_REMEMBERED)

    def note(self, snapshot: SnapshotId | None, now: float) -> None:
        """The mark names ``snapshot`` at ``now`` (``time.monotonic``)."""
        if snapshot is None or (self._seen and snapshot.lineage != self._seen[-1][1].lineage):
            self._seen.clear()  # what was before a restart says nothing of what is now
        if snapshot is not None and (not self._seen or self._seen[-1][1] != snapshot):
            self._seen.append((now, snapshot))

    def fields(self, now: float) -> dict[str, Any] | None:
        """``iteration`` and ``lineage`` of the newest; ``age_secs``: since it was first seen; ``every_secs`` and
        ``every_iterations``: from one to the next, null where that is unknown. None where there is none."""
        if not self._seen:
            return None
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        steps = len(self._seen) - 1
        every_secs = (last_at - first_at) / steps if steps else 0.0
        # What comes more often than anybody looks was not seen each time.
        known = every_secs > 2 * self._look_secs
        return {
            **last.fields, "age_secs": round(now - last_at, 3), "every_secs": round(every_secs, 3) if known else None,
            "every_iterations": (last.iteration - first.iteration) / steps if known else None,
        }  # fmt: skip
