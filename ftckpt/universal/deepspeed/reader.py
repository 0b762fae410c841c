"""A reader of checkpoints that ``save_checkpoint`` of a DeepSpeed engine wrote: ZeRO 1, 2, 3 or none, and pipelines.

Masters and optimizer state are read from partitions, weights and buffers from modules and layers. A specification, or
else the checkpoint's ``universal_checkpoint_info``, describes tensor-parallel sharding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Shape
from ftckpt.model.text import with_article
from ftckpt.universal.catalog import FileReader, needs_optimizer
from ftckpt.universal.consolidation import derived_weights
from ftckpt.universal.deepspeed.division import place_by_info
from ftckpt.universal.deepspeed.files import FileNumbers, Files, find_files, iteration_of, objects_of, precision
from ftckpt.universal.deepspeed.optimizers import parameter_shapes, read_partitions, read_plain
from ftckpt.universal.foreign import archives
from ftckpt.universal.foreign.slices import ParameterSlice, stored_in
from ftckpt.universal.language.placing import LocalTensor, Placement, place, place_whole
from ftckpt.universal.language.spec import Spec

_TIED = "tied_modules."
_STAGES = ("disabled", "optimizer_states", "gradients", "weights")
"""DeepSpeed's names of the ZeRO stages, by number."""


def read_weights(files: Files) -> Iterator[ParameterSlice]:
    """All weights and buffers in the files, in the order of modules; not those that ZeRO 3 has partitioned.

    Raises:
        ConvertError: the name of a tied layer's weight is ambiguous.
    """
    groups = parameter_shapes(files)
    known = {mp: dict(item for shapes in groups_of for item in shapes.items()) for mp, groups_of in groups.items()}
    for numbers, path in files.models():
        yield from _of_module(files, numbers, path, known.get(numbers.mp, {}))
        yield from _frozen(files, numbers, path)
    by_tp: dict[int, dict[str, Shape]] = {}
    for mp, shapes in known.items():
        by_tp.setdefault(mp % files.tp, {}).update(shapes)
    buffers = {name for _, path in files.models() for name in files.load(path).get("buffer_names") or ()}
    for numbers, path in files.of("layer"):
        for name, tensor in flat_module(path, files.load(path)):
            full_name = _layer_name(path, numbers.layer, name, tuple(tensor.shape), by_tp.get(numbers.mp, {}))
            role = "buffer" if full_name in buffers else "weight"
            yield ParameterSlice.whole(role, full_name, files.coords(numbers), tensor, path)
    for numbers, path in files.of("expert"):
        for name, tensor in flat_module(path, files.load(path)):
            yield ParameterSlice.whole("weight", name, files.coords(numbers), tensor, path)


