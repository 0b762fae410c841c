"""A write to stepped state is counted, whichever of its views it goes through."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ftckpt.capture.boundary import WriteCounts
from ftckpt.frameworks.optimizers import ParameterRange, stepped_pieces
from ftckpt.frameworks.tensors import LogicalBox, frozen_pieces
from ftckpt.model.fragment import Box
from ftckpt.model.training_state import Piece


def boxes(*parameters: torch.nn.Parameter) -> dict[Any, list[LogicalBox]]:
    return {
        one: [LogicalBox(f"w{index}", tuple(one.shape), Box((0,) * one.dim(), tuple(one.shape)), 0)]
        for index, one in enumerate(parameters)
    }


def stepped() -> tuple[dict[str, torch.Tensor], list[Piece]]:
    """Two parameters in a flat master, as ZeRO has it, one that is its own master, and one that is frozen."""
    first, second = (torch.nn.Parameter(torch.ones(2, 2).bfloat16()) for _ in range(2))
    alone, frozen = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    master, moment, step = torch.ones(8), torch.ones(8), torch.ones(1)
    ranges = [
        ParameterRange(first, 0, first.detach().view(-1), master),
        ParameterRange(second, 0, second.detach().view(-1), master, 4),
        ParameterRange(alone, 0, alone, alone),
    ]
    states: dict[int, dict[str, Any]] = {
        id(master): {"exp_avg": moment}, id(alone): {"exp_avg": torch.ones(3), "step": step},
    }  # fmt: skip
    places = boxes(first, second, alone, frozen)
    found = list(stepped_pieces(places, ranges, lambda part: states[id(part.owner)]))
    found += frozen_pieces(places, {first, second, alone}, lambda one: (0, one))
    live = {
        "weight/w0": first, "weight/w1": second, "weight/w2": alone, "weight/w3": frozen, "master/w0": master,
        "exp_avg/w0": moment, "exp_avg/w2": states[id(alone)]["exp_avg"], "step/w2": step,
    }  # fmt: skip
    return live, found


@pytest.mark.parametrize("key", stepped()[0])
@pytest.mark.parametrize("view", [False, True], ids=["the tensor", "a view of it"])
def test_a_write_to_any_piece_is_told_by_its_key(key: str, view: bool) -> None:
    live, pieces = stepped()
    counts = WriteCounts(pieces)
    before = counts.read()
    assert counts.written(before) == ""
    with torch.no_grad():
        (live[key].view(-1)[:1] if view else live[key]).add_(1)
    assert counts.written(before) == key
    assert counts.written(counts.read()) == ""


def test_what_is_one_tensor_is_looked_at_once() -> None:
    _, pieces = stepped()
    counts = WriteCounts(pieces)
    assert len(pieces) == 10 and len(counts.read()) == 8
    counts.forget()
    assert len(counts.read()) == 0
