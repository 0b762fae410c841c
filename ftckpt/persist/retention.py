"""Retention on storage: deletes old checkpoints, never one that is pinned or being read.

No write has to be atomic or conditional. A remover first marks the checkpoint void, then reads pins and readers, then
removes the manifest. A pinner or reader first writes its mark, then reads the void marks. On storage where a read
returns every write that finished before it, as on file systems and the usual object stores, at least one of two
concurrent processes sees the other: Dekker's order (E. W. Dijkstra, EWD 123, 1965), with an object per flag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ftckpt.errors import StorageError
from ftckpt.model.lineage import Lineage, is_doubtful, is_past, last_shared, newest
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import (
    PINS,
    READERS,
    READS,
    VOID,
    CheckpointName,
    checkpoints,
    claimed_lineage,
    committed,
    folder_of,
    latest,
    name_latest,
    read_manifest,
    readers,
)
from ftckpt.persist.shards import FORMAT, StoredSnapshot, is_sound
from ftckpt.persist.storage import Storage

VOID_MEANS = "about to be removed: no restart takes it"
"""The meaning of a void mark, for messages."""


def kept(iterations: Collection[int], keep: int) -> set[int]:
    """The iterations that stay: the newest ``keep``, or all if ``keep`` is 0."""
    return set(sorted(iterations)[-keep:])  # -0: all


def restorable(lineages: Mapping[CheckpointName, Lineage], head: Lineage) -> set[CheckpointName]:
    """The checkpoints that a start may restore without naming one: in the past of ``head`` and not doubtful."""
    return {
        name for name, lineage in lineages.items()
        if is_past(lineage, name.iteration, head) and not is_doubtful(lineage, name.iteration, head)
    }  # fmt: skip


def surplus(lineages: Mapping[CheckpointName, Lineage], head: Lineage, keep: int) -> set[CheckpointName]:
    """The checkpoints to remove, of those with these lineages.

    Of restorable ones ``kept`` stay. An abandoned one is removed once the branch that abandoned it has ``keep``
    restorable ones, a doubtful one once there are ``keep`` after it.
    """
    counting = restorable(lineages, head)
    stay = kept([name.iteration for name in counting], keep)
    gone = {name for name in counting if name.iteration not in stay}
    for name in lineages.keys() - counting:
        since = min(name.iteration, last_shared(lineages[name], head))
        if 0 < keep <= sum(one.iteration > since for one in counting):
            gone.add(name)
    return gone


def readable(storage: Storage) -> dict[CheckpointName, StoredSnapshot]:
    """The readable manifests of checkpoints, newest first. Raises StorageError if storage fails."""
    found = {name: committed(storage, name) for name in checkpoints(storage)}
    return {name: stored for name, stored in found.items() if stored is not None}


def usable(storage: Storage) -> dict[CheckpointName, StoredSnapshot]:
    """The manifests of the checkpoints that a start may restore without naming one, newest first.

    Raises:
        StorageError: storage fails, the head of the job is damaged, or none is recorded and a manifest that may be
            of it is unreadable.
    """
    void, names, claimed = voided(storage), checkpoints(storage), claimed_lineage(storage)
    found = {name: stored for name in names if (stored := committed(storage, name)) is not None}
    lineages = {name: stored.lineage for name, stored in found.items()}
    head = newest([claimed, *lineages.values()])
    for name in names:
        # One that was set aside has its generation in its name.
        if name not in found and not claimed.branches and not 0 < name.generation < head.generation:
            _require_readable(storage, name)
    certain = restorable(lineages, head)
    return {name: stored for name, stored in found.items() if name in certain and stored.snapshot not in void}


def _require_readable(storage: Storage, name: CheckpointName) -> None:
    """Raises StorageError if the manifest of ``name``, by which others may be abandoned, exists and is unreadable."""
    try:
        read_manifest(storage, name)
    except StorageError as error:
        if storage.size(name.manifest) is not None:
            text = "abandoned checkpoints are unknown without it; name the one to load, or move its folder away"
            raise StorageError(f"{error}: {text}", lasting=error.lasting) from None


def pin(storage: Storage, name: CheckpointName) -> bool:
    """Pins a checkpoint: no run removes or replaces it from then on. Whether it is void, so that a run may be
    removing it at this moment.

    Raises:
        StorageError: it does not exist, its manifest is unreadable, or storage fails.
    """
    was_pinned = storage.size(_pin(name)) is not None
    storage.put(_pin(name), b"pinned\n")
    # Void marks before the manifest: a remover removes the manifest before its mark.
    void = voided(storage)
    try:
        return read_manifest(storage, name).snapshot in void
    except StorageError as error:
        is_there = not error.lasting or name in checkpoints(storage)
        if not (is_there and was_pinned):
            unpin(storage, name)
        state = "stays pinned, but" if was_pinned else "is not pinned"
        text = f"{name} {state}: {error}" if is_there else f"{storage.where}: there is no checkpoint {name}"
        raise StorageError(text, lasting=error.lasting) from None


def unpin(storage: Storage, name: CheckpointName) -> bool:
    """Unpins a checkpoint; whether it was pinned."""
    was_pinned = storage.size(_pin(name)) is not None
    storage.remove([_pin(name)])
    return was_pinned


def pinned(storage: Storage) -> set[CheckpointName]:
    """The names of pinned checkpoints; some may not exist."""
    found = (CheckpointName.parse(name) for name in _below(storage, PINS))
    return {name for name in found if name is not None}


def hold(storage: Storage, reader: str) -> None:
    """Marks that a restart reads: no checkpoint is removed or replaced until ``let_go``, or until a run claims the
    storage. The restart must call ``voided`` after this, and not read those."""
    storage.put(f"{READERS}/{reader}", READS)


def let_go(storage: Storage, reader: str) -> None:
    """Removes the mark of ``hold``."""
    storage.remove([f"{READERS}/{reader}"])


def void(storage: Storage, snapshots: Collection[SnapshotId]) -> None:
    """Marks checkpoints void: no restart reads them, and they may be removed."""
    for snapshot in snapshots:
        storage.put(_void(snapshot), b"void\n")


def voided(storage: Storage) -> set[SnapshotId]:
    """The snapshots marked void; some may be removed already."""
    return void_of(_below(storage, VOID))


def void_of(names: Iterable[str]) -> set[SnapshotId]:
    """The snapshots marked by objects of these ``names`` in the folder ``VOID``."""
    found = set()
    for name in names:
        try:
            found.add(SnapshotId.parse(name))
        except ValueError:
            continue  # not written by ftckpt
    return found


def forget_void(storage: Storage, snapshots: Collection[SnapshotId]) -> None:
    """Removes void marks."""
    storage.remove([_void(snapshot) for snapshot in snapshots])


def set_aside(storage: Storage, snapshot: SnapshotId) -> None:
    """Renames a checkpoint of another branch that has the iteration of ``snapshot`` after its generation: the caller
    replaces its manifest. An unreadable one is not preserved.

    Raises:
        StorageError: it is unreadable and pinned, or not ftckpt's; or storage fails.
    """
    name = CheckpointName(snapshot.iteration)
    if storage.size(name.manifest) is None:
        return
    stored, is_pinned = committed(storage, name), name in pinned(storage)
    if stored is not None and stored.snapshot == snapshot:
        return
    if stored is None:
        data = storage.read(name.manifest)
        if FORMAT.encode() not in data or is_sound(data):  # of another program, or of another iteration
            text = "was not written by ftckpt: move its folder away"
            raise StorageError(f"{storage.where}/{name.manifest}: {text}", lasting=True)
        if is_pinned:
            text = f"{storage.where}: {name} cannot be read and is pinned"
            raise StorageError(f"{text}: 'ftckpt pin --remove' lets the new checkpoint replace it", lasting=True)
        return
    aside = CheckpointName(name.iteration, max(1, stored.lineage.generation))
    # New manifest, new pin, then unpin: at each instant the checkpoint is committed and pinned under one name.
    storage.put(aside.manifest, stored.encode())
    if is_pinned:
        storage.put(_pin(aside), b"pinned\n")
        unpin(storage, name)


def retain(
    storage: Storage, snapshot: SnapshotId, head: Lineage, keep: int, owns: Callable[[], bool] = lambda: True
) -> list[CheckpointName]:
    """Removes the ``surplus`` of a job whose newest checkpoint is ``snapshot``, and makes ``latest`` name the newest
    restorable one; returns the names of those removed. Unreadable checkpoints stay.

    Args:
        head: the job's head.
        owns: see ``retire``.
    """
    there = readable(storage)
    lineages = {name: stored.lineage for name, stored in there.items()}
    doomed = {
        name: there[name].snapshot for name in surplus(lineages, head, keep) if there[name].snapshot != snapshot
    }
    if not owns():
        return []
    # ``latest`` may name a checkpoint of an abandoned branch, or one in doubt by now.
    newest_restorable = max((name.iteration for name in restorable(lineages, head)), default=snapshot.iteration)
    if latest(storage) != newest_restorable:
        name_latest(storage, newest_restorable)
    committed_now = {stored.snapshot for stored in there.values()}
    forget_void(storage, [one for one in voided(storage) if one not in committed_now])
    return retire(storage, doomed, newest_restorable, owns) if doomed else []


def retire(
    storage: Storage, doomed: Mapping[CheckpointName, SnapshotId], newest: int, owns: Callable[[], bool]
) -> list[CheckpointName]:
    """Removes the ``doomed`` checkpoints; returns those removed. Pinned ones stay; while a restart reads, all stay.

    Args:
        newest: the newest iteration, not doomed, which ``latest`` is to name.
        owns: whether the claim is still the caller's; called before each removal. Storage has no conditional removal:
            if the caller stalls between this check and the removal while another run claims the storage, restores
            and commits the same iteration, it removes that run's manifest. This is the only way to lose a
            checkpoint, as all other names contain their lineage.
    """
    name_latest(storage, newest)
    stay = pinned(storage)
    going = {} if readers(storage) else {name: one for name, one in doomed.items() if name not in stay}
    void(storage, going.values())
    # Read again after the void marks: a process that has pinned or started to read meanwhile has not seen them.
    stay, read, gone = pinned(storage), readers(storage), list[CheckpointName]()
    for name, snapshot in sorted(going.items()):
        if read or name in stay:
            continue
        if not owns():
            return gone
        remove(storage, name, snapshot)
        gone.append(name)
    forget_void(storage, going.values())
    return gone


def remove(storage: Storage, name: CheckpointName, snapshot: SnapshotId) -> None:
    """Removes a checkpoint: its manifest, then its files, so that after a kill it is either committed or absent;
    ``commit.sweep`` removes leftover files.

    Raises:
        StorageError: it is the only checkpoint, or another has its name now; or storage fails.
    """
    every = checkpoints(storage)
    # A kill in ``set_aside`` leaves it with two names.
    beside = [one for one in every if one.iteration == name.iteration]
    names = [name, *(one for one in beside if (it := committed(storage, one)) and it.snapshot == snapshot)]
    others = [one for one in every if one not in names]
    if not others:
        raise StorageError(f"{storage.where}: {name} is not removed: it is the only checkpoint", lasting=True)
    stored, folder = read_manifest(storage, name), folder_of(name.iteration)
    if stored.snapshot != snapshot:
        raise StorageError(f"{storage.where}: {name} is now of another branch of the job", lasting=True)
    if latest(storage) == name.iteration and all(one.iteration != name.iteration for one in others):
        name_latest(storage, others[0].iteration)
    storage.remove(sorted({one.manifest for one in names}))  # first: this makes it absent
    storage.remove([f"{folder}/{shard.file}" for shard in stored.shards.values()])


def _below(storage: Storage, folder: str) -> Sequence[str]:
    return [entry.name.removeprefix(f"{folder}/") for entry in storage.list(folder)]


def _pin(name: CheckpointName) -> str:
    return f"{PINS}/{name}"


def _void(snapshot: SnapshotId) -> str:
    return f"{VOID}/{snapshot}"
