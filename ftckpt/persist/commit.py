"""Checkpoints on storage: files written by several nodes and committed by one object, the manifest.

The checkpoint of iteration 12 is the folder ``iter_0000012/``, if ``manifest.json`` is in it: that object is
the commit, and names all the others. Before it come the files, then a mark of each node that its files are durable.
Files and marks carry the lineage of their snapshot, so that of two that write one iteration neither writes over what
the other has; two that write one snapshot, such as after a restart from it, write the same bytes. Whichever manifest
is there is complete. ``latest``, moved last, is for people and for programs that look no further: only manifests
count.

Nothing rests on ``Storage.create`` being atomic: where two commit at once, the last manifest counts, and the files of
the other are swept.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from ftckpt.array_types import Buffer
from ftckpt.errors import StorageError
from ftckpt.model import codec
from ftckpt.model.lineage import UNKNOWN, Lineage
from ftckpt.model.snapshot import LINEAGE_BYTES, SnapshotId
from ftckpt.persist.storage import Storage

FLUSH_SECS = 7200.0
"""For a snapshot to become a checkpoint before a newer one is tried. Terabytes take an hour of slow storage; storage
that takes two does not answer."""

OWNER_NAME = "owner.json"
MANIFEST_NAME = "manifest.json"
LATEST_NAME = "latest"
_FOLDER = re.compile(r"iter_(\d{7,18})")
_NAME = re.compile(r"iter_(\d{7,18})(?:-g([1-9]\d{0,9}))?")
_MANIFEST = re.compile(r"manifest(-g[1-9]\d{0,9})?\.json")
_DONE = "done"
_FILE = rf"[0-9a-f]{{{2 * LINEAGE_BYTES}}}-(?:[a-z]+\d+(?:-[a-z]+\d+)*\.(?:safetensors|zst)|{_DONE}\.[A-Za-z0-9._-]+)"
_OURS = re.compile(_FILE)
"""Names of what is written beside a manifest, of a shard or of a node's mark: nothing else is ever removed there."""
_BEGUN = re.compile(rf"\.(?:{_FILE}|{re.escape(MANIFEST_NAME)}|{LATEST_NAME})-.+")
"""As ``_OURS``, of what a writer that was killed has left of one."""
_OTHERS = ("latest_checkpointed_iteration.txt", "latest_universal", "zero_to_fp32.py")
"""Of Megatron and of DeepSpeed."""
_BESIDE_EXPORTS = (f"ftckpt/{OWNER_NAME}", f"ftckpt/{LATEST_NAME}")
"""Of snapshots beside what others load."""
_HOLDINGS = "holdings"
PINS, READERS, VOID = "pins", "readers", "void"
"""Folders of what ``retention`` says of checkpoints."""
READS = b"reads\n"
"""What a restart that reads has left below ``READERS``: nothing else there is one, and is removed as one."""


def folder_of(iteration: int) -> str:
    """``iter_0000012``, as Megatron names its own."""
    return f"iter_{iteration:07d}"


def iteration_of(folder: str) -> int | None:
    """Inverse of ``folder_of``; None for any other name."""
    found = _FOLDER.fullmatch(folder)
    return int(found[1]) if found is not None else None


class CheckpointName(NamedTuple):
    """The name of a checkpoint, ``iter_0000012``.

    One of an abandoned branch, whose place a newer one has taken, is ``iter_0000012-g1`` after the ``generation`` of
    its lineage: its manifest gets another name, and no file of it is moved.
    """

    iteration: int
    generation: int = 0

    def __str__(self) -> str:
        return f"{folder_of(self.iteration)}{self._suffix}"

    @property
    def manifest(self) -> str:
        """The object that makes the checkpoint one."""
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
    def of_manifest(cls, path: str) -> CheckpointName | None:
        """The checkpoint that the object ``path`` makes one; None where it is no manifest."""
        folder, _, file = path.partition("/")
        found = _MANIFEST.fullmatch(file)
        return cls.parse(f"{folder}{found[1] or ''}") if found is not None else None


