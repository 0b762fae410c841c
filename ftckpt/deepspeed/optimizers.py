"""DeepSpeed's optimizers as pieces: the weights that each rank steps, with their masters and moments.

Most optimizers step flat tensors of concatenated parameters, and each rank a partition of them. A parameter's
position follows from its address, so order, alignment and padding need not be known. Padding belongs to no parameter,
has no gradient and no effect, and is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ftckpt.deepspeed import inner_optimizers
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks.optimizers import ParameterRange, stepped_pieces
from ftckpt.frameworks.tensors import ParameterBoxes, flat
from ftckpt.model.training_state import Piece


def check(optimizer: Any) -> None:
    """Checks that an optimizer is supported.

    Raises:
        UnsupportedError: it is not; names the supported ones.
    """
    if type(optimizer) not in _READERS and not isinstance(optimizer, torch.optim.Optimizer):
        known = ", ".join(kind.__name__ for kind in _READERS)
        name = "no optimizer" if optimizer is None else type(optimizer).__name__
        raise UnsupportedError(f"the engine has {name}; supported are torch's optimizers and DeepSpeed's {known}")


def inner(optimizer: Any) -> Any:
    """The optimizer that steps tensors, without DeepSpeed's wrapper."""
    return optimizer.optimizer if type(optimizer) in _READERS else optimizer


def pieces(optimizer: Any, boxes: ParameterBoxes) -> Iterator[Piece]:
    """Every tensor that this rank steps, including weights.

    Raises:
        UnsupportedError: a parameter or state is not supported, by name.
    """
    state = inner(optimizer).state

    def tensors(part: ParameterRange) -> Mapping[str, Any]:
        # Step counts that are Python numbers are saved with the hyperparameters: see inner_optimizers.
        return {name: v for name, v in state[part.owner].items() if not inner_optimizers.is_number(v)}

    return stepped_pieces(boxes, _ranges(optimizer), tensors)


def stepped_parameters(optimizer: Any) -> set[torch.nn.Parameter]:
    """Parameters that the optimizer steps on any rank, including those of which this rank has no part."""
    for name in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if type(optimizer) in _READERS and hasattr(optimizer, name):
            return {parameter for group in getattr(optimizer, name) for parameter in group}
    return {part.parameter for part in _ranges(optimizer)}


def owners(optimizer: Any) -> list[torch.Tensor]:
    """The tensors that are keys of the inner optimizer's state, in its order."""
    if type(optimizer) is DeepSpeedZeroOptimizer_Stage3:
        # Under ZeRO 3 the inner optimizer's groups are empty outside of a step.
        return list(optimizer.fp32_partitioned_groups_flat)
    return [owner for group in inner(optimizer).param_groups for owner in group["params"]]


