"""Where each tensor of a Megatron model lies in its logical tensor, which no layout changes.

Megatron says it itself, in ``sharded_state_dict``: key, shape and offset of what each rank holds, with layers
numbered across pipeline stages and virtual chunks, experts across expert parallelism, a tied output layer
under the key of the embedding, and gated layers as two halves. Legacy grouped experts are the exception: see
``_grouped``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.moe import experts as moe

from ftckpt.errors import UnsupportedError
from ftckpt.live.tensors import Placed
from ftckpt.state.fragment import Box

_GROUPED = getattr(moe, "GroupedMLP", ())
"""Legacy grouped experts; releases from 0.17 on have none."""


@dataclass(frozen=True)
class Geometry:
    """The places of the parameters of this rank's model chunks, and of those buffers that belong to the model.

    ``padded`` are keys, without a role, of vocabularies: Megatron pads them for the tensor parallel size.
    """

    parameters: Mapping[torch.nn.Parameter, tuple[Placed, ...]]
    buffers: Mapping[torch.Tensor, tuple[Placed, ...]]
    padded: frozenset[str]


def place_tensors(chunks: Sequence[Any]) -> Geometry:
    """The places of every parameter, and of every buffer that ``sharded_state_dict`` has.

    Raises:
        UnsupportedError: a parameter that Megatron does not place, or whose parts are not contiguous; a model that
            Megatron cannot describe.
    """
    metadata = {
        "non_homogeneous_layers": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    parameters: dict[torch.nn.Parameter, tuple[Placed, ...]] = {}
    buffers: dict[torch.Tensor, tuple[Placed, ...]] = {}
    padded: set[str] = set()
    for index, chunk in enumerate(chunks):
        by_address: dict[int, Any] = {}
        try:
            described = chunk.sharded_state_dict(metadata=metadata)
        except AssertionError as error:
            raise UnsupportedError(
                f"sharded_state_dict of model chunk {index} fails, so that Megatron's own checkpoints fail too; with "
                "multi-token prediction under pipeline parallelism use --untie-embeddings-and-output-weights"
            ) from error
        for entry in _leaves(described):
            if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
                by_address.setdefault(entry.data.data_ptr(), entry)
                if getattr(entry, "allow_shape_mismatch", False):
                    padded.add(entry.key)
        grouped = dict(_grouped_experts(chunk))
        for name, parameter in chunk.named_parameters():
            found = by_address.get(parameter.data_ptr())
            if found is None:
                raise UnsupportedError(f"parameter {name} of model chunk {index} is not in its sharded_state_dict")
            if parameter in grouped:
                parameters[parameter] = (_grouped(found.key, *grouped[parameter]),)
            else:
                parameters[parameter] = tuple(_places(found, parameter, name))
        for name, buffer in chunk.named_buffers():
            found = by_address.get(buffer.data_ptr()) if buffer.numel() else None
            if found is not None:
                buffers[buffer] = tuple(_places(found, buffer, name))
    return Geometry(parameters, buffers, frozenset(padded))


def _places(entry: Any, tensor: torch.Tensor, name: str) -> Iterator[Placed]:
    parts = _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    covered = 0
    for part in parts:
        data = part.data
        inside = data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        if not inside or not data.is_contiguous():
            raise UnsupportedError(f"{name} is not stored in the order of its logical tensor {part.key}")
        start = (data.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        outer = part.prepend_axis_num
        shape = (1,) * outer + tuple(part.local_shape)
        yield Placed(part.key, tuple(part.global_shape), Box(tuple(part.global_offset), shape), start, outer)
        covered += data.numel()
    if covered != tensor.numel():
        raise UnsupportedError(f"{name}: {covered} of {tensor.numel()} elements have a place")


def _grouped_experts(chunk: Any) -> Iterator[tuple[torch.nn.Parameter, tuple[Any, str]]]:
    for module in chunk.modules():
        if isinstance(module, _GROUPED):
            for name in ("weight1", "weight2"):
                yield getattr(module, name), (module, name)


def _grouped(key: str, experts: Any, name: str) -> Placed:
    """All local experts of a layer, which their grouped multiplication wants transposed and in one parameter.

    Shape of ``weight1``: [experts, hidden, ffn], and [experts, hidden, 2, ffn] where it is gated: with the halves an
    axis of their own what a rank holds is one box. Of ``weight2``: [experts, ffn, hidden]. The names are not those
    of sequential experts, whose tensors and moments are the other way round.
    """
    local, hidden = experts.num_local_experts, experts.config.hidden_size
    group, number = experts.ep_group.size(), experts.ep_group.rank()
    parts, part = experts.tp_group.size(), experts.tp_group.rank()
    ffn = experts.weight2.numel() // local // hidden
    if name == "weight2":
        shape, axis = [local, ffn, hidden], 1
    else:
        shape = [local, hidden, 2, ffn] if experts.config.gated_linear_unit else [local, hidden, ffn]
        axis = len(shape) - 1
    whole, offset = list(shape), [0] * len(shape)
    whole[0], offset[0] = local * group, local * number
    whole[axis], offset[axis] = ffn * parts, ffn * part
    layer = key.rpartition(".linear_fc")[0]
    return Placed(f"{layer}.{name}", tuple(whole), Box(tuple(offset), tuple(shape)), 0)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
