"""Checkpoints on storage: files written by several nodes and committed by one object, the manifest.

The checkpoint of iteration 12 is the folder ``iter_0000012/`` with a ``manifest.json``: that object is the commit,
and names all others. The order of writes: the files of each node, the node's mark that they are durable, the
manifest, ``latest``. A checkpoint with a manifest is therefore complete. ``latest`` is for people and simple
programs; ftckpt reads manifests.

Names of files and marks begin with the snapshot's lineage, so that two lineages that write the same iteration do not
overwrite each other. Two writers of one snapshot, such as after a restart from it, write the same bytes.
``Storage.create`` need not be atomic: of two concurrent commits the last manifest counts, and ``sweep`` removes the
files of the other.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import xxhash

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage
from ftckpt.model.snapshot import LINEAGE_BYTES, SnapshotId
from ftckpt.persist.membership import forget_members
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage, content

FLUSH_SECS = 7200.0
"""Deadline of a flush, after which a newer snapshot is tried. Terabytes to slow storage take an hour; at two hours
storage counts as unavailable."""

OWNER_NAME = "owner.json"
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
_FOLDER = re.compile(r"iter_(\d{7,18})")
_NAME = re.compile(r"iter_(\d{7,18})(?:-g([1-9]\d{0,9}))?")
_MANIFEST = re.compile(r"manifest(-g[1-9]\d{0,9})?\.json")
_DONE = "done"
_FILE = rf"[0-9a-f]{{{2 * LINEAGE_BYTES}}}-(?:[a-z]+\d+(?:-[a-z]+\d+)*\.(?:safetensors|zst)|{_DONE}\.[A-Za-z0-9._-]+)"
_OURS = re.compile(_FILE)
"""Names of shard files and marks in a checkpoint's folder: ``sweep`` removes nothing else from it."""
_VOID_MARK = rf"[0-9a-f]{{{2 * LINEAGE_BYTES}}}\.\d+"
_BEGUN = re.compile(rf"\.(?:{_FILE}|{_VOID_MARK}|{_MANIFEST.pattern}|{LATEST_NAME})-.+")
"""Names of unfinished files of killed writers."""
_OTHERS = ("latest_checkpointed_iteration.txt", "latest_universal", "zero_to_fp32.py")
"""Files of Megatron's and DeepSpeed's checkpoints."""
_BESIDE_EXPORTS = (f"ftckpt/{OWNER_NAME}", f"ftckpt/{LATEST_NAME}")
"""Files that show that the place has exports, and snapshots in its folder ``ftckpt``."""
PINS, READERS, VOID = "pins", "readers", "void"
"""Folders of the marks of ``retention``."""
READS = b"reads\n"
"""The content of a reader's mark below ``READERS``; an object with other content is not ftckpt's, and stays."""


def folder_of(iteration: int) -> str:
    """``iter_0000012``, as Megatron names its folders."""
    return f"iter_{iteration:07d}"


def iteration_of(folder: str) -> int | None:
    """Inverse of ``folder_of``; None for any other name."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found is not None else None


class CheckpointName(NamedTuple):
    """The name of a checkpoint, ``iter_0000012``.

    A checkpoint of an abandoned branch that gives way to a newer one is renamed ``iter_0000012-g1``, after its
    lineage's ``generation``: its manifest gets another name, and its files stay.
    """

    iteration: int
    generation: int = 0

    def __str__(self) -> str:
        return f"{folder_of(self.iteration)}{self._suffix}"

    @property
    def manifest(self) -> str:
        """The object that commits the checkpoint."""
        return f"{folder_of(self.iteration)}/manifest{self._suffix}.json"

    @property
    def _suffix(self) -> str:
        return f"-g{self.generation}" if self.generation else ""

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Inverse of ``str``; None for any other text."""
        found = _NAME.fullmatch(text)
        return cls(int(found[1]), int(found[2] or 0)) if found is not None else None

    @classmethod
    def of(cls, text: str) -> CheckpointName | None:
        """The checkpoint that a user names by its name or iteration; None for any other text."""
        return cls(int(text)) if text.isdecimal() else cls.parse(text)

    @classmethod
    def of_manifest(cls, path: str) -> CheckpointName | None:
        """The checkpoint of the manifest at ``path``; None for any other object."""
        folder, _, file = path.partition("/")
        found = _MANIFEST.fullmatch(file)
        return cls.parse(f"{folder}{found[1] or ''}") if found is not None else None


