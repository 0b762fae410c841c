"""Partitions of ZeRO's optimizers: which elements of which parameter each rank's flat tensors hold.

ZeRO 1 and 2 lay the parameters of a group end to end and cut that into equal partitions; ZeRO 3 cuts every parameter.
The order of parameters is that of ``param_shapes``, which is right where gradients are dealt round robin, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Shape
from ftckpt.universal.deepspeed.files import Files
from ftckpt.universal.foreign import records

Shapes = Mapping[str, Shape]
Kept = Mapping[str, tuple[torch.Tensor, bool]]
"""Role → flat values, and whether they are one number for all that the optimizer keeps under one tensor."""
_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")


@dataclass(frozen=True)
class Held:
    """Elements ``first`` and on of one tensor-parallel rank's part of a parameter, flattened, in one file.

    ``shape`` is that of the part; a number that belongs to the whole parameter has ``is_number`` and one element.
    """

    role: str
    name: str
    stage: int
    tp: int
    shape: Shape
    first: int
    values: torch.Tensor
    path: Path
    is_number: bool = False


class _Part(NamedTuple):
    """Elements ``first`` and on of a parameter lie at ``low`` to ``high`` of a rank's flat tensors."""

    first: int
    low: int
    high: int


def parameter_shapes(files: Files) -> dict[int, list[Shapes]]:
    """By ``mp``: of each group of parameters their names and shapes, in order; none where ZeRO was not used."""
    found: dict[int, list[Shapes]] = {}
    for place, path in files.models():
        said = files.load(path).get("param_shapes")
        if said is not None and place.dp == 0:
            groups = said if isinstance(said, (list, tuple)) else [said]
            found[place.mp] = [{name: tuple(map(int, shape)) for name, shape in group.items()} for group in groups]
    return found


def read_partitions(files: Files) -> Iterator[Held]:
    """Masters and optimizer state, all of it.

    Raises:
        ConvertError: a file holds less than its rank must have, or contradicts the others; the text names it.
    """
    shapes = parameter_shapes(files)
    for mp in range(files.pp * files.tp):
        ranks = [(path, files.load(path)) for place, path in files.of("zero") if place.mp == mp]
        stage, tp = divmod(mp, files.tp)
        if mp not in shapes:
            raise ConvertError(
                f"{files.path}: mp_rank {mp} has optimizer partitions, but no param_shapes to cut them by"
            )
        states = [(path, _state(path, value)) for path, value in ranks]
        read = _read_stage3 if "fp32_flat_groups" in states[0][1] else _read_stage12
        for held in read(files, shapes[mp], states):
            yield replace(held, stage=stage, tp=tp)


def _state(path: Path, value: Mapping[str, Any]) -> Mapping[str, Any]:
    state = value.get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise ConvertError(f"{path}: has no optimizer_state_dict")
    if state.get("ds_zero_partition_groups") is not None:
        raise ConvertError(f"{path}: was written with AutoEP, whose experts this program does not know")
    return state


