"""The partitions of ZeRO's optimizers: maps each rank's flat tensors to elements of parameters.

ZeRO 1 and 2 concatenate the parameters of a group and cut the result into equal partitions; ZeRO 3 cuts each
parameter. The order of parameters is that of ``param_shapes``, also under ``round_robin_gradients``.
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
from ftckpt.model.fragment import Shape
from ftckpt.model.text import with_article
from ftckpt.universal.deepspeed.files import Files
from ftckpt.universal.foreign import archives
from ftckpt.universal.foreign.slices import ParameterSlice

Shapes = Mapping[str, Shape]
Values = Mapping[str, tuple[torch.Tensor, bool]]
"""Role → flat values, and whether they are one number for the complete flat tensor."""
_REMEDY = "save with ZeRO 1, which writes names, or convert the weights alone with --roles weight"
_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)(\d+)(\..+)")


class _Part(NamedTuple):
    """Elements of a parameter, from ``first`` on, at positions ``low`` to ``high`` of a rank's flat tensors."""

    first: int
    low: int
    high: int


def parameter_shapes(files: Files) -> dict[int, list[Shapes]]:
    """The names and shapes of parameters, in order, by ``mp`` and parameter group; empty without ZeRO."""
    shapes_of: dict[int, list[Shapes]] = {}
    for numbers, path in files.models():
        stated = files.load(path).get("param_shapes")
        if stated is not None and numbers.dp == 0:
            groups = stated if isinstance(stated, (list, tuple)) else [stated]
            shapes_of[numbers.mp] = [
                {name: tuple(map(int, shape)) for name, shape in group.items()} for group in groups
            ]
    return shapes_of


def read_partitions(files: Files) -> Iterator[ParameterSlice]:
    """All masters and optimizer state in ZeRO's files.

    Raises:
        ConvertError: a file is incomplete or contradicts others; the text names it.
    """
    shapes = parameter_shapes(files)
    for mp in range(files.pp * files.tp):
        ranks = [(path, files.load(path)) for place, path in files.of("zero") if place.mp == mp]
        if mp not in shapes:
            raise ConvertError(
                f"{files.path}: mp_rank {mp} has optimizer partitions, but no param_shapes to cut them by"
            )
        states = [(path, _state(path, value)) for path, value in ranks]
        # The name of masters under ZeRO 3; under ZeRO 1 and 2 it is ``single_partition_of_fp32_groups``.
        read = _read_stage3 if "fp32_flat_groups" in states[0][1] else _read_stage12
        for part in read(files, shapes[mp], states):
            yield replace(part, coords=(("tp", mp % files.tp),))


def _state(path: Path, value: Mapping[str, Any]) -> Mapping[str, Any]:
    state = value.get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise ConvertError(f"{path}: has no optimizer_state_dict")
    if state.get("ds_zero_partition_groups") is not None:
        raise ConvertError(f"{path}: was written with AutoEP, which is not supported")
    return state


