"""State that DDP keeps: its buckets as they were before a restart, and that of communication hooks.

DDP sums gradients in buckets. Its first iteration uses provisional ones; from the order in which gradients then
became ready it builds those of all later iterations. Where three replicas or more add up, the place of a gradient in
a bucket decides in which order its summands are added, hence its last bits. A restarted job would use provisional
buckets once more, for one iteration that has other bits than an unbroken run's. So the order is saved, and after a
restore the gradients become ready once in that order, all of them zero, before training goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ftckpt.errors import CaptureError, UnsupportedError
from ftckpt.frameworks.torch_state import Stateful

_ANY_ORDER = 2
"""Replicas whose gradients have the same sum however they are added: a + b is b + a."""


class Buckets:
    """The order in which the parameters of ``ddp`` had their gradients in its first iteration.

    Raises:
        UnsupportedError: a mode of DDP whose first iteration cannot be replayed.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        if ddp.static_graph or ddp.mixed_precision is not None:
            raise UnsupportedError(
                "DistributedDataParallel with static_graph or mixed_precision treats its first iteration in its own "
                "way, and would do so again after a restart; leave both out (torch.autocast gives mixed precision)"
            )
        self._ddp = ddp
        ignored = ddp.parameters_to_ignore
        named = ddp.module.named_parameters()
        self._parameters = [p for name, p in named if p.requires_grad and name not in ignored]
        if any(_has_other_hooks(parameter) for parameter in self._parameters):
            raise UnsupportedError(
                "a parameter has a hook of the script that runs when its gradient is ready (an optimizer inside the "
                "backward pass?); a restart would run it once too often: step after the backward pass"
            )
        # A set that knows the order.
        self._ready: dict[int, None] = {}
        self._order: list[int] = []
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._note(index))
            for index, parameter in enumerate(self._parameters)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The order, as indices of trained parameters; empty before the first iteration."""
        # A parameter that had no gradient yet keeps the hooks waiting: DDP builds its buckets from a complete order.
        if self._hooks and len(self._ready) == len(self._parameters):
            self._order = list(self._ready)
            self._forget_hooks()
        return {"order": self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the order; ``replay`` makes DDP know it."""
        self._order = [int(index) for index in state["order"]]

    def replay(self) -> None:
        """Let gradients of zero become ready in the order that was loaded. Collective; before training begins."""
        if len(self._order) != len(self._parameters):
            return
        self._forget_hooks()  # the order is known; the one of this rehearsal must not replace it
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.enable_grad():
            self._ddp.reducer.prepare_for_backward([])  # as DDP's forward does, which does not run here
            for index in self._order:
                parameter = self._parameters[index]
                # Leads to the parameter's own accumulator, which is where DDP's hooks are.
                parameter.expand_as(parameter).backward(torch.zeros_like(parameter))
        for parameter, grad in zip(self._parameters, before, strict=True):
            parameter.grad = grad

    def _note(self, index: int) -> Any:
        def ready(_: torch.Tensor) -> None:
            self._ready.pop(index, None)  # of several micro-batches the last one counts: DDP sums then
            self._ready[index] = None

        return ready

    def _forget_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _has_other_hooks(parameter: Any) -> bool:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(hook.__module__ != __name__ for hook in hooks)


def buckets_of(model: torch.nn.Module, comm_hooks: CommHooks) -> Buckets | None:
    """The buckets that must be remembered, if the model is wrapped in DDP that builds them anew: by the order of
    sums, or by hooks that keep state for each bucket."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            # DDP builds its buckets anew in these modes alone.
            rebuilt = not module.find_unused_parameters or module.static_graph
            matters = dist.get_world_size(module.process_group) > _ANY_ORDER or bool(comm_hooks.states)
            return Buckets(module) if rebuilt and matters else None
    return None


class CommHooks:
    """The hooks that are registered with the DDP modules of ``model``; ``states`` has those that keep some, by name:
    what compression has left over, factors that it starts from, periods.

    Raises:
        UnsupportedError: a hook keeps state without ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._hooks = list(self._registered())
        self.states: dict[str, Stateful] = {}
        for number, (hook, state) in enumerate(self._hooks):
            # A hook without state is registered with None or the process group.
            if state is None or isinstance(state, dist.ProcessGroup):
                continue
            if not (hasattr(state, "state_dict") and hasattr(state, "load_state_dict")):
                name, kind = getattr(hook, "__qualname__", type(hook).__name__), type(state).__name__
                raise UnsupportedError(
                    f"DDP's communication hook {name} keeps state ({kind}), without which a restart would train with "
                    f"other gradients: register it with a subclass of {kind} that has state_dict() and "
                    "load_state_dict(), or train without it"
                )
            self.states[f"communication hook {number}"] = state

    @property
    def are_plain(self) -> bool:
        """Whether each is one of torch's that average gradients over all ranks, and keeps nothing."""
        return all(getattr(hook, "__module__", "") == default_hooks.__name__ for hook, _ in self._hooks)

    def check(self) -> None:
        """Raises CaptureError where a hook was registered since."""
        if list(self._registered()) != self._hooks:
            raise CaptureError("a communication hook of DDP was registered after attach: register it before")

    def _registered(self) -> Iterator[tuple[Any, Any]]:
        for module in self._replicas:
            yield from module._comm_hooks
