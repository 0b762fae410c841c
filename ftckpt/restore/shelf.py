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
from ftckpt.model.failures import LastAttempt
from ftckpt.model.loaded import NOTHING, Checkpoint, is_undone
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist import commit, retention
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage, open_storage, patiently

_NEWEST = 10
"""Snapshots on storage that a restart looks at: should all of them be bad, older ones are for people to choose."""

_PATIENCE_SECS = 30.0
"""How long a restart tries what storage does not give: less than ranks wait for each other."""

T = TypeVar("T")


@dataclass(frozen=True)
class Shelf:
    """The newest snapshots on storage, newest first, the same on all ranks; none without storage."""

    storage: Storage | None = None
    snapshots: tuple[StoredSnapshot, ...] = ()
    problem: str = ""
    """Why there may be more than can be seen."""
    is_away: bool = False
    """Whether that passes: what cannot be seen now may be seen by a later start."""
    reader: str = ""
    """As whom this restart keeps what is there from being removed."""
    last: LastAttempt | None = None
    """The last attempt of the job, as storage knows of it."""
    bad: tuple[int, ...] = ()
    """Iterations that have proven bad."""

    def close(self) -> None:
        """What this restart has not read it reads no more."""
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
        return LostError(f"what is on storage cannot be seen: {self.problem}") if self.problem else None

    def require_seen(self) -> None:
        """Nothing older than what memory last called whole may be gone on from before storage was seen: it may have
        something newer, which the next checkpoint would count as undone, and remove.

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

    @property
    def origins(self) -> list[Checkpoint]:
        """What the snapshots went on from."""
        return [one.origin for one in self.snapshots]

    def without_undone(self, origin: Checkpoint) -> Shelf:
        """Without snapshots of a history that was undone since."""
        left = (one for one in self.snapshots if not is_undone(one.origin, origin, one.snapshot.iteration))
        return replace(self, snapshots=tuple(left))

    def before(self, iteration: int) -> Shelf:
        """Without snapshots of this iteration and behind it."""
        return replace(self, snapshots=tuple(one for one in self.snapshots if one.snapshot.iteration < iteration))

    def without(self, snapshot: SnapshotId) -> Shelf:
        """Without a snapshot that has proven bad."""
        left = tuple(one for one in self.snapshots if one.snapshot != snapshot)
        return replace(self, snapshots=left, bad=(*self.bad, snapshot.iteration))

    def void_from(self, iteration: int, owner: str, job: str = "") -> list[SnapshotId]:
        """No later start takes what storage has of this iteration and behind it; returns what that is. Called by one
        rank, for the run ``owner`` of ``job``.

        Raises:
            StorageError: storage fails, or cannot be seen.
        """
        if self.storage is None:
            text = "--ftckpt-restore-before: storage cannot be seen, and what is newer there not be undone"
            raise StorageError(f"{text}: {self.problem}", lasting=True)
        storage, undone = self.storage, list[SnapshotId]()
        # First: an SMP of an earlier run may be about to commit what is undone here, which cannot be seen yet. What
        # is known of failures stays: this run tells of its own when it trains.
        failures = self.last.record if self.last is not None else None
        ask(lambda: commit.claim(storage, owner, job, failures))
        if self.reader:  # to a claim all readers are killed ones
            ask(lambda: retention.hold(storage, self.reader))
        for number in ask(lambda: commit.committed(storage)):
            if number >= iteration:
                try:
                    undone.append(_manifest(storage, number).snapshot)
                except StorageError as error:
                    if not error.lasting:
                        raise  # what is damaged no start can take
        ask(lambda: retention.void(storage, undone))
        return undone

    @property
    def newest(self) -> int:
        """The newest iteration, -1 for none."""
        return max((one.snapshot.iteration for one in self.snapshots), default=-1)


NO_SHELF = Shelf()


class Look(NamedTuple):
    """What one rank sees of storage: why it cannot reach it, and the length of what it is to tell the others."""

    away: str
    length: int


class ShelfLook:
    """How ranks look at storage, one for all of them: ``see`` on each, ``join`` with what all have seen."""

    def __init__(
        self, group: Group, where: str, events: Events, before: int = 0, job: str = "", *,
        origin: Callable[[], Checkpoint] = lambda: NOTHING,
    ) -> None:  # fmt: skip
        self._group, self._events, self._origin = group, events, origin
        self._where, self._before, self._job = where, before, job
        self._storage: Storage | None = None
        self._told = b""

    @property
    def _reader(self) -> str:
        return self._group.name.rpartition("/")[2]

    def see(self) -> Look:
        """Whether this rank can reach storage; the first looks what is there, of which nothing is removed from here
        on.

        Raises:
            StorageError: it cannot, and trying again is of no use.
        """
        if not self._where:
            return Look("", 0)
        self._storage, away = _open(self._where)
        if self._storage is not None and self._group.rank == 0:
            _require_own(self._storage)
            _hold(self._storage, self._reader, self._events)
            texts, problem, is_away = _read(self._storage, self._events, self._before, self._origin())
            found = texts, problem, is_away, self._last_attempt(self._storage)
            self._told = codec.encode(found)
        return Look(away, len(self._told))

    def join(self, seen: Sequence[Look]) -> Shelf:
        """What is there; with ``before`` the newest before that iteration, too. Collective."""
        if not self._where:
            return NO_SHELF
        leads = self._group.rank == 0
        if away := next((one.away for one in seen if one.away), ""):
            self._events.emit("storage_fails", error=away)  # memory may do
            if leads and self._storage is not None:
                with suppress(StorageError):
                    retention.let_go(self._storage, self._reader)
            return Shelf(problem=away, is_away=True)
        # The length is known: a broadcast takes as many bytes on all ranks.
        data = self._group.broadcast(self._told.ljust(max(one.length for one in seen), b" "))
        texts, problem, is_away, last = codec.decode(data, tuple[list[str], str, bool, LastAttempt | None])
        snapshots = tuple(StoredSnapshot.decode(text.encode(), self._where) for text in texts)
        return Shelf(self._storage, snapshots, problem, is_away, self._reader if leads else "", last)

    def _last_attempt(self, storage: Storage) -> LastAttempt | None:
        try:
            return ask(lambda: last_attempt(storage, self._job))
        except StorageError as error:
            self._events.emit("storage_fails", error=f"failures of the job are not known: {error}")
            return None


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


def _read(
    storage: Storage, events: Events, before: int, origin: Checkpoint = NOTHING
) -> tuple[list[str], str, bool]:  # fmt: skip
    """The newest manifests that count, those before an iteration among them, why there may be more, and whether a
    later start may see them.

    What never happened, as far as ``origin`` says, is among them, but in the place of none that counts.
    """
    texts, problem, is_away = list[str](), "", False
    try:
        void = ask(lambda: retention.voided(storage))
        there = ask(lambda: commit.committed(storage))
        wanted = [_NEWEST, _NEWEST if before else 0]  # of all, of those before it
        for iteration in there:
            is_older = iteration < before
            if wanted[0] <= 0 and not (is_older and wanted[1] > 0):
                continue
            try:
                stored = _manifest(storage, iteration)
            except StorageError as error:
                if not error.lasting:
                    raise
                events.emit("storage_damaged", iteration=iteration, error=str(error))
                problem = problem or str(error)
            else:
                if stored.snapshot in void:
                    continue
                texts.append(stored.encode().decode())
                if is_undone(stored.origin, origin, iteration):
                    continue
            wanted = [wanted[0] - 1, wanted[1] - is_older]
    except StorageError as error:
        events.emit("storage_fails", error=str(error))
        problem, is_away = str(error), not error.lasting
    return texts, problem, is_away


def _manifest(storage: Storage, iteration: int) -> StoredSnapshot:
    return ask(lambda: retention.read_manifest(storage, iteration))


def ask(action: Callable[[], T]) -> T:
    """What storage answers, asked as long as a restart may wait; raises StorageError."""
    return patiently(action, _PATIENCE_SECS)
