"""The tensor-parallel sharding of parameters, as ``universal_checkpoint_info`` describes it.

A model that supports DeepSpeed's universal checkpoints stores lists of regular expressions in its checkpoints: which
parameters are replicated, averaged, sharded along their second dimension, made of sub-parameters, or padded. All
others are sharded along their first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ftckpt.errors import ConvertError, SpecError
from ftckpt.model.fragment import Shape
from ftckpt.universal.catalog import Catalog
from ftckpt.universal.language.placing import Placement, place_parts, place_whole

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


def place_by_info(info: Info, name: str, shapes: Sequence[Shape]) -> list[Placement]:
    """The placement of each tensor-parallel rank's part; ``shapes`` are the shapes of the parts.

    Raises:
        ConvertError: the shapes contradict ``info``, or it lists the parameter as unsupported.
    """
    for pattern, reason in dict(info.get(_REFUSED) or {}).items():
        if re.match(pattern, name):
            raise ConvertError(f"{name}: the checkpoint marks its sharding as unsupported: {reason}")
    vocabulary = _vocabulary(info, name)
    try:
        if len(shapes) > 1 and not is_in(info, REPLICATED, name) and not is_in(info, AVERAGED, name):
            return place_parts(name, shapes, *_division(info, name, shapes), vocabulary)
        if len(set(shapes)) > 1:
            raise SpecError(f"is listed as replicated, but shapes differ on ranks: {list(shapes)}")
        placed = place_whole(name, shapes[0], vocabulary)
    except SpecError as error:
        raise ConvertError(f"{name}: {error}") from None
    return [replace(placed, average=is_in(info, AVERAGED, name))] * len(shapes)


def _vocabulary(info: Info, name: str) -> int | None:
    """The rows of a vocabulary without its padding, which depends on the layout; None for another parameter."""
    if not is_in(info, VOCABULARY, name):
        return None
    rows = info.get(_VOCABULARY_SIZE)
    if type(rows) is not int:
        raise ConvertError(f"{name}: {_VOCABULARY_SIZE} is {rows!r}, not a number of rows")
    return rows


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
            raise SpecError(f"ranks divide dimension {dim} of {shapes[0]}, which has no such dimension")
        return dim, [[shape[dim] for shape in shapes]]
    pattern, entry = patterned
    dim, sizes = int(field(entry, "partition_dim")), field(entry, "shape")
    if not 0 <= dim < min(len(sizes), len(shapes[0])):
        raise SpecError(f"its sub-parameters divide dimension {dim} of {shapes[0]}")
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


_CAT_DIM, _PARTS, _SUB_SHAPE, _VOCABULARY = "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"
SUB_PARAMETERS_CLASS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


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
            fields = {_SUB_SHAPE: {"class": SUB_PARAMETERS_CLASS, **_fields(sub[1])}}
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