class CheckpointFile(NamedTuple):
    """A durable file: its name in the checkpoint, size, and xxh3-64 as 16 hex digits."""

    name: str
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class NodeCommitMarker:
    """A node's mark that its files are durable, with its ``parts`` of the manifest, JSON values.

    ``lineage``: the snapshot's lineage, as the node knew it before it read the first byte. If the job branches during
    the flush, the checkpoint belongs to the history before.
    """

    node: str
    files: tuple[CheckpointFile, ...]
    parts: Mapping[str, Any]
    lineage: Lineage

    @classmethod
    def decode(cls, data: bytes, where: str) -> NodeCommitMarker:
        """Inverse of ``codec.encode``. Raises StorageError for anything else."""
        try:
            return codec.decode(data, cls)
        except ValueError as error:
            raise StorageError(f"{where}: is no mark of a node: {error}", lasting=True) from None


class CheckpointTransaction:
    """One node's part of writing ``snapshot``, and on one chosen node the commit.

    Order: ``write`` each file, then ``done``; on the committing node ``commit`` with the ``marks`` of all nodes.
    """

    def __init__(self, storage: Storage, snapshot: SnapshotId, node: str) -> None:
        self.folder = folder_of(snapshot.iteration)
        self.snapshot, self.node, self._storage = snapshot, node, storage
        self._files: list[CheckpointFile] = []

    def write(self, name: str, chunks: Iterable[Buffer]) -> CheckpointFile:
        """Writes a file of the checkpoint and computes its checksum in the same pass; durable on return."""
        checksum = xxhash.xxh3_64()

        def hashed() -> Iterable[Buffer]:
            for chunk in chunks:
                checksum.update(chunk)
                yield chunk

        full_name = f"{_prefix(self.snapshot.lineage)}{name}"
        nbytes = self._storage.write(f"{self.folder}/{full_name}", hashed())
        file = CheckpointFile(full_name, nbytes, checksum.hexdigest())
        self._files.append(file)
        return file

    def done(self, parts: Mapping[str, Any], lineage: Lineage = UNKNOWN) -> None:
        """Writes this node's mark: all its files are durable. ``parts`` are JSON values for the manifest."""
        mark = NodeCommitMarker(self.node, tuple(self._files), parts, lineage)
        self._storage.put(f"{self._marks}{self.node}", codec.encode(mark))

    def own_mark(self) -> NodeCommitMarker | None:
        """This node's mark, if it exists: then the commit on another node may already rely on its files."""
        return self._mark(f"{self._marks}{self.node}")

    def lacks(self, *marks: NodeCommitMarker) -> CheckpointFile | None:
        """A file named by ``marks`` that is missing or of another size, if any."""
        there = {entry.name: entry.nbytes for entry in self._storage.list(self.folder)}
        files = (file for mark in marks for file in mark.files)
        return next((file for file in files if there.get(f"{self.folder}/{file.name}") != file.nbytes), None)

    def withdraw(self) -> None:
        """Removes the files of this node, if it has not called ``done``. The last call."""
        self._storage.remove([f"{self.folder}/{file.name}" for file in self._files])

    def marks(self) -> dict[str, NodeCommitMarker]:
        """The marks of the nodes that are done, by node."""
        names = _beginning(self._storage, self.folder, self._marks)
        return {mark.node: mark for mark in map(self._mark, names) if mark is not None}

    def commit(self, manifest: bytes, marks: Mapping[str, NodeCommitMarker], replaces: bool = False) -> bool:
        """Commits the files named by the ``marks`` of all nodes. False: another lineage has a checkpoint of this
        iteration, and the files of this snapshot are removed; with ``replaces`` this one replaces it.

        Raises:
            StorageError: a file is missing or of another size, or storage fails. May be retried.
        """
        self._require(marks)
        path = f"{self.folder}/{MANIFEST_NAME}"
        # A retry finds the manifest of a commit whose answer was lost: equal bytes are this commit's.
        if not self._storage.create(path, manifest) and self._storage.read(path) != manifest:
            if not replaces:
                self.abandon()
                return False
            self._storage.put(path, manifest)  # atomic: readers find the old manifest or the new one
        named = latest(self._storage)
        if named is None or named < self.snapshot.iteration:
            name_latest(self._storage, self.snapshot.iteration)
        with contextlib.suppress(StorageError):  # ``sweep`` removes them later
            self._storage.remove(_beginning(self._storage, self.folder, self._marks))
        return True

    def abandon(self) -> None:
        """Removes the files of all nodes, which must have stopped writing."""
        names = _beginning(self._storage, self.folder, files_prefix(self.snapshot))
        self._storage.remove([name for name in names if _is_ours(name)])

    def _mark(self, name: str) -> NodeCommitMarker | None:
        """The mark ``name``; None if it does not exist, also if a commit removes it meanwhile."""
        data = content(self._storage, name)
        return NodeCommitMarker.decode(data, name) if data is not None else None

    @property
    def _marks(self) -> str:
        return f"{files_prefix(self.snapshot)}{_DONE}."

    def _require(self, marks: Mapping[str, NodeCommitMarker]) -> None:
        if file := self.lacks(*marks.values()):
            # Not lasting: a node that finds its mark, but not the files, writes them again.
            raise StorageError(
                f"{self._storage.where}/{self.folder}/{file.name}: missing, or does not have {file.nbytes} bytes: "
                "another program has removed or changed it"
            )


