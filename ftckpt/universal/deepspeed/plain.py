"""Optimizers of DeepSpeed jobs without ZeRO, whose state is numbered and not named.

Numbers count the parameters that the job gave to its optimizer. Which ones these are is found by their shapes, and
only where there is exactly one way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ftckpt.errors import ConvertError
from ftckpt.state.fragment import Shape
from ftckpt.universal.deepspeed.files import Files
from ftckpt.universal.deepspeed.partitions import Held, state_values
from ftckpt.universal.foreign import records


def read_plain(files: Files, weights: Sequence[Held]) -> Iterator[Held]:
    """Masters and state of the optimizers that model files hold; ``weights`` are all that there are, in order.

    Raises:
        ConvertError: which parameters they belong to cannot be told.
    """
    for tp in range(files.tp):
        optimizers: list[tuple[Path, int, Mapping[str, Any]]] = []
        for place, path in files.of("model"):
            stage, rank = files.stage(place)
            optimizer = files.load(path).get("optimizer")
            if rank == tp and optimizer is not None:
                optimizers.append((path, stage, optimizer))
        if not optimizers:
            continue
        if files.of("experts"):
            raise ConvertError(f"{optimizers[0][0]}: without ZeRO the optimizer of a model with experts has no names")
        names = [held for held in weights if held.tp == tp and held.role == "weight"]
        slots = [slot for path, stage, optimizer in optimizers for slot in _slots(path, stage, optimizer, names)]
        chosen = _only_way([slot[0] for slot in slots], [held.shape for held in names])
        if chosen is None:
            raise ConvertError(
                f"{optimizers[0][0]}: the optimizer keeps state of {len(slots)} parameters, the model has "
                f"{len(names)}, and which belongs to which cannot be told; save with ZeRO 1, which writes names, or "
                "convert --roles weight alone"
            )
        for index, (shape, path, stage, kept) in zip(chosen, slots, strict=True):
            name = names[index].name
            for role, (values, is_number) in kept.items():
                yield Held(role, name, stage, tp, shape or names[index].shape, 0, values, path, is_number)


_Slot = tuple[Shape | None, Path, int, dict[str, tuple[torch.Tensor, bool]]]
"""Shape where it is known, file, stage, and what is kept of one parameter by role."""


def _slots(path: Path, stage: int, optimizer: Mapping[str, Any], names: Sequence[Held]) -> list[_Slot]:
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = inner.get("param_groups") or [], inner.get("state") or {}
    if len(groups) != 1:
        raise ConvertError(
            f"{path}: the optimizer has {len(groups)} groups of parameters, and which parameter is in which is not "
            "said; save with ZeRO 1, which writes names, or convert --roles weight alone"
        )
    flats = optimizer.get("fp32_groups_flat")
    if flats is not None:
        return _flat_slots(path, stage, flats[0], states.get(0, {}), names)
    masters = (optimizer.get("fp32_groups") or [[None] * len(groups[0]["params"])])[0]
    slots: list[_Slot] = []
    for number, master in zip(groups[0]["params"], masters, strict=True):
        state = states.get(number, {})
        kept: dict[str, tuple[torch.Tensor, bool]] = {}
        like = master if master is not None else next((v for v in state.values() if _has_dims(v)), None)
        shape = tuple(like.shape) if like is not None else None
        if master is not None:
            kept["master"] = (records.flat(master, f"master of parameter {number}"), False)
        for role, value in state.items():
            size = math.prod(shape) if shape is not None else 1
            kept |= (
                {role: state_values(f"{path}: {role} of parameter {number}", value, (size,))}
                if value is not None
                else {}
            )
        slots.append((shape, path, stage, kept))
    return slots


def _flat_slots(
    path: Path, stage: int, flat: torch.Tensor, state: Mapping[str, Any], names: Sequence[Held]
) -> list[_Slot]:
    """Parameters of the only stage, laid end to end in the order in which the module lists them."""
    if flat.numel() != sum(math.prod(held.shape) for held in names):
        raise ConvertError(
            f"{path}: the optimizer has one flat tensor of {flat.numel()} elements, and which parameters are in it "
            "cannot be told; save with ZeRO 1, which writes names, or convert --roles weight alone"
        )
    kept = {"master": (records.flat(flat, "masters"), False)}
    kept |= {role: state_values(f"{path}: {role}", value, (flat.numel(),)) for role, value in state.items()}
    slots: list[_Slot] = []
    begin = 0
    for held in names:
        end = begin + math.prod(held.shape)
        parts = {role: (v if number else v[begin:end], number) for role, (v, number) in kept.items()}
        slots.append((held.shape, path, stage, parts))
        begin = end
    return slots


def _has_dims(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _only_way(slots: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """The indices of ``shapes``, ascending, that ``slots`` have, where there is one choice of them and no other."""
    first = _match(slots, shapes)
    last = _match(slots[::-1], shapes[::-1])
    if first is None or last is None:
        return None
    return first if first == [len(shapes) - 1 - index for index in reversed(last)] else None


def _match(slots: Sequence[Shape | None], shapes: Sequence[Shape]) -> list[int] | None:
    """The earliest indices that fit."""
    found: list[int] = []
    index = 0
    for slot in slots:
        while index < len(shapes) and slot is not None and shapes[index] != slot:
            index += 1
        if index == len(shapes):
            return None
        found.append(index)
        index += 1
    return found