class CheckpointFile(NamedTuple):
    """A file that is durable: its name in the checkpoint, bytes, and xxh3-64 of them as 16 hex digits."""

    name: str
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class NodeCommitMarker:
    """What one node says of its part: the files, all durable, and whatever the manifest needs of it, as JSON.

    ``lineage``: of the snapshot, as the node knew it before it read the first byte: where the job has branched since,
    the snapshot that is committed is of the history before.
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
    """One node's part in writing ``snapshot``, and, on the node that is chosen to, the commit of all parts."""

    def __init__(self, storage: Storage, snapshot: SnapshotId, node: str) -> None:
        self.folder = folder_of(snapshot.iteration)
        self._storage, self._snapshot, self._node = storage, snapshot, node
        self._files: list[CheckpointFile] = []

    def write(self, name: str, chunks: Iterable[Buffer]) -> CheckpointFile:
        """Write a file of the checkpoint, with its checksum in the same pass; durable when it returns."""
        checksum = xxhash.xxh3_64()

        def hashed() -> Iterable[Buffer]:
            for chunk in chunks:
                checksum.update(chunk)
                yield chunk

        full_name = f"{_prefix(self._snapshot.lineage)}{name}"
        nbytes = self._storage.write(f"{self.folder}/{full_name}", hashed())
        file = CheckpointFile(full_name, nbytes, checksum.hexdigest())
        self._files.append(file)
        return file

    def done(self, parts: Mapping[str, Any], lineage: Lineage = UNKNOWN) -> None:
        """All that this node has to write is durable; ``parts`` are JSON values for the manifest."""
        mark = NodeCommitMarker(self._node, tuple(self._files), parts, lineage)
        self._storage.put(f"{self._marks}{self._node}", codec.encode(mark))

    def own_mark(self) -> NodeCommitMarker | None:
        """What this node has said before: the commit, elsewhere, may count on its files from then on."""
        return self._mark(f"{self._marks}{self._node}")

    def lacks(self, *marks: NodeCommitMarker) -> CheckpointFile | None:
        """A file that ``marks`` name and that is not there with its bytes, if there is one."""
        there = {entry.name: entry.nbytes for entry in self._storage.list(self.folder)}
        files = (file for mark in marks for file in mark.files)
        return next((file for file in files if there.get(f"{self.folder}/{file.name}") != file.nbytes), None)

    def withdraw(self) -> None:
        """Remove what this node has written, where it never said that it is done; nothing may be called after it."""
        self._storage.remove([f"{self.folder}/{file.name}" for file in self._files])

    def marks(self) -> dict[str, NodeCommitMarker]:
        """The nodes that are done."""
        names = _beginning(self._storage, self.folder, self._marks)
        return {mark.node: mark for mark in map(self._mark, names) if mark is not None}

    def commit(self, manifest: bytes, marks: Mapping[str, NodeCommitMarker], replaces: bool = False) -> bool:
        """Make a checkpoint of what the ``marks`` of all nodes name; False: there is one of another lineage, and
        what was written for this one is gone. ``replaces``: this one takes its place.

        Raises:
            StorageError: a file is missing or of another size, or storage fails: then it may be tried again.
        """
        self._require(marks)
        path = f"{self.folder}/{MANIFEST_NAME}"
        # A commit whose answer was lost on the way is found there at the second try, and is this one's.
        if not self._storage.create(path, manifest) and self._storage.read(path) != manifest:
            if not replaces:
                self.abandon()
                return False
            self._storage.put(path, manifest)  # at each instant one of the two is there, whole
        named = latest(self._storage)
        if named is None or named < self._snapshot.iteration:
            name_latest(self._storage, self._snapshot.iteration)
        with contextlib.suppress(StorageError):  # they are swept
            self._storage.remove(_beginning(self._storage, self.folder, self._marks))
        return True

    def abandon(self) -> None:
        """Remove what all nodes have written. None of them may write any more."""
        names = _beginning(self._storage, self.folder, files_prefix(self._snapshot))
        self._storage.remove([name for name in names if _is_ours(name)])

    def _mark(self, name: str) -> NodeCommitMarker | None:
        """None where there is none, or a commit takes it away at this moment."""
        if self._storage.size(name) is None:
            return None
        try:
            data = self._storage.read(name)
        except StorageError:
            if self._storage.size(name) is None:
                return None
            raise
        return NodeCommitMarker.decode(data, name)

    @property
    def _marks(self) -> str:
        return f"{files_prefix(self._snapshot)}{_DONE}."

    def _require(self, marks: Mapping[str, NodeCommitMarker]) -> None:
        if file := self.lacks(*marks.values()):
            # Not for good: a node that finds a mark without its files, of one that was killed, writes them anew.
            raise StorageError(
                f"{self._storage.where}/{self.folder}/{file.name}: is not there with its {file.nbytes} bytes: "
                "somebody else has removed or changed it"
            )


