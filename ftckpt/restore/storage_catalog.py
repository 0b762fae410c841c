"""Catalog of the snapshots on storage that a restart may restore, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from ftckpt.errors import LostError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage, Request, Selection, is_doubtful, is_past, newest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit, retention
from ftckpt.persist.backend import open_storage
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage, patiently, pause_within

_NEWEST = 10
"""Maximum manifests that a restart reads: if all these snapshots are corrupt, users choose an older one by name."""

_PATIENCE_SECS = 30.0
"""Deadline of retries on storage: less than the time that ranks wait for each other."""

T = TypeVar("T")


@dataclass(frozen=True)
class StorageCatalog:
    """The newest snapshots on storage, newest first, the same on all ranks; none without storage."""

    storage: Storage | None = None
    snapshots: tuple[StoredSnapshot, ...] = ()
    problem: str = ""
    """The reason why there may be more snapshots; empty if all were read."""
    is_away: bool = False
    """Whether the problem is temporary: a later start may see more."""
    reader: str = ""
    """The name under which this restart holds checkpoints, so that none is removed."""
    lineage: Lineage = UNKNOWN
    """The newest head that storage has recorded."""
    named: StoredSnapshot | None = None
    """The snapshot that ``Request.name`` names."""
    abandoned: tuple[str, ...] = ()
    """Names of checkpoints that are not in the past of the head."""
    bad: tuple[int, ...] = ()
    """Iterations of corrupt snapshots."""

    def close(self) -> None:
        """Release the hold on checkpoints."""
        if self.storage is not None and self.reader:
            with suppress(StorageError):  # the claim of the next run releases it, too
                retention.let_go(self.storage, self.reader)

    @property
    def lost(self) -> LostError | None:
        """The error if neither memory nor this catalog has a usable snapshot; None if storage has none at all."""
        if there := [*self.bad, *(one.snapshot.iteration for one in self.snapshots)]:
            return LostError(
                f"none of the snapshots on storage ({', '.join(map(str, there))}) can be used; the log says why"
            )
        if self.abandoned:
            return LostError(
                f"storage has only checkpoints of abandoned branches ({', '.join(self.abandoned[:_NEWEST])}): name "
                "one with --ftckpt-restore-from"
            )
        return LostError(f"storage cannot be read: {self.problem}") if self.problem else None

    def require_seen(self) -> None:
        """Check that storage was read, before the job resumes from older state than it had: storage may have newer
        snapshots, which the next checkpoint would abandon.

        Raises:
            StorageError: on all ranks; storage is unavailable.
        """
        if self.is_away:
            away = StorageError(
                "memory lacks the newest snapshot, and storage, which may have it, is unavailable: "
                f"{self.problem}; start again when it is back, or without --ftckpt-persist to ignore it"
            )
            away.of_all_ranks = True
            raise away

    def selected(self, selection: Selection) -> StorageCatalog:
        """The catalog with only the snapshots that a restart may restore."""
        every = self.snapshots if self.named is None else (self.named, *self.snapshots)
        left = {one.snapshot: one for one in every if selection.takes(one.lineage, one.snapshot)}
        abandoned = [
            one.name for one in every
            if one.snapshot not in left and not is_past(one.lineage, one.snapshot.iteration, selection.assumed)
        ]  # fmt: skip
        return replace(self, snapshots=tuple(left.values()), abandoned=(*self.abandoned, *abandoned))

    def without(self, snapshot: SnapshotId) -> StorageCatalog:
        """The catalog without a corrupt snapshot."""
        left = tuple(one for one in self.snapshots if one.snapshot != snapshot)
        return replace(self, snapshots=left, bad=(*self.bad, snapshot.iteration))

    @property
    def newest(self) -> int:
        """The newest iteration; -1 for none."""
        return max((one.snapshot.iteration for one in self.snapshots), default=-1)


EMPTY_CATALOG = StorageCatalog()


class StorageView(NamedTuple):
    """One rank's view of storage: the reason why it is unavailable, and the length of the rank's encoded contents."""

    away: str
    length: int


@dataclass
class _StorageContents:
    """The contents that rank 0 has read: names and manifests of the newest snapshots in the past of the head, name
    and manifest of the requested one (``named``), and fields as in ``StorageCatalog``."""

    lineage: Lineage = UNKNOWN
    manifests: list[tuple[str, str]] = field(default_factory=list)
    abandoned: list[str] = field(default_factory=list)
    named: tuple[str, str] = ("", "")
    problem: str = ""
    is_away: bool = False


class CatalogSurvey:
    """The survey of storage, read by rank 0: ``see`` on each rank, then ``join`` with the results of all.

    ``lineage`` gives the head that rank 0's node has recorded.
    """

    def __init__(
        self, group: Group, where: str, events: Events, request: Request, *,
        lineage: Callable[[], Lineage] = lambda: UNKNOWN,
    ) -> None:  # fmt: skip
        self._group, self._events, self._lineage = group, events, lineage
        self._where, self._request = where, request
        self._storage: Storage | None = None
        self._told = b""

    @property
    def _reader(self) -> str:
        return self._group.name.rpartition("/")[2]

    def see(self) -> StorageView:
        """Open storage; rank 0 also holds its checkpoints, so that none is removed from here on, and reads them.

        Raises:
            StorageError: storage cannot be used, and retrying is useless.
        """
        if not self._where:
            return StorageView("", 0)
        self._storage, away = _open(self._where)
        if self._storage is not None and self._group.rank == 0:
            _require_own(self._storage)
            _hold(self._storage, self._reader, self._events)
            self._told = codec.encode(_read(self._storage, self._events, self._request, self._lineage()))
        return StorageView(away, len(self._told))

    def join(self, seen: Sequence[StorageView]) -> StorageCatalog:
        """The catalog of storage; empty, with the problem, if a rank cannot reach it. Collective."""
        if not self._where:
            return EMPTY_CATALOG
        leads = self._group.rank == 0
        if away := next((one.away for one in seen if one.away), ""):
            self._events.emit("storage_fails", error=away)  # memory may suffice
            if leads and self._storage is not None:
                with suppress(StorageError):
                    retention.let_go(self._storage, self._reader)
            return StorageCatalog(problem=away, is_away=True)
        # Padded: a broadcast needs equal sizes on all ranks.
        data = self._group.broadcast(self._told.ljust(max(one.length for one in seen), b" "))
        found = codec.decode(data, _StorageContents)
        snapshots = tuple(self._decoded(*one) for one in found.manifests)
        return StorageCatalog(
            self._storage, snapshots, found.problem, found.is_away, self._reader if leads else "",
            lineage=newest([found.lineage, *(one.lineage for one in snapshots)]),
            named=self._decoded(*found.named) if found.named[0] else None, abandoned=tuple(found.abandoned),
        )  # fmt: skip

    def _decoded(self, name: str, manifest: str) -> StoredSnapshot:
        return replace(StoredSnapshot.decode(manifest.encode(), self._where), name=name)


def _open(where: str) -> tuple[Storage | None, str]:
    """Storage, or the reason why it is unavailable for now."""
    try:
        return ask(lambda: open_storage(where, "--ftckpt-persist")), ""
    except StorageError as error:
        if error.lasting:
            raise
        return None, str(error)


def _require_own(storage: Storage) -> None:
    try:
        ask(lambda: commit.require_own(storage))
    except StorageError as error:
        if error.lasting:
            raise StorageError(f"--ftckpt-persist: {error}", lasting=True) from None


def _hold(storage: Storage, reader: str, events: Events) -> None:
    try:
        retention.hold(storage, reader)
    except StorageError as error:  # not fatal: full storage can be read
        events.emit("storage_fails", error=f"checkpoints may be removed while this restart reads them: {error}")


def _read(storage: Storage, events: Events, request: Request, head: Lineage) -> _StorageContents:
    """The newest manifests in the past of the head, and as many from before ``request.before``."""
    found = _StorageContents()
    try:
        void = ask(lambda: retention.voided(storage))
        found.lineage = head = newest([head, ask(lambda: commit.claimed_lineage(storage))])
        wanted = [_NEWEST, _NEWEST if request.before else 0]  # of all iterations, of those before ``request.before``
        for name in ask(lambda: commit.checkpoints(storage)):
            is_older, is_named = name.iteration < request.before, str(name) == request.name
            if wanted[0] <= 0 and not (is_older and wanted[1] > 0) and not is_named:
                continue
            try:
                stored = ask(lambda name=name: commit.read_manifest(storage, name))  # type: ignore[misc]
            except StorageError as error:
                if not error.lasting:
                    raise
                events.emit("storage_damaged", iteration=name.iteration, error=str(error))
                found.problem = found.problem or str(error)
            else:
                if stored.snapshot in void:
                    continue
                manifest = str(name), stored.encode().decode()
                if is_named:
                    found.named = manifest
                if not is_past(stored.lineage, name.iteration, head):
                    found.abandoned.append(str(name))
                    continue
                found.manifests.append(manifest)
                if is_doubtful(stored.lineage, name.iteration, head):
                    continue  # restored only by name: it does not count toward ``wanted``
            wanted = [wanted[0] - 1, wanted[1] - is_older]
    except StorageError as error:
        events.emit("storage_fails", error=str(error))
        found.problem, found.is_away = str(error), not error.lasting
    return found


def ask(action: Callable[[], T]) -> T:
    """The result of ``action``, retried until a restart's deadline; raises StorageError."""
    return patiently(action, pause_within(_PATIENCE_SECS))