def flat_module(path: Path, module: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The names and tensors of a state dict; names of nested ones are joined by dots.

    Raises:
        ConvertError: a value is neither a tensor nor a mapping.
    """
    for name, value in module.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value.detach()
        elif isinstance(value, Mapping):
            yield from flat_module(path, value, f"{prefix}{name}.")
        elif value is not None and not str(name).endswith("_extra_state"):
            raise ConvertError(
                f"{path}: {prefix}{name} of the module is {with_article(type(value).__name__)}, not a tensor"
            )


def _of_module(
    files: Files, numbers: FileNumbers, path: Path, shapes: Mapping[str, Shape]
) -> Iterator[ParameterSlice]:
    state = files.load(path)
    module = state.get("module")
    if module is None:
        return
    if not isinstance(module, Mapping):
        raise ConvertError(f"{path}: module is {with_article(type(module).__name__)}, not the tensors of a module")
    buffers = set(state.get("buffer_names") or ())
    # Under ZeRO 3 a module's tensors are empty placeholders.
    elsewhere = {**shapes, **(state.get("frozen_param_shapes") or {})} if files.of("partition") else {}
    shared = set(state.get("shared_params") or {})
    seen: set[tuple[int, Shape]] = set()
    for name, tensor in flat_module(path, module):
        if name in buffers:
            yield ParameterSlice.whole("buffer", name, files.coords(numbers), tensor, path)
            continue
        # Tied weights share a storage in the file, and so an address.
        where = (tensor.data_ptr(), tuple(tensor.shape))
        if name in elsewhere or name in shared or (tensor.numel() and where in seen):
            continue  # in ZeRO 3 partitions, or another name of a weight that was yielded
        seen.add(where)
        yield ParameterSlice.whole("weight", name, files.coords(numbers), tensor, path)


def _frozen(files: Files, numbers: FileNumbers, path: Path) -> Iterator[ParameterSlice]:
    """The rank's partitions of frozen parameters under ZeRO 3."""
    state = files.load(path)
    if not files.of("partition"):
        return
    fragments = state.get("frozen_param_fragments") or {}
    for name, sizes in (state.get("frozen_param_shapes") or {}).items():
        shape = tuple(map(int, sizes))
        fragment = fragments.get(name)
        if not isinstance(fragment, torch.Tensor):
            raise ConvertError(f"{path}: has no frozen_param_fragments of {name}, which it lists as frozen")
        first = numbers.dp * fragment.numel()
        length = max(0, min(fragment.numel(), math.prod(shape) - first))
        if length:
            values = archives.flat(fragment, name)[:length]
            yield ParameterSlice("weight", name, files.coords(numbers), shape, values, path, first)


def _layer_name(path: Path, layer: int, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> str:
    """The model's name of a PipelineModule layer's tensor: numbered, or the common name of tied layers."""
    numbered = f"{layer}.{name}"
    if numbered in shapes:
        return numbered
    tied = [known for known in shapes if known.startswith(_TIED) and known.endswith(f".{name}")]
    # With two more parts than ``name``: ``tied_modules`` and the key of the tied layers.
    fitting = [known for known in tied if shapes[known] == shape and known.count(".") == name.count(".") + 2]
    if len(fitting) > 1:
        raise ConvertError(f"{path}: {name} is ambiguous: {', '.join(fitting)} have the same shape")
    return fitting[0] if fitting else numbered


INFO = "universal_checkpoint_info"


class DeepSpeedReader(FileReader):
    """Reads the checkpoint in ``path``, the directory of a tag or of several with a file ``latest``.

    ``spec`` describes the tensor-parallel sharding; without it the checkpoint must. ``roles``: None for all. Without
    ZeRO the optimizer is skipped if they are only weights and buffers.
    """

    def __init__(self, path: Path, spec: Spec | None = None, roles: Collection[str] | None = None) -> None:
        files = find_files(path)
        parts = _all_slices(files, roles)
        places = _places(files, parts, spec)
        placed = _trained(files, ((each, places.get(_place_key(each))) for each in parts))
        stored = [one for each, place in placed for one in stored_in(each, place, each.role)]
        first = files.models()[0][1]
        state = files.load(first)
        cast = precision(state.get("ds_config"))
        super().__init__(
            files.path,
            stored,
            (file for kind in files.kinds for _, file in files.of(kind)),
            origin="deepspeed",
            iteration=iteration_of(state.get("global_steps", state.get("iteration")), first),
            layout=_layout(files),
            objects={"deepspeed": _objects(files), "precision": cast},
            derived=derived_weights({each.fragment.key for each in stored}, cast),
        )


def _trained(
    files: Files, placed: Iterable[tuple[ParameterSlice, Placement | None]]
) -> Iterator[tuple[ParameterSlice, Placement]]:
    """The parts that have a place; of tensors that are averaged only those of their first pipeline stage: a module
    that the last one ties to the first may have parameters that it does not use, and so does not train."""
    stages = {path: numbers.mp // files.tp for kind in files.kinds for numbers, path in files.of(kind)}
    first: dict[tuple[str, str], int] = {}
    for part, placement in placed:  # in the order of stages
        if placement is None:
            continue
        stage = stages[part.file]
        if not placement.average or first.setdefault((part.role, part.name), stage) == stage:
            yield part, placement


def _all_slices(files: Files, roles: Collection[str] | None) -> list[ParameterSlice]:
    _refuse_unknown(files)
    slices = list(read_weights(files))
    if files.of("zero"):
        slices += list(read_partitions(files))
    elif needs_optimizer(roles):
        slices += list(read_plain(files, slices))
    _check_layers(files, slices)
    return slices


def _check_layers(files: Files, slices: Sequence[ParameterSlice]) -> None:
    """Raises ConvertError if a layer's file is missing: parameter-free layers have none, so weights are compared."""
    if files.of("layer"):
        weights = {(each.name, each.coords) for each in slices if each.role == "weight"}
        for each in slices:
            if each.role == "master" and (each.name, each.coords) not in weights:
                where = " ".join(f"{axis} {at}" for axis, at in each.coords)
                raise ConvertError(f"{files.path}: no layer_… file of {where} holds the weight {each.name}")


def _refuse_unknown(files: Files) -> None:
    for _, path in files.models():
        state = files.load(path)
        if state.get("ds_autoep_layers") is not None or state.get("autoep_layers") is not None:
            raise ConvertError(f"{path}: was written with AutoEP, which is not supported")


def _place_key(part: ParameterSlice) -> tuple[str, int, bool]:
    return part.name, dict(part.coords)["tp"], part.role == "buffer"


def _places(
    files: Files, slices: Sequence[ParameterSlice], spec: Spec | None
) -> dict[tuple[str, int, bool], Placement]:
    shapes: dict[tuple[str, int, bool], tuple[Shape, Path]] = {}
    for each in slices:
        shape, path = shapes.setdefault(_place_key(each), (each.shape, each.file))
        if shape != each.shape:
            raise ConvertError(f"{each.name} is {each.shape} in {each.file} and {shape} in {path}")
    places = {key: place_whole(key[0], shape) for key, (shape, _) in shapes.items() if key[2]}
    names = sorted({(name, tp) for name, tp, is_buffer in shapes if not is_buffer})
    first = files.load(files.models()[0][1])
    if spec is not None:
        stored = [LocalTensor(name, shapes[name, tp, False][0], {"tp": tp}) for name, tp in names]
        for (name, tp), placed in zip(names, place(spec, stored, _arguments(first)), strict=True):
            if placed is not None:
                places[name, tp, False] = placed
        return places
    info = first.get(INFO) or {}
    if files.tp > 1 and not info:
        raise ConvertError(
            f"{files.path} is of {files.tp} tensor-parallel ranks and has no {INFO} that describes how they shard "
            "parameters: give a specification with --spec"
        )
    for name in sorted({name for name, _ in names}):
        ranks = [tp for tp in range(files.tp) if (name, tp, False) in shapes]
        if len(ranks) != files.tp:
            raise ConvertError(f"{name}: only tensor-parallel ranks {ranks} of {files.tp} hold it")
        for tp, placed in zip(
            ranks, place_by_info(info, name, [shapes[name, t, False][0] for t in ranks]), strict=True
        ):
            places[name, tp, False] = placed
    return places


def _arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The command-line arguments that the training script stored in the checkpoint."""
    args = state.get("args") or {}
    return dict(args) if isinstance(args, Mapping) else dict(vars(args))


def _layout(files: Files) -> dict[str, int | str | bool]:
    stage = 0
    for _, path in files.of("zero")[:1]:
        state = files.load(path).get("optimizer_state_dict") or {}
        stated = state.get("zero_stage", 1)
        # DeepSpeed's enumeration is read as a stand-in; some Python versions pickle its name instead of its value.
        value = stated if isinstance(stated, int) else stated.arguments[0]
        stage = _STAGES.index(value) if isinstance(value, str) else int(value)
    return {"tp": files.tp, "pp": files.pp, "dp": files.dp, "zero": stage}


def _objects(files: Files) -> dict[str, Any]:
    optimizer = next((files.load(path)["optimizer_state_dict"] for _, path in files.of("zero")), None)
    first = files.load(files.models()[0][1])
    return objects_of(first, optimizer if optimizer is not None else first.get("optimizer") or {})
