"""Where each parameter of a Megatron model lies in its logical tensor.

Megatron says it itself, in ``sharded_state_dict``: key, shape and offset of what each rank holds, with layers
numbered across pipeline stages and virtual chunks, experts across expert parallelism, a tied output layer
under the key of the embedding, and gated layers as two halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from ftckpt.errors import UnsupportedError
from ftckpt.live.tensors import Placed
from ftckpt.state.fragment import Box


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
