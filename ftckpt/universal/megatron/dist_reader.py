"""A reader of Megatron's ``torch_dist`` checkpoints: weights, masters, optimizer state and objects."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ftckpt.array_types import Bytes
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import DTYPE_BYTES, Box, Fragment, Shape
from ftckpt.universal.catalog import FileReader, FragmentPlace, needs_optimizer, whole_fragment
from ftckpt.universal.foreign import pickles
from ftckpt.universal.foreign.distributed import METADATA, CheckpointDirectory, DcpChunk, StoredTensor
from ftckpt.universal.megatron import names
from ftckpt.universal.megatron.common import CONTENT, common_step, layout_of

CONFIG = "metadata.json"
COMMON = "common.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_LEFT_OUT = ("rerun_state_machine",)
"""Objects that have no meaning in another job."""
_BUFFERS = "optimizer.distributed."
"""Part of the names of optimizer state that is specific to a layout."""


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


class MegatronDistReader(FileReader):
    """Reads the checkpoint in ``path``, or that of ``iteration`` (default: the newest) among those in ``path``.

    ``roles``: the roles to read, None for all. Weights alone can be read even if optimizer state is unreadable.
    """

    def __init__(self, path: Path, iteration: int | None = None, roles: Collection[str] | None = None) -> None:
        path = iteration_directory(path, iteration)
        _check_config(path / CONFIG)
        directory = CheckpointDirectory(path)
        common = pickles.plain(pickles.load(path / COMMON))
        args = common.get("args") if isinstance(common.get("args"), dict) else {}
        if needs_optimizer(roles):
            names.refuse_unreadable([*directory.tensors, *directory.objects], common.get(CONTENT) or {}, str(path))
        stored = list(_stored(directory, roles))
        objects = {"megatron": common, "sharded_objects": _objects(directory)}
        step = common_step(objects, str(path / COMMON))
        if step is not None and (roles is None or "step" in roles):
            stored += _steps(stored, step, path / COMMON)
        super().__init__(
            path,
            stored,
            (file for file in path.iterdir() if file.is_file()),
            origin="megatron-dist",
            iteration=int(common.get("iteration", 0)),
            layout=layout_of(args),
            objects=objects,
        )


def _objects(directory: CheckpointDirectory) -> dict[str, Any]:
    objects = {}
    for name in directory.objects:
        if not name.startswith(_LEFT_OUT) and _BUFFERS not in name:
            value = directory.object(name)
            # Empty without FP8. Megatron requires it all the same, so the writer creates it.
            if not (name.partition("/")[0].endswith("_extra_state") and value == [None]):
                objects[name] = pickles.plain(value)
    return objects


def _stored(directory: CheckpointDirectory, roles: Collection[str] | None) -> Iterator[FragmentPlace]:
    tensors = directory.tensors
    for name, tensor in tensors.items():
        role, bare = names.from_megatron(name)
        if role == "master" and bare in tensors and tensors[bare].dtype == tensor.dtype:
            role = "weight"  # the optimizer updates the weight itself: both copies must be equal
        if _BUFFERS not in name and (roles is None or role in roles):
            for chunk in tensor.chunks:
                yield from _of_chunk(directory, name, (role, bare), chunk)


def _of_chunk(
    directory: CheckpointDirectory, name: str, key: tuple[str, str], chunk: DcpChunk
) -> Iterator[FragmentPlace]:
    (role, bare), tensor = key, directory.tensors[name]
    shape, box, start, stop = _geometry(tensor, chunk)

    def stored(fragment: Fragment, begin: int = 0) -> FragmentPlace:
        return FragmentPlace(
            fragment,
            directory.path / chunk.blob.file,
            lambda: directory.chunk(name, chunk)[begin : begin + fragment.nbytes],
            names.is_padded(fragment.key),
        )

    if not names.STACKED.fullmatch(bare) or not shape:
        yield stored(Fragment(f"{role}/{bare}", tensor.dtype, shape, box, start, stop))
        return
    inner = Box(box.offset[1:], box.shape[1:])
    # A partial flat range over several layers would have to be cut at layer borders.
    if box.shape[0] != 1 and (start, stop) != (0, box.numel):
        raise ConvertError(f"{directory.path}: {name}: not supported: a flattened part of several layers")
    for layer in range(box.shape[0]):
        first, last = (start, stop) if box.shape[0] == 1 else (0, inner.numel)
        of_layer = f"{role}/{names.unstacked(bare, box.offset[0] + layer)}"
        fragment = Fragment(of_layer, tensor.dtype, shape[1:], inner, first, last)
        yield stored(fragment, layer * inner.numel * DTYPE_BYTES[tensor.dtype])


def _steps(stored: Sequence[FragmentPlace], step: float, file: Path) -> list[FragmentPlace]:
    """``step/NAME`` of each parameter with optimizer state: the common ``step``."""
    moments = [each.fragment for each in stored if each.fragment.key.startswith("exp_avg/")]
    shapes = {fragment.key.partition("/")[2]: fragment.global_shape for fragment in moments}
    made = []
    for name, shape in shapes.items():
        counts = names.step_shape(name, shape)
        value: Bytes = np.full(counts, step, np.float32).view(np.uint8).reshape(-1)
        made.append(FragmentPlace(whole_fragment(f"step/{name}", "F32", counts), file, partial(np.asarray, value)))
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
