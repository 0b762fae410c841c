"""The snapshots on storage that a restart may take, as all ranks see them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
from ftckpt.persist.storage import Storage, patiently

_NEWEST = 10
"""Snapshots on storage that a restart reads about: should all of them be bad, older ones are for people to choose."""

_PATIENCE_SECS = 30.0
"""How long a restart tries what storage does not give: less than ranks wait for each other."""

T = TypeVar("T")


@dataclass(frozen=True)
class StorageCatalog:
    """The newest snapshots on storage, newest first, the same on all ranks; none without storage."""

    storage: Storage | None = None
    snapshots: tuple[StoredSnapshot, ...] = ()
    problem: str = ""
    """Why there may be more than can be seen."""
    is_away: bool = False
    """Whether that passes: what cannot be seen now may be seen by a later start."""
    reader: str = ""
    """As whom this restart keeps what is there from being removed."""
    lineage: Lineage = UNKNOWN
    """The head, as far as storage has recorded it."""
    named: StoredSnapshot | None = None
    """The one that ``Request.name`` names."""
    abandoned: tuple[str, ...] = ()
    """Names of checkpoints that are not in the past of the job."""
    bad: tuple[int, ...] = ()
    """Iterations that have proven bad."""

    def close(self) -> None:
        """Release the hold on what is there."""
        if self.storage is not None and self.reader:
            with suppress(StorageError):  # the claim of the run that follows does so, too
                retention.let_go(self.storage, self.reader)

    @property
    def lost(self) -> LostError | None:
        """What it means that nothing of it can be used, where memory has nothing either."""
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
        """Refuses to go on from less than what memory last called whole before storage was seen: storage may have
        something newer, which the next checkpoint would abandon.

        Raises:
            StorageError: on all ranks: it is away.
        """
        if self.is_away:
            away = StorageError(
                "memory does not have what the job came to, and storage, which may have it, cannot be seen: "
                f"{self.problem}; start again when it is back, or without --ftckpt-persist to do without it"
            )
            away.of_all_ranks = True
            raise away

    def selected(self, selection: Selection) -> StorageCatalog:
        """With the snapshots alone that a restart may take."""
        every = self.snapshots if self.named is None else (self.named, *self.snapshots)
        left = {one.snapshot: one for one in every if selection.takes(one.lineage, one.snapshot)}
        abandoned = [
            one.name for one in every
            if one.snapshot not in left and not is_past(one.lineage, one.snapshot.iteration, selection.assumed)
        ]  # fmt: skip
        return replace(self, snapshots=tuple(left.values()), abandoned=(*self.abandoned, *abandoned))

    def without(self, snapshot: SnapshotId) -> StorageCatalog:
        """Without a snapshot that has proven bad."""
        left = tuple(one for one in self.snapshots if one.snapshot != snapshot)
        return replace(self, snapshots=left, bad=(*self.bad, snapshot.iteration))

    @property
    def newest(self) -> int:
        """The newest iteration, -1 for none."""
        return max((one.snapshot.iteration for one in self.snapshots), default=-1)


NO_SHELF = StorageCatalog()


class StorageView(NamedTuple):
    """What one rank sees of storage: why it cannot reach it, and the length of what it is to tell the others."""

    away: str
    length: int


class _StorageContents(NamedTuple):
    """What rank 0 has read: names and manifests of the newest that count, the head that storage has recorded, names
    of those that do not count, name and manifest of the one that was named, why there may be more, and whether that
    passes."""

    manifests: list[tuple[str, str]]
    lineage: Lineage = UNKNOWN
    abandoned: tuple[str, ...] = ()
    named: tuple[str, str] = ("", "")
    problem: str = ""
    is_away: bool = False


class CatalogSurvey:
    """How ranks look at storage, one for all of them: ``see`` on each, ``join`` with what all have seen.

    ``lineage`` gives what rank 0's node knows of the head.
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
        """Whether this rank can reach storage; the first looks what is there, of which nothing is removed from here
        on.

        Raises:
            StorageError: it cannot, and trying again is of no use.
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
        """What is there. Collective."""
        if not self._where:
            return NO_SHELF
        leads = self._group.rank == 0
        if away := next((one.away for one in seen if one.away), ""):
            self._events.emit("storage_fails", error=away)  # memory may do
            if leads and self._storage is not None:
                with suppress(StorageError):
                    retention.let_go(self._storage, self._reader)
            return StorageCatalog(problem=away, is_away=True)
        # The length is known: a broadcast takes as many bytes on all ranks.
        data = self._group.broadcast(self._told.ljust(max(one.length for one in seen), b" "))
        found = codec.decode(data, _StorageContents)
        snapshots = tuple(self._decoded(*one) for one in found.manifests)
        return StorageCatalog(
            self._storage, snapshots, found.problem, found.is_away, self._reader if leads else "",
            lineage=newest([found.lineage, *(one.lineage for one in snapshots)]),
            named=self._decoded(*found.named) if found.named[0] else None, abandoned=found.abandoned,
        )  # fmt: skip

    def _decoded(self, name: str, manifest: str) -> StoredSnapshot:
        return replace(StoredSnapshot.decode(manifest.encode(), self._where), name=name)


def _open(where: str) -> tuple[Storage | None, str]:
    """Storage, or why it is away."""
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
    except StorageError as error:  # a place that is full can be read
        events.emit("storage_fails", error=f"it may remove what this restart reads: {error}")


def _read(storage: Storage, events: Events, request: Request, head: Lineage) -> _StorageContents:
    """The newest manifests that count, and of those before ``request.before`` as many, with what else is there."""
    found = _StorageContents([])
    try:
        void = ask(lambda: retention.voided(storage))
        head = newest([head, ask(lambda: commit.claimed_lineage(storage))])
        found = found._replace(lineage=head)
        wanted = [_NEWEST, _NEWEST if request.before else 0]  # of all, of those before it
        for name in ask(lambda: commit.checkpoints(storage)):
            is_older, is_named = name.iteration < request.before, str(name) == request.name
            if wanted[0] <= 0 and not (is_older and wanted[1] > 0) and not is_named:
                continue
            try:
                stored = ask(lambda name=name: retention.read_manifest(storage, name))  # type: ignore[misc]
            except StorageError as error:
                if not error.lasting:
                    raise
                events.emit("storage_damaged", iteration=name.iteration, error=str(error))
                found = found._replace(problem=found.problem or str(error))
            else:
                if stored.snapshot in void:
                    continue
                manifest = str(name), stored.encode().decode()
                if is_named:
                    found = found._replace(named=manifest)
                if not is_past(stored.lineage, name.iteration, head):
                    found = found._replace(abandoned=(*found.abandoned, str(name)))
                    continue
                found.manifests.append(manifest)
                if is_doubtful(stored.lineage, name.iteration, head):
                    continue  # a start takes it by name alone
            wanted = [wanted[0] - 1, wanted[1] - is_older]
    except StorageError as error:
        events.emit("storage_fails", error=str(error))
        found = found._replace(problem=str(error), is_away=not error.lasting)
    return found


def ask(action: Callable[[], T]) -> T:
    """What storage answers, asked as long as a restart may wait; raises StorageError."""
    return patiently(action, _PATIENCE_SECS)
