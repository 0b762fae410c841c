"""Optimizers as third parties write them: their state is nested, made in the first step, and replaced in others."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch


class Whitened(torch.optim.Optimizer):
    """Scales gradients by a factor for each dimension, as Shampoo and SOAP do; its average is a new tensor each time.

    ``twist`` is called with each parameter's state after its step.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, twist: Callable[[dict[str, Any]], object] | None = None
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.twist = twist

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad, state = parameter.grad, self.state[parameter]
                mine = getattr(grad, "_local_tensor", grad)
                if not state:
                    state.update(step=0, average=torch.ones_like(grad), last={"loss": None, "sizes": []})
                    state["factors"] = [torch.eye(size) for size in mine.shape]
                state["step"] += 1
                state["average"] = 0.9 * state["average"] + grad
                for dim, factor in enumerate(state["factors"]):
                    others = mine.movedim(dim, 0).flatten(1) if mine.dim() > 1 else mine[:, None]
                    state["factors"][dim] = (0.5 * factor + others @ others.mT).t()  # column-major
                state["last"] = {"loss": float(mine.sum()), "sizes": [state["step"] % 3, mine.norm()]}
                scale = sum(factor.diagonal().sum() for factor in state["factors"])
                parameter.add_(state["average"], alpha=-group["lr"] / (1 + float(scale)) / state["step"])
                if self.twist is not None:
                    self.twist(state)


class Counting(Whitened):
    """Counts its steps in an attribute."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        super().step(closure)


class Early(Whitened):
    """Writes parameters before it calls its closure."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)
        closure()
        super().step()


class Averaging(torch.optim.Optimizer):
    """A wrapper with state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def state_dict(self) -> dict[str, Any]:
        return {**self.optimizer.state_dict(), "slow_weights": []}


class Mode(Enum):
    """A setting."""

    WARM = 1


class Warmup:
    """Counts its calls."""

    num_calls = 0

    def __call__(self) -> float:
        self.num_calls += 1
        return min(1.0, self.num_calls / 20)


class Slotted:
    """Has its content in a slot."""

    __slots__ = ("value",)


OPAQUE: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random(0),
    "Generator": lambda: np.random.default_rng(0),
    "torch._C.Generator": torch.Generator,
    "count": itertools.count,
    "Slotted": Slotted,
    "Warmup": Warmup,
    "Linear": lambda: torch.nn.Linear(1, 1),
}
"""Objects whose content cannot be compared, by their type."""


class Holding(Whitened):
    """Has an object as an attribute or as a setting of its groups."""

    def __init__(self, params: Iterable[Any], held: object = None, setting: object = None) -> None:
        super().__init__(params)
        self.held = [held]
        if setting is not None:
            self.param_groups[0]["setting"] = setting


class Tallying(Whitened):
    """Counts its steps in an array."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.tally = np.zeros(3)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.tally += 1
        super().step(closure)


class Marking(Whitened):
    """Counts its steps in a list on each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            vars(parameter).setdefault("marks", []).append(1)
        super().step(closure)


class Hooked(torch.optim.Adam):
    """torch's, with a hook that counts steps."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.seen = 0
        self.register_step_pre_hook(Hooked.count)

    @staticmethod
    def count(optimizer: Any, *_: Any) -> None:
        """Lowers the learning rate."""
        optimizer.seen += 1
        optimizer.param_groups[0]["lr"] = 1e-2 / optimizer.seen


class Lookahead(torch.optim.Optimizer):
    """Has slow weights in a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            parameter.copy_(slow.lerp_(parameter, 0.5))


class Delegating(torch.optim.Optimizer):
    """A wrapper without state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.is_verbose = optimizer, False
        self.state, self.param_groups = optimizer.state, optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()


class Ambiguous(Whitened):
    """Has tensors in its state whose keys are written alike."""

    def __init__(self, params: Iterable[Any], *keys: Hashable) -> None:
        super().__init__(params)
        self.keys = keys

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for state in self.state.values():
            state.setdefault("nested", {"inner": torch.zeros(3)})
            for key in self.keys:
                state.setdefault(key, torch.zeros(3))


class Scaled(torch.optim.Optimizer):
    """Its step takes a number first, then perhaps a closure."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, scale: float = 1.0, closure: Any = None, /) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"] * scale)
