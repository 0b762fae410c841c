"""A writer of ``torch_dist`` checkpoints that Megatron's ``dist_checkpointing.load`` reads in any layout."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.storage import WriteResult

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import TORCH_DTYPES, WEIGHTS_ALONE, Catalog, Get, Rows, Tensor, Unit, Writer
from ftckpt.universal.consolidation import WEIGHT, master_of, refuse_remainders, require_weights, with_derived
from ftckpt.universal.foreign import pickles
from ftckpt.universal.megatron import names
from ftckpt.universal.megatron.common import SHARDING, arguments_of, hyperparameters, make_common
from ftckpt.universal.megatron.dist_reader import COMMON, CONFIG, TRACKER
from ftckpt.universal.safetensors import MAX_FILE_BYTES, strip_memory, strips
from ftckpt.universal.storage import Destination, explained

BLOB_BYTES = 64 << 20
"""Maximum of a strip of rows in which tensors are stored, unless one row is larger."""
STEP = "step"
_INDEX = ".index.json"
_EXTRA = "extra_states.distcp"
_CONTENT = {
    "distrib_optim_sharding_type": SHARDING,
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class MegatronDistWriter(Writer):
    """Writes a directory as Megatron's ``--save`` does: ``iter_0000005`` and the file that names the newest.

    The layers of homogeneous blocks are stacked, as in Megatron (``stack=False``: never), which ``content_metadata``
    records. Optimizer state has the names of jobs with the distributed optimizer and without, which share the bytes.
    RNG state is not carried over.
    """

    def __init__(self, path: Path, max_file_bytes: int = MAX_FILE_BYTES, stack: bool = True) -> None:
        self.destination = Destination(path)
        self._max_file_bytes = max(1, max_file_bytes)
        self._stack = stack
        self._stored: list[Tensor] = []
        self._stacks: dict[str, int] = {}
        self._stepped: frozenset[str] = frozenset()

    def plan(self, catalog: Catalog, tensors: Sequence[Tensor]) -> list[Unit]:
        every = sorted(with_derived(catalog, tensors))
        refuse_remainders(every)
        require_weights(every)
        steps = [tensor for tensor in every if tensor.role == STEP]
        self._stored = [tensor for tensor in every if tensor.role != STEP]
        keys = {tensor.key for tensor in self._stored}
        self._stepped = frozenset(key for key in keys if _is_stepped_weight(key, keys))
        if self._has_optimizer() and not hyperparameters(catalog.objects).groups:
            raise ConvertError(
                "the source has no learning rates, betas and weight decays of parameter groups, which Megatron "
                "requires with optimizer state; convert the weights alone with --roles weight,buffer"
            )
        is_stacked = self._stack and not _names_each_layer(catalog.objects)
        self._stacks = names.stackable(self._stored) if is_stacked else {}
        packed = _pack(self._stored, self._max_file_bytes)
        if packed:  # steps are read with the first file and written to ``common.pt``
            packed[0][:0] = map(Rows.whole, steps)
        directory = _directory(catalog)
        return [
            Unit(f"{directory}/__0_{number}.distcp", tuple(parts), sum(part.nbytes for part in parts))
            for number, parts in enumerate(packed)
        ]

    def memory(self, unit: Unit) -> int:
        """Maximum memory of ``write`` in bytes: a strip, its source, and its archive."""
        return strip_memory(unit, BLOB_BYTES)

    def write(self, unit: Unit, get: Get) -> None:
        """Write the file and its index for ``finish``, which may run in another process."""
        steps: set[float] = set()
        written: list[tuple[str, int, int, int, int]] = []
        with self.destination.file(unit.name) as file:
            for part in unit.parts:
                if part.tensor.role == STEP:
                    steps |= _steps(part, get)
                else:
                    written += self._write_part(part, file, get)
            if len(steps) > 1:
                raise ConvertError(f"tensors are at different optimizer steps, {sorted(steps)}; Megatron stores one")
            # Inside the other: the index is renamed first, so that a finished file always has one.
            with self.destination.file(_index_name(unit.name)) as index:
                index.write(json.dumps({"written": written, "steps": sorted(steps)}).encode())

    def finish(self, catalog: Catalog, units: Sequence[Unit]) -> None:
        directory = _directory(catalog)
        # Written last: if an earlier attempt left it, all else is complete, and indexes may be removed.
        if not (self.destination.partial / TRACKER).is_file():
            self._write_rest(catalog, directory, units)
        for unit in units:
            (self.destination.partial / _index_name(unit.name)).unlink(missing_ok=True)
        self.destination.commit()

    def _write_rest(self, catalog: Catalog, directory: str, units: Sequence[Unit]) -> None:
        indexes = {Path(unit.name).name: self._index(unit) for unit in units}
        metadata: dict[str, Any] = {}
        results: list[WriteResult] = []
        by_key = {tensor.key: tensor for tensor in self._stored}
        for name, index in indexes.items():
            for key, first, last, offset, length in index["written"]:
                strip = (by_key[key], first, last)
                results += self._records(metadata, strip, _StorageInfo(name, offset, length))
        results += self._extra_states(directory, metadata)
        writer = FileSystemWriter(self.destination.partial / directory)
        with explained(self.destination.partial / directory):
            writer.finish(dcp.Metadata(metadata), [results])
        step = next((step for index in indexes.values() for step in index["steps"]), None)
        self._write_common(catalog, directory, step)
        # Last: Megatron recognizes a checkpoint by this file, and finds the newest by the tracker.
        for name, text in ((f"{directory}/{CONFIG}", json.dumps(_CONFIG)), (TRACKER, str(catalog.iteration))):
            with self.destination.file(name) as file:
                file.write(text.encode())

    def _write_part(self, part: Rows, file: BinaryIO, get: Get) -> Iterator[tuple[str, int, int, int, int]]:
        tensor = part.tensor
        for first, last in _strips(part):
            data = get(tensor, first, last)
            # torch warns of tensors over read-only memory, such as a mapped file.
            flat = torch.from_numpy(data if data.flags.writeable else data.copy()).view(TORCH_DTYPES[tensor.dtype])
            value = flat.reshape(self._blob_shape(tensor, first, last))
            offset = file.tell()
            yield tensor.key, first, last, offset, pickles.dump(value, file)

    def _blob_shape(self, tensor: Tensor, first: int, last: int) -> tuple[int, ...]:
        # Any of the names: the shape is the same.
        place = next(names.places(tensor, names.to_megatron(tensor.key), self._stacks))
        rows = (last - first, *tensor.shape[1:]) if tensor.shape else ()
        return (1,) * len(place.first) + rows

    def _records(
        self, metadata: dict[str, Any], strip: tuple[Tensor, int, int], info: _StorageInfo
    ) -> Iterator[WriteResult]:
        """One entry per name under which a job may load these rows, all with the same bytes."""
        tensor, first, last = strip
        sizes = torch.Size(self._blob_shape(tensor, first, last))
        # The distributed optimizer also saves a weight that it updates itself as its master.
        aliases = names.to_megatron(tensor.key, tensor.dtype == "F32" and tensor.key in self._stepped)
        for place in names.places(tensor, aliases, self._stacks):
            inner = (first, *(0 for _ in tensor.shape[1:])) if tensor.shape else ()
            offsets = torch.Size((*place.first, *inner))
            properties = dcp.TensorProperties(dtype=TORCH_DTYPES[tensor.dtype])
            stored = metadata.setdefault(
                place.name, dcp.TensorStorageMetadata(properties, torch.Size(place.shape), [])
            )
            stored.chunks.append(dcp.ChunkStorageMetadata(offsets, sizes))
            yield WriteResult(dcp.MetadataIndex(place.name, offsets), info.length, info)

    def _has_optimizer(self) -> bool:
        return any(tensor.role not in WEIGHTS_ALONE for tensor in self._stored)

    def _index(self, unit: Unit) -> dict[str, Any]:
        path = self.destination.partial / _index_name(unit.name)
        try:
            index: dict[str, Any] = json.loads(path.read_bytes())
        except (OSError, ValueError):
            raise ConvertError(f"{path}: is missing or damaged; remove {path.parent} and start again") from None
        return index

    def _extra_states(self, directory: str, metadata: dict[str, Any]) -> list[WriteResult]:
        with self.destination.file(f"{directory}/{_EXTRA}") as file:
            length = pickles.dump([None], file)
        results = []
        for name in sorted(set(names.extra_states(self._stored, self._stacks))):
            metadata[name] = dcp.BytesStorageMetadata()
            # All names share the same few bytes.
            results.append(WriteResult(dcp.MetadataIndex(name), length, _StorageInfo(_EXTRA, 0, length)))
        return results

    def _write_common(self, catalog: Catalog, directory: str, step: float | None) -> None:
        content = {**_CONTENT, "non_homogeneous_layers": not self._stacks}
        fp32 = not any(tensor.role == "master" for tensor in self._stored)
        common = make_common(catalog.objects, catalog.iteration, step, fp32, content)
        if not self._has_optimizer():
            common.pop("optimizer", None)
        with self.destination.file(f"{directory}/{COMMON}") as file:
            pickles.dump(common, file)


def _is_stepped_weight(key: str, keys: Collection[str]) -> bool:
    """Whether the optimizer updates the weight itself, which has optimizer state and no master."""
    is_stepped = key.startswith(WEIGHT) and key.replace(WEIGHT, "exp_avg/", 1) in keys
    return is_stepped and master_of(key) not in keys


def _directory(catalog: Catalog) -> str:
    return f"iter_{catalog.iteration:07d}"


def _index_name(name: str) -> str:
    return f"{name}{_INDEX}"


def _names_each_layer(objects: Mapping[str, Any]) -> bool:
    """Whether the Megatron job that wrote the source names each layer, even in homogeneous blocks."""
    common = objects.get("megatron") or {}
    args = arguments_of(objects)
    frequency = args.get("moe_layer_freq")
    content = common.get("content_metadata") or {}
    return bool(
        content.get("non_homogeneous_layers")
        or isinstance(frequency, (list, tuple))
        or (isinstance(frequency, int) and frequency > 1)
        or args.get("heterogeneous_layers_config_path")
    )


def _pack(tensors: Sequence[Tensor], max_file_bytes: int) -> list[list[Rows]]:
    """Packs tensors into files of at most ``max_file_bytes``; larger tensors are cut between rows."""
    files: list[list[Rows]] = []
    room = 0
    for tensor in tensors:
        rows = max(1, max_file_bytes // max(1, tensor.row_bytes))
        for first in range(0, max(1, tensor.rows), rows):
            part = Rows(tensor, first, min(first + rows, tensor.rows))
            if not files or part.nbytes > room:
                files.append([])
                room = max_file_bytes
            files[-1].append(part)
            room -= part.nbytes
    return files


def _strips(part: Rows) -> Iterator[tuple[int, int]]:
    """The strips of ``part``; an empty tensor has an empty one, which Megatron requires."""
    if part.nbytes == 0:
        yield part.first, part.last
    yield from strips(part, BLOB_BYTES)


def _steps(part: Rows, get: Get) -> set[float]:
    data: Bytes = get(part.tensor, part.first, part.last)
    values = torch.from_numpy(data.copy()).view(TORCH_DTYPES[part.tensor.dtype])
    return set(values.double().tolist())
