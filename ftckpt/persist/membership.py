"""Membership of a job's nodes without trainers, published on storage by their SMPs."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ftckpt.errors import StorageError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.storage import Storage, content

_FOLDER = "holdings"
_BEAT_SECS = 1.0
_FIELDS = {"owner", "beat", "held"}


class MembershipEntry(NamedTuple):
    """The entry of a node: ``beat`` changes with each renewal; it has its part of all ``snapshots``."""

    beat: str
    snapshots: frozenset[SnapshotId]


class Membership:
    """The entry of ``node`` among those of all ``nodes`` of the run ``owner``.

    All methods raise StorageError if storage fails, and can be retried.
    """

    def __init__(
        self, storage: Storage, node: str, nodes: Sequence[str], owner: str, snapshots: Collection[SnapshotId]
    ) -> None:
        self._storage, self._node, self._nodes, self._owner = storage, node, nodes, owner
        self._snapshots = frozenset(snapshots)
        self._name, self._number, self._renewed_secs = secrets.token_hex(4), 0, 0.0
        self._first: dict[str, str] | None = None

    def beat(self) -> None:
        """Renew this node's entry, at most once a second."""
        if time.monotonic() - self._renewed_secs >= _BEAT_SECS:
            self._number += 1
            beat, held = f"{self._name}-{self._number}", sorted(map(str, self._snapshots))
            entry = {"owner": self._owner, "beat": beat, "held": held}
            self._storage.put(_name(self._node), json.dumps(entry).encode())
            self._renewed_secs = time.monotonic()

    def present(self) -> dict[str, frozenset[SnapshotId]]:
        """The snapshots of each node that has renewed its entry since the first call."""
        found = self._read()
        if self._first is None:
            self._first = {node: member.beat for node, member in found.items()}
        renewed = {node: one.snapshots for node, one in found.items() if one.beat != self._first.get(node)}
        return {**renewed, self._node: self._snapshots}

    def all_have(self, snapshot: SnapshotId) -> bool:
        """Whether every node has an entry with ``snapshot``, recent or not: nodes leave once it is on storage."""
        found = self._read()
        return all(node in found and snapshot in found[node].snapshots for node in self._nodes)

    def leave(self) -> None:
        """Remove this node's entry."""
        _forget(self._storage, [_name(self._node)])

    def _read(self) -> dict[str, MembershipEntry]:
        found = {}
        for node in self._nodes:
            if (data := content(self._storage, _name(node))) is None:
                continue
            try:
                entry = json.loads(data)
                if entry["owner"] == self._owner:
                    found[node] = MembershipEntry(str(entry["beat"]), frozenset(map(SnapshotId.parse, entry["held"])))
            except (KeyError, TypeError, ValueError):
                text = "is damaged; remove it"
                raise StorageError(f"{self._storage.where}/{_name(node)}: {text}", lasting=True) from None
        return found


def forget_members(storage: Storage) -> None:
    """Removes the entries of all nodes."""
    _forget(storage, [entry.name for entry in storage.list(_FOLDER)])


def _forget(storage: Storage, names: Sequence[str]) -> None:
    storage.remove([name for name in names if _is_entry(content(storage, name))])


def _is_entry(data: bytes | None) -> bool:
    try:
        entry = json.loads(data or b"")
    except ValueError:
        return False
    return isinstance(entry, dict) and entry.keys() == _FIELDS


def _name(node: str) -> str:
    return f"{_FOLDER}/{node}.json"
