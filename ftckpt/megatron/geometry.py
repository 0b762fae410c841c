"""Coordinates of a Megatron rank in the layout, and boxes of its tensors in logical tensors.

Boxes come from Megatron's ``sharded_state_dict``: the key, shape and offset of each rank's part. Layers are numbered
across pipeline stages and virtual chunks, experts across expert parallelism, a tied output layer has the key of the
embedding, and gated layers are two halves. Legacy grouped experts are an exception: see ``_grouped``.
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
from ftckpt.frameworks.tensors import LogicalBox, ParameterBoxes
from ftckpt.model.fragment import Box

_GROUPED = getattr(moe, "GroupedMLP", ())
"""Legacy grouped experts; removed in release 0.17."""


def coordinates() -> dict[str, int]:
    """This rank's coordinates along each axis that divides state."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "cp": parallel_state.get_context_parallel_rank(),
        "dp": parallel_state.get_data_parallel_rank(),
    }


def layout_sizes(distributed_optimizer: bool) -> dict[str, Any]:
    """The sizes of the job's layout."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "vpp": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        "cp": parallel_state.get_context_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
        "ep": parallel_state.get_expert_model_parallel_world_size(),
        "etp": parallel_state.get_expert_tensor_parallel_world_size(),
        "distributed_optimizer": distributed_optimizer,
    }


@dataclass(frozen=True)
class Geometry:
    """Boxes of the parameters of this rank's model chunks, and of the buffers that belong to the model.

    ``padded`` are keys, without role, of vocabularies, which Megatron pads depending on the tensor parallel size.
    """

    parameters: ParameterBoxes
    buffers: Mapping[torch.Tensor, tuple[LogicalBox, ...]]
    padded: frozenset[str]


def place_tensors(chunks: Sequence[Any]) -> Geometry:
    """The boxes of every parameter, and of every buffer in ``sharded_state_dict``.

    Raises:
        UnsupportedError: a parameter is not in ``sharded_state_dict`` or its parts are not contiguous, or Megatron
            cannot describe the model.
    """
    parameters: dict[torch.nn.Parameter, tuple[LogicalBox, ...]] = {}
    buffers: dict[torch.Tensor, tuple[LogicalBox, ...]] = {}
    padded: set[str] = set()
    for index, chunk in enumerate(chunks):
        entries = _sharded_entries(chunk, index)
        # Megatron-core sets this mark for vocabularies only: their padding depends on the tensor parallel size.
        padded |= {entry.key for entry in entries.values() if getattr(entry, "allow_shape_mismatch", False)}
        grouped = dict(_grouped_experts(chunk))
        for name, parameter in chunk.named_parameters():
            entry = entries.get(parameter.data_ptr())
            if entry is None:
                raise UnsupportedError(f"parameter {name} of model chunk {index} is not in its sharded_state_dict")
            if parameter in grouped:
                parameters[parameter] = (_grouped(entry.key, *grouped[parameter]),)
            else:
                parameters[parameter] = tuple(_boxes(entry, parameter, name))
        for name, buffer in chunk.named_buffers():
            # Empty tensors all have the address 0.
            if buffer.numel() and buffer.data_ptr() in entries:
                buffers[buffer] = tuple(_boxes(entries[buffer.data_ptr()], buffer, name))
    return Geometry(parameters, buffers, frozenset(padded))


def _sharded_entries(chunk: Any, index: int) -> dict[int, Any]:
    """The entries in the ``sharded_state_dict`` of a model chunk, by address.

    Its names differ from those of ``named_parameters``, so tensors are matched by address. A tied tensor has two
    entries, of which the first is used.
    """
    metadata = {
        # One key per layer instead of one stacked tensor: stages of another layout have other layers.
        "non_homogeneous_layers": True,
        # Layers of Megatron-core 0.16 get their replica's number from this group.
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    try:
        described = chunk.sharded_state_dict(metadata=metadata)
    except AssertionError as error:
        raise UnsupportedError(
            f"sharded_state_dict of model chunk {index} fails, and so do Megatron's own checkpoints; with "
            "multi-token prediction under pipeline parallelism use --untie-embeddings-and-output-weights"
        ) from error
    entries: dict[int, Any] = {}
    for entry in _leaves(described):
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
            entries.setdefault(entry.data.data_ptr(), entry)
    return entries


def _boxes(entry: Any, tensor: torch.Tensor, name: str) -> Iterator[LogicalBox]:
    # A factory divides a parameter into several logical tensors: the gate and the up half of a gated layer.
    parts = _leaves(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    covered = 0
    for part in parts:
        data = part.data
        inside = data.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        # Snapshot copies read flat ranges of the live parameter; a part that Megatron copies first is not one.
        if not inside or not data.is_contiguous():
            raise UnsupportedError(f"{name} is not a contiguous part of its logical tensor {part.key}")
        start = (data.data_ptr() - tensor.data_ptr()) // tensor.element_size()
        outer = part.prepend_axis_num
        # Leading axes that the rank's tensor does not have, such as the expert's number.
        shape = (1,) * outer + tuple(part.local_shape)
        yield LogicalBox(part.key, tuple(part.global_shape), Box(tuple(part.global_offset), shape), start, outer)
        covered += data.numel()
    if covered != tensor.numel():
        raise UnsupportedError(f"{name}: sharded_state_dict covers only {covered} of {tensor.numel()} elements")


def _grouped_experts(chunk: Any) -> Iterator[tuple[torch.nn.Parameter, tuple[Any, str]]]:
    for module in chunk.modules():
        if isinstance(module, _GROUPED):
            for name in ("weight1", "weight2"):
                yield getattr(module, name), (module, name)


def _grouped(key: str, experts: Any, name: str) -> LogicalBox:
    """The box of all local experts of a layer, which grouped GEMM stores transposed and in one parameter.

    ``weight1`` has shape [experts, hidden, ffn], or [experts, hidden, 2, ffn] if gated: with a separate axis for the
    halves, a rank's part is one box. ``weight2`` has [experts, ffn, hidden]. The keys differ from those of sequential
    experts, whose tensors and moments are not transposed.
    """
    local, hidden = experts.num_local_experts, experts.config.hidden_size
    group, number = experts.ep_group.size(), experts.ep_group.rank()
    parts, part = experts.tp_group.size(), experts.tp_group.rank()
    # This rank's size, from the weight: the configuration's may be that of a gated layer or of all ranks.
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
    return LogicalBox(f"{layer}.{name}", tuple(whole), Box(tuple(offset), tuple(shape)), 0)


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
