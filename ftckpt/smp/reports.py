"""Parts of an SMP's status replies: protection, ranks, and the ages of marks."""

from __future__ import annotations

import base64
import time
import zlib
from typing import Any

from ftckpt.errors import SmpError
from ftckpt.memory.heartbeat import HeartbeatGauge, RankHeartbeat
from ftckpt.memory.inventory import NodeProtection
from ftckpt.memory.page import pid_of
from ftckpt.model import codec
from ftckpt.model.snapshot import SnapshotId

_MOST_BYTES = 64 << 20
"""Limit after decompression: hundreds of times the size for a node of eight large arenas."""


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


class MarkAge:
    """The snapshot that a mark in this node's arenas names, and since when."""

    def __init__(self) -> None:
        self._seen: tuple[float, SnapshotId] | None = None

    def note(self, snapshot: SnapshotId | None, now: float) -> None:
        """The mark names ``snapshot`` at ``now`` (``time.monotonic``)."""
        if snapshot is None:
            self._seen = None
        elif self._seen is None or self._seen[1] != snapshot:
            self._seen = now, snapshot

    def fields(self, now: float) -> dict[str, Any] | None:
        """``iteration`` and ``lineage`` of the snapshot; ``age_secs`` since it was first seen. None without one."""
        if self._seen is None:
            return None
        seen_at, snapshot = self._seen
        return {**snapshot.fields, "age_secs": round(now - seen_at, 3)}
