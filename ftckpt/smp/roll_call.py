"""Nodes of a job without ranks tell each other through storage that they are there, and what they hold.

What a node has said counts while it goes on saying it: one that was lost may have spoken before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit
from ftckpt.persist.storage import Storage

_BEAT_SECS = 1.0


class RollCall:
    """One node's part in it, for the run ``owner``; ``held`` are the snapshots of which it has all its shards.

    All methods but ``leave`` raise StorageError where storage fails; they may be called again.
    """

    def __init__(self, storage: Storage, node: str, owner: str, held: Collection[SnapshotId]) -> None:
        self._storage, self._node, self._owner, self._held = storage, node, owner, set(held)
        self._name, self._number, self._told = secrets.token_hex(4), 0, 0.0
        self._first: dict[str, str | None] | None = None

    def beat(self) -> None:
        """Say it again, where it is time."""
        if time.monotonic() - self._told >= _BEAT_SECS:
            self._number += 1
            beat = f"{self._name}-{self._number}"
            commit.tell_holdings(self._storage, self._node, self._owner, self._held, beat)
            self._told = time.monotonic()

    def present(self, nodes: Collection[str]) -> dict[str, set[SnapshotId]]:
        """What those of ``nodes`` hold that have said something since the first call."""
        told = commit.holdings(self._storage, nodes, self._owner)
        if self._first is None:
            self._first = {node: beat for node, (beat, _) in told.items()}
        found = {node: held for node, (beat, held) in told.items() if beat != self._first.get(node)}
        return {**found, self._node: self._held}

    def told(self, nodes: Collection[str], snapshot: SnapshotId) -> set[str]:
        """Those of ``nodes`` that have ever said that they hold ``snapshot``: once that is on storage they go."""
        told = commit.holdings(self._storage, nodes, self._owner)
        return {node for node, (_, held) in told.items() if snapshot in held}

    def leave(self) -> None:
        """Say no more, and that nothing counts that was said."""
        commit.forget_holdings(self._storage, self._node)