def require_own(storage: Storage) -> None:
    """Raises StorageError where another program keeps its checkpoints there, or storage fails: both would take files
    of the other for their own."""
    other = next((name for name in _OTHERS if storage.size(name) is not None), "")
    if not other and storage.size(LATEST_NAME) is not None and latest(storage) is None:
        other = LATEST_NAME  # DeepSpeed's names a tag
    if other:
        text = f"{storage.where}: {other} is of another program; name a place of its own, such as a folder in it"
        raise StorageError(text, lasting=True)
    if any(storage.size(name) is not None for name in _BESIDE_EXPORTS):
        text = f"{storage.where}: what others load lies there, and snapshots in a folder in it"
        raise StorageError(f"{text}: name its --ftckpt-persist-format, or another place", lasting=True)


def claim(storage: Storage, owner: str, job: str, began: float = 0.0, lineage: Lineage = UNKNOWN) -> None:
    """From now on ``owner``, a run of ``job`` that began at that time of day, writes there: an earlier one that still
    lives neither commits nor removes anything any more. Nobody reads there but that earlier one.

    ``lineage``: the head of the job.
    """
    claimed = {"owner": owner, "job": job, "began": began, "lineage": codec.to_json(lineage)}
    storage.put(OWNER_NAME, json.dumps(claimed).encode())
    storage.remove([f"{READERS}/{reader}" for reader in readers(storage)])  # of restarts that were killed
    forget_holdings(storage)


def readers(storage: Storage) -> list[str]:
    """Restarts that read here, or were killed while they did."""
    entries = [entry for entry in storage.list(READERS) if entry.nbytes == len(READS)]
    return sorted(one.name.removeprefix(f"{READERS}/") for one in entries if _content(storage, one.name) == READS)


def _content(storage: Storage, name: str) -> bytes | None:
    """None where it was removed since it was listed."""
    try:
        return storage.read(name)
    except StorageError:
        if storage.size(name) is None:
            return None
        raise


def require_owner(storage: Storage, owner: str, began: float = 0.0) -> bool:
    """Whether ``owner`` has claimed the place; False: nobody has.

    ``began``: the time of day when that run did; 0: not known. Where storage was away then it claims the place late,
    and what an earlier run has left there is no reason to give up.

    Raises:
        StorageError: another run has, which passes where that began before this one; or storage fails.
    """
    if storage.size(OWNER_NAME) is None:
        return False
    try:
        claimed = json.loads(storage.read(OWNER_NAME))
        other, job = str(claimed["owner"]), str(claimed["job"])
        other_began = float(claimed.get("began", 0.0))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise StorageError(f"{storage.where}/{OWNER_NAME}: is damaged; remove it", lasting=True) from None
    if other != owner and other_began < began:
        raise StorageError(f"{storage.where}: this run has not claimed it yet, an earlier one of job {job!r} has")
    if other != owner:
        text = f"{storage.where}: another run of job {job!r} writes here since; give each its own --ftckpt-persist"
        raise StorageError(text, lasting=True)
    return True


def tell_holdings(storage: Storage, node: str, owner: str, held: Collection[SnapshotId], beat: str) -> None:
    """Tell the other nodes of the run ``owner`` which snapshots this one holds, all of its part. ``beat`` is another
    each time: it shows that the node lives."""
    told = {"owner": owner, "beat": beat, "held": sorted(map(str, held))}
    storage.put(f"{_HOLDINGS}/{node}.json", json.dumps(told).encode())


def holdings(storage: Storage, nodes: Collection[str], owner: str) -> dict[str, tuple[str, set[SnapshotId]]]:
    """The last beat of those of ``nodes`` that have told in this run what they hold, and what that is."""
    found = {}
    for node in nodes:
        name = f"{_HOLDINGS}/{node}.json"
        if storage.size(name) is None:
            continue
        try:
            told = json.loads(storage.read(name))
            if told["owner"] == owner:
                found[node] = str(told["beat"]), {SnapshotId.parse(text) for text in told["held"]}
        except (KeyError, TypeError, ValueError):
            raise StorageError(f"{storage.where}/{name}: is damaged; remove it", lasting=True) from None
    return found


def forget_holdings(storage: Storage, node: str = "") -> None:
    """Remove what nodes have told, or one of them."""
    names = [f"{_HOLDINGS}/{node}.json"] if node else [entry.name for entry in storage.list(_HOLDINGS)]
    storage.remove([name for name in names if _is_told(_content(storage, name))])


def _is_told(data: bytes | None) -> bool:
    """Whether it is what ``tell_holdings`` writes."""
    try:
        told = json.loads(data or b"")
    except ValueError:
        return False
    return isinstance(told, dict) and told.keys() == {"owner", "beat", "held"}


