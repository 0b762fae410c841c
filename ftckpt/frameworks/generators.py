"""Generators of random numbers that belong to a script: in its modules, or given by it as objects."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ftckpt.frameworks.torch_state import derived_seed, load_python, python_state

_KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


class OwnGenerator:
    """A generator as an object of a snapshot."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._built = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        match self._generator:
            case torch.Generator():
                state: Any = self._generator.get_state()
            case np.random.Generator():
                state = self._generator.bit_generator.state
            case np.random.RandomState():
                state = self._generator.get_state()
            case _:
                state = python_state(self._generator)
        return {"state": state}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        match self._generator:
            case torch.Generator():
                self._generator.set_state(saved["state"])
            case np.random.Generator():
                self._generator.bit_generator.state = saved["state"]
            case np.random.RandomState():
                self._generator.set_state(saved["state"])
            case _:
                load_python(self._generator, saved["state"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """In another layout no rank of the snapshot is this one: a seed from what this rank was built with."""
        seed = derived_seed("own", self._built, states[0])
        match self._generator:
            case torch.Generator():
                self._generator.manual_seed(seed)
            case np.random.Generator():
                bits = self._generator.bit_generator
                bits.state = type(bits)(seed).state
            case np.random.RandomState():
                self._generator.seed([seed & 0xFFFFFFFF, seed >> 32])
            case _:
                self._generator.seed(seed)


def as_object(value: Any) -> Any:
    """A generator with ``state_dict`` and ``load_state_dict``; any other value as it is."""
    return OwnGenerator(value) if isinstance(value, _KINDS) else value


def generators_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, OwnGenerator]:
    """Those that modules hold in attributes, each once, by name."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if isinstance(value, _KINDS):
                found.setdefault(id(value), (f"ftckpt.generator {name}.{attribute}", value))
    return {name: OwnGenerator(value) for name, value in found.values()}
