"""Maps names in Megatron ``torch_dist`` checkpoints to ``ROLE/LOGICAL`` and back.

Megatron stacks the layers of a homogeneous block: ``decoder.layers.mlp.linear_fc2.bias`` has a leading axis of
layers; its logical names are ``decoder.layers.0.mlp.linear_fc2.bias`` and so on. Optimizer state has the prefix
``optimizer.state.NAME.``; masters are ``param`` there if a distributed optimizer wrote them, else ``fp32_param``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Shape
from ftckpt.universal.catalog import Tensor

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
MASTERS = ("param", "fp32_param")
"""The name that the distributed optimizer loads, and that of the others."""
# No number after ``layers``: the tensor is a stack of the block's layers.
STACKED = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers)\.(?!\d+\.)(.+)")
LAYER = re.compile(r"((?:.*\.)?(?:decoder|encoder)\.layers)\.(\d+)\.(.+)")
VOCABULARY = re.compile(r"(.*\.)?(word_embeddings|output_layer)\.(weight|bias)")
"""Padded by Megatron to a size that depends on tensor parallelism."""
BUFFER = re.compile(r"(.*\.)?(expert_bias|local_tokens_per_expert|running_mean|running_var|num_batches_tracked)")
EXPERTS = ".experts.experts."
"""Part of the names of tensors whose leading axis numbers experts."""
_EXTRA = re.compile(r"(.+\.(?:linear_\w+|output_layer))\.weight")
_ATTENTION = re.compile(r"(.+\.\w*attention)\.linear_proj\.weight")


def from_megatron(name: str) -> tuple[str, str]:
    """Role and logical name, layers still stacked: ``optimizer.state.exp_avg.X`` is ``exp_avg`` and ``X``."""
    state = STATE.fullmatch(name)
    if state:
        return ("master" if state[1] in MASTERS else state[1]), state[2]
    return ("buffer" if BUFFER.fullmatch(name) else "weight"), name


def to_megatron(key: str, weight_is_master: bool = False) -> tuple[str, ...]:
    """All names under which a job may load ``key``; ``weight_is_master``: the optimizer updates the weight itself."""
    role, _, name = key.partition("/")
    if role in ("weight", "buffer"):
        return (name, f"optimizer.state.{MASTERS[0]}.{name}") if weight_is_master else (name,)
    if role == "master":
        return tuple(f"optimizer.state.{master}.{name}" for master in MASTERS)
    return (f"optimizer.state.{role}.{name}",)


def is_padded(key: str) -> bool:
    """Whether the first dimension of a tensor depends on the layout."""
    role, _, name = key.partition("/")
    return role != "step" and VOCABULARY.fullmatch(name) is not None


def unstacked(name: str, layer: int) -> str:
    """The name of one layer's tensor in a stack."""
    match = STACKED.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not stacked")
    return f"{match[1]}.{layer}.{match[2]}"


def step_shape(name: str, shape: Shape) -> Shape:
    """The shape of ``step/NAME``: one number per tensor with its own optimizer state."""
    return shape[:1] if EXPERTS in name else (1,)


@dataclass(frozen=True)
class TensorPosition:
    """The position of a tensor in the checkpoint's tensor ``name`` of ``shape``: layer ``first`` of a stack, or, if
    that is empty, all of it."""

    name: str
    shape: Shape
    first: Shape


def stackable(tensors: Iterable[Tensor]) -> dict[str, int]:
    """The number of layers of each homogeneous block, by names such as ``decoder.layers``: all its layers have the
    same tensors of the same types and shapes."""
    layers: dict[str, dict[int, set[tuple[str, str, Shape]]]] = defaultdict(lambda: defaultdict(set))
    for tensor in tensors:
        role, _, name = tensor.key.partition("/")
        match = LAYER.fullmatch(name)
        if match and role != "step":
            layers[match[1]][int(match[2])].add((f"{role}/{match[3]}", tensor.dtype, tensor.shape))
    return {
        block: len(numbers)
        for block, numbers in layers.items()
        # Megatron stacks no block with gaps or differing layers.
        if sorted(numbers) == list(range(len(numbers))) and all(one == numbers[0] for one in numbers.values())
    }


def places(tensor: Tensor, names: Sequence[str], stacks: Mapping[str, int]) -> Iterator[TensorPosition]:
    """The position of ``tensor`` under each of ``names``; ``stacks``: stacked blocks and their numbers of layers."""
    for name in names:
        state = STATE.fullmatch(name)
        bare = state[2] if state else name
        match = LAYER.fullmatch(bare)
        if match and match[1] in stacks:
            stacked = f"{name[: len(name) - len(bare)]}{match[1]}.{match[3]}"
            yield TensorPosition(stacked, (stacks[match[1]], *tensor.shape), (int(match[2]),))
        else:
            yield TensorPosition(name, tensor.shape, ())


def extra_states(tensors: Iterable[Tensor], stacks: Mapping[str, int]) -> Iterator[str]:
    """The names of each ``_extra_state`` that Megatron loads with ``tensors``, whatever its content."""
    for tensor in tensors:
        role, _, name = tensor.key.partition("/")
        if role != "weight":
            continue
        # Transformer Engine's linear layers and attention have one.
        for match, module in ((_EXTRA.fullmatch(name), ""), (_ATTENTION.fullmatch(name), ".core_attention")):
            if match is None:
                continue
            experts = tensor.shape[0] if EXPERTS in name else 1
            for expert in range(experts):
                yield _object_name(f"{match[1]}{module}._extra_state", stacks, (expert, experts))


def _object_name(name: str, stacks: Mapping[str, int], expert: tuple[int, int]) -> str:
    index, size = ([expert[0]], [expert[1]]) if EXPERTS in name else ([], [])
    match = LAYER.fullmatch(name)
    if match and match[1] in stacks:
        name = f"{match[1]}.{match[3]}"
        index, size = [int(match[2]), *index], [stacks[match[1]], *size]
    offset, shape = (".".join(map(str, numbers or [0 if numbers is index else 1])) for numbers in (index, size))
    # The names of Megatron-core's ShardedObject: offset and number of parts along each axis.
    return f"{name}/shard_{offset}_{shape}"


def refuse_unreadable(names: Iterable[str], metadata: Mapping[str, object], where: str) -> None:
    """Refuse optimizer state that is specific to a layout.

    Raises:
        ConvertError: the text explains how to save instead.
    """
    kind = metadata.get("distrib_optim_sharding_type", "")
    inside = next((name for name in names if "optimizer.distributed.dp_group_idx" in name), None)
    if inside is not None:
        raise ConvertError(
            f"{where}: {inside}: the distributed optimizer's state was saved in its own buffers"
            f"{f' ({kind})' if kind else ''}, which are specific to a layout; save with "
            "--dist-ckpt-optim-fully-reshardable (before Megatron-core 0.15: --ckpt-fully-parallel-save), or read "
            "the weights alone with --roles weight"
        )
    if metadata.get("singleton_local_shards"):
        raise ConvertError(f"{where}: was saved with singleton_local_shards, which is not supported; save without")
