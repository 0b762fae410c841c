"""Writes checkpoints of ``torch.distributed.checkpoint`` in the format of ftckpt's snapshots on storage.

Each rank writes one shard file: a fragment per tensor of its plan, and as objects the values that are not tensors.
The coordinator commits all of them by one manifest.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ftckpt.array_types import Buffer
from ftckpt.errors import ConfigError, StorageError, UnsupportedError
from ftckpt.frameworks.tensors import DTYPE_NAMES
from ftckpt.memory.image import SlotImage
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.lineage import FIRST, Lineage, newest
from ftckpt.model.manifest import Manifest
from ftckpt.model.snapshot import LINEAGE_BYTES, SnapshotId
from ftckpt.persist import commit
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import CheckpointFile, CheckpointName, CheckpointTransaction, NodeCommitMarker
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place
from ftckpt.persist.retention import readable, restorable, retain, set_aside
from ftckpt.persist.shards import PIECE_BYTES, StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage

MARK = "dcp"
"""The entry of the layout in checkpoints of this writer."""
_JOB = "torch.distributed.checkpoint"
_CHUNK_BYTES = 16 << 20
"""The unit of checksums, and of reads."""


class _Save(NamedTuple):
    """A save that the coordinator has begun. ``replaces``: a checkpoint of this iteration exists."""

    snapshot: SnapshotId
    lineage: Lineage
    replaces: bool


class StorageWriter(torch_storage.StorageWriter):
    """The ``storage_writer`` of ``dcp.save`` and ``dcp.async_save``. All ranks construct it alike.

    ``checkpoint_id`` of a save is the iteration; without it, one more than the newest on storage. If that or newer
    ones exist, the save is a rollback and abandons them: a load takes them only by name, and retention removes them.

    Order of calls, by torch: ``reset`` if there is a ``checkpoint_id``, ``set_up_storage_writer`` and
    ``prepare_local_plan`` on all ranks, ``prepare_global_plan`` on the coordinator, ``write_data`` on all ranks; when
    it has returned on all of them, with their files durable, ``finish`` on the coordinator. One save at a time: await
    the future of ``async_save`` before the next. Torch wraps errors in its ``CheckpointException``.

    Args:
        where: a directory that all ranks share (its parent must exist), or a URL such as ``s3://bucket/folder``.
        keep: number of newest checkpoints to retain; 0: all. Pinned ones stay.

    Raises:
        ConfigError: ``keep`` is negative, or a ``checkpoint_id`` is no iteration.
        StorageError: in a save: ``where`` is missing, not writable, of another program or of a job of ftckpt, another
            save has committed the iteration meanwhile, a file has disappeared, or storage fails.
        UnsupportedError: in a save: ``use_collectives=False``, a planner that reuses plans, or a value or tensor that
            cannot be saved.
    """

    def __init__(self, where: str | os.PathLike[str], keep: int = 0) -> None:
        if keep < 0:
            raise ConfigError(f"keep={keep}: is negative; give the number of checkpoints to retain, 0 for all")
        self._where, self._keep = os.fspath(where), keep
        self._iteration: int | None = None
        self._save: _Save | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CheckpointName.of(str(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._iteration = None if checkpoint_id is None else checkpoint_name(checkpoint_id).iteration

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UnsupportedError("use_collectives=False: ranks that do not wait for each other cannot commit")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise UnsupportedError("enable_plan_caching=True: a reused plan names the files of an earlier save")
        prepare(Place(self._where))
        storage = open_storage(self._where)
        commit.require_own(storage)
        if storage.size(commit.OWNER_NAME) is not None:
            raise StorageError(f"{self._where}: a job of ftckpt persists there: name another place", lasting=True)
        self._save = self._begin(storage)
        commit.sweep(storage, None)  # no rank writes: the save before has ended on all of them, or they are dead
        return [replace(plan, storage_data=(self._save.snapshot, n, len(plans))) for n, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One result, whose ``storage_data`` are the rank's shard and its entry for the manifest."""
        shard, entry = _write_shard(open_storage(self._where), plan, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(shard), entry.nbytes, (shard, entry))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self._save is not None, "prepare_global_plan comes first"
        (snapshot, lineage, replaces), storage = self._save, open_storage(self._where)
        shards: dict[str, StoredShard] = dict(result.storage_data for of_rank in results for result in of_rank)
        stored = StoredSnapshot(snapshot, _JOB, {"dp": len(shards), MARK: True}, shards, lineage)
        files = {shard: CheckpointFile(entry.file, entry.nbytes, entry.checksum) for shard, entry in shards.items()}
        marks = {shard: NodeCommitMarker(shard, (file,), {}, lineage) for shard, file in files.items()}
        if replaces:
            set_aside(storage, snapshot)
        name = CheckpointName(snapshot.iteration)
        # Compares the files on storage with the marks, then creates the manifest.
        if not CheckpointTransaction(storage, snapshot, "").commit(stored.encode(), marks, replaces):
            raise StorageError(f"{self._where}/{name}: another save has committed it: use one job", lasting=True)
        metadata.storage_meta = StorageMeta(str(name))
        try:
            retain(storage, snapshot, lineage, self._keep)
        except StorageError as error:
            text = "ftckpt: %s is committed; older checkpoints stay until the next save: %s"
            logging.getLogger("ftckpt").warning(text, name, error)

    def _begin(self, storage: Storage) -> _Save:
        names, lineages = commit.checkpoints(storage), {name: one.lineage for name, one in readable(storage).items()}
        head, iteration, self._iteration = newest(lineages.values()), self._iteration, None
        if iteration is None:
            iteration = 1 + max((name.iteration for name in names), default=0)
        if any(name.iteration >= iteration for name in restorable(lineages, head)):
            head = head.branch(iteration - 1)
        snapshot = SnapshotId(secrets.token_bytes(LINEAGE_BYTES), iteration)
        return _Save(snapshot, head if head.branches else FIRST, CheckpointName(iteration) in names)


