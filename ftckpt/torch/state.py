"""One rank's training state under plain torch, for ``ftckpt.Checkpointer``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ftckpt.errors import CaptureError, ConfigError
from ftckpt.frameworks import optimizers
from ftckpt.frameworks.live_state import LiveState
from ftckpt.frameworks.optimizers import ParameterRange
from ftckpt.frameworks.tensors import as_real, frozen_pieces, unwrapped, whole_piece
from ftckpt.frameworks.torch_state import Stateful, load_all, load_all_reshaped, save_all
from ftckpt.model.text import with_article
from ftckpt.model.training_state import Description
from ftckpt.torch.ddp import CommHooks, buckets_of
from ftckpt.torch.geometry import (
    LOCAL,
    follows_buffers,
    keeps_replicas,
    local,
    named_parameters,
    places,
    settle_shards,
    unwrap,
)
from ftckpt.torch.optimizer_state import OptimizerState

_memory = attrgetter(LOCAL)
_writes = attrgetter("_version")


class PlainState(LiveState):
    """Implements ``ftckpt.model.training_state.TrainingState``.

    Optimizer-updated: parameters and their optimizer state. Mutable: buffers; those that DDP overwrites with the
    first replica's before each forward are not restored in another layout. Objects: RNG, the optimizer's
    hyperparameters, the scheduler and ``objects``.

    Hooks set ``is_fenced`` before the optimizer's step and ``has_run`` at a forward in training; each step boundary
    clears both.

    Raises:
        ConfigError: an object, or the scheduler, has no ``state_dict`` and ``load_state_dict``.
    """

    flags_name, inside = "flags", LOCAL
    replaced_remedy = "attach after the last load, and write into tensors instead of replacing them"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None,
        objects: Mapping[str, Stateful],
    ) -> None:
        self.model = unwrap(model)
        settle_shards(self.model)  # before code that can fail on one rank only: it is collective
        self.is_fenced = self.has_run = False
        self._optimizer, self._lr_scheduler = optimizer, scheduler
        named = {f"objects: {name}": value for name, value in objects.items()}
        super().__init__({"": self.model}, named)
        self.optimizer_state = OptimizerState(optimizer, self.model)
        self._comm_hooks = CommHooks(model)
        self._replicated = keeps_replicas(model, self._comm_hooks.are_plain)
        self._buckets = buckets_of(model, self._comm_hooks)
        self._follows_buffers = follows_buffers(model)
        if self._buckets is not None:
            self._objects["DDP buckets"] = self._buckets
        kept = self._objects if scheduler is None else {**self._objects, "scheduler": scheduler}
        for name, value in kept.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigError(
                    f"{name} is {with_article(type(value).__name__)} without state_dict and load_state_dict"
                )
        self._load_hooks: Callable[[], None] | None = None
        self._num_writes = 0
        self._stepped: tuple[list[Any], list[Any]] = [], []  # trained parameters: DTensors, others

    def _scheduler(self) -> Stateful | None:
        return self._lr_scheduler

    def _optimizers(self) -> Sequence[Any]:
        return [self._optimizer]

    def _settled(self) -> Sequence[Any]:
        if not self.optimizer_state.is_forecast:
            return self._optimizers()
        # Its state is created and replaced in steps: ``optimizer_state`` settles it.
        return [SimpleNamespace(state={}, param_groups=self._optimizer.param_groups)]

    def _describe(self) -> tuple[Description, Iterator[tuple[str, torch.nn.Parameter]]]:
        boxes = places(self.model)
        self.optimizer_state.prepare(boxes)
        trained = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        stepped = [
            *optimizers.stepped_pieces(boxes, self._ranges(), lambda part: self.optimizer_state.of(part.parameter)),
            *self.optimizer_state.pieces(),
            *frozen_pieces(boxes, trained, lambda parameter: (0, as_real(local(parameter)))),
        ]
        role = "local" if self._follows_buffers else "buffer"
        buffers = ((name, local(buffer)) for name, buffer in unwrapped(self.model.named_buffers()))
        volatile = [whole_piece(f"{role}/{name}", buffer) for name, buffer in buffers if buffer.numel()]
        self._stepped = [p for p in trained if hasattr(p, LOCAL)], [p for p in trained if not hasattr(p, LOCAL)]
        self._num_writes = self._count_writes()
        room = self.optimizer_state.objects_bytes
        description = Description(tuple(stepped), tuple(volatile), objects_bytes=room, replicated=self._replicated)
        return description, named_parameters(self.model)

    def _save(self) -> dict[str, Any]:
        """See LiveState.

        Raises:
            CaptureError: parameters were written and no fence came before, gradients wait for the optimizer, or a
                communication hook was registered.
        """
        self._check_fence()
        self._comm_hooks.check()
        return {"optimizer": self.optimizer_state.save(), "comm hooks": save_all(self._comm_hooks.states)}

    def check_objects(self, objects: Sequence[Mapping[str, Any]], is_reshaped: bool) -> None:
        self.optimizer_state.check([saved["optimizer"] for saved in objects], is_reshaped)

    def _load(self, objects: Mapping[str, Any]) -> None:
        self.optimizer_state.load(objects["optimizer"])
        self._load_hooks = lambda: load_all(self._comm_hooks.states, objects["comm hooks"])

    def _load_reshaped(self, objects: Sequence[Mapping[str, Any]]) -> None:
        self.optimizer_state.load_reshaped([saved["optimizer"] for saved in objects])
        self._load_hooks = lambda: load_all_reshaped(self._comm_hooks.states, [o["comm hooks"] for o in objects])

    def _reshaped_objects(self) -> Mapping[str, Stateful]:
        # Without DDP's bucket order: another layout sums differently anyway.
        return {name: value for name, value in self._objects.items() if value is not self._buckets}

    def finish_load(self) -> None:
        """Discards parameters that FSDP2 gathered before the load, replays DDP's bucket order, then sets RNG."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                # Gathered full parameters are copies of the shards before the load.
                module.reshard()
        if self._buckets is not None:
            self._buckets.replay()
        if self._load_hooks is not None:
            self._load_hooks()  # after the replay, which calls the hooks
        # The restore writes parameters without a fence: not an error.
        self._num_writes = self._count_writes()
        self.set_rng()  # last: the steps above may draw random numbers
        self.late_changes.boundary()

    def _ranges(self) -> Iterator[ParameterRange]:
        for parameter in (parameter for group in self._optimizer.param_groups for parameter in group["params"]):
            mine = as_real(local(parameter))
            yield ParameterRange(parameter, 0, mine, mine)

    def _check_fence(self) -> None:
        writes_before, was_fenced, has_run = self._num_writes, self.is_fenced, self.has_run
        # Before the error: the next boundary must not report the same writes again.
        self._num_writes, self.is_fenced, self.has_run = self._count_writes(), False, False
        if self._num_writes != writes_before and not was_fenced:
            raise CaptureError(
                "parameters were written and the optimizer's step hooks were not called; step with the optimizer "
                "that ftckpt.torch.attach was given"
            )
        if has_run and not was_fenced:
            self._refuse_pending_gradients()

    def _refuse_pending_gradients(self) -> None:
        """Raises CaptureError if gradients await the optimizer, because no snapshot contains them.

        A gradient that is not finite was skipped by a GradScaler and is not used.
        """
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        pending = [parameter for parameter in parameters if parameter.grad is not None]
        if pending and all(bool(local(parameter.grad).isfinite().all()) for parameter in pending):
            name = next(name for name, parameter in named_parameters(self.model) if parameter is pending[0])
            raise CaptureError(
                f"the gradient of {name} waits for the optimizer, and no snapshot has it: where gradients are "
                "accumulated, call step() only after optimizer.step(), not after each micro-batch"
            )

    def _count_writes(self) -> int:
        """Sum of torch's version counters of all trained parameters; grows with each write."""
        apart, whole = self._stepped
        return sum(map(_writes, chain(whole, map(_memory, apart))))
