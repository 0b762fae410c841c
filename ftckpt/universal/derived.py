"""Weights that a checkpoint leaves out because they are casts of its masters: made again, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import Bytes, Catalog, Get, Tensor

WEIGHT, MASTER = "weight/", "master/"
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def with_derived(catalog: Catalog, tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` and the weights that the catalog derives from masters among them.

    Raises:
        ConvertError: a type that nothing can be cast to.
    """
    there = {tensor.key: tensor for tensor in tensors}
    found = list(tensors)
    for key, dtype in sorted(catalog.derived.items()):
        if dtype not in _DTYPES:
            raise ConvertError(f"{key}: cannot be made from its master as {dtype}; known are {', '.join(_DTYPES)}")
        master = there.get(master_of(key))
        if master is not None and key not in there:
            found.append(Tensor(key, dtype, master.shape))
    return found


def getting_derived(catalog: Catalog, tensors: Sequence[Tensor], get: Get) -> Get:
    """``get`` that gives weights which the catalog derives, too, from rows of their masters."""
    there: Mapping[str, Tensor] = {tensor.key: tensor for tensor in tensors}

    def get_or_cast(tensor: Tensor, first: int, last: int) -> Bytes:
        if tensor.key in there or tensor.key not in catalog.derived:
            return get(tensor, first, last)
        master = there[master_of(tensor.key)]
        return cast(get(master, first, last), master.dtype, tensor.dtype)

    return get_or_cast


def cast(data: Bytes, from_dtype: str, to_dtype: str) -> Bytes:
    """Elements of one floating type as another, rounded to nearest even, as an optimizer writes weights."""
    if from_dtype == to_dtype:
        return data
    source = torch.from_numpy(data if data.flags.writeable else data.copy()).view(_DTYPES[from_dtype])
    result: Bytes = source.to(_DTYPES[to_dtype]).view(torch.uint8).numpy()
    return result


def master_of(key: str) -> str:
    """The master that a weight is the cast of."""
    return MASTER + key.removeprefix(WEIGHT)
