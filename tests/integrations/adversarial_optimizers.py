"""Optimizers and step hooks with state in places that no snapshot holds, some of which changes after many steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

LATE = 20
"""The step in which state changes that no step before has changed: a trial takes fewer."""


class Steady(torch.optim.Optimizer):
    """Counts its steps in its state; ``scale`` is the factor of a step."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                parameter.sub_(parameter.grad, alpha=group["lr"] * self.scale(parameter, state))

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        """Called for each parameter in a step."""
        raise NotImplementedError


class Tardy(Steady):
    """Switches an attribute in a late step."""

    is_warm = False

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if state["step"] == LATE:
            self.is_warm = True
        return 0.5 if self.is_warm else 1.0


class Caching(Steady):
    """Writes into a tensor that is an attribute in a late step."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.factors = torch.ones(2)

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if state["step"] == LATE:
            self.factors.mul_(0.75)
        return float(self.factors[0])


class Common(Steady):
    """Counts in an attribute of its class in late steps."""

    num_late = 0

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if state["step"] >= LATE:
            Common.num_late += 1
        return 1 / (1 + Common.num_late)


class Defaulting(Steady):
    """Counts in its defaults in late steps."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if state["step"] >= LATE:
            self.defaults["late"] = self.defaults.get("late", 0) + 1
        return 1 / (1 + self.defaults.get("late", 0))


class Latching(Steady):
    """Remembers the learning rate of its first step, which a scheduler changes later."""

    first_lr = 0.0

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        self.first_lr = self.first_lr or self.param_groups[0]["lr"]
        return self.param_groups[0]["lr"] / self.first_lr


class Starting(Steady):
    """Clears its state in its first step, as a flag tells."""

    is_ready = False

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if not self.is_ready:
            self.state.clear()
            self.is_ready = True
        average = self.state[parameter].setdefault("average", torch.ones(1))
        return float(average.mul_(0.9))


class Alternating(Steady):
    """Its steps alternate, as an attribute tells."""

    is_odd = False

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if parameter is self.param_groups[0]["params"][0]:
            self.is_odd = not self.is_odd
        return 0.5 if self.is_odd else 1.0


class Entangled(Steady):
    """The states of all parameters have one list."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        first = self.state[self.param_groups[0]["params"][0]]
        recent = state.setdefault("recent", first.get("recent", []))
        recent[:] = [*recent, 1.0][-50:] if len(recent) < 50 else recent
        return 1 / len(recent)


class Entwined(Steady):
    """Reads a tensor of its state through another one, which shares its memory."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        average = state.setdefault("average", torch.ones(2))
        same = state.setdefault("same", average[:1])
        average.mul_(0.9)
        return float(same)


num_calls = 0


class Worldly(Steady):
    """Counts in a variable of its module."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        global num_calls
        num_calls += 1
        return 1 / num_calls


class Keyed(Steady):
    """Has its state in an attribute, by the ids of parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.averages: dict[int, torch.Tensor] = {}

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        average = self.averages.setdefault(id(parameter), torch.ones(1))
        return float(average.mul_(0.9))


class Noisy(Steady):
    """Draws random numbers, and has a state that is not a number for a while."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        state["ratio"] = torch.full((), float("nan" if state["step"] < LATE else "inf"))
        return float(torch.rand(()))


class Sparing(Steady):
    """Creates a tensor of its state in a late step."""

    def scale(self, parameter: torch.Tensor, state: dict[str, Any]) -> float:
        if state["step"] == LATE:
            state["late"] = torch.full((3,), 0.5)
        return float(state["late"][0]) if "late" in state else 1.0


EXACT = (Noisy,)
REFUSED: dict[type[Steady], str] = {
    Latching: "first_lr",
    Starting: "parameter",
    Alternating: "is_odd",
    Entangled: "parameter",
    Entwined: "parameter",
    Worldly: "parameter",
    Keyed: "averages",
}
"""Refused at start, and what the error names."""
LATER: dict[type[Steady], str] = {
    Tardy: "is_warm",
    Caching: "factors",
    Common: "num_late",
    Defaulting: "defaults",
    Sparing: "late",
}
"""Refused at the boundary of the step in which it changes, and what the error names."""


def number(optimizer: Any, *_: Any) -> None:
    """A hook with numbers in the state."""
    for state in optimizer.state.values():
        state["calls"] = state.get("calls", 0) + 1
        optimizer.param_groups[0]["lr"] = 1e-2 / state["calls"]


def nest(optimizer: Any, *_: Any) -> None:
    """A hook with averages in the state, in a dictionary."""
    for parameter, state in optimizer.state.items():
        average = state.setdefault("hook", {}).setdefault("average", parameter.detach().clone())
        parameter.data.copy_(average.lerp_(parameter.detach(), 0.9))


def name(optimizer: Any, *_: Any) -> None:
    """A hook with a state of its own beside those of parameters."""
    mine = optimizer.state.setdefault("hook", {"calls": 0})
    mine["calls"] += 1
    optimizer.param_groups[0]["lr"] = 1e-2 / mine["calls"]


def assign(optimizer: Any, *_: Any) -> None:
    """A hook that counts in an attribute."""
    optimizer.num_calls = getattr(optimizer, "num_calls", 0) + 1
    optimizer.param_groups[0]["lr"] = 1e-2 / optimizer.num_calls


def warm(optimizer: Any, *_: Any) -> None:
    """A hook that changes settings alone."""
    optimizer.param_groups[0]["calls"] = optimizer.param_groups[0].get("calls", 0) + 1
    optimizer.param_groups[0]["lr"] = 1e-2 / optimizer.param_groups[0]["calls"]


HOOKS: dict[Callable[..., None], str] = {number: "state", nest: "state", name: "optimizer hook", assign: "num_calls"}
"""Hooks whose state no snapshot of torch's optimizers holds, and what the error names."""