def checkpoint_name(checkpoint_id: str | os.PathLike[str]) -> CheckpointName:
    """The checkpoint of a ``checkpoint_id``. Raises ConfigError if it is neither an iteration nor a name."""
    if (name := CheckpointName.of(str(checkpoint_id))) is None:
        raise ConfigError(f"checkpoint_id={str(checkpoint_id)!r}: is no iteration, nor a name such as iter_0000012")
    return name


def _write_shard(storage: Storage, plan: SavePlan, planner: SavePlanner) -> tuple[str, StoredShard]:
    """Writes a rank's file, durable on return; its shard and entry."""
    (snapshot, rank, ranks), hashes = plan.storage_data, list[int]()
    tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
    values = [item.index for item in plan.items if item.type == WriteItemType.BYTE_IO]
    # ``resolve_data`` would return a pickle, and ftckpt reads none from storage.
    lookup: Any = getattr(planner, "lookup_object", None)
    if values and lookup is None:
        raise UnsupportedError(f"{values[0].fqn}: derive {type(planner).__name__} from DefaultSavePlanner")
    encoded = objects.encode({index.fqn: lookup(index) for index in values})
    fragments = tuple(map(_fragment, tensors))
    manifest = Manifest({"dp": rank}, {"dp": ranks, MARK: True}, fragments, (), len(encoded), _CHUNK_BYTES)
    image = SlotImage.of(manifest)

    def contents() -> Iterator[Buffer]:
        yield image.header
        yield from _hashed(image, (_bytes(item, planner.resolve_data(item)) for item in tensors), hashes)
        yield bytes(image.objects.begin - image.stepped.end)
        yield encoded
        yield bytes(image.file_bytes - image.objects.end)

    file = CheckpointTransaction(storage, snapshot, manifest.shard).write(f"{manifest.shard}.safetensors", contents())
    return manifest.shard, StoredShard(
        file.name, file.nbytes, file.checksum, manifest.digest.hex(), len(encoded),
        xxhash.xxh3_64_intdigest(encoded), np.array(hashes, np.uint64),
    )  # fmt: skip


def _fragment(item: WriteItem) -> Fragment:
    data: Any = item.tensor_data
    if (dtype := DTYPE_NAMES.get(data.properties.dtype)) is None:
        raise UnsupportedError(f"{item.index.fqn} has type {data.properties.dtype}, which ftckpt cannot save")
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return Fragment.whole(item.index.fqn, dtype, tuple(data.size), box)


def _bytes(item: WriteItem, tensor: Any) -> memoryview:
    data: Any = item.tensor_data
    if (tensor.dtype, tensor.shape) != (data.properties.dtype, data.chunk.sizes):
        text = f"is {tensor.dtype} {list(tensor.shape)}, planned as {data.properties.dtype} {list(data.chunk.sizes)}"
        raise UnsupportedError(f"{item.index.fqn}: {text}: the planner must plan what it resolves")
    flat = tensor.detach().cpu().resolve_neg().reshape(-1)
    if len(flat) < 2:  # of any stride, which ``view`` refuses
        flat = flat.clone(memory_format=torch.contiguous_format)
    return memoryview(flat.contiguous().view(torch.uint8).numpy())  # contiguous: a slice has gaps


def _hashed(image: SlotImage, tensors: Iterable[memoryview], hashes: list[int]) -> Iterator[memoryview]:
    """The tensors, and zeros in the gaps before them; ``hashes`` receives the checksum of each chunk."""
    digest, left, position = xxhash.xxh3_64(), _CHUNK_BYTES, image.stepped.begin
    for offset, data in zip(image.offsets, tensors, strict=True):
        for view in (memoryview(bytes(offset - position)), data):
            while view:
                piece, view = view[: min(left, PIECE_BYTES)], view[min(left, PIECE_BYTES) :]  # noqa: PLW2901
                digest.update(piece)
                yield piece
                left -= len(piece)
                if not left:
                    hashes.append(digest.intdigest())
                    digest, left = xxhash.xxh3_64(), _CHUNK_BYTES
        position = offset + len(data)
    if left < _CHUNK_BYTES:
        hashes.append(digest.intdigest())
