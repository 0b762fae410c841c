"""State of DDP's communication hooks: what compression has left over, factors that it starts from, periods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ftckpt.errors import CaptureError, UnsupportedError
from ftckpt.frameworks.torch_state import Stateful


class CommHooks:
    """The hooks that are registered with the DDP modules of ``model``; ``states`` has those that keep some, by name.

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
