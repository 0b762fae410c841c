"""A reader of Megatron's ``torch_dist`` checkpoints: weights, masters, optimizer state and objects."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment, Shape
from ftckpt.universal.catalog import Catalog, Reader
from ftckpt.universal.foreign import pickles
from ftckpt.universal.foreign.distributed import METADATA, CheckpointDirectory, DcpChunk, StoredTensor
from ftckpt.universal.megatron import names
from ftckpt.universal.megatron.common import CONTENT, common_step, layout_of
from ftckpt.universal.storage import fingerprint_of

CONFIG = "metadata.json"
COMMON = "common.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_LEFT_OUT = ("rerun_state_machine",)
"""Objects that have no meaning in another job."""


def recognises(path: Path) -> bool:
    """Whether ``path`` is a ``torch_dist`` checkpoint, or a directory of several whose newest is one."""
    try:
        directory = iteration_directory(path, None)
        return bool(json.loads((directory / CONFIG).read_bytes()).get("sharded_backend") == "torch_dist")
    except (ConvertError, OSError, ValueError, AttributeError):
        return False


def iteration_directory(path: Path, iteration: int | None) -> Path:
    """The directory in ``path`` of ``iteration``. If that is None: ``path`` itself if it is a checkpoint, or else the
    directory that its ``latest_checkpointed_iteration.txt`` names.

    Raises:
        ConvertError: there is none.
    """
    if (path / CONFIG).exists() and iteration is None:
        return path
    if iteration is None:
        try:
            text = (path / TRACKER).read_text().strip()
        except (OSError, UnicodeDecodeError):
            raise ConvertError(f"{path}: has neither {CONFIG} nor {TRACKER}") from None
        # Megatron's name for weights without a training run.
        if text == "release":
            return path / text
        if not text.isdecimal():
            raise ConvertError(f"{path / TRACKER}: holds {text[:40]!r}, not an iteration")
        iteration = int(text)
    directory = path / f"iter_{iteration:07d}"
    if not directory.is_dir():
        raise ConvertError(f"{directory}: is missing")
    return directory


@dataclass(frozen=True)
class _ChunkRange:
    """Bytes ``begin`` to ``end`` of ``chunk``; if that is None, the bytes ``value``."""

    name: str
    chunk: DcpChunk | None
    begin: int
    end: int
    value: bytes = b""


class MegatronDistReader(Reader):
    """Reads the checkpoint in ``path``, or that of ``iteration`` (default: the newest) among those in ``path``.

    ``roles``: the roles to read, None for all. Weights alone can be read even if optimizer state is unreadable.

    Raises:
        ConvertError: a file is missing, truncated or corrupt, optimizer state is specific to a layout, or an object
            needs code.
    """

    def __init__(self, path: Path, iteration: int | None = None, roles: Iterable[str] | None = None) -> None:
        self._wanted = None if roles is None else set(roles)
        self.path = iteration_directory(path, iteration)
        _check_config(self.path / CONFIG)
        self._directory = CheckpointDirectory(self.path)
        common = pickles.plain(pickles.load(self.path / COMMON))
        args = common.get("args") if isinstance(common.get("args"), dict) else {}
        if self._wanted is None or self._wanted - {"weight", "buffer"}:
            names.refuse_unreadable(self._all_names(), common.get(CONTENT) or {}, str(self.path))
        self._reads: list[_ChunkRange] = []
        fragments = list(self._fragments())
        objects = {"megatron": common, "sharded_objects": self._objects()}
        fragments += self._steps(fragments, common_step(objects, str(self.path / COMMON)))
        self.catalog = Catalog(
            origin="megatron-dist",
            iteration=int(common.get("iteration", 0)),
            layout=layout_of(args),
            fragments=tuple(fragments),
            objects=objects,
            padded=frozenset(fragment.key for fragment in fragments if names.is_padded(fragment.key)),
        )

    def read(self, index: int) -> Bytes:
        read = self._reads[index]
        if read.chunk is None:
            return np.frombuffer(read.value, np.uint8)
        return self._directory.chunk(read.name, read.chunk)[read.begin : read.end]

    def where(self, index: int) -> Path:
        """The file that holds a fragment."""
        chunk = self._reads[index].chunk
        return self.path / (COMMON if chunk is None else chunk.blob.file)

    def fingerprint(self) -> str:
        return fingerprint_of(file for file in self.path.iterdir() if file.is_file())

    def close(self) -> None:
        self._directory.close()

    def _all_names(self) -> Iterator[str]:
        yield from self._directory.tensors
        yield from self._directory.objects

    def _objects(self) -> dict[str, Any]:
        objects = {}
        for name in self._directory.objects:
            if not name.startswith(_LEFT_OUT) and "optimizer.distributed." not in name:
                value = self._directory.object(name)
                # Empty without FP8. Megatron requires it all the same, so the writer creates it.
                if not (name.partition("/")[0].endswith("_extra_state") and value == [None]):
                    objects[name] = pickles.plain(value)
        return objects

    def _fragments(self) -> Iterator[Fragment]:
        tensors = self._directory.tensors
        for name, tensor in tensors.items():
            role, bare = names.from_megatron(name)
            if role == "master" and bare in tensors and tensors[bare].dtype == tensor.dtype:
                role = "weight"  # the optimizer updates the weight itself: both copies must be equal
            if "optimizer.distributed." in name or (self._wanted is not None and role not in self._wanted):
                continue
            for chunk in tensor.chunks:
                yield from self._of_chunk(name, f"{role}/", bare, tensor, chunk)

    def _of_chunk(self, name: str, role: str, bare: str, tensor: StoredTensor, chunk: DcpChunk) -> Iterator[Fragment]:
        shape, box, start, stop = _geometry(tensor, chunk)
        item = DTYPE_BYTES[tensor.dtype]
        if not names.STACKED.fullmatch(bare) or not shape:
            self._reads.append(_ChunkRange(name, chunk, 0, (stop - start) * item))
            yield Fragment(role + bare, tensor.dtype, shape, box, start, stop)
            return
        inner = Box(box.offset[1:], box.shape[1:])
        size = math.prod(inner.shape)
        # A partial flat range over several layers would have to be cut at layer borders.
        if box.shape[0] != 1 and (start, stop) != (0, box.numel):
            raise ConvertError(f"{self.path}: {name}: not supported: a flattened part of several layers")
        for layer in range(box.shape[0]):
            first, last = (start, stop) if box.shape[0] == 1 else (0, size)
            begin = layer * size * item
            self._reads.append(_ChunkRange(name, chunk, begin, begin + (last - first) * item))
            key = role + names.unstacked(bare, box.offset[0] + layer)
            yield Fragment(key, tensor.dtype, shape[1:], inner, first, last)

    def _steps(self, fragments: list[Fragment], step: float | None) -> list[Fragment]:
        if step is None or (self._wanted is not None and "step" not in self._wanted):
            return []
        shapes = {
            fragment.key.partition("/")[2]: fragment.global_shape
            for fragment in fragments
            if fragment.key.startswith("exp_avg/")
        }
        made = []
        for name, shape in shapes.items():
            counts = names.step_shape(name, shape)
            value = np.full(counts, step, np.float32).tobytes()
            self._reads.append(_ChunkRange(name, None, 0, len(value), value))
            made.append(Fragment.whole(f"step/{name}", "F32", counts, Box((0,) * len(counts), counts)))
        return made


def _geometry(tensor: StoredTensor, chunk: DcpChunk) -> tuple[Shape, Box, int, int]:
    """The tensor's shape, the chunk's box in it, and the range of the box's elements that the chunk holds."""
    if tensor.flattened_from is None:
        return tensor.shape, Box(chunk.offset, chunk.shape), 0, math.prod(chunk.shape)
    whole = tensor.flattened_from
    part = tuple(size // parts for size, parts in zip(whole, tensor.shape[:-1], strict=True))
    offset = tuple(index * size for index, size in zip(chunk.offset[:-1], part, strict=True))
    return whole, Box(offset, part), chunk.offset[-1], chunk.offset[-1] + chunk.shape[-1]


def _check_config(path: Path) -> None:
    try:
        config = json.loads(path.read_bytes())
        backend, version = config["sharded_backend"], config.get("sharded_backend_version", 1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConvertError(f"{path}: cannot be read: not a Megatron checkpoint, or incomplete") from None
    if (backend, version) != ("torch_dist", 1):
        raise ConvertError(f"{path}: format {backend} version {version}; only torch_dist version 1 is read")
    if not (path.parent / METADATA).exists():
        raise ConvertError(f"{path.parent / METADATA}: is missing: the checkpoint was never completed")