def claimed_lineage(storage: Storage) -> Lineage:
    """The head of the job, as the run that claimed the place last has recorded it; unknown where none has.

    Raises:
        StorageError: the record is damaged, so that nobody knows what is abandoned or doubtful; or storage fails.
    """
    if storage.size(OWNER_NAME) is None:
        return UNKNOWN
    if (lineage := lineage_of_claim(storage.read(OWNER_NAME))) is None:
        text = "is damaged, and with it which checkpoints count; move it away for all of them to count"
        raise StorageError(f"{storage.where}/{OWNER_NAME} {text}", lasting=True)
    return lineage


def lineage_of_claim(data: bytes) -> Lineage | None:
    """The lineage in the object ``OWNER_NAME``; None where it is damaged."""
    try:
        return codec.from_json(json.loads(data)["lineage"], Lineage)
    except (KeyError, TypeError, ValueError):
        return None


def checkpoints(storage: Storage) -> list[CheckpointName]:
    """The names of all whole checkpoints, newest iteration first."""
    found = (CheckpointName.of_manifest(entry.name) for entry in storage.list())
    return sorted((name for name in found if name is not None), key=lambda one: (-one.iteration, one.generation))


def sweep(
    storage: Storage, current: SnapshotId | None, files_of: Callable[[bytes], Collection[str] | None],
    owns: Callable[[], bool] = lambda: True, lineages: Collection[bytes] = (),
) -> list[str]:  # fmt: skip
    """Remove what came to nothing; returns the names of what went.

    Args:
        current: what this run is writing now. What it has is left, and what is newer of its lineage or one of
            ``lineages``: other nodes may have gone on to that already. None: nobody writes.
        files_of: the files that a manifest names; None: it cannot be read, and all beside it stays.
        owns: whether the caller may remove things yet: the place is its own, and what it writes is still wanted. It
            is asked when all has been looked at, as others may have begun to write meanwhile.
    """
    names = [entry.name for entry in storage.list() if _FOLDER.fullmatch(entry.name.partition("/")[0])]
    keep = {name for name in names if not _is_ours(name)}
    for manifest in [name for name in names if CheckpointName.of_manifest(name) is not None]:
        folder, named = f"{manifest.partition('/')[0]}/", files_of(storage.read(manifest))
        beside = [name.removeprefix(folder) for name in names if name.startswith(folder)]
        keep |= {folder + name for name in (beside if named is None else named)}

    def is_active(name: str) -> bool:
        return current is not None and _may_be_written(name, current, lineages)

    gone = [name for name in names if name not in keep and not is_active(name)]
    unfinished = [name for name in storage.unfinished(is_active) if _BEGUN.fullmatch(name.rpartition("/")[2])]
    if not owns():
        return []
    storage.remove(gone)
    storage.discard(unfinished)
    return gone


def _may_be_written(name: str, current: SnapshotId, lineages: Collection[bytes]) -> bool:
    folder, _, rest = name.partition("/")
    iteration = iteration_of(folder)
    if iteration is None:
        return True  # what is small and beside checkpoints anybody may be writing
    if iteration > current.iteration:
        return rest.startswith((*map(_prefix, {current.lineage, *lineages}), MANIFEST_NAME))
    return iteration == current.iteration and rest.startswith((_prefix(current.lineage), MANIFEST_NAME))


def files_prefix(snapshot: SnapshotId) -> str:
    """What names of all that is written of a snapshot begin with, but for its manifest."""
    return f"{folder_of(snapshot.iteration)}/{_prefix(snapshot.lineage)}"


def _is_ours(name: str) -> bool:
    return _OURS.fullmatch(name.rpartition("/")[2]) is not None


def _prefix(lineage: bytes) -> str:
    return f"{lineage.hex()}-"


def name_latest(storage: Storage, iteration: int) -> None:
    """Let ``latest`` name the checkpoint of that iteration."""
    storage.put(LATEST_NAME, f"{folder_of(iteration)}\n".encode())


def latest(storage: Storage) -> int | None:
    """The iteration that ``latest`` names; None where it names none of ftckpt's."""
    if storage.size(LATEST_NAME) is None:
        return None
    return iteration_of(storage.read(LATEST_NAME).decode(errors="replace").strip())


def _beginning(storage: Storage, folder: str, words: str) -> list[str]:
    return [entry.name for entry in storage.list(folder) if entry.name.startswith(words)]
