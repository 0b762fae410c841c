"""Nodes of a job without ranks tell each other through storage that they are there, and which snapshots they hold.

What a node has written counts while it goes on writing: one that is lost may have written before.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection

from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit
from ftckpt.persist.storage import Storage
from ftckpt.smp.flush import FlushOrders

_BEAT_SECS = 1.0


class RollCall:
    """One node's part in it; ``held`` are the snapshots of which it has all its shards.

    All methods but ``leave`` raise StorageError where storage fails; they may be called again.
    """

    def __init__(self, storage: Storage, orders: FlushOrders, held: Collection[SnapshotId]) -> None:
        self._storage, self._orders, self._held = storage, orders, set(held)
        self._name, self._number, self._told = secrets.token_hex(4), 0, 0.0
        self._first: dict[str, str | None] | None = None

    def beat(self) -> None:
        """Write that this node is there, once a second at most."""
        if time.monotonic() - self._told >= _BEAT_SECS:
            self._number += 1
            beat = f"{self._name}-{self._number}"
            commit.tell_holdings(self._storage, self._orders.node, self._orders.owner, self._held, beat)
            self._told = time.monotonic()

    def present(self) -> dict[str, set[SnapshotId]]:
        """What each node holds that has written since the first call."""
        told = self._read()
        if self._first is None:
            self._first = {node: beat for node, (beat, _) in told.items()}
        found = {node: held for node, (beat, held) in told.items() if beat != self._first.get(node)}
        return {**found, self._orders.node: self._held}

    def knew_all(self, snapshot: SnapshotId) -> bool:
        """Whether every node has written at some time that it holds ``snapshot``: once it is on storage they go."""
        told = self._read()
        return all(node in told and snapshot in told[node][1] for node in self._orders.nodes)

    def leave(self) -> None:
        """Withdraw what this node has written."""
        commit.forget_holdings(self._storage, self._orders.node)

    def _read(self) -> dict[str, tuple[str, set[SnapshotId]]]:
        return commit.holdings(self._storage, self._orders.nodes, self._orders.owner)