def require_own(storage: Storage) -> None:
    """Raises StorageError if another program has checkpoints there: each would take the other's files for its own."""
    other = next((name for name in _OTHERS if storage.size(name) is not None), "")
    if not other and storage.size(LATEST_NAME) is not None and latest(storage) is None:
        other = LATEST_NAME  # DeepSpeed's, which names a tag
    if other:
        text = f"{storage.where}: {other} is of another program; name a place of its own, such as a folder in it"
        raise StorageError(text, lasting=True)
    if any(storage.size(name) is not None for name in _BESIDE_EXPORTS):
        text = f"{storage.where}: has exports, and snapshots in its folder 'ftckpt'"
        raise StorageError(f"{text}: name its --ftckpt-persist-format, or another place", lasting=True)


def claim(storage: Storage, owner: str, job: str, began: float = 0.0, lineage: Lineage = UNKNOWN) -> None:
    """Claims the storage for ``owner``, a run of ``job``: an earlier run that still lives stops committing and
    removing. The marks of readers, which can only be of killed restarts, and of holdings are removed.

    ``began``: the start of the run, in seconds since the epoch. ``lineage``: the head of the job.
    """
    claimed = {"owner": owner, "job": job, "began": began, "lineage": codec.to_json(lineage)}
    storage.put(OWNER_NAME, json.dumps(claimed).encode())
    storage.remove([f"{READERS}/{reader}" for reader in readers(storage)])
    forget_members(storage)


def readers(storage: Storage) -> list[str]:
    """The marks of restarts that read checkpoints, or were killed while reading."""
    entries = [entry for entry in storage.list(READERS) if entry.nbytes == len(READS)]
    return sorted(one.name.removeprefix(f"{READERS}/") for one in entries if content(storage, one.name) == READS)


def require_owner(storage: Storage, owner: str, began: float = 0.0) -> bool:
    """Whether ``owner`` has claimed the storage; False: no run has.

    ``began``: the start of the run, in seconds since the epoch; 0: unknown. The run claims storage late if it was
    unavailable at the start: until then, the claim of an earlier run is not a lasting error.

    Raises:
        StorageError: another run has claimed it (lasting, unless that run started earlier); or storage fails.
    """
    if (data := content(storage, OWNER_NAME)) is None:
        return False
    try:
        claimed = json.loads(data)
        other, job = str(claimed["owner"]), str(claimed["job"])
        other_began = float(claimed.get("began", 0.0))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StorageError(f"{storage.where}/{OWNER_NAME}: is damaged; remove it", lasting=True) from None
    if other != owner and other_began < began:
        raise StorageError(f"{storage.where}: claimed by an earlier run of job {job!r}, and not yet by this one")
    if other != owner:
        text = f"{storage.where}: another run of job {job!r} has claimed it; give each its own --ftckpt-persist"
        raise StorageError(text, lasting=True)
    return True


def claimed_lineage(storage: Storage) -> Lineage:
    """The head of the job, recorded by the last run that claimed the storage; unknown if none has.

    Raises:
        StorageError: the record is damaged, so that abandoned and doubtful checkpoints are unknown; or storage fails.
    """
    if (data := content(storage, OWNER_NAME)) is None:
        return UNKNOWN
    if (lineage := lineage_of_claim(data)) is None:
        text = "is damaged: abandoned checkpoints are unknown; move it away, and all checkpoints count"
        raise StorageError(f"{storage.where}/{OWNER_NAME} {text}", lasting=True)
    return lineage


def lineage_of_claim(data: bytes) -> Lineage | None:
    """The lineage in the object ``OWNER_NAME``; None if it is damaged."""
    try:
        return codec.from_json(json.loads(data)["lineage"], Lineage)
    except (KeyError, TypeError, ValueError):
        return None


def checkpoints(storage: Storage) -> list[CheckpointName]:
    """The names of all committed checkpoints, newest iteration first."""
    found = (CheckpointName.of_manifest(entry.name) for entry in storage.list())
    return sorted((name for name in found if name is not None), key=lambda one: (-one.iteration, one.generation))