def _read_stage3(
    files: Files, groups: Sequence[Shapes], states: Sequence[tuple[Path, Mapping[str, Any]]]
) -> Iterator[Held]:
    for rank, (path, state) in enumerate(states):
        flats, inner = state["fp32_flat_groups"], state.get("optimizer_state_dict") or {}
        if len(flats) != len(groups):
            raise ConvertError(f"{path}: has {len(flats)} groups of parameters; the model's files say {len(groups)}")
        for group, (shapes, flat) in enumerate(zip(groups, flats, strict=True)):
            kept = _kept(path, group, flat, _of_group(inner, group), 0)
            begin = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                size = -(-numel // len(states))
                first = rank * size
                length = max(0, min(size, numel - first))
                yield from _cut(path, name, shape, _Part(first, begin, begin + length), kept)
                begin += size


def _read_stage12(
    files: Files, groups: Sequence[Shapes], states: Sequence[tuple[Path, Mapping[str, Any]]]
) -> Iterator[Held]:
    first_path, first_state = states[0]
    for group, shapes in enumerate(groups):
        flats = [_masters(path, state, group, len(groups)) for path, state in states]
        size = max(flat.numel() for flat in flats)
        count = _partition_count(first_state, group, len(states))
        paddings = _listed(first_state.get("param_alignment_paddings"), group) or [0] * len(shapes)
        total = sum(math.prod(shape) for shape in shapes.values()) + sum(paddings)
        if size * count < total:
            raise ConvertError(
                f"{first_path} and the files of other ranks hold {size * count} elements of group {group}, whose "
                f"parameters have {total}: they are of different runs"
            )
        experts = _ExpertRanks.of(files, shapes, count, len(states))
        for dp, (path, state) in enumerate(states):
            begin = experts.partition(dp) * size
            end = _listed(state.get("group_paddings"), group) or 0
            kept = _kept(path, group, flats[dp], _of_group(state.get("base_optimizer_state") or {}, group), end)
            said = _listed(state.get("param_slice_mappings"), group)
            offset = 0
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                low, high = max(offset, begin), min(offset + math.prod(shape), begin + size)
                if low < high:
                    if not experts.is_round_robin:
                        _check_slice(path, name, said, low - begin, high - low)
                    whose = experts.name(name, dp)
                    yield from _cut(path, whose, shape, _Part(low - offset, low - begin, high - begin), kept)
                offset += math.prod(shape) + padding


@dataclass(frozen=True)
class _ExpertRanks:
    """Which experts and which partition of a group a rank has; without experts each rank has the next partition."""

    ep: int
    dp: int
    data_first: bool
    local: Mapping[str, int]
    is_round_robin: bool

    @classmethod
    def of(cls, files: Files, shapes: Shapes, count: int, dp: int) -> _ExpertRanks:
        local: dict[str, int] = {}
        for name in shapes:
            found = _EXPERT.fullmatch(name)
            if found:
                local[found[1]] = max(local.get(found[1], 0), int(found[2]) + 1)
        if dp % count:
            raise ConvertError(f"{files.path}: {dp} ranks cannot share partitions of {count}")
        if count != dp and not local:
            raise ConvertError(f"{files.path}: a group has {count} partitions on {dp} ranks and no experts")
        config = files.load(files.models()[0][1]).get("ds_config") or {}
        zero = config.get("zero_optimization") or {}
        data_first = bool(config.get("use_data_before_expert_parallelism"))
        return cls(dp // count, dp, data_first, local, bool(zero.get("round_robin_gradients")))

    def partition(self, dp: int) -> int:
        return dp % (self.dp // self.ep) if self.data_first else dp // self.ep

    def name(self, name: str, dp: int) -> str:
        """Experts are numbered from 0 on each rank."""
        found = _EXPERT.fullmatch(name)
        if not found or self.ep == 1:
            return name
        rank = dp // (self.dp // self.ep) if self.data_first else dp % self.ep
        return f"{found[1]}{rank * self.local[found[1]] + int(found[2])}{found[3]}"


def _masters(path: Path, state: Mapping[str, Any], group: int, groups: int) -> torch.Tensor:
    flats = state.get("single_partition_of_fp32_groups")
    if not isinstance(flats, (list, tuple)) or len(flats) != groups or not isinstance(flats[group], torch.Tensor):
        raise ConvertError(f"{path}: does not hold single_partition_of_fp32_groups of {groups} groups of parameters")
    return records.flat(flats[group], f"masters of group {group}")


def _partition_count(state: Mapping[str, Any], group: int, ranks: int) -> int:
    said = state.get("partition_count", ranks)
    count = said[group] if isinstance(said, (list, tuple)) else said
    return int(count)


def _listed(value: Any, group: int) -> Any:
    return value[group] if isinstance(value, (list, tuple)) and group < len(value) else None


def _of_group(inner: Any, group: int) -> Mapping[str, Any]:
    """The inner optimizer's state of a group, which it keeps under one flat tensor."""
    if isinstance(inner, (list, tuple)):
        return inner[group] if group < len(inner) else {}
    states = inner.get("state", {})
    found: Mapping[str, Any] = states.get(group, {})
    return found


def _kept(path: Path, group: int, flat: torch.Tensor, state: Mapping[str, Any], padding: int) -> Kept:
    flat = records.flat(flat, f"masters of group {group}")
    kept = {"master": (flat, False)}
    for role, value in state.items():
        kept[role] = state_values(f"{path}: {role} of group {group}", value, (flat.numel(), flat.numel() + padding))
    return kept


def state_values(what: str, value: Any, sizes: Sequence[int]) -> tuple[torch.Tensor, bool]:
    """An optimizer's state as a flat tensor, and whether it is one number.

    Raises:
        ConvertError: neither a number nor a tensor of one of ``sizes`` elements.
    """
    if type(value) in (int, float, bool):
        return torch.tensor([value], dtype=torch.float32), True
    if not isinstance(value, torch.Tensor) or (value.dim() and value.numel() not in sizes):
        told = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ConvertError(f"{what} is {told}; {sizes[0]} elements or one number were expected")
    return records.flat(value, what), value.dim() == 0


def _cut(path: Path, name: str, shape: Shape, part: _Part, kept: Kept) -> Iterator[Held]:
    first, low, high = part
    if low >= high:
        return
    for role, (values, is_number) in kept.items():
        if not is_number and high > values.numel():
            raise ConvertError(f"{path}: {role} has {values.numel()} elements; {name} should lie at {low} to {high}")
        elements = values if is_number else values[low:high]
        yield Held(role, name, 0, 0, shape, 0 if is_number else first, elements, path, is_number)


def _check_slice(path: Path, name: str, said: Any, start: int, numel: int) -> None:
    """DeepSpeed says itself where a rank's part of a parameter lies: two that disagree are an error."""
    if not isinstance(said, Mapping) or not said:
        return
    address = said.get(name)
    found = (getattr(address, "start", None), getattr(address, "numel", None)) if address is not None else None
    if found not in ((start, numel), (None, None)):
        raise ConvertError(
            f"{path}: {name} should be {numel} elements at {start} by the shapes of parameters; the file's own "
            f"param_slice_mappings say {found}"
        )
