"""What stays on storage and what goes, so that nobody loses a checkpoint that he has pinned or is reading.

Nothing here rests on a write being atomic or conditional. Whoever removes a checkpoint calls it void first, then
looks for pins and readers, and takes its manifest last. Whoever pins one, or reads there, says so first, and then
looks for what is void. Of two that do so at the same moment at least one sees the other, wherever a read gives what
was written before it began, as with files and the usual object stores: Dekker's order (E. W. Dijkstra, EWD 123,
1965), with an object for each flag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ftckpt.errors import StorageError
from ftckpt.model.loaded import Checkpoint, is_undone
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.commit import (
    LATEST_NAME,
    MANIFEST_NAME,
    PINS,
    READERS,
    VOID,
    committed,
    files_prefix,
    folder_of,
    iteration_of,
    latest,
    manifest_of,
)
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage

VOID_MEANS = "bad, or of a past that the job has left: no restart takes it"
"""Of a snapshot, in words."""


def kept(iterations: Collection[int], keep: int) -> set[int]:
    """Of checkpoints those that stay: the newest ``keep``, 0 for all."""
    return set(sorted(iterations)[-keep:])  # -0: all


def pin(storage: Storage, iteration: int) -> bool:
    """From now on no run removes or replaces the checkpoint of ``iteration``; whether it is void, and may be on its
    way out just now.

    Raises:
        StorageError: there is none, or storage fails.
    """
    storage.put(_pin(iteration), b"pinned\n")
    is_void = any(snapshot.iteration == iteration for snapshot in voided(storage))
    # In this order: who has removed it meanwhile has taken the mark away behind the manifest.
    if iteration not in committed(storage):
        unpin(storage, iteration)
        raise StorageError(f"{storage.where}: there is no checkpoint of iteration {iteration}", lasting=True)
    return is_void


def unpin(storage: Storage, iteration: int) -> bool:
    """It stays no longer than others; False: it was not pinned."""
    was_pinned = storage.size(_pin(iteration)) is not None
    storage.remove([_pin(iteration)])
    return was_pinned


def pinned(storage: Storage) -> set[int]:
    """Iterations that are pinned."""
    found = (iteration_of(name) for name in _below(storage, PINS))
    return {iteration for iteration in found if iteration is not None}


def hold(storage: Storage, reader: str) -> None:
    """A restart reads here: until it lets go, or a run claims the place, no checkpoint is removed or replaced. It
    must look for what is ``voided`` behind this, and not read that."""
    storage.put(f"{READERS}/{reader}", b"reads\n")


def let_go(storage: Storage, reader: str) -> None:
    """The restart has read what it needs."""
    storage.remove([f"{READERS}/{reader}"])


def readers(storage: Storage) -> list[str]:
    """Restarts that read here, or were killed while they did."""
    return sorted(_below(storage, READERS))


def void(storage: Storage, snapshots: Collection[SnapshotId]) -> None:
    """No restart takes these any more: they are bad, of a past that the job has left, or about to be removed."""
    for snapshot in snapshots:
        storage.put(_void(snapshot), b"void\n")


def read_manifest(storage: Storage, iteration: int) -> StoredSnapshot:
    """Of a committed snapshot; raises StorageError."""
    name = manifest_of(iteration)
    return StoredSnapshot.decode(storage.read(name), f"{storage.where}/{name}")


def void_undone(storage: Storage, origin: Checkpoint) -> list[SnapshotId]:
    """Call void what never happened to a job whose snapshots have this ``origin`` by now; returns that."""
    undone: list[SnapshotId] = []
    for iteration in committed(storage):
        try:
            stored = read_manifest(storage, iteration)
        except StorageError as error:
            if not error.lasting:
                raise
            continue  # what is damaged, or was removed meanwhile, no start can take
        if is_undone(stored.origin, origin, iteration):
            undone.append(stored.snapshot)
    void(storage, undone)
    return undone


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


def may_be_replaced(storage: Storage, snapshot: SnapshotId) -> bool:
    """Whether what the job has come to a second time may take the place of ``snapshot``, which is void from here on;
    False: not yet, a restart reads.

    Raises:
        StorageError: it is pinned, or storage fails.
    """
    void(storage, [snapshot])
    require_unpinned(storage, snapshot.iteration)
    return not readers(storage)


def require_unpinned(storage: Storage, iteration: int) -> None:
    """Raises StorageError where the checkpoint of ``iteration`` is pinned, or storage fails."""
    if iteration in pinned(storage):
        text = f"{storage.where}: another checkpoint of iteration {iteration} is pinned there"
        raise StorageError(f"{text}; 'ftckpt unpin' makes room for this one", lasting=True)


def retire(
    storage: Storage, surplus: Collection[SnapshotId], left: Collection[SnapshotId], newest: int,
    owns: Callable[[], bool],
) -> list[SnapshotId]:  # fmt: skip
    """Remove the checkpoints that are ``surplus``, and those that the job has ``left`` behind it; returns what went.

    Pinned ones stay, and all where a restart reads; what was left counts no more even then.

    Args:
        newest: the iteration to go on from, which is none of them.
        owns: whether the place is the caller's yet; asked right before each removal, as the answer may have changed.
            Who stands still between the answer and the removal for so long that another run claims the place,
            restores and commits the same iteration takes its manifest: storage that knows no conditions for removals
            leaves that, and no other way to lose a checkpoint. All other names have their lineage in them.
    """
    _name_latest(storage, newest)
    stay = pinned(storage)
    going = set() if readers(storage) else {one for one in surplus if one.iteration not in stay}
    doomed = going.union(left)
    void(storage, doomed)
    # Once more, behind the last of the marks: who has pinned one or begun to read meanwhile has seen none.
    stay, read, gone = pinned(storage), readers(storage), list[SnapshotId]()
    for snapshot in sorted(doomed):
        if read or snapshot.iteration in stay:
            continue
        if not owns():
            return gone
        remove(storage, snapshot)
        gone.append(snapshot)
    forget_void(storage, [*gone, *going.difference(gone)])
    return gone


def remove(storage: Storage, snapshot: SnapshotId) -> None:
    """Remove a checkpoint. Killed at any instant it is there or not, never half.

    Raises:
        StorageError: it is the only whole one, or storage fails.
    """
    iteration, folder = snapshot.iteration, folder_of(snapshot.iteration)
    others = [other for other in committed(storage) if other != iteration]
    if not others:
        raise StorageError(f"{storage.where}: {folder} is the only whole checkpoint", lasting=True)
    if latest(storage) == iteration:
        _name_latest(storage, others[0])
    storage.remove([f"{folder}/{MANIFEST_NAME}"])  # first: from here on it is none
    storage.remove([entry.name for entry in storage.list(folder) if entry.name.startswith(files_prefix(snapshot))])


def _name_latest(storage: Storage, iteration: int) -> None:
    storage.put(LATEST_NAME, f"{folder_of(iteration)}\n".encode())


def _below(storage: Storage, folder: str) -> Sequence[str]:
    return [entry.name.removeprefix(f"{folder}/") for entry in storage.list(folder)]


def _pin(iteration: int) -> str:
    return f"{PINS}/{folder_of(iteration)}"


def _void(snapshot: SnapshotId) -> str:
    return f"{VOID}/{snapshot}"
