"""The part of a rank's training state that is alike in all integrations: modules, optimizers, RNG, objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ftckpt.frameworks import schedulers
from ftckpt.frameworks.extra_state import ExtraState
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.optimizers import save_groups, state_tensors
from ftckpt.frameworks.tensors import unwrapped
from ftckpt.frameworks.torch_state import (
    Stateful,
    as_object,
    derive_generators,
    generators_in,
    load_all,
    load_all_reshaped,
    load_generators,
    save_all,
    save_generators,
)
from ftckpt.model.training_state import Description

RANDOM = "random numbers"
"""RNG's name in warnings of late changes."""


class Rng(NamedTuple):
    """Functions that save, load, and derive for another layout, the states of all generators of a framework."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[Mapping[str, Any]], None]
    derive: Callable[[Mapping[str, Any], int], dict[str, Any]]


class LiveState:
    """Base of a framework's ``ftckpt.model.training_state.TrainingState``.

    A subclass describes the pieces: ``_describe`` returns them, and parameters by names that do not depend on the
    layout. It saves and loads what only its framework has: ``_save``, ``_load``, ``_load_reshaped``.

    Args:
        roots: the rank's modules by the prefix of their names.
        objects: stateful objects by name; those of ftckpt itself begin with ``ftckpt.``.
        scheduler: returns the learning rate scheduler, or None.
        optimizers: returns the optimizers that step tensors.
        owners: returns tensors that are neither in a module nor in the groups of an optimizer.
        rng: the framework's generators.
        inside: the attribute in which a distributed tensor stores this rank's part.
        apart: returns True for modules whose extra state the subclass saves.
        late: the remedy for state that a script changes after the boundary.
        frozen: names of state that must not change before the first iteration either.
    """

    flags_name = "ftckpt.flags"
    replaced_remedy = ""
    """The remedy for a tensor that was replaced."""

    def __init__(
        self,
        roots: Mapping[str, Any],
        objects: Mapping[str, Stateful],
        scheduler: Callable[[], Any],
        optimizers: Callable[[], Sequence[Any]],
        owners: Callable[[], Sequence[torch.Tensor]] = tuple,
        *,
        rng: Rng = Rng(save_generators, load_generators, derive_generators),  # noqa: B008 - immutable
        inside: str = "",
        apart: Callable[[torch.nn.Module], bool] = lambda _module: False,
        late: str = "call step() last in each iteration",
        frozen: Collection[str] = (),
    ) -> None:
        self._roots, self._inside = roots, inside
        self._scheduler, self._optimizers, self._owners, self._rng = scheduler, optimizers, owners, rng
        self._objects = {name: as_object(value) for name, value in objects.items()}
        self._own = {name: value for name, value in self._objects.items() if not name.startswith("ftckpt.")}
        self._objects |= generators_in(self._named_modules())
        self._extra = [ExtraState(root, apart) for root in roots.values()]
        self._live = LiveTensors(self._live_tensors, self._holders, inside)
        self.late_changes = LateChanges(self._changing, late, frozen)
        self._loaded_rng: Mapping[str, Any] | None = None
        self._built: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        if self._built is None:
            # As the job's own setup seeds it, before a restore: RNG of another layout is derived from this.
            self._built = self._rng.save()
        for extra in self._extra:
            extra.refuse()
        described, parameters = self._describe()
        if self.flags_name not in self._objects:
            self._objects[self.flags_name] = TrainingFlags(parameters, self._named_modules())
        # Last: ``check`` must know the addresses of tensors created above.
        self._live.note()
        return described

    def save_objects(self) -> dict[str, Any]:
        """See TrainingState.

        Raises:
            CaptureError: a tensor was replaced since ``describe``, or see the subclass's ``_save``.
            UnsupportedError: a module has extra state that was not described.
        """
        for extra in self._extra:
            extra.look_again()
        self._live.check(self.replaced_remedy)
        own = self._save()
        self.late_changes.boundary()
        shared = {"rng": self._rng.save(), "scheduler": schedulers.save(self._scheduler())}
        return {**shared, **own, "objects": save_all(self._objects)}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        schedulers.load(self._scheduler(), objects["scheduler"])  # first: it may write learning rates
        self._load(objects)
        load_all(self._objects, objects["objects"])
        self._loaded_rng = objects["rng"]

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        assert self._built is not None, "describe comes first"
        schedulers.load_reshaped(self._scheduler(), [saved["scheduler"] for saved in objects])
        self._load_reshaped(objects)
        load_all_reshaped(self._reshaped_objects(), [saved["objects"] for saved in objects])
        self._loaded_rng = self._rng.derive(self._built, iteration)

    def set_rng(self) -> None:
        """Sets RNG to the loaded state; must follow code that draws random numbers before training."""
        if self._loaded_rng is not None:
            self._rng.load(self._loaded_rng)

    def _describe(self) -> tuple[Description, Iterable[tuple[str, torch.Tensor]]]:
        raise NotImplementedError

    def _save(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load(self, objects: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _load_reshaped(self, objects: Sequence[Mapping[str, Any]]) -> None:
        raise NotImplementedError

    def _reshaped_objects(self) -> Mapping[str, Stateful]:
        """The objects that are restored in another layout."""
        return self._objects

    def _changing(self) -> dict[str, Any]:
        return {
            RANDOM: self._rng.save(),
            "the scheduler": schedulers.save(self._scheduler()),
            "parameter groups": [save_groups(optimizer) for optimizer in self._optimizers()],
            **save_all(self._own),
        }

    def _named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for prefix, root in self._roots.items():
            yield from ((f"{prefix}{name}", module) for name, module in unwrapped(root.named_modules()))

    def _holders(self) -> Holders:
        return Holders(list(self._roots.values()), self._optimizers(), self._owners())

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor."""
        mine: torch.Tensor = getattr(tensor, self._inside, tensor) if self._inside else tensor
        return mine

    def _live_tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        names: dict[Any, str] = {}
        for prefix, root in self._roots.items():
            names |= {parameter: f"{prefix}{name}" for name, parameter in unwrapped(root.named_parameters())}
            for name, buffer in unwrapped(root.named_buffers()):
                yield "buffer", f"{prefix}{name}", self._memory(buffer)
        yield from (("parameter", name, self._memory(parameter)) for parameter, name in names.items())
        for index, optimizer in enumerate(self._optimizers()):
            for what, key, value in state_tensors(optimizer, index, names):
                yield what, key, self._memory(value)
        yield from (("optimizer's tensor", number, owner) for number, owner in enumerate(self._owners()))
