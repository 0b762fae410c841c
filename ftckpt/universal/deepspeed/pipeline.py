"""Weights and buffers of a DeepSpeed checkpoint: of modules, of a PipelineModule's layers, and of single experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Shape
from ftckpt.universal.deepspeed.files import Files, Place
from ftckpt.universal.deepspeed.partitions import Held, parameter_shapes
from ftckpt.universal.foreign import records

_TIED = "tied_modules."


def read_weights(files: Files) -> Iterator[Held]:
    """Every weight and buffer that the files hold, in the order in which modules list them.

    Those that ZeRO 3 has cut into partitions are not there: their masters are.

    Raises:
        ConvertError: a layer that is tied to others has a weight whose name is not known.
    """
    groups = parameter_shapes(files)
    known = {mp: dict(item for shapes in said for item in shapes.items()) for mp, said in groups.items()}
    for place, path in files.models():
        yield from _of_module(files, place, path, known.get(place.mp, {}))
        yield from _frozen(files, place, path)
    by_tp: dict[int, dict[str, Shape]] = {}
    for mp, shapes in known.items():
        by_tp.setdefault(mp % files.tp, {}).update(shapes)
    buffers = {name for _, path in files.models() for name in files.load(path).get("buffer_names") or ()}
    for place, path in files.of("layer"):
        for name, tensor in flat_module(path, files.load(path)):
            found = _layer_name(path, place.layer, name, tuple(tensor.shape), by_tp.get(place.mp, {}))
            role = "buffer" if found in buffers else "weight"
            # Layers are in files of their own, whatever stage holds them: layer numbers are the same in all layouts.
            yield _held(role, found, (0, place.mp), tensor, path)
    for place, path in files.of("expert"):
        for name, tensor in flat_module(path, files.load(path)):
            yield _held("weight", name, files.stage(place), tensor, path)


def flat_module(path: Path, module: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a state dict; those of nested ones, joined by dots.

    Raises:
        ConvertError: something that is no tensor.
    """
    for name, value in module.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value.detach()
        elif isinstance(value, Mapping):
            yield from flat_module(path, value, f"{prefix}{name}.")
        elif value is not None and not str(name).endswith("_extra_state"):
            raise ConvertError(f"{path}: {prefix}{name} of the module is a {type(value).__name__}, not a tensor")


def _of_module(files: Files, place: Place, path: Path, shapes: Mapping[str, Shape]) -> Iterator[Held]:
    state = files.load(path)
    module = state.get("module")
    if module is None:
        return
    if not isinstance(module, Mapping):
        raise ConvertError(f"{path}: module is a {type(module).__name__}, not the tensors of a module")
    buffers = set(state.get("buffer_names") or ())
    elsewhere = {**shapes, **(state.get("frozen_param_shapes") or {})} if files.of("partition") else {}
    shared = set(state.get("shared_params") or {})
    seen: set[tuple[int, Shape]] = set()
    for name, tensor in flat_module(path, module):
        if name in buffers:
            yield _held("buffer", name, files.stage(place), tensor, path)
            continue
        where = (tensor.data_ptr(), tuple(tensor.shape))
        if name in elsewhere or name in shared or (tensor.numel() and where in seen):
            continue  # of ZeRO 3 partitions, or another name of a weight that was there
        seen.add(where)
        yield _held("weight", name, files.stage(place), tensor, path)


def _frozen(files: Files, place: Place, path: Path) -> Iterator[Held]:
    """Parameters that nothing trains, of which each rank has a partition under ZeRO 3."""
    state = files.load(path)
    if not files.of("partition"):
        return
    stage, tp = files.stage(place)
    fragments = state.get("frozen_param_fragments") or {}
    for name, said in (state.get("frozen_param_shapes") or {}).items():
        shape = tuple(map(int, said))
        fragment = fragments.get(name)
        if not isinstance(fragment, torch.Tensor):
            raise ConvertError(f"{path}: has no frozen_param_fragments of {name}, which it lists as frozen")
        first = place.dp * fragment.numel()
        length = max(0, min(fragment.numel(), math.prod(shape) - first))
        if length:
            yield Held("weight", name, stage, tp, shape, first, records.flat(fragment, name)[:length], path)


def _layer_name(path: Path, layer: int, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> str:
    """A PipelineModule numbers its layers; those that share a weight have a name in common instead."""
    numbered = f"{layer}.{name}"
    if numbered in shapes:
        return numbered
    tied = [known for known in shapes if known.startswith(_TIED) and known.endswith(f".{name}")]
    fitting = [known for known in tied if shapes[known] == shape and known.count(".") == name.count(".") + 2]
    if len(fitting) > 1:
        raise ConvertError(f"{path}: {name} may be any of {', '.join(fitting)}, which have one shape; cannot be told")
    return fitting[0] if fitting else numbered


def _held(role: str, name: str, ranks: tuple[int, int], tensor: torch.Tensor, path: Path) -> Held:
    stage, tp = ranks
    return Held(role, name, stage, tp, tuple(tensor.shape), 0, records.flat(tensor, name), path)
