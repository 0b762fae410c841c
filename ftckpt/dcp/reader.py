"""Reads checkpoints for ``torch.distributed.checkpoint``: those of ``StorageWriter``, and those that a job of ftckpt
under plain torch has persisted."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import add
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import storage as torch_storage
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

_STAYS = object()
"""A value that a load leaves as it is in the state."""


class StorageReader(torch_storage.StorageReader):
    """The ``storage_reader`` of ``dcp.load``; ranks may be more or fewer than at the save. All construct it alike.

    ``checkpoint_id`` of a load is an iteration, or a name that ``ftckpt list`` prints; without it, the newest
    checkpoint that is not abandoned is loaded. The attribute ``checkpoint_id`` names the last one loaded.

    Of a checkpoint that a job of ftckpt under plain torch has persisted, a load finds what torch's ``get_state_dict``
    returns: weights and buffers below the key ``model``, the optimizer's state and hyperparameters (without
    ``flatten_optimizer_state_dict``) below ``optimizer``. Parameter groups are matched by their order.

    Order of calls, by torch: ``reset`` if there is a ``checkpoint_id``, ``read_metadata``, ``set_up_storage_reader``
    and ``prepare_local_plan`` on all ranks, ``prepare_global_plan`` on the coordinator, ``read_data`` on all ranks.
    After an error the state may be partly loaded: load another checkpoint. Torch wraps errors in its
    ``CheckpointException``.

    Args:
        where: see ``StorageWriter``; also the folder of one checkpoint in a directory.
        model: key of the weights in the state; nested keys are joined by dots, "" is the state itself.
        optimizer: key of the optimizer's state.

    Raises:
        StorageError: in a load: there is no such checkpoint, ranks see different ones, or storage fails; without
            ``checkpoint_id`` also: a manifest is damaged, so that abandoned checkpoints are unknown.
        DamagedError: in a load: bytes do not match their checksum; the text names the file.
        LostError: in a load: elements of a tensor are missing.
        MismatchError: in a load: a tensor of another shape.
        UnsupportedError: in a load: a job of Megatron or DeepSpeed has persisted it.
    """

    def __init__(self, where: str | os.PathLike[str], model: str = "model", optimizer: str = "optimizer") -> None:
        located = locate(os.fspath(where))
        self._where, self._model, self._optimizer = located.where, f"{model}." if model else "", optimizer
        self._only = None if located.iteration is None else CheckpointName(located.iteration)
        self._wanted: CheckpointName | None = None
        self.checkpoint_id: str | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CheckpointName.of(str(checkpoint_id)) is not None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wanted = None if checkpoint_id is None else checkpoint_name(checkpoint_id)

    def read_metadata(self) -> dcp.Metadata:  # without kwargs, or torch would ask for the metadata of each rank
        storage = open_storage(self._where)
        stored = self._choose(storage)
        self.checkpoint_id, self._snapshot = stored.name, str(stored.snapshot)
        self._shards = [*in_order(ShardFiles(storage, stored).get, stored.shards, READERS)]
        self._values: dict[str, Any] = {}
        if stored.layout.get(MARK):
            entries = [*self._saved()]
        elif "sharded" in stored.layout:
            entries = [*self._persisted()]
        else:
            raise UnsupportedError(f"{self._where}/{stored.name}: is not of plain torch: use 'ftckpt convert'")
        self._index, self._tensors = Index(entries), _described(entry.fragment for entry in entries)
        keys: dict[str, Any] = {**dict.fromkeys(self._values, dcp.BytesStorageMetadata()), **self._tensors}
        return dcp.Metadata(keys, {key: (key,) for key in keys}, storage_meta=dcp.StorageMeta(stored.name))

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._snapshot)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise StorageError(f"{self._where}: ranks see different newest checkpoints: load again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._load_tensors([item for item in plan.items if item.type != LoadItemType.BYTE_IO], planner)
        for item in plan.items:
            value = self._values.get(item.storage_index.fqn, _STAYS)
            if item.type == LoadItemType.BYTE_IO and value is not _STAYS:
                buffer = io.BytesIO()
                torch.save(value, buffer)  # the planner takes nothing else
                buffer.seek(0)
                planner.load_bytes(item, buffer)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _choose(self, storage: Storage) -> StoredSnapshot:
        name, self._wanted = self._wanted or self._only, None
        if name is not None:
            return read_manifest(storage, name)
        for stored in usable(storage).values():
            return stored
        raise StorageError(f"{self._where}: there is no checkpoint that a load may take", lasting=True)

    def _saved(self) -> Iterator[ShardEntry]:
        """The tensors of a checkpoint of ``StorageWriter``; reads its values."""
        for number, file in enumerate(self._shards):
            self._values |= objects.decode(bytes(file.objects()))
            for fragment, offset in zip(file.image.manifest.fragments, file.image.offsets, strict=True):
                yield ShardEntry(number, fragment, offset)

    def _persisted(self) -> Iterator[ShardEntry]:
        """The tensors of a checkpoint of a job under plain torch; reads its hyperparameters."""
        for number, group in enumerate(objects.decode(bytes(self._shards[0].objects()))["optimizer"]["groups"]):
            values = {**group, "params": _STAYS}  # names, which the snapshot does not have
            prefix = f"{self._optimizer}.param_groups.{number}."
            self._values |= {f"{prefix}{name}": value for name, value in values.items()}
        for number, file in enumerate(self._shards):
            for stored in logical_fragments([file.image.manifest]):
                role, _, name = stored.fragment.key.partition("/")
                key = f"{self._optimizer}.state.{name}.{role}"
                if role == "step":  # a number, and a tensor of one element in the snapshot
                    fragment = Fragment.whole(key, stored.fragment.dtype, (), Box((), ()))
                else:
                    fragment = stored.fragment.with_key(f"{self._model}{name}" if role in WEIGHTS_ALONE else key)
                yield ShardEntry(number, fragment, file.image.offsets[stored.index])

    def _load_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        targets = [planner.resolve_tensor(item).detach() for item in items]
        needs = [self._need(item) for item in items]
        memories = [_memory(need, target) for need, target in zip(needs, targets, strict=True)]
        parts: dict[int, list[Part]] = {}
        for read in plan(self._index, needs, lambda source: 0):
            entry, memory = read.offer, memories[read.need].view(torch.uint8)
            copies = (in_bytes(copy, entry.fragment.item_bytes, entry.offset) for copy in read.copies)
            parts.setdefault(entry.source, []).extend(Part(copy, memory) for copy in copies)
        chunks = [chunk for source, of in parts.items() for chunk in chunks_of(self._shards[source], of)]
        for _ in land_all(chunks, READERS):
            pass  # reads each chunk once, verifies it, and copies its parts
        for item, target, memory in zip(items, targets, memories, strict=True):
            if memory.data_ptr() != target.data_ptr():
                target.copy_(memory.view(target.shape))
            planner.commit_tensor(item, target)

    def _need(self, item: ReadItem) -> Fragment:
        key, offset = item.storage_index.fqn, item.storage_index.offset or ()
        tensor = self._tensors[key]
        box = Box(tuple(map(add, offset, item.storage_offsets)), tuple(item.lengths))
        return Fragment.whole(key, DTYPE_NAMES[tensor.properties.dtype], tuple(tensor.size), box)


def _memory(need: Fragment, target: torch.Tensor) -> torch.Tensor:
    """The memory to read into: the target's own, if it has the type of the need and no gaps."""
    if tuple(target.shape) != need.box.shape:  # a copy would broadcast
        raise MismatchError(f"{need.key}: {list(target.shape)} in the state, {list(need.box.shape)} on storage")
    dtype = TORCH_DTYPES[need.dtype]
    if target.is_contiguous() and target.dtype == dtype and need.numel > 1:  # one element may have any stride
        return target.view(-1)
    return torch.empty(need.numel, dtype=dtype, device=target.device)


def _described(fragments: Iterable[Fragment]) -> dict[str, dcp.TensorStorageMetadata]:
    """The tensors of ``fragments`` by key, each with its boxes."""
    tensors, boxes = dict[str, dcp.TensorStorageMetadata](), set[tuple[str, Box]]()
    for key, dtype, shape, box, start, stop in fragments:
        properties = dcp.TensorProperties(TORCH_DTYPES[dtype])
        tensor = tensors.setdefault(key, dcp.TensorStorageMetadata(properties, torch.Size(shape), []))
        # A rank that has nothing of a tensor has an empty box of it.
        if (start < stop or 0 in shape) and (key, box) not in boxes:
            boxes.add((key, box))
            tensor.chunks.append(dcp.ChunkStorageMetadata(*map(torch.Size, box)))
    return tensors
