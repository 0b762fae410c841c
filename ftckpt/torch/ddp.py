"""State inside DDP: the order of its gradient buckets, and the state of communication hooks.

DDP sums gradients in buckets. The first iteration uses provisional buckets; the order in which its gradients become
ready determines the buckets of all later iterations. With three or more replicas, the position of a gradient in its
bucket determines the order of summation, hence its last bits. A restarted job would use provisional buckets for one
iteration and differ from an uninterrupted run. So the order is saved, and a restore replays it with zero gradients
before training resumes.
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
"""Number of replicas up to which the order of summation does not matter: a + b is b + a."""


class Buckets:
    """The order in which gradients of ``ddp`` became ready in its first iteration.

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
        # An ordered set.
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
        """Loads the order; ``replay`` applies it to DDP."""
        self._order = [int(index) for index in state["order"]]

    def replay(self) -> None:
        """Makes zero gradients ready in the loaded order. Collective; call it before training starts."""
        if len(self._order) != len(self._parameters):
            return
        self._forget_hooks()  # the replay must not overwrite the loaded order
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        with torch.enable_grad():
            self._ddp.reducer.prepare_for_backward([])  # DDP's forward, which does not run here, does this
            for index in self._order:
                parameter = self._parameters[index]
                # Reaches the parameter's gradient accumulator, where DDP's hooks are.
                parameter.expand_as(parameter).backward(torch.zeros_like(parameter))
        for parameter, grad in zip(self._parameters, before, strict=True):
            parameter.grad = grad

    def _note(self, index: int) -> Any:
        def ready(_: torch.Tensor) -> None:
            self._ready.pop(index, None)  # the last micro-batch counts: DDP reduces there
            self._ready[index] = None

        return ready

    def _forget_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


def _has_other_hooks(parameter: Any) -> bool:
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    return any(hook.__module__ != __name__ for hook in hooks)


def buckets_of(model: torch.nn.Module, comm_hooks: CommHooks) -> Buckets | None:
    """The buckets to save, or None. They matter if DDP rebuilds them and either the order of summation changes bits
    or hooks keep state for each bucket."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            # DDP rebuilds its buckets in these modes only.
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
        """True if all hooks are torch's stateless ones, which average gradients over all ranks."""
        return all(getattr(hook, "__module__", "") == default_hooks.__name__ for hook, _ in self._hooks)

    def check(self) -> None:
        """Raises CaptureError if a hook was registered after construction."""
        if list(self._registered()) != self._hooks:
            raise CaptureError("a communication hook of DDP was registered after attach: register it before")

    def _registered(self) -> Iterator[tuple[Any, Any]]:
        for module in self._replicas:
            yield from module._comm_hooks
