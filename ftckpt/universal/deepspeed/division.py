"""How DeepSpeed divides each parameter over tensor-parallel ranks: what its universal checkpoints say beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt.universal.catalog import Catalog
from ftckpt.universal.deepspeed.patterns import AVERAGED, HALVES, REPLICATED, ROWS, VOCABULARY, is_in, sub_parameters

_CAT_DIM, _PARTS, _SUB_SHAPE, _VOCABULARY = "cat_dim", "param_n_sub_params", "sub_param_shape", "vocab_tensor"
_SUBPARAM_CLASS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"


class Division:
    """What to write beside each parameter. A source of DeepSpeed says it; of others, the boxes of their fragments
    tell in which dimension ranks divide a parameter."""

    def __init__(self, catalog: Catalog) -> None:
        said = catalog.objects.get("deepspeed")
        said = said if isinstance(said, Mapping) else {}
        self._parameters: Mapping[str, Any] = said.get("parameters") or {}
        self._info: Mapping[str, Any] = (said.get("state") or {}).get("universal_checkpoint_info") or {}
        self._dims = _divided_dims(catalog)
        self._padded = {key.partition("/")[2] for key in catalog.padded}
        groups = (said.get("optimizer") or {}).get("param_groups") or []
        self.steps_are_numbers = any("step" in group for group in groups)

    def of(self, name: str) -> dict[str, Any]:
        """Fields for the files of one parameter."""
        if name in self._parameters:
            return dict(self._parameters[name])
        found: dict[str, Any] = {}
        sub = sub_parameters(self._info, name)
        if is_in(self._info, REPLICATED, name) or is_in(self._info, AVERAGED, name):
            pass
        elif is_in(self._info, HALVES, name):
            found = {_CAT_DIM: 0, _PARTS: 2}
        elif sub is not None:
            found = {_SUB_SHAPE: {"class": _SUBPARAM_CLASS, **_fields(sub[1])}}
        elif self._info:
            found = {_CAT_DIM: 1 if is_in(self._info, ROWS, name) else 0}
        else:
            found = {_CAT_DIM: self._dims.get(name, 0)}
        if name in self._padded or is_in(self._info, VOCABULARY, name):
            found[_VOCABULARY] = True
        return found


def _fields(entry: Any) -> dict[str, Any]:
    fields = entry if isinstance(entry, Mapping) else vars(entry)
    return {key: fields[key] for key in ("patterns", "shape", "partition_dim")}


def _divided_dims(catalog: Catalog) -> dict[str, int]:
    """Name → the first dimension in which a box of it is not all of it."""
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
