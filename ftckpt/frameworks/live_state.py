"""The part of a rank's training state that is alike in all integrations: modules, optimizers, RNG, objects."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ftckpt.frameworks import schedulers
from ftckpt.frameworks.extra_state import ExtraState
from ftckpt.frameworks.flags import TrainingFlags
from ftckpt.frameworks.late_changes import LateChanges
from ftckpt.frameworks.live_tensors import Holders, LiveTensors
from ftckpt.frameworks.model_config import model_config
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


class LiveState:
    """Base of a framework's ``ftckpt.model.training_state.TrainingState``.

    A subclass describes the pieces: ``_describe`` returns them, and parameters by names that do not depend on the
    layout. It names its scheduler and optimizers, and saves and loads what only its framework has: ``_save``,
    ``_load``, ``_load_reshaped``.

    Args:
        roots: the rank's modules by the prefix of their names.
        objects: stateful objects by name; those of ftckpt itself begin with ``ftckpt.``.
    """

    flags_name = "ftckpt.flags"
    inside = ""
    """The attribute in which a distributed tensor stores this rank's part; empty: there are none."""
    replaced_remedy = ""
    """The remedy for a tensor that was replaced."""
    late_remedy = "call step() last in each iteration"
    """The remedy for state that a script changes after the boundary."""
    frozen: Collection[str] = ()
    """Names of state that must not change before the first iteration either."""
    save_rng: Callable[[], dict[str, Any]] = staticmethod(save_generators)
    """The states of all generators of the framework; ``load_rng`` restores them, ``derive_rng`` derives those of
    another layout from the job's initial ones and an iteration."""
    load_rng: Callable[[Mapping[str, Any]], None] = staticmethod(load_generators)
    derive_rng: Callable[[Mapping[str, Any], int], dict[str, Any]] = staticmethod(derive_generators)

    def __init__(self, roots: Mapping[str, Any], objects: Mapping[str, Stateful]) -> None:
        self._roots = roots
        self._objects = {name: as_object(value) for name, value in objects.items()}
        self._own = {name: value for name, value in self._objects.items() if not name.startswith("ftckpt.")}
        self._objects |= generators_in(self._named_modules())
        self._extra = [ExtraState(root, self._saves_extra_state) for root in roots.values()]
        self._live = LiveTensors(self._live_tensors, self._holders, self.inside)
        self.late_changes = LateChanges(self._changing, self.late_remedy, self.frozen)
        self._model = self._describe_model()
        self._loaded_rng: Mapping[str, Any] | None = None
        self._built: Mapping[str, Any] | None = None

    def describe(self) -> Description:
        if self._built is None:
            # As the job's own setup seeds it, before a restore: RNG of another layout is derived from this.
            self._built = self.save_rng()
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
        shared = {"rng": self.save_rng(), "scheduler": schedulers.save(self._scheduler())}
        return {**shared, **own, "model": self._model, "objects": save_all(self._objects)}

    def check_objects(self, objects: Sequence[Mapping[str, Any]], is_reshaped: bool) -> None:
        """See TrainingState; a subclass compares the kinds of optimizers."""

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
        self._loaded_rng = self.derive_rng(self._built, iteration)

    def set_rng(self) -> None:
        """Sets RNG to the loaded state; must follow code that draws random numbers before training."""
        if self._loaded_rng is not None:
            self.load_rng(self._loaded_rng)

    def _describe(self) -> tuple[Description, Iterable[tuple[str, torch.Tensor]]]:
        raise NotImplementedError

    def _describe_model(self) -> str:
        """JSON that describes the model to ``ftckpt convert --to huggingface``; empty if there is none."""
        return model_config(self._roots.values())

    def _scheduler(self) -> Any:
        """The learning rate scheduler, or None."""
        raise NotImplementedError

    def _optimizers(self) -> Sequence[Any]:
        """The optimizers that step tensors, without a framework's wrappers."""
        raise NotImplementedError

    def _settled(self) -> Sequence[Any]:
        """Optimizers whose state must stay where it is described."""
        return self._optimizers()

    def _owners(self) -> Sequence[torch.Tensor]:
        """Tensors of the state that no module and no optimizer owns."""
        return ()

    def _saves_extra_state(self, module: torch.nn.Module) -> bool:
        """Whether the subclass saves what ``get_extra_state`` of ``module`` returns."""
        return False

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
            RANDOM: self.save_rng(),
            "the scheduler": schedulers.save(self._scheduler()),
            "parameter groups": [save_groups(optimizer) for optimizer in self._optimizers()],
            **save_all(self._own),
        }

    def _named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for prefix, root in self._roots.items():
            yield from ((f"{prefix}{name}", module) for name, module in unwrapped(root.named_modules()))

    def _holders(self) -> Holders:
        return Holders(list(self._roots.values()), self._settled(), self._owners())

    def _memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor."""
        mine: torch.Tensor = getattr(tensor, self.inside, tensor) if self.inside else tensor
        return mine

    def _live_tensors(self) -> Iterator[tuple[str, object, torch.Tensor]]:
        names: dict[Any, str] = {}
        for prefix, root in self._roots.items():
            names |= {parameter: f"{prefix}{name}" for name, parameter in unwrapped(root.named_parameters())}
            for name, buffer in unwrapped(root.named_buffers()):
                yield "buffer", f"{prefix}{name}", self._memory(buffer)
        yield from (("parameter", name, self._memory(parameter)) for parameter, name in names.items())
        for index, optimizer in enumerate(self._settled()):
            for what, key, value in state_tensors(optimizer, index, names):
                yield what, key, self._memory(value)
        yield from (("optimizer's tensor", number, owner) for number, owner in enumerate(self._owners()))
