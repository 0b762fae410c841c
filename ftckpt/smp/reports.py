"""Parts of an SMP's status replies: protection, ranks, and the history of marks."""

from __future__ import annotations

import base64
import time
import zlib
from collections import deque
from typing import Any

from ftckpt.errors import SmpError
from ftckpt.memory.heartbeat import HeartbeatGauge, RankHeartbeat
from ftckpt.memory.inventory import NodeProtection
from ftckpt.memory.page import pid_of
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId

_MOST_BYTES = 64 << 20
"""Limit after decompression: hundreds of times the size for a node of eight large arenas."""
_REMEMBERED = 32


def packed(protection: NodeProtection) -> str:
    """Encode and compress it as text for a reply: groups of large arenas are repetitive."""
    return base64.b64encode(zlib.compress(codec.encode(protection), 1)).decode()


def unpacked(text: str) -> NodeProtection:
    """Decode the output of ``packed``.

    Raises:
        SmpError: invalid text.
    """
    try:
        inflated = zlib.decompressobj()
        data = inflated.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
        return codec.decode(data, NodeProtection)
    except (ValueError, zlib.error) as error:
        raise SmpError(f"its description of the protection is invalid: {error}") from None


def rank_report(pulse: RankHeartbeat) -> dict[str, Any]:
    """The state of a rank: ``iteration`` of its last step boundary, ``step_secs`` since then, ``secs`` since its last
    heartbeat, ``iteration_secs`` of the iteration before (null: unknown), and ``counts`` by ``HeartbeatGauge``."""
    now_ns = time.monotonic_ns()
    return {
        "rank": pulse.rank if pulse.rank >= 0 else None,
        "place": pulse.place,
        "pid": pid_of(pulse.owner),
        "iteration": pulse.iteration,
        "phase": pulse.phase,
        "secs": round(max(0, now_ns - pulse.beat_ns) / 1e9, 3),
        "step_secs": round(max(0, now_ns - pulse.began_ns) / 1e9, 3) if pulse.began_ns else None,
        "iteration_secs": pulse.last_ns / 1e9 if pulse.last_ns else None,
        "lives": pulse.lives,
        "counts": {count.label: pulse.counts[count] for count in HeartbeatGauge},
    }


class MarkHistory:
    """History of a mark in this node's arenas, sampled every ``look_secs``."""

    def __init__(self, look_secs: float) -> None:
        self._look_secs = look_secs
        self._seen: deque[tuple[float, SnapshotId]] = deque(maxlen=_REMEMBERED)

    def note(self, snapshot: SnapshotId | None, now: float) -> None:
        """Add a sample: the mark names ``snapshot`` at ``now`` (``time.monotonic``)."""
        if snapshot is None or (self._seen and snapshot.lineage != self._seen[-1][1].lineage):
            self._seen.clear()  # the history before a restart is irrelevant
        if snapshot is not None and (not self._seen or self._seen[-1][1] != snapshot):
            self._seen.append((now, snapshot))

    def fields(self, now: float) -> dict[str, Any] | None:
        """``iteration`` and ``lineage`` of the newest snapshot; ``age_secs`` since it was first seen; ``every_secs``
        and ``every_iterations`` between snapshots, null if unknown. None without a snapshot."""
        if not self._seen:
            return None
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        steps = len(self._seen) - 1
        every_secs = (last_at - first_at) / steps if steps else 0.0
        # Shorter intervals than the sampling miss snapshots.
        known = every_secs > 2 * self._look_secs
        return {
            **last.fields, "age_secs": round(now - last_at, 3), "every_secs": round(every_secs, 3) if known else None,
            "every_iterations": (last.iteration - first.iteration) / steps if known else None,
        }  # fmt: skip
