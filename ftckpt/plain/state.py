"""One rank's training state under plain torch, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ftckpt.errors import CaptureError, ConfigError, UnsupportedError
from ftckpt.live import optimizers
from ftckpt.live.rng import load_generators, save_generators
from ftckpt.live.stateful import Stateful, load_all
from ftckpt.live.tensors import Placed, fragments, whole_piece
from ftckpt.plain.buckets import buckets_of
from ftckpt.plain.geometry import local, named_parameters, place, unwrap
from ftckpt.state.piece import Description, Piece


class TorchState:
    """Implements ``ftckpt.state.piece.TrainingState``.

    Stepped: parameters and what the optimizer keeps for them. Volatile: buffers. Objects: RNG, the optimizer's
    hyperparameters, the scheduler and ``objects``.

    ``fenced`` is set by whoever fences the optimizer's step, and cleared at each boundary.

    Raises:
        ConfigError: an object, or the scheduler, has no ``state_dict`` and ``load_state_dict``.
    """

    reshapes = False

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        objects: Mapping[str, Stateful],
    ) -> None:
        self.model = unwrap(model)
        self.fenced = False
        self._optimizer = optimizer
        self._objects = {f"objects: {name}": value for name, value in objects.items()}
        if scheduler is not None:
            self._objects["scheduler"] = scheduler
        self._buckets = buckets_of(model)
        if self._buckets is not None:
            self._objects["DDP buckets"] = self._buckets
        for name, value in self._objects.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(f"{name} is a {type(value).__name__} without state_dict and load_state_dict")
        self._addresses: dict[str, int] = {}
        self._versions = 0
        self._rng: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        """See TrainingState."""
        places = {parameter: place(name, parameter) for name, parameter in named_parameters(self.model)}
        optimizers.materialise(self._optimizer)
        stepped = [*self._optimized(places), *self._frozen(places)]
        volatile = [whole_piece(f"buffer/{name}", buffer) for name, buffer in self._buffers() if buffer.numel()]
        self._addresses, self._versions = dict(self._live_addresses()), self._count_writes()
        return Description(tuple(stepped), tuple(volatile))

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe``, so that copies would read dead memory; or
                parameters were written and no fence came before.
        """
        self._check_addresses()
        self._check_fence()
        return {
            "rng": save_generators(),
            "optimizer": optimizers.save_groups(self._optimizer),
            "objects": {name: value.state_dict() for name, value in self._objects.items()},
        }

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See TrainingState."""
        optimizers.load_groups(self._optimizer, objects["optimizer"])
        load_all(self._objects, objects["objects"])
        self._rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """See TrainingState; raises UnsupportedError."""
        raise UnsupportedError("state of plain torch cannot be loaded into another layout yet; start on the old one")

    def finish_load(self) -> None:
        """Forget what FSDP2 gathered and DDP arranged before state was loaded, then set RNG."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        if self._buckets is not None:
            self._buckets.replay()
        self._versions = self._count_writes()
        if self._rng is not None:
            load_generators(self._rng)

    def _optimized(self, places: Mapping[torch.nn.Parameter, Placed]) -> Iterator[Piece]:
        for index, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in places:
                    shape = tuple(parameter.shape)
                    raise UnsupportedError(f"group {index} of the optimizer steps a {shape} that is not in the model")
                state = self._optimizer.state.get(parameter, {})
                kept = {name: local(v) if isinstance(v, torch.Tensor) else v for name, v in state.items()}
                mine = local(parameter)
                item = optimizers.Optimized(parameter, 0, mine, mine)
                yield from optimizers.stepped_pieces([places[parameter]], item, kept)

    def _frozen(self, places: Mapping[torch.nn.Parameter, Placed]) -> Iterator[Piece]:
        stepped = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        for parameter, placed in places.items():
            if parameter in stepped:
                continue
            if parameter.requires_grad:
                raise UnsupportedError(f"parameter {placed.key} needs gradients and no optimizer steps it")
            for fragment, view in fragments([placed], "weight", local(parameter), 0):
                yield Piece(fragment, view)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, local(buffer)) for name, buffer in self.model.named_buffers())

    def _check_addresses(self) -> None:
        now = dict(self._live_addresses())
        if now != self._addresses:
            moved = sorted(name for name in now | self._addresses if now.get(name) != self._addresses.get(name))
            raise CaptureError(
                f"{moved[0]} and {len(moved) - 1} more tensors were replaced or added after ftckpt.plain.attach "
                "(load_state_dict?); attach after the last load, and write into tensors instead of replacing them"
            )

    def _check_fence(self) -> None:
        writes, fenced = self._count_writes(), self.fenced
        written, self._versions, self.fenced = writes != self._versions, writes, False
        if written and not fenced:
            raise CaptureError(
                "parameters were written and the optimizer's step hooks were not called; step with the optimizer "
                "that ftckpt.plain.attach was given"
            )

    def _count_writes(self) -> int:
        """Grows with each write to a parameter that the optimizer steps."""
        groups = self._optimizer.param_groups
        return sum(local(parameter)._version for group in groups for parameter in group["params"])

    def _live_addresses(self) -> Iterator[tuple[str, int]]:
        """Of all that has elements: an empty shard has no address to keep."""
        names: dict[torch.Tensor, str] = {p: name for name, p in named_parameters(self.model)}
        for tensor, name in names.items():
            yield from _address(f"parameter {name}", tensor)
        for name, buffer in self._buffers():
            yield from _address(f"buffer {name}", buffer)
        for owner, state in self._optimizer.state.items():
            for kind, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield from _address(f"optimizer state {kind} of {names.get(owner, '?')}", value)


def _address(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, int]]:
    mine = local(tensor)
    if mine.numel():
        yield name, mine.data_ptr()
