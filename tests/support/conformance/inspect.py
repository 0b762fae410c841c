"""On a rank: what the integration says of the state, held against the state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ftckpt.capture.assignment import assign, rule_holds
from ftckpt.errors import UnsupportedError
from ftckpt.group import Group
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from tests.support.conformance.adapter import Adapter, Job
from tests.support.elements import Elements, held

_ROOM = 1 << 20
_TRAINED = 4
"""Iterations; a loss scale that begins too high skips the first ones."""


@dataclass(frozen=True)
class Inspection:
    """What one rank saw. ``untrained`` and ``trained`` are its stepped elements before and after some iterations.

    ``moved`` names pieces that training gave another address, ``off_their_source`` derived ones that are no
    casts; ``captured`` are the keys that would be copied, ``captured_if_spoiled`` the same with one element of
    ``spoiled`` changed on rank 0. ``refusals`` has what ``describe`` says, by what was added to the state.
    """

    problems: list[str]
    untrained: list[Elements]
    trained: list[Elements]
    moved: list[str]
    derived: list[str]
    off_their_source: list[str]
    captured: list[str]
    spoiled: str
    captured_if_spoiled: list[str]
    refusals: dict[str, str]


def inspect(rank: int, world_size: int, adapter: Adapter) -> Inspection:
    """Build the job, describe it, train, describe it again, spoil it. Collective."""
    job = adapter.build()
    state = job.state()
    described = state.describe()
    group = Group(60.0)
    topology = Topology(rank, tuple(RankPlace({"r": r}, "node") for r in range(world_size)), {"r": world_size})

    def captured() -> list[str]:
        manifest = assign(group, topology, described, _ROOM, _ROOM).manifest
        return [fragment.key.partition("@")[0] for fragment in manifest.fragments]

    problems, untrained = _problems(described), held(described.stepped)
    derived = [piece for piece in described.stepped if piece.derived_from is not None]
    wrong = [piece.fragment.key for piece in derived if not rule_holds(piece)]
    untouched = captured()
    spoiled = group.gather((derived[0].fragment.key if derived else "").encode())[0].decode()
    afterwards: list[str] = []
    if spoiled:
        afterwards = _with_one_element_changed(derived[0] if rank == 0 else None, captured)
    for _ in range(_TRAINED):
        job.train_iteration()
    again = state.describe()
    return Inspection(
        problems=problems + _problems(again),
        untrained=untrained,
        trained=held(again.stepped),
        moved=_moved(described, again),
        derived=[piece.fragment.key for piece in derived],
        off_their_source=wrong
        + [p.fragment.key for p in again.stepped if p.derived_from is not None and not rule_holds(p)],
        captured=untouched,
        spoiled=spoiled,
        captured_if_spoiled=afterwards,
        refusals={"state": _refusal_of_state(job), "parameter": _refusal_of_parameter(job)},
    )


def _problems(described: Description) -> list[str]:
    problems, seen = [], set()
    for piece in (*described.stepped, *described.volatile):
        fragment, tensor = piece.fragment, piece.tensor
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != fragment.numel:
            problems.append(f"{fragment.name} is given {tuple(tensor.shape)}, strides {tensor.stride()}")
        if tensor.requires_grad:
            problems.append(f"{fragment.name} is given with its gradients")
        if fragment.name in seen:
            problems.append(f"{fragment.name} is described twice")
        seen.add(fragment.name)
    return problems


def _moved(before: Description, after: Description) -> list[str]:
    def places(described: Description) -> dict[str, Any]:
        return {p.fragment.name: p.tensor.data_ptr() for p in (*described.stepped, *described.volatile)}

    first, then = places(before), places(after)
    return sorted(name for name in first | then if first.get(name) != then.get(name))


def _with_one_element_changed(piece: Piece | None, action: Callable[[], list[str]]) -> list[str]:
    if piece is None:
        return action()
    was = piece.tensor[0].clone()
    piece.tensor[0] += 1
    try:
        return action()
    finally:
        piece.tensor[0] = was


def _refusal_of_state(job: Job) -> str:
    """What is said of a tensor ``mystery`` that an optimizer keeps, and that is neither per element nor a number."""
    for optimizer in job.optimizers():
        for state in optimizer.state.values():
            sizes = [value.numel() for value in state.values() if isinstance(value, torch.Tensor)]
            state["mystery"] = torch.zeros(max(sizes, default=1) + 2)
            try:
                return _refusal(job)
            finally:
                del state["mystery"]
    return "no optimizer of this rank keeps any state"


def _refusal_of_parameter(job: Job) -> str:
    job.add_parameter()
    return _refusal(job)


def _refusal(job: Job) -> str:
    try:
        job.state().describe()
    except UnsupportedError as error:
        return str(error)
    return "it was accepted"