def read_manifest(storage: Storage, name: CheckpointName) -> StoredSnapshot:
    """Reads the manifest of a checkpoint.

    Raises:
        StorageError: it is missing, damaged, or of another iteration; or storage fails.
    """
    stored = StoredSnapshot.decode(storage.read(name.manifest), f"{storage.where}/{name.manifest}")
    if stored.snapshot.iteration != name.iteration:
        text = f"is of iteration {stored.snapshot.iteration}: its folder was copied or renamed"
        raise StorageError(f"{storage.where}/{name.manifest}: {text}", lasting=True)
    return replace(stored, name=str(name))


def committed(storage: Storage, name: CheckpointName) -> StoredSnapshot | None:
    """The manifest of a checkpoint; None if it is missing or unreadable. Raises StorageError if storage fails."""
    try:
        return read_manifest(storage, name) if storage.size(name.manifest) is not None else None
    except StorageError as error:
        if not error.lasting:
            raise
        return None


def sweep(
    storage: Storage, current: SnapshotId | None, owns: Callable[[], bool] = lambda: True,
    lineages: Collection[bytes] = (),
) -> list[str]:  # fmt: skip
    """Removes the files of uncommitted checkpoints; returns their names. If a manifest is unreadable, all files in
    its folder stay.

    Args:
        current: the snapshot being written; None: no node writes. Its files stay, and newer ones of its lineage or of
            ``lineages``: other nodes may be writing those already.
        owns: whether the caller may still remove files: the claim is its own, and ``current`` is still wanted. Called
            after the listing, as other nodes may have started to write meanwhile.
    """

    def is_active(name: str) -> bool:
        return current is not None and _may_be_written(name, current, lineages)

    def listed() -> list[str]:
        return [entry.name for entry in storage.list() if _FOLDER.fullmatch(entry.name.partition("/")[0])]

    names = listed()
    gone = _uncommitted(storage, names, [name for name in names if _is_ours(name) and not is_active(name)])
    unfinished = [name for name in storage.unfinished(is_active) if _BEGUN.fullmatch(name.rpartition("/")[2])]
    if not owns():
        return []
    if gone:  # a save that owns no claim may have committed meanwhile
        gone = _uncommitted(storage, listed(), gone)
    storage.remove(gone)
    storage.discard(unfinished)
    return gone


def _uncommitted(storage: Storage, names: Collection[str], files: Collection[str]) -> list[str]:
    """Those of ``files`` that no manifest among ``names`` names, and that have no unreadable one beside them."""
    folders, kept = {file.partition("/")[0] for file in files}, set[str]()
    for checkpoint in filter(None, map(CheckpointName.of_manifest, names)):
        folder = folder_of(checkpoint.iteration)
        if folder not in folders:
            continue
        if (stored := committed(storage, checkpoint)) is None:
            kept |= {file for file in files if file.startswith(f"{folder}/")}
        else:
            kept |= {f"{folder}/{shard.file}" for shard in stored.shards.values()}
    return [file for file in files if file not in kept]


def _may_be_written(name: str, current: SnapshotId, lineages: Collection[bytes]) -> bool:
    folder, _, rest = name.partition("/")
    iteration = iteration_of(folder)
    if iteration is None:
        return True  # small objects next to checkpoints: any node may be writing one
    if iteration > current.iteration:
        return rest.startswith((*map(_prefix, {current.lineage, *lineages}), MANIFEST_NAME))
    return iteration == current.iteration and rest.startswith((_prefix(current.lineage), MANIFEST_NAME))


def files_prefix(snapshot: SnapshotId) -> str:
    """The common prefix of all objects of a snapshot except its manifest."""
    return f"{folder_of(snapshot.iteration)}/{_prefix(snapshot.lineage)}"


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name.rpartition("/")[2]) is not None


def _prefix(lineage: bytes) -> str:
    return f"{lineage.hex()}-"


def name_latest(storage: Storage, iteration: int) -> None:
    """Makes ``latest`` name the checkpoint of ``iteration``."""
    storage.put(LATEST_NAME, f"{folder_of(iteration)}\n".encode())


def latest(storage: Storage) -> int | None:
    """The iteration that ``latest`` names; None if it does not name a checkpoint of ftckpt."""
    data = content(storage, LATEST_NAME)
    return None if data is None else iteration_of(data.decode(errors="replace").strip())


def _beginning(storage: Storage, folder: str, words: str) -> list[str]:
    return [entry.name for entry in storage.list(folder) if entry.name.startswith(words)]
