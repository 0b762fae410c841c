"""The tensor-parallel sharding of parameters, as ``universal_checkpoint_info`` describes it.

A model that supports DeepSpeed's universal checkpoints stores lists of regular expressions in its checkpoints: which
parameters are replicated, averaged, sharded along their second dimension, made of sub-parameters, or padded. All
others are sharded along their first dimension.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Box, Shape
from ftckpt.universal.catalog import Catalog
from ftckpt.universal.language.placing import BoxMap, Placement

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMETERS = "parameter_with_sub_params"
WIDTHS = "sub_param_shard_widths"
VOCABULARY = "vocabulary_parameter_patterns"
_VOCABULARY_SIZE = "original_vocab_size"
_REFUSED = "autotp_unsupported_parameter_patterns"

Info = Mapping[str, Any]


def whole(name: str, shape: Shape, padded: bool = False) -> Placement:
    """The placement of a parameter that each rank holds completely."""
    box = Box((0,) * len(shape), shape)
    return Placement(name, shape, (BoxMap(box, box),), False, padded)


def place_by_info(info: Info, name: str, shapes: Sequence[Shape]) -> list[Placement]:
    """The placement of each tensor-parallel rank's part; ``shapes`` are the shapes of the parts.

    Raises:
        ConvertError: the shapes contradict ``info``, or it lists the parameter as unsupported.
    """
    for pattern, reason in dict(info.get(_REFUSED) or {}).items():
        if re.match(pattern, name):
            raise ConvertError(f"{name}: the checkpoint marks its sharding as unsupported: {reason}")
    if len(shapes) == 1 or is_in(info, REPLICATED, name) or is_in(info, AVERAGED, name):
        if len(set(shapes)) > 1:
            raise ConvertError(f"{name}: is listed as replicated, but shapes differ on ranks: {list(shapes)}")
        placed = whole(name, shapes[0])
        placements = [Placement(name, placed.shape, placed.boxes, is_in(info, AVERAGED, name), False)] * len(shapes)
    else:
        dim, widths = _division(info, name, shapes)
        placements = _divided(name, shapes, dim, widths)
    return _without_padding(info, name, placements)


def is_in(info: Info, field: str, name: str) -> bool:
    """Whether a pattern of ``field`` matches the start of ``name``, as in DeepSpeed."""
    return any(re.match(pattern, name) for pattern in info.get(field) or ())


def sub_parameters(info: Info, name: str) -> tuple[str, Any] | None:
    """The pattern and entry for the sub-parameters of ``name``, None without any. The entry, an object or a mapping,
    has ``shape`` and ``partition_dim``."""
    for entry in info.get(SUB_PARAMETERS) or ():
        for pattern in field(entry, "patterns"):
            if re.match(pattern, name):
                return pattern, entry
    return None


def field(entry: Any, name: str) -> Any:
    """A field of an entry that older versions wrote as an object and newer ones as a mapping."""
    return entry[name] if isinstance(entry, Mapping) else getattr(entry, name)


def _division(info: Info, name: str, shapes: Sequence[Shape]) -> tuple[int, list[list[int]]]:
    """The sharded dimension, and each rank's size of each sub-parameter in it."""
    if is_in(info, HALVES, name):
        # Two successive halves, as gate and up of a gated layer, each sharded on its own.
        return 0, [[shape[0] // 2 for shape in shapes]] * 2
    patterned = sub_parameters(info, name)
    if patterned is None:
        dim = 1 if is_in(info, ROWS, name) else 0
        if len(shapes[0]) <= dim:
            raise ConvertError(f"{name}: ranks divide dimension {dim} of {shapes[0]}, which has no such dimension")
        return dim, [[shape[dim] for shape in shapes]]
    pattern, entry = patterned
    dim, sizes = int(field(entry, "partition_dim")), field(entry, "shape")
    if not 0 <= dim < min(len(sizes), len(shapes[0])):
        raise ConvertError(f"{name}: its sub-parameters divide dimension {dim} of {shapes[0]}")
    stated = sizes[dim]
    total = sum(shape[dim] for shape in shapes)
    recorded = (info.get(WIDTHS) or {}).get(pattern)
    if recorded is None:
        # Before version 0.4 of DeepSpeed's universal checkpoints: the number of equal parts; later: their sizes.
        parts = list(stated) if isinstance(stated, (tuple, list)) else [total // max(1, int(stated))] * int(stated)
        # Without recorded widths: sharded evenly.
        recorded = [[size // len(shapes)] * len(shapes) for size in parts]
    widths = [[int(size) for size in part] for part in recorded]
    described = sum(map(sum, widths))
    if described and total % described == 0 and total != described:  # in rows of a view, not of the tensor
        widths = [[size * (total // described) for size in part] for part in widths]
    return dim, widths


def _divided(name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]]) -> list[Placement]:
    wholes = [sum(part) for part in widths]
    shape = (*shapes[0][:dim], sum(wholes), *shapes[0][dim + 1 :])
    placements = []
    for rank, local in enumerate(shapes):
        if any(len(part) != len(shapes) for part in widths) or sum(part[rank] for part in widths) != local[dim]:
            raise ConvertError(
                f"{name}: rank {rank} holds {local[dim]} entries of dimension {dim}; the checkpoint lists "
                f"{[part[rank] for part in widths if rank < len(part)]}"
            )
        if local[:dim] + local[dim + 1 :] != shape[:dim] + shape[dim + 1 :]:
            raise ConvertError(f"{name}: shapes of tensor-parallel ranks are inconsistent: {list(shapes)}")
        boxes = []
        firsts = accumulate((part[rank] for part in widths), initial=0)
        for part, begin, first in zip(widths, accumulate(wholes, initial=0), firsts, strict=False):
            if part[rank]:
                at = begin + sum(part[:rank])
                size = (*local[:dim], part[rank], *local[dim + 1 :])
                boxes.append(BoxMap(Box(_at(local, dim, first), size), Box(_at(local, dim, at), size)))
        placements.append(Placement(name, shape, tuple(boxes), False, False))
    return placements


def _at(shape: Shape, dim: int, offset: int) -> Shape:
    return tuple(offset if axis == dim else 0 for axis in range(len(shape)))


def _without_padding(info: Info, name: str, placements: list[Placement]) -> list[Placement]:
    """Removes the rows that pad a vocabulary: their number depends on the layout."""
    if not is_in(info, VOCABULARY, name):
        return placements
    rows, shape = info.get(_VOCABULARY_SIZE), placements[0].shape
    if type(rows) is not int or not 0 < rows <= shape[0]:
        raise ConvertError(f"{name}: {_VOCABULARY_SIZE} is {rows!r}; it has {shape[0]} rows")
    return [
        Placement(name, (rows, *shape[1:]), tuple(_cut(box_map, rows) for box_map in each.boxes), each.average, True)
        for each in placements
    ]


def _cut(box_map: BoxMap, rows: int) -> BoxMap:
    rows_left = max(0, min(box_map.box.shape[0], rows - box_map.box.offset[0]))
    size = (rows_left, *box_map.box.shape[1:])
    # A part that is all padding has no elements; its offset must still be inside the tensor.
    offset = box_map.box.offset if math.prod(size) else (0,) * len(size)
    return BoxMap(Box(box_map.local.offset, size), Box(offset, size))


_CAT_DIM, _PARTS, _SUB_SHAPE, _VOCABULARY = "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"
_SUBPARAM_CLASS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


class Division:
    """The sharding fields that DeepSpeed needs in the files of each parameter.

    A DeepSpeed source provides them. Of other sources the fragments' boxes show the sharded dimension.
    """

    def __init__(self, catalog: Catalog) -> None:
        settings = catalog.objects.get("deepspeed")
        settings = settings if isinstance(settings, Mapping) else {}
        self._parameters: Mapping[str, Any] = settings.get("parameters") or {}
        self._info: Mapping[str, Any] = (settings.get("state") or {}).get("universal_checkpoint_info") or {}
        self._dims = _divided_dims(catalog)
        self._padded = {key.partition("/")[2] for key in catalog.padded}
        groups = (settings.get("optimizer") or {}).get("param_groups") or []
        self.steps_are_numbers = any("step" in group for group in groups)

    def of(self, name: str) -> dict[str, Any]:
        """The fields for the files of a parameter."""
        if name in self._parameters:
            return dict(self._parameters[name])
        fields: dict[str, Any] = {}
        sub = sub_parameters(self._info, name)
        if is_in(self._info, REPLICATED, name) or is_in(self._info, AVERAGED, name):
            pass
        elif is_in(self._info, HALVES, name):
            fields = {_CAT_DIM: 0, _PARTS: 2}
        elif sub is not None:
            fields = {_SUB_SHAPE: {"class": _SUBPARAM_CLASS, **_fields(sub[1])}}
        elif self._info:
            fields = {_CAT_DIM: 1 if is_in(self._info, ROWS, name) else 0}
        else:
            # With a single rank the dimension is unknown; 0 is DeepSpeed's default.
            fields = {_CAT_DIM: self._dims.get(name, 0)}
        if name in self._padded or is_in(self._info, VOCABULARY, name):
            fields[_VOCABULARY] = True
        return fields


def _fields(entry: Any) -> dict[str, Any]:
    fields = entry if isinstance(entry, Mapping) else vars(entry)
    return {key: fields[key] for key in ("patterns", "shape", "partition_dim")}


def _divided_dims(catalog: Catalog) -> dict[str, int]:
    """Name → the first dimension in which a box is smaller than the parameter."""
    dims: dict[str, int] = {}
    for fragment in catalog.fragments:
        role, _, name = fragment.key.partition("/")
        if role in ("weight", "master") and name not in dims:
            sizes = zip(fragment.box.shape, fragment.global_shape, strict=True)
            for dim, (part, whole) in enumerate(sizes):
                if part < whole:
                    dims[name] = dim
                    break
    return dims