def materialise(optimizer: Any) -> None:
    """Creates the state that the inner optimizer would create in its first step.

    Raises:
        UnsupportedError: an inner optimizer that ftckpt does not know.
    """
    if type(optimizer) is not DeepSpeedZeroOptimizer_Stage3:
        inner_optimizers.materialise(inner(optimizer))
        return
    optimizer._set_fp32_optimizer_param_groups()  # ZeRO 3 empties its groups except during a step
    try:
        inner_optimizers.materialise(inner(optimizer))
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def spread(optimizer: Any) -> None:
    """Gathers the weights after each rank has loaded its own partition. Collective."""
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        _gather_flat(optimizer, optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups)
    elif isinstance(optimizer, BF16_Optimizer):
        _gather_flat(optimizer, optimizer.bf16_groups_flat, optimizer.bf16_partitioned_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._partition_all_parameters()  # frees gathered copies of old partitions
        # Small parameters stay gathered, so no forward would gather them again.
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _gather_flat(optimizer: Any, flats: Any, partitions: Any) -> None:
    all_gather_dp_groups(
        groups_flat=flats,
        partitioned_param_groups=partitions,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )


def _ranges(optimizer: Any) -> Iterator[ParameterRange]:
    yield from _READERS.get(type(optimizer), _read_plain)(optimizer)


def _read_plain(optimizer: Any) -> Iterator[ParameterRange]:
    """Ranges of an optimizer that steps the parameters themselves, except frozen ones."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield ParameterRange(parameter, 0, flat(parameter), parameter)


def _read_unfused(optimizer: Any) -> Iterator[ParameterRange]:
    for parameters, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            yield ParameterRange(parameter, 0, flat(parameter), master)


def _read_fused(optimizer: Any) -> Iterator[ParameterRange]:
    groups = zip(optimizer.fp16_groups, optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True)
    for parameters, every, master in groups:
        yield from _in_flat(parameters, every, master, 0)


def _read_bf16(optimizer: Any) -> Iterator[ParameterRange]:
    masters = optimizer.fp32_groups_flat_partition
    yield from _read_partitions(optimizer, optimizer.bf16_groups, optimizer.bf16_groups_flat, masters)


def _read_zero(optimizer: Any) -> Iterator[ParameterRange]:
    masters = optimizer.single_partition_of_fp32_groups
    yield from _read_partitions(optimizer, optimizer.bit16_groups, optimizer.bit16_groups_flat, masters)


def _read_partitions(optimizer: Any, groups: Any, flats: Any, masters: Any) -> Iterator[ParameterRange]:
    """Ranges of partitioned flat tensors; groups of experts are divided over other ranks than the rest."""
    # One process group for each group of parameters.
    ranks = map(dist.get_rank, optimizer.real_dp_process_group)
    for parameters, every, master, rank in zip(groups, flats, masters, ranks, strict=True):
        # Partitions of a group have equal sizes: the flat tensor is padded.
        yield from _in_flat(parameters, every, master, rank * master.numel())


def _in_flat(
    parameters: Sequence[torch.nn.Parameter], every: torch.Tensor, owner: torch.Tensor, begin: int
) -> Iterator[ParameterRange]:
    """The range of each parameter in ``owner``, which corresponds to the elements of ``every`` from ``begin``."""
    for parameter in parameters:
        offset = (parameter.data_ptr() - every.data_ptr()) // every.element_size()
        if not 0 <= offset <= every.numel() - parameter.numel():
            raise UnsupportedError(
                "a parameter is not in the flat tensor of its optimizer group: its data was replaced after "
                "deepspeed.initialize; load weights before it, or in place"
            )
        low, high = max(offset, begin), min(offset + parameter.numel(), begin + owner.numel())
        if low < high:
            yield ParameterRange(parameter, low - offset, flat(every)[low:high], owner, low - begin)


def _read_stage3(optimizer: Any) -> Iterator[ParameterRange]:
    """Ranges under ZeRO 3: parameters are cut into equal partitions, the last padded; a rank's are concatenated."""
    for parameters, owner in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        begin = 0
        for parameter in parameters:
            first, weight = partition(parameter)
            if weight.numel():
                yield ParameterRange(parameter, first, weight, owner, begin)
            # With padding: partitions of all ranks have the same size, even if the last ones are empty.
            begin += parameter.partition_numel()


def partition(parameter: Any) -> tuple[int, torch.Tensor]:
    """This rank's partition of a parameter under ZeRO 3: its first element's index, and its data without padding."""
    size = int(parameter.partition_numel())
    first = dist.get_rank(parameter.ds_process_group) * size
    return first, flat(parameter.ds_tensor)[: max(0, min(size, int(parameter.ds_numel) - first))]


def owned(parameter: Any) -> tuple[int, torch.Tensor]:
    """The part of a parameter without optimizer that this rank saves: its first element's index, and its data."""
    return partition(parameter) if hasattr(parameter, "ds_tensor") else (0, parameter)


_READERS: dict[type, Callable[[Any], Iterator[ParameterRange]]] = {
    FP16_Optimizer: _read_fused,
    FP16_UnfusedOptimizer: _read_unfused,
    BF16_Optimizer: _read_bf16,
    DeepSpeedZeroOptimizer: _read_zero,
    DeepSpeedZeroOptimizer_Stage3: _read_stage3,
}