def _read_stage3(
    files: Files, groups: Sequence[Shapes], states: Sequence[tuple[Path, Mapping[str, Any]]]
) -> Iterator[ParameterSlice]:
    for rank, (path, state) in enumerate(states):
        flats, inner = state["fp32_flat_groups"], state.get("optimizer_state_dict") or {}
        if len(flats) != len(groups):
            raise ConvertError(f"{path}: has {len(flats)} parameter groups; the model's files have {len(groups)}")
        for group, (shapes, flat) in enumerate(zip(groups, flats, strict=True)):
            values = _state_of(path, group, flat, _of_group(inner, group), 0)
            begin = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                # Each parameter is padded to equal partitions: the last ranks may hold none of it.
                size = -(-numel // len(states))
                first = rank * size
                length = max(0, min(size, numel - first))
                yield from _cut(path, name, shape, _Part(first, begin, begin + length), values)
                begin += size


def _read_stage12(
    files: Files, groups: Sequence[Shapes], states: Sequence[tuple[Path, Mapping[str, Any]]]
) -> Iterator[ParameterSlice]:
    first_path, first_state = states[0]
    for group, shapes in enumerate(groups):
        flats = [_masters(path, state, group, len(groups)) for path, state in states]
        # Masters are stored without the last partition's padding: only the others have the full size.
        size = max(flat.numel() for flat in flats)
        count = _partition_count(first_state, group, len(states))
        paddings = _listed(first_state.get("param_alignment_paddings"), group) or [0] * len(shapes)
        total = sum(math.prod(shape) for shape in shapes.values()) + sum(paddings)
        if size * count < total:
            raise ConvertError(
                f"{first_path} and the files of other ranks hold {size * count} elements of group {group}, whose "
                f"parameters have {total}: the files are of different runs"
            )
        experts = _ExpertRanks.of(files, shapes, count, len(states))
        for dp, (path, state) in enumerate(states):
            begin = experts.partition(dp) * size
            # Masters are stored without the last partition's padding, optimizer state with or without it.
            end = _listed(state.get("group_paddings"), group) or 0
            values = _state_of(path, group, flats[dp], _of_group(state.get("base_optimizer_state") or {}, group), end)
            slices = _listed(state.get("param_slice_mappings"), group)
            offset = 0
            for (name, shape), padding in zip(shapes.items(), paddings, strict=True):
                low, high = max(offset, begin), min(offset + math.prod(shape), begin + size)
                if low < high:
                    if not experts.is_round_robin:
                        _check_slice(path, name, slices, low - begin, high - low)
                    whose = experts.name(name, dp)
                    yield from _cut(path, whose, shape, _Part(low - offset, low - begin, high - begin), values)
                offset += math.prod(shape) + padding


@dataclass(frozen=True)
class _ExpertRanks:
    """The experts of each rank, and its partition of a group; without experts there is one partition per rank."""

    ep: int
    dp: int
    data_first: bool
    local: Mapping[str, int]
    is_round_robin: bool

    @classmethod
    def of(cls, files: Files, shapes: Shapes, count: int, dp: int) -> _ExpertRanks:
        local: dict[str, int] = {}
        for name in shapes:
            match = _EXPERT.fullmatch(name)
            if match:
                local[match[1]] = max(local.get(match[1], 0), int(match[2]) + 1)
        if dp % count:
            raise ConvertError(f"{files.path}: {dp} ranks are no multiple of a group's {count} partitions")
        if count != dp and not local:
            raise ConvertError(f"{files.path}: a group has {count} partitions on {dp} ranks and no experts")
        config = files.load(files.models()[0][1]).get("ds_config") or {}
        zero = config.get("zero_optimization") or {}
        data_first = bool(config.get("use_data_before_expert_parallelism"))
        return cls(dp // count, dp, data_first, local, bool(zero.get("round_robin_gradients")))

    def partition(self, dp: int) -> int:
        # Ranks with the same experts are neighbours if data parallelism comes first, else every ``ep``-th rank.
        return dp % (self.dp // self.ep) if self.data_first else dp // self.ep

    def name(self, name: str, dp: int) -> str:
        """The name with the expert's global number; on each rank experts are numbered from 0."""
        match = _EXPERT.fullmatch(name)
        if not match or self.ep == 1:
            return name
        rank = dp // (self.dp // self.ep) if self.data_first else dp % self.ep
        return f"{match[1]}{rank * self.local[match[1]] + int(match[2])}{match[3]}"


def _masters(path: Path, state: Mapping[str, Any], group: int, groups: int) -> torch.Tensor:
    flats = state.get("single_partition_of_fp32_groups")
    if not isinstance(flats, (list, tuple)) or len(flats) != groups or not isinstance(flats[group], torch.Tensor):
        raise ConvertError(f"{path}: does not hold single_partition_of_fp32_groups of {groups} parameter groups")
    return archives.flat(flats[group], f"masters of group {group}")


def _partition_count(state: Mapping[str, Any], group: int, ranks: int) -> int:
    counts = state.get("partition_count", ranks)
    count = counts[group] if isinstance(counts, (list, tuple)) else counts
    return int(count)


def _listed(value: Any, group: int) -> Any:
    return value[group] if isinstance(value, (list, tuple)) and group < len(value) else None


def _of_group(inner: Any, group: int) -> Mapping[str, Any]:
    """The inner optimizer's state of a group's flat tensor."""
    if isinstance(inner, (list, tuple)):
        return inner[group] if group < len(inner) else {}
    states = inner.get("state", {})
    state: Mapping[str, Any] = states.get(group, {})
    return state


def _state_of(path: Path, group: int, flat: torch.Tensor, state: Mapping[str, Any], padding: int) -> Values:
    flat = archives.flat(flat, f"masters of group {group}")
    values = {"master": (flat, False)}
    for role, value in state.items():
        values[role] = state_values(f"{path}: {role} of group {group}", value, (flat.numel(), flat.numel() + padding))
    return values


def state_values(what: str, value: Any, sizes: Sequence[int]) -> tuple[torch.Tensor, bool]:
    """An optimizer's state as a flat tensor, and whether it is a single number; ``what`` names it in errors.

    Raises:
        ConvertError: neither a number nor a tensor of one of ``sizes`` elements.
    """
    if type(value) in (int, float, bool):
        # The type of a step in torch's own optimizers.
        return torch.tensor([value], dtype=torch.float32), True
    if not isinstance(value, torch.Tensor) or (value.dim() and value.numel() not in sizes):
        kind = f"{value.numel()} elements" if isinstance(value, torch.Tensor) else with_article(type(value).__name__)
        raise ConvertError(f"{what} is {kind}; {sizes[0]} elements or one number were expected")
    return archives.flat(value, what), value.dim() == 0


def _cut(path: Path, name: str, shape: Shape, part: _Part, values_of: Values) -> Iterator[ParameterSlice]:
    first, low, high = part
    if low >= high:
        return
    for role, (values, is_number) in values_of.items():
        if not is_number and high > values.numel():
            raise ConvertError(f"{path}: {role} has {values.numel()} elements; {name} needs those {low} to {high}")
        elements = values if is_number else values[low:high]
        yield ParameterSlice(role, name, (), shape, elements, path, 0 if is_number else first, is_number)


def _check_slice(path: Path, name: str, slices: Any, start: int, numel: int) -> None:
    """Raises ConvertError if DeepSpeed's record of a rank's part of a parameter contradicts the computed one."""
    if not isinstance(slices, Mapping) or not slices:
        return
    address = slices.get(name)
    stated = (getattr(address, "start", None), getattr(address, "numel", None)) if address is not None else None
    if stated not in ((start, numel), (None, None)):
        raise ConvertError(
            f"{path}: {name} should be {numel} elements at {start} by the shapes of parameters; the file's own "
            f"param_slice_mappings have {stated}"
        )


def read_plain(files: Files, weights: Sequence[ParameterSlice]) -> Iterator[ParameterSlice]:
    """Masters and optimizer state in model files, without ZeRO; ``weights`` are all weights, in order.

    Raises:
        ConvertError: the optimizer's parameters cannot be identified.
    """
    for tp in range(files.tp):
        mine = [(path, files.load(path).get("optimizer")) for at, path in files.of("model") if at.mp % files.tp == tp]
        optimizers = [(path, optimizer) for path, optimizer in mine if optimizer is not None]
        if not optimizers:
            continue
        if files.of("experts"):
            raise ConvertError(f"{optimizers[0][0]}: without ZeRO the optimizer of a model with experts has no names")
        names = [weight for weight in weights if weight.coords == (("tp", tp),) and weight.role == "weight"]
        slots = [slot for path, optimizer in optimizers for slot in _slots(path, optimizer, names)]
        pairs = list(zip(names, slots, strict=False))
        if len(slots) != len(names) or any(slot[0] not in (None, weight.shape) for weight, slot in pairs):
            raise ConvertError(
                f"{optimizers[0][0]}: the optimizer has state of {len(slots)} parameters, the model has "
                f"{len(names)}, and shapes do not identify them; {_REMEDY}"
            )
        for weight, (_, path, values_of) in pairs:
            for role, (values, is_number) in values_of.items():
                yield replace(weight, role=role, values=values, file=path, is_number=is_number)


_Slot = tuple[Shape | None, Path, Values]
"""Optimizer state of a parameter: its shape if known, file, and values by role."""


def _slots(path: Path, optimizer: Mapping[str, Any], names: Sequence[ParameterSlice]) -> list[_Slot]:
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = inner.get("param_groups") or [], inner.get("state") or {}
    if len(groups) != 1:
        raise ConvertError(
            f"{path}: the optimizer has {len(groups)} groups of parameters, which the file does not name; {_REMEDY}"
        )
    flats = optimizer.get("fp32_groups_flat")
    if flats is not None:
        return _flat_slots(path, flats[0], states.get(0, {}), names)
    masters = (optimizer.get("fp32_groups") or [[None] * len(groups[0]["params"])])[0]
    slots: list[_Slot] = []
    for number, master in zip(groups[0]["params"], masters, strict=True):
        state = states.get(number, {})
        values_of: dict[str, tuple[torch.Tensor, bool]] = {}
        like = master if master is not None else next((v for v in state.values() if _has_dims(v)), None)
        shape = tuple(like.shape) if like is not None else None
        if master is not None:
            values_of["master"] = (archives.flat(master, f"master of parameter {number}"), False)
        for role, value in state.items():
            size = math.prod(shape) if shape is not None else 1
            if value is not None:
                values_of[role] = state_values(f"{path}: {role} of parameter {number}", value, (size,))
        slots.append((shape, path, values_of))
    return slots


def _flat_slots(
    path: Path, flat: torch.Tensor, state: Mapping[str, Any], names: Sequence[ParameterSlice]
) -> list[_Slot]:
    """Slots of a fused optimizer's flat tensor: all parameters, concatenated in the module's order."""
    if flat.numel() != sum(math.prod(weight.shape) for weight in names):
        raise ConvertError(
            f"{path}: the optimizer has one flat tensor of {flat.numel()} elements, which are not those of all "
            f"parameters; {_REMEDY}"
        )
    values_of = {"master": (archives.flat(flat, "masters"), False)}
    values_of |= {role: state_values(f"{path}: {role}", value, (flat.numel(),)) for role, value in state.items()}
    slots: list[_Slot] = []
    begin = 0
    for weight in names:
        end = begin + math.prod(weight.shape)
        parts = {role: (v if number else v[begin:end], number) for role, (v, number) in values_of.items()}
        slots.append((weight.shape, path, parts))
        begin = end
    return slots


def _has_dims(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0
