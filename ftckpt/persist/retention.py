"""Retention on storage: deletes old checkpoints, never one that is pinned or being read.

No write has to be atomic or conditional. Whoever removes a checkpoint marks it void first, then
looks for pins and readers, and takes its manifest last. Whoever pins one, or reads there, says so first, and then
looks for what is void. Of two that do so at the same moment at least one sees the other, wherever a read gives what
was written before it began, as with files and the usual object stores: Dekker's order (E. W. Dijkstra, EWD 123,
1965), with an object for each flag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ftckpt.errors import StorageError
from ftckpt.model.lineage import Lineage, is_doubtful, is_past, last_shared
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import (
    PINS,
    READERS,
    READS,
    VOID,
    CheckpointName,
    checkpoints,
    folder_of,
    latest,
    name_latest,
    readers,
)
from ftckpt.persist.shards import FORMAT, StoredSnapshot, files_of
from ftckpt.persist.storage import Storage

VOID_MEANS = "about to be removed: no restart takes it"
"""Of a snapshot, in words."""


def kept(iterations: Collection[int], keep: int) -> set[int]:
    """Of checkpoints those that stay: the newest ``keep``, 0 for all."""
    return set(sorted(iterations)[-keep:])  # -0: all


def restorable(lineages: Mapping[CheckpointName, Lineage], head: Lineage) -> set[CheckpointName]:
    """The checkpoints with these lineages that a start takes by itself: in the past of ``head`` and in no doubt."""
    return {
        name for name, lineage in lineages.items()
        if is_past(lineage, name.iteration, head) and not is_doubtful(lineage, name.iteration, head)
    }  # fmt: skip


def surplus(lineages: Mapping[CheckpointName, Lineage], head: Lineage, keep: int) -> set[CheckpointName]:
    """The checkpoints that ``kept`` does not let stay, of those there are with these lineages.

    An abandoned one goes once ``keep`` restorable ones of the branch that abandoned it are there, a doubtful one once
    there are as many after it.
    """
    counting = restorable(lineages, head)
    stay = kept([name.iteration for name in counting], keep)
    gone = {name for name in counting if name.iteration not in stay}
    for name in lineages.keys() - counting:
        since = min(name.iteration, last_shared(lineages[name], head))
        if 0 < keep <= sum(one.iteration > since for one in counting):
            gone.add(name)
    return gone


def pin(storage: Storage, name: CheckpointName) -> bool:
    """From now on no run removes or replaces a checkpoint; whether it is void, and may be on its way out just now.

    Raises:
        StorageError: there is none, its manifest cannot be read, or storage fails.
    """
    was_pinned = storage.size(_pin(name)) is not None
    storage.put(_pin(name), b"pinned\n")
    # In this order: who has removed it meanwhile has taken the mark away after the manifest.
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
    """It stays no longer than others; False: it was not pinned."""
    was_pinned = storage.size(_pin(name)) is not None
    storage.remove([_pin(name)])
    return was_pinned


def pinned(storage: Storage) -> set[CheckpointName]:
    """Checkpoints that are pinned."""
    found = (CheckpointName.parse(name) for name in _below(storage, PINS))
    return {name for name in found if name is not None}


def hold(storage: Storage, reader: str) -> None:
    """A restart reads here: until it lets go, or a run claims the place, no checkpoint is removed or replaced. It
    must look for what is ``voided`` behind this, and not read that."""
    storage.put(f"{READERS}/{reader}", READS)


def let_go(storage: Storage, reader: str) -> None:
    """The restart has read what it needs."""
    storage.remove([f"{READERS}/{reader}"])


def void(storage: Storage, snapshots: Collection[SnapshotId]) -> None:
    """No restart takes these any more: they are about to be removed."""
    for snapshot in snapshots:
        storage.put(_void(snapshot), b"void\n")


def read_manifest(storage: Storage, name: CheckpointName) -> StoredSnapshot:
    """Of a committed snapshot.

    Raises:
        StorageError: it is damaged, or of another iteration; or storage fails.
    """
    stored = StoredSnapshot.decode(storage.read(name.manifest), f"{storage.where}/{name.manifest}")
    if stored.snapshot.iteration != name.iteration:
        text = f"is of iteration {stored.snapshot.iteration}: its folder was copied or renamed"
        raise StorageError(f"{storage.where}/{name.manifest}: {text}", lasting=True)
    return replace(stored, name=str(name))


def voided(storage: Storage) -> set[SnapshotId]:
    """What ``void`` was told; some of it may be gone."""
    return void_of(_below(storage, VOID))


def void_of(names: Iterable[str]) -> set[SnapshotId]:
    """What is void where the folder ``VOID`` has objects of these ``names``."""
    found = set()
    for name in names:
        try:
            found.add(SnapshotId.parse(name))
        except ValueError:
            continue  # of somebody else
    return found


def forget_void(storage: Storage, snapshots: Collection[SnapshotId]) -> None:
    """These count again, or are gone."""
    storage.remove([_void(snapshot) for snapshot in snapshots])


def set_aside(storage: Storage, iteration: int, stored: StoredSnapshot | None) -> None:
    """Let the checkpoint that has the place of another branch's stay, under the name of its generation; the caller
    commits its own there next. None: what is there cannot be read.

    Raises:
        StorageError: it cannot be read and is pinned, or storage fails.
    """
    name = CheckpointName(iteration)
    is_pinned = name in pinned(storage)
    if stored is None:
        _require_own(storage, name.manifest)
        if is_pinned:
            text = f"{storage.where}: {name} cannot be read, and is pinned there"
            raise StorageError(f"{text}; 'ftckpt unpin' makes room for this one", lasting=True)
        return
    aside = CheckpointName(iteration, max(1, stored.lineage.generation))
    # First the name, then the pin: at each instant one of both names has what it had.
    storage.put(aside.manifest, stored.encode())
    if is_pinned:
        storage.put(_pin(aside), b"pinned\n")
        unpin(storage, name)


def _require_own(storage: Storage, name: str) -> None:
    """Raises StorageError where a manifest that cannot be read was not damaged there, but brought there."""
    data = storage.read(name)
    if FORMAT.encode() not in data or files_of(data) is not None:
        text = "was not written there by ftckpt: move its folder away, for this iteration to come there"
        raise StorageError(f"{storage.where}/{name}: {text}", lasting=True)


def retire(
    storage: Storage, doomed: Mapping[CheckpointName, SnapshotId], newest: int, owns: Callable[[], bool]
) -> list[CheckpointName]:
    """Remove the checkpoints that are ``doomed``; returns what went. Pinned ones stay, and all where a restart reads.

    Args:
        newest: the iteration to go on from, which is none of them.
        owns: whether the place is the caller's yet; asked right before each removal, as the answer may have changed.
            Who stands still between the answer and the removal for so long that another run claims the place,
            restores and commits the same iteration takes its manifest: storage that knows no conditions for removals
            leaves that, and no other way to lose a checkpoint. All other names have their lineage in them.
    """
    name_latest(storage, newest)
    stay = pinned(storage)
    going = {} if readers(storage) else {name: one for name, one in doomed.items() if name not in stay}
    void(storage, going.values())
    # Once more, after the last of the marks: who has pinned one or begun to read meanwhile has seen none.
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
    """Remove a checkpoint: its manifest, and the files that this names. Killed at any instant it is there or not,
    never half; ``commit.sweep`` removes what a kill leaves.

    Raises:
        StorageError: it is the only whole one, or another is there by now; or storage fails.
    """
    every = checkpoints(storage)
    # A kill while it was set aside leaves it two names.
    beside = (one for one in every if one.iteration == name.iteration)
    names = [name, *(one for one in beside if snapshot_of(storage, one) == snapshot)]
    others = [one for one in every if one not in names]
    if not others:
        raise StorageError(f"{storage.where}: {name} is the only whole checkpoint", lasting=True)
    stored, folder = read_manifest(storage, name), folder_of(name.iteration)
    if stored.snapshot != snapshot:
        raise StorageError(f"{storage.where}: {name} is of another branch of the job by now", lasting=True)
    if latest(storage) == name.iteration and all(one.iteration != name.iteration for one in others):
        name_latest(storage, others[0].iteration)
    storage.remove(sorted({one.manifest for one in names}))  # first: from here on it is none
    storage.remove([f"{folder}/{shard.file}" for shard in stored.shards.values()])


def snapshot_of(storage: Storage, name: CheckpointName) -> SnapshotId | None:
    """What a checkpoint is of; None: its manifest cannot be read, or is gone."""
    try:
        return read_manifest(storage, name).snapshot
    except StorageError as error:
        if not error.lasting:
            raise
        return None


def _below(storage: Storage, folder: str) -> Sequence[str]:
    return [entry.name.removeprefix(f"{folder}/") for entry in storage.list(folder)]


def _pin(name: CheckpointName) -> str:
    return f"{PINS}/{name}"


def _void(snapshot: SnapshotId) -> str:
    return f"{VOID}/{snapshot}"
