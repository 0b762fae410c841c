"""Recipes, and the state of delayed scaling that all modules of a process share (``pytorch/fp8.py``, later
``pytorch/quantization.py``)."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class _Formats:
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _Formats(448.0, 448.0)
    HYBRID = _Formats(448.0, 57344.0)


class Recipe:
    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def custom(self) -> bool:
        return False


@dataclass
class DelayedScaling(Recipe):
    """Compared by value: a job makes a new one for each forward."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    params_dtype: Any = None
    device: Any = None


@dataclass
class Float8CurrentScaling(Recipe):
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


class DelayedScalingRecipeState:
    """All casts of one direction in one module: ``scale`` [casts] and ``amax_history`` [length, casts], fp32."""

    def __init__(self, recipe: DelayedScaling, mode: str, num_quantizers: int) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = E4M3 if mode == "forward" or recipe.fp8_format is Format.E4M3 else E5M2
        self.scale = torch.ones(num_quantizers, dtype=torch.float32)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, dtype=torch.float32)

    def cast(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """What a multiplication sees of ``tensor``; the largest value is noted in the history's first row."""
        noted, scale = self.amax_history[0], self.scale[index]
        noted[index] = torch.maximum(noted[index], tensor.detach().abs().amax().float())
        most = torch.finfo(self.dtype).max
        return ((tensor.float() * scale).clamp(-most, most).to(self.dtype).float() / scale).to(tensor.dtype)


class Float8CurrentScalingRecipeState:
    """Nothing is kept: the scale follows from the tensor."""

    def __init__(self, recipe: Float8CurrentScaling, mode: str, num_quantizers: int) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        self.dtype = E4M3 if mode == "forward" else E5M2

    def cast(self, tensor: torch.Tensor, _index: int) -> torch.Tensor:
        scale = torch.finfo(self.dtype).max / tensor.detach().abs().amax().float().clamp(min=1e-12)
        return ((tensor.float() * scale).to(self.dtype).float() / scale).to(tensor.dtype)


def recipe_state(recipe: Any, mode: str, num_quantizers: int) -> Any:
    kind: Any = DelayedScalingRecipeState if recipe.delayed() else Float8CurrentScalingRecipeState
    return kind(recipe, mode, num_quantizers)


class FP8GlobalStateManager:
    """Newer releases keep the same in an instance, ``quantization_state``."""

    FP8_ENABLED = False
    FP8_RECIPE: Any = None
    FP8_DISTRIBUTED_GROUP: Any = None
    IS_FIRST_FP8_MODULE = False
    FP8_AUTOCAST_DEPTH = 0
    buffers: ClassVar[dict[str, list[Any]]] = {}
    arguments: ClassVar[dict[str, tuple[Any, Any]]] = {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.FP8_ENABLED

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.FP8_RECIPE or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.FP8_DISTRIBUTED_GROUP

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        first, cls.IS_FIRST_FP8_MODULE = cls.IS_FIRST_FP8_MODULE, False
        return first

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Once for each module, in its first forward: what is reduced and updated goes by these tensors."""
        if not fp8_meta["recipe"].delayed() or "buffer_index_and_autocast_key" in fp8_meta:
            return
        fp8_meta["buffer_index_and_autocast_key"] = []
        for direction in ("scaling_fwd", "scaling_bwd"):
            key = f"{direction}:{fp8_meta['recipe']}:{id(fp8_meta['fp8_group'])}"
            cls.arguments[key] = (fp8_meta["recipe"], fp8_meta["fp8_group"])
            cls.buffers.setdefault(key, []).append(fp8_meta[direction])

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Of all modules together: largest values over the group, then the next scales."""
        for key, states in cls.buffers.items():
            if key.startswith("scaling_fwd") != forward:
                continue
            recipe, group = cls.arguments[key]
            largest = torch.cat([state.amax_history[0] for state in states])
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group=group) > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            for state, row in zip(states, largest.split([s.num_quantizers for s in states]), strict=True):
                state.amax_history[0] = row
                _update(state, recipe)


def _update(state: DelayedScalingRecipeState, recipe: DelayedScaling) -> None:
    history = state.amax_history
    amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
    history.copy_(history.roll(-1, 0))
    history[0] = 0
    scale = torch.finfo(state.dtype).max / amax / 2**recipe.margin
    state.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, state.scale))


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None
) -> Iterator[None]:
    manager: Any = FP8GlobalStateManager
    names = ("FP8_ENABLED", "FP8_RECIPE", "FP8_DISTRIBUTED_GROUP", "IS_FIRST_FP8_MODULE")
    before = {name: getattr(manager, name) for name in names}
    manager.FP8_ENABLED, manager.FP8_RECIPE = enabled, fp8_recipe or DelayedScaling()
    manager.FP8_DISTRIBUTED_GROUP = fp8_group
    if manager.FP8_AUTOCAST_DEPTH == 0:
        manager.IS_FIRST_FP8_MODULE = True
    manager.FP8_AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(manager, name, value)
        manager.FP8_AUTOCAST_DEPTH -= 1
        if enabled and manager.FP8_AUTOCAST_DEPTH == 0 and torch.is_grad_enabled():
            manager.reduce_and_update_fp8_tensors(forward=True)


@contextlib.contextmanager
def fp8_model_init(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    yield
