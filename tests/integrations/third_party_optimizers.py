"""Optimizers as third parties write them: their state is nested, made in the first step, and replaced in others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
