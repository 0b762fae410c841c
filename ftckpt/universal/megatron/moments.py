"""Which optimizer state of a Megatron ``torch`` checkpoint belongs to which parameter: it is only numbered there.

Numbers follow the order of the model's parameters, within groups that Megatron makes of them by their names and
shapes. Every count and shape is compared, so that another order is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Shape
from ftckpt.universal.foreign import pickles
from ftckpt.universal.megatron import names

DISTRIBUTED_FILE = "distrib_optim.pt"
_ALIGNMENT = 64
"""Elements: where parameters begin in the distributed optimizer's buffers."""
_REMEDY = "convert the weights alone with --roles weight,buffer, or save in Megatron's torch_dist format"


@dataclass(frozen=True)
class Held:
    """A tensor of one rank's file. ``shape`` is the parameter's, also where ``tensor`` is its ``step``."""

    role: str
    name: str
    coords: tuple[tuple[str, int], ...]
    tensor: torch.Tensor
    shape: Shape
    file: Path


def read_optimizer(file: Path, state: Any, chunks: Sequence[Sequence[Held]]) -> Iterator[Held]:
    """Optimizer state of the parameters of a rank's model ``chunks``, in the order in which the model has them.

    Raises:
        ConvertError: numbers and parameters do not fit.
    """
    if state is None:
        return
    chain = list(state) if isinstance(state, (list, tuple)) else [state]
    parameters = [[each for each in chunk if _is_parameter(each.name)] for chunk in chunks]
    split = _by_optimizer(parameters, len(chain))
    beside = file.with_name(DISTRIBUTED_FILE)
    flat = pickles.load(beside) if beside.exists() else None
    flats = list(flat) if isinstance(flat, list) else [flat] * len(chain)
    if not len(chain) == len(split) == len(flats):
        raise ConvertError(f"{file}: {len(chain)} optimizers, {len(flats)} of them in {DISTRIBUTED_FILE}; {_REMEDY}")
    for part, mine, buffers in zip(chain, split, flats, strict=True):
        inner = part.get("optimizer", part) if isinstance(part, Mapping) else {}
        if "state" in inner:
            yield from _numbered(file, part, inner, [each for chunk in mine for each in chunk])
        elif isinstance(buffers, Mapping):
            yield from _buffered(beside, inner, buffers, mine)
        elif any(mine) and not any(flats):  # of some of several another expert rank has it
            raise ConvertError(
                f"{beside}: is missing or empty: the distributed optimizer's state lies there; {_REMEDY}"
            )


def _is_parameter(name: str) -> bool:
    return not name.endswith("_extra_state") and names.BUFFER.fullmatch(name) is None


def _by_optimizer(chunks: Sequence[Sequence[Held]], count: int) -> list[list[list[Held]]]:
    """Experts have an optimizer of their own where there are two."""
    if count == 1:
        return [[list(chunk) for chunk in chunks]]
    return [
        [[each for each in chunk if (".experts." in each.name) is experts] for chunk in chunks]
        for experts in (False, True)
    ]


def _numbered(
    file: Path, part: Mapping[str, Any], inner: Mapping[str, Any], parameters: Sequence[Held]
) -> Iterator[Held]:
    masters = part.get("fp32_from_fp16_params") or [()] * len(inner["param_groups"])
    pairs = [(group, held) for group, held in zip(inner["param_groups"], masters, strict=True) if group["params"]]
    dealt = _deal(file, [group for group, _ in pairs], parameters)
    half = (torch.float16, torch.bfloat16)
    for (group, stored), mine in zip(pairs, dealt, strict=True):
        copies = [each for each in mine if each.tensor.dtype in half]
        if len(copies) != len(stored):
            raise ConvertError(f"{file}: {len(stored)} masters for {len(copies)} parameters; {_REMEDY}")
        for each, master in zip(copies, stored, strict=False):
            yield _checked(each, "master", master)
        for index, each in zip(group["params"], mine, strict=True):
            for role, value in inner["state"].get(index, {}).items():
                if isinstance(value, torch.Tensor):
                    yield _checked(each, role, value)


