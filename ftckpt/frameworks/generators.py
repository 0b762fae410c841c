"""Random number generators of a script: attributes of its modules, or registered objects."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ftckpt.frameworks.torch_state import derived_seed

_KINDS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random


class OwnGenerator:
    """A generator as an object of a snapshot."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._built = self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        one = self._generator
        if isinstance(one, np.random.Generator):
            return {"state": one.bit_generator.state}
        return {"state": one.getstate() if isinstance(one, random.Random) else one.get_state()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        one = self._generator
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = saved["state"]
        else:
            (one.setstate if isinstance(one, random.Random) else one.set_state)(saved["state"])

    def load_reshaped(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Seeds the generator from its initial state and the snapshot's: ranks of other layouts do not correspond."""
        one, seed = self._generator, derived_seed("own", self._built, states[0])
        if isinstance(one, np.random.Generator):
            one.bit_generator.state = type(one.bit_generator)(seed).state
        elif isinstance(one, torch.Generator):
            one.manual_seed(seed)
        else:
            one.seed(seed & 0xFFFFFFFF)  # NumPy's maximum


def as_object(value: Any) -> Any:
    """Wraps a generator in an object with ``state_dict`` and ``load_state_dict``; returns other values unchanged."""
    return OwnGenerator(value) if isinstance(value, _KINDS) else value


def generators_in(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[str, OwnGenerator]:
    """Generators in attributes of modules, each once, by name."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in modules:
        for attribute, value in vars(module).items():
            if isinstance(value, _KINDS):
                found.setdefault(id(value), (f"ftckpt.generator {name}.{attribute}", value))
    return {name: OwnGenerator(value) for name, value in found.values()}
