"""Where each parameter of a Megatron model lies in its logical tensor.

Megatron says it itself, in ``sharded_state_dict``: key, shape and offset of what each rank holds, with layers
numbered across pipeline stages and virtual chunks, experts across expert parallelism, a tied output layer
under the key of the embedding, and gated layers as two halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from ftckpt.errors import UnsupportedError
from ftckpt.state.fragment import Box, Fragment

DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """``box`` of the logical tensor ``key``; its first element is element ``start`` of the local parameter."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    start: int


def fragments(
    placed: Sequence[Placed], role: str, tensor: torch.Tensor, first: int
) -> list[tuple[Fragment, torch.Tensor]]:
    """Fragments of ``tensor``: elements ``first`` and on of a flattened local parameter, in role ``role``.

    A parameter of several boxes, or one cut by an optimizer, gives several fragments, each with its view.
    """
    found: list[tuple[Fragment, torch.Tensor]] = []
    flat = tensor.detach().view(-1)
    for place in placed:
        begin = max(place.start, first)
        end = min(place.start + place.box.numel, first + flat.numel())
        if begin < end:
            start, stop = begin - place.start, end - place.start
            fragment = Fragment(
                f"{role}/{place.key}", dtype_name(tensor, place.key), place.global_shape, place.box, start, stop
            )
            found.append((fragment, flat[begin - first : end - first]))
    return found


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The safetensors name of a tensor's type; raises UnsupportedError naming ``what``."""
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"{what} has type {tensor.dtype}, which ftckpt cannot save")
    return DTYPE_NAMES[tensor.dtype]


def place_parameters(chunks: Sequence[Any]) -> dict[torch.nn.Parameter, tuple[Placed, ...]]:
    """The places of every parameter of this rank's model chunks.

    Raises:
        UnsupportedError: a parameter that Megatron does not place, or whose parts are not contiguous.
    """
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    places: dict[torch.nn.Parameter, tuple[Placed, ...]] = {}
    for index, chunk in enumerate(chunks):
        by_address: dict[int, ShardedTensor | ShardedTensorFactory] = {}
        for entry in _leaves(chunk.sharded_state_dict(metadata=metadata)):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
                by_address.setdefault(entry.data.data_ptr(), entry)
        for name, parameter in chunk.named_parameters():
            entry = by_address.get(parameter.data_ptr())
            if entry is None:
                raise UnsupportedError(f"parameter {name} of model chunk {index} is not in its sharded_state_dict")
            places[parameter] = tuple(_places(entry, parameter, name))
    return places


def _places(
    entry: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter, name: str
) -> Iterator[Placed]:
    parts = _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    covered = 0
    for part in parts:
        data = part.data
        inside = data.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        if not inside or not data.is_contiguous():
            raise UnsupportedError(
                f"parameter {name} is not stored in the order of its logical tensor (legacy grouped experts?); "
                "use sequential experts or Transformer Engine's grouped ones"
            )
        start = (data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
        yield Placed(part.key, tuple(part.global_shape), Box(tuple(part.global_offset), shape), start)
        covered += data.numel()
    if covered != parameter.numel():
        raise UnsupportedError(f"parameter {name}: {covered} of {parameter.numel()} elements have a place")


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
