"""Reads checkpoints for ``torch.distributed.checkpoint``: those of ``StorageWriter``, and those that a job of ftckpt
under plain torch has persisted."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint import storage as torch_storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from ftckpt.dcp.writer import MARK, checkpoint_name
from ftckpt.errors import MismatchError, StorageError, UnsupportedError
from ftckpt.model import objects
from ftckpt.model.fragment import Box, Fragment
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import CheckpointName, read_manifest
from ftckpt.persist.paths import locate
from ftckpt.persist.retention import usable
from ftckpt.persist.shards import StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.chunk_reads import Part, chunks_of, land_all
from ftckpt.restore.plan import in_bytes, plan
from ftckpt.restore.storage_source import READERS, ShardFiles
from ftckpt.restore.tensor_index import Index, ShardEntry
from ftckpt.restore.threads import in_order
from ftckpt.universal.arenas import logical_fragments
from ftckpt.universal.catalog import DTYPE_NAMES, TORCH_DTYPES, WEIGHTS_ALONE


class StorageReader(torch_storage.StorageReader):
    """The ``storage_reader`` of ``dcp.load``; ranks may be more or fewer than at the save. All construct it alike.

    ``checkpoint_id`` of a load is an iteration, or a name that ``ftckpt list`` prints; without it, the newest checkpoint
    that is not abandoned is loaded. The attribute ``checkpoint_id`` names the last one loaded.

    Of a checkpoint that a job of ftckpt under plain torch has persisted, a load finds what torch's ``get_state_dict``
    returns: weights and buffers below the key ``model``, the optimizer's state and hyperparameters (without
    ``flatten_optimizer_state_dict``) below ``optimizer``. Parameter groups are matched by their order.

    Order of calls, by torch: ``reset`` if there is a ``checkpoint_id``, ``read_metadata``, ``set_up_storage_reader`` and
    ``prepare_local_plan`` on all ranks, ``prepare_global_plan`` on the coordinator, ``read_data`` on all ranks. After an
    error the state may be partly loaded: load another checkpoint. Torch wraps errors in its ``CheckpointException``.

    Args:
        where: see ``StorageWriter``; also the folder of one checkpoint in a directory.
        model: key of the weights in the state; nested keys are joined by dots, "" is the state itself.
        optimizer: key of the optimizer's state.

    Raises:
        StorageError: in a load: there is no such checkpoint, ranks see different ones, or storage fails.
        DamagedError: in a load: bytes do not match their checksum; the text names the file.
        LostError: in a load: elements of a tensor are missing.
        MismatchError: in a load: a tensor of another shape.
        UnsupportedError: in a load: a job of Megatron or DeepSpeed has persisted it.
    """

    def __init__(self, where: str | os.PathLike[str], model: str = "model", optimizer: str = "optimizer") -> None:
        located = locate(os.fspath(where))
        self._where, self._model, self._optimizer = located.where, f"{model}." if model else "", f"{optimizer}."
        self._only = None if located.iteration is None else CheckpointName(located.iteration)
        self._wanted: CheckpointName | None = None
        self.checkpoint_id: str | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CheckpointName.of(str(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wanted = None if checkpoint_id is None else checkpoint_name(checkpoint_id)

    def read_metadata(self) -> Metadata:  # type: ignore[override] # with kwargs, torch would ask for each rank's
        storage = open_storage(self._where)
        stored = self._choose(storage)
        self.checkpoint_id, self._files = stored.name, ShardFiles(storage, stored)
        for _ in in_order(self._files.get, stored.shards, READERS):
            pass  # opens them
        self._values: dict[str, Any] = {}
        if stored.layout.get(MARK):
            entries, absent = self._saved(), list[str]()
        elif "sharded" in stored.layout:
            entries, absent = self._persisted()
        else:
            text = "is not of plain torch; 'ftckpt convert' converts it"
            raise UnsupportedError(f"{self._where}/{stored.name}: {text}")
        self._index, self._tensors = Index(entries), _described(entry.fragment for entry in entries)
        keys = {**dict.fromkeys([*self._values, *absent], BytesStorageMetadata()), **self._tensors}
        return Metadata(keys, {key: (key,) for key in keys}, storage_meta=StorageMeta(stored.name))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=str(self._files.stored.snapshot))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            text = "ranks see different newest checkpoints, as a save has ended meanwhile: load again, or give"
            raise StorageError(f"{self._where}: {text} checkpoint_id")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._load_tensors([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO and item.storage_index.fqn in self._values:
                buffer = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], buffer)  # the planner takes nothing else
                buffer.seek(0)
                planner.load_bytes(item, buffer)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _choose(self, storage: Storage) -> StoredSnapshot:
        name, self._wanted = self._wanted or self._only, None
        if name is not None:
            return read_manifest(storage, name)
        if (stored := next(iter(usable(storage).values()), None)) is None:
            raise StorageError(f"{self._where}: there is no checkpoint that a load may take", lasting=True)
        return stored

    def _saved(self) -> list[ShardEntry]:
        """The entries of a checkpoint of ``StorageWriter``."""
        entries = list[ShardEntry]()
        for number, shard in enumerate(self._files.stored.shards):
            file = self._files.get(shard)
            self._values |= objects.decode(bytes(file.objects()))
            places = zip(file.image.manifest.fragments, file.image.offsets, strict=True)
            entries += (ShardEntry(number, fragment, offset) for fragment, offset in places)
        return entries

    def _persisted(self) -> tuple[list[ShardEntry], list[str]]:
        """The entries of a checkpoint of a job under plain torch, and the keys of values that it does not have: they
        stay as they are in the state."""
        entries, numbers = list[ShardEntry](), {shard: n for n, shard in enumerate(self._files.stored.shards)}
        images = {shard: self._files.get(shard).image for shard in numbers}
        for shard, index, fragment in map(tuple, logical_fragments(image.manifest for image in images.values())):
            role, _, name = fragment.key.partition("/")
            key = f"{self._model}{name}" if role in WEIGHTS_ALONE else f"{self._optimizer}state.{name}.{role}"
            # A step is a number, and a tensor of one element in the snapshot.
            scalar = Fragment.whole(key, fragment.dtype, (), Box((), ()))
            renamed = scalar if role == "step" else fragment.with_key(key)
            entries.append(ShardEntry(numbers[shard], renamed, images[shard].offsets[index]))
        saved = objects.decode(bytes(self._files.get(next(iter(numbers))).objects()))
        groups = {f"{self._optimizer}param_groups.{n}": group for n, group in enumerate(saved["optimizer"]["groups"])}
        self._values = {f"{key}.{name}": value for key, group in groups.items() for name, value in group.items()}
        return entries, [f"{key}.params" for key in groups]

    def _load_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        targets = [planner.resolve_tensor(item).detach() for item in items]
        needs = [self._need(item) for item in items]
        memories = [_memory(need, target) for need, target in zip(needs, targets, strict=True)]
        parts: dict[int, list[Part]] = {}
        for read in plan(self._index, needs, lambda source: 0):
            entry, memory = read.offer, memories[read.need].view(torch.uint8)
            copies = (in_bytes(copy, entry.fragment.item_bytes, entry.offset) for copy in read.copies)
            parts.setdefault(entry.source, []).extend(Part(copy, memory) for copy in copies)
        shards = list(self._files.stored.shards)
        chunks = [one for source, of in parts.items() for one in chunks_of(self._files.get(shards[source]), of)]
        for _ in land_all(chunks, READERS):
            pass  # reads each chunk once, verifies it, and copies its parts
        for item, target, memory in zip(items, targets, memories, strict=True):
            if memory.data_ptr() != target.data_ptr():
                target.copy_(memory.view(target.shape))
            planner.commit_tensor(item, target)

    def _need(self, item: ReadItem) -> Fragment:
        key, offset = item.storage_index.fqn, item.storage_index.offset
        assert offset is not None, "the index of a tensor has one"
        tensor = self._tensors[key]
        box = Box(tuple(map(add, offset, item.storage_offsets)), tuple(item.lengths))
        return Fragment.whole(key, DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), box)


def _memory(need: Fragment, target: torch.Tensor) -> torch.Tensor:
    """The memory to read into: the target's own, if it has the type of the need and no gaps."""
    if tuple(target.shape) != need.box.shape:  # a copy would broadcast
        raise MismatchError(f"{need.key}: is {list(need.box.shape)} on storage, and {list(target.shape)} in the state")
    dtype = TORCH_DTYPES[need.dtype]
    if target.is_contiguous() and target.dtype == dtype:
        return target.view(-1)
    return torch.empty(need.numel, dtype=dtype, device=target.device)


def _described(fragments: Iterable[Fragment]) -> dict[str, TensorStorageMetadata]:
    """The tensors of ``fragments`` by key, each with its boxes."""
    boxes: dict[tuple[str, str, tuple[int, ...]], dict[Box, None]] = {}
    for fragment in fragments:
        of = boxes.setdefault((fragment.key, fragment.dtype, fragment.global_shape), {})
        if fragment.numel or 0 in fragment.global_shape:  # the box of a rank that has nothing of it may be empty
            of[fragment.box] = None
    return {
        key: TensorStorageMetadata(
            TensorProperties(TORCH_DTYPES[dtype]), torch.Size(shape),
            [ChunkStorageMetadata(*map(torch.Size, box)) for box in of],
        )
        for (key, dtype, shape), of in boxes.items()
    }  # fmt: skip