def _deal(file: Path, groups: Sequence[Mapping[str, Any]], parameters: Sequence[Held]) -> list[list[Held]]:
    """The parameters of each group: those without weight decay are biases and what has one dimension."""
    dealt: list[list[Held]] = [[] for _ in groups]
    plain = [_multiplier(group) == 0.0 for group in groups]
    for each in parameters:
        flat = len(each.shape) == 1 or each.name.endswith(".bias")
        fitting = [index for index, without_decay in enumerate(plain) if without_decay is flat]
        if len(groups) == 1:
            fitting = [0]
        if len(fitting) != 1:
            raise ConvertError(f"{file}: cannot tell to which of {len(groups)} groups {each.name} belongs; {_REMEDY}")
        dealt[fitting[0]].append(each)
    for group, mine in zip(groups, dealt, strict=True):
        if len(group["params"]) != len(mine):
            told = f"{len(group['params'])} parameters in a group of the optimizer, {len(mine)} in the model"
            raise ConvertError(f"{file}: {told}; {_REMEDY}")
    return dealt


def _multiplier(group: Mapping[str, Any]) -> float:
    return float(group.get("wd_mult", group.get("pre_wd_mult", 1.0)))


def _checked(each: Held, role: str, value: torch.Tensor) -> Held:
    if role == "step":
        return replace(each, role=role, tensor=value.reshape(1))
    if value.shape != each.tensor.shape:
        told = f"{tuple(value.shape)} and {each.shape}"
        raise ConvertError(f"{each.file}: {role} of {each.name} and the weight differ in shape: {told}; {_REMEDY}")
    return replace(each, role=role, tensor=value)


def _buffered(
    file: Path, inner: Mapping[str, Any], state: Mapping[Any, Any], chunks: Sequence[Sequence[Held]]
) -> Iterator[Held]:
    """State of the distributed optimizer: flat buffers, one per model chunk and type, parameters in reverse order."""
    steps = {
        float(group["step"])
        for group in inner["param_groups"]
        if isinstance(group.get("step"), (float, torch.Tensor))
    }
    expected = [(chunk, dtype) for chunk in chunks for dtype in dict.fromkeys(each.tensor.dtype for each in chunk)]
    buffers = [
        (types, value)
        for index in sorted(k for k in state if isinstance(k, int))
        for types, value in state[index].items()
    ]
    if len(buffers) != len(expected) or any(
        types[0] != dtype for (types, _), (_, dtype) in zip(buffers, expected, strict=False)
    ):
        raise ConvertError(f"{file}: {len(buffers)} buffers, the model should have {len(expected)}; {_REMEDY}")
    for (_, value), (chunk, dtype) in zip(buffers, expected, strict=True):
        mine = [each for each in chunk if each.tensor.dtype == dtype][::-1]
        places = _aligned(mine)
        end = places[-1] + math.prod(mine[-1].shape) if mine else 0
        tensors = {role: flat for role, flat in value.items() if isinstance(flat, torch.Tensor)}
        for role, flat in tensors.items():
            if flat.numel() != end:
                raise ConvertError(
                    f"{file}: {role} has {flat.numel()} elements, {end} were expected: the distributed optimizer had "
                    f"several buckets, whose sizes the file does not say; {_REMEDY}"
                )
        for each, begin in zip(mine, places, strict=True):
            for role, flat in tensors.items():
                values = flat[begin : begin + math.prod(each.shape)].view(each.shape)
                own = role == "param" and each.tensor.dtype == torch.float32
                yield replace(each, role="weight" if own else "master" if role == "param" else role, tensor=values)
            if len(steps) == 1:
                yield replace(each, role="step", tensor=torch.tensor(list(steps), dtype=torch.float32))


def _aligned(parameters: Sequence[Held]) -> list[int]:
    places, at = [], 0
    for each in parameters:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        places.append(at)
        at += math.prod(each.shape)
    return places
