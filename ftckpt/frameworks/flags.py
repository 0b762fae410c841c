"""Flags that affect training and are not tensors: frozen parameters, modules in evaluation mode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch

from ftckpt.frameworks.launcher import log_once
from ftckpt.model.text import listed

_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")


class TrainingFlags:
    """``requires_grad`` of parameters and ``training`` of modules, as an object of a snapshot.

    Args:
        parameters: named independently of the layout; their flags are those that the script set before a restore.
        modules: names may be specific to this layout.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, torch.Tensor]], modules: Iterable[tuple[str, torch.nn.Module]]
    ) -> None:
        self._parameters, self._modules = list(parameters), list(modules)
        self._looked_at = [parameter for _, parameter in self._parameters], [module for _, module in self._modules]
        self._built = [parameter.requires_grad for _, parameter in self._parameters]
        self._flags: tuple[list[bool], list[bool]] = [], []
        self._state: dict[str, str] = {}

    def state_dict(self) -> dict[str, str]:
        """Names as JSON texts, encoded again only if a flag has changed."""
        parameters, modules = self._looked_at
        flags = [*map(_requires_grad, parameters)], [*map(_training, modules)]
        if not self._state or flags != self._flags:
            self._flags = flags
            trained = zip(self._parameters, self._built, flags[0], strict=True)
            names = [(name, was, now) for (name, _), was, now in trained]
            self._state = {
                "frozen": json.dumps([name for name, _, now in names if not now]),
                "thawed": json.dumps([name for name, was, now in names if now and not was]),
                "evaluating": json.dumps([n for (n, _), now in zip(self._modules, flags[1], strict=True) if not now]),
            }
        return self._state

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Restores every flag."""
        frozen = set(json.loads(state["frozen"]))
        self._set({name: name not in frozen for name, _ in self._parameters})
        evaluating = set(json.loads(state["evaluating"]))
        for name, module in self._modules:
            module.training = name not in evaluating

    def load_reshaped(self, states: Sequence[Mapping[str, str]]) -> None:
        """Restores flags of the parameters named in any rank's state; leaves other parameters and all modules."""
        flags = {name: True for state in states for name in json.loads(state["thawed"])}
        self._set(flags | {name: False for state in states for name in json.loads(state["frozen"])})

    def _set(self, flags: Mapping[str, bool]) -> None:
        changed = []
        for name, parameter in self._parameters:
            if parameter.requires_grad != flags.get(name, parameter.requires_grad):
                parameter.requires_grad_(flags[name])
                changed.append(name)
        if changed:
            log_once("requires_grad restored from the snapshot: changed for %s", listed(changed))
