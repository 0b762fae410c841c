"""Recipes, the state of delayed scaling, and modules that multiply in FP8, without tensor parallelism.

Mirrored: ``pytorch/fp8.py``, later ``pytorch/quantization.py``, ``pytorch/module``, ``attention`` and ``ops``.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.standin import te

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Format(enum.Enum):
    E4M3, HYBRID = range(2)


class Recipe:
    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


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
        self.num_quantizers = num_quantizers
        self.dtype = E4M3 if mode == "forward" or recipe.fp8_format is Format.E4M3 else E5M2
        self.scale = torch.ones(num_quantizers, dtype=torch.float32)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers, dtype=torch.float32)

    def cast(self, tensor: torch.Tensor, index: int) -> torch.Tensor:
        """Cast ``tensor`` to FP8 and back; the largest value is noted in the history's first row."""
        noted, scale = self.amax_history[0], self.scale[index]
        noted[index] = torch.maximum(noted[index], tensor.detach().abs().amax().float())
        most = torch.finfo(self.dtype).max
        return ((tensor.float() * scale).clamp(-most, most).to(self.dtype).float() / scale).to(tensor.dtype)


class Float8CurrentScalingRecipeState:
    """No state: the scale follows from the tensor."""

    def __init__(self, recipe: Float8CurrentScaling, mode: str, num_quantizers: int) -> None:
        self.dtype = E4M3 if mode == "forward" else E5M2

    def cast(self, tensor: torch.Tensor, _index: int) -> torch.Tensor:
        scale = torch.finfo(self.dtype).max / tensor.detach().abs().amax().float().clamp(min=1e-12)
        return ((tensor.float() * scale).to(self.dtype).float() / scale).to(tensor.dtype)


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
        """Reduce the largest values of all modules over the group, then compute the next scales."""
        for key, states in cls.buffers.items():
            if key.startswith("scaling_fwd") != forward:
                continue
            recipe, group = cls.arguments[key]
            largest = torch.cat([state.amax_history[0] for state in states])
            if recipe.reduce_amax and dist.is_initialized() and dist.get_world_size(group=group) > 1:
                dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            for state, row in zip(states, largest.split([s.num_quantizers for s in states]), strict=True):
                history = state.amax_history
                history[0] = row
                amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
                history.copy_(history.roll(-1, 0))
                history[0] = 0
                scale = torch.finfo(state.dtype).max / amax / 2**recipe.margin
                state.scale.copy_(torch.where((amax > 0) & amax.isfinite(), scale, state.scale))


@contextmanager
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


@contextmanager
def fp8_model_init(enabled: bool = True, recipe: Any = None) -> Iterator[None]:
    yield


class QuantizedTensor(torch.Tensor):
    """A parameter in FP8; there is none here."""


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = self.fp8_initialized = self.fp8_meta_tensors_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        direction = "scaling_fwd" if fwd else "scaling_bwd"
        if self.fp8_meta_tensors_initialized:
            state = self.fp8_meta[direction]
            if recipe.delayed() and hasattr(state, "amax_history"):
                # Another tensor in its place, cut off at its end or filled up with zeros there.
                more = recipe.amax_history_len - len(state.amax_history)
                if more:
                    state.amax_history = F.pad(state.amax_history, (0, 0, 0, more)).clone()
                return
            if not recipe.delayed() and not hasattr(state, "amax_history"):
                return
        casts = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        kind: Any = DelayedScalingRecipeState if recipe.delayed() else Float8CurrentScalingRecipeState
        self.fp8_meta[direction] = kind(recipe, "forward" if fwd else "backward", casts)

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fp8_meta_tensors_initialized = True

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Called in each forward; the first makes the tensors."""
        meta, recipe = self.fp8_meta, FP8GlobalStateManager.FP8_RECIPE or DelayedScaling()
        self.fp8 = meta["fp8_checkpoint"] = FP8GlobalStateManager.FP8_ENABLED
        if not self.fp8:
            self.fp8_initialized = False
            return
        if self.fp8_initialized and recipe == meta["recipe"]:
            return
        meta["recipe"], meta["num_gemms"] = recipe, num_gemms
        meta["fp8_group"] = FP8GlobalStateManager.FP8_DISTRIBUTED_GROUP
        self.init_fp8_meta_tensors(recipe)
        self.fp8_initialized = True

    def prepare_forward(self, num_gemms: int = 1) -> None:
        self.init_fp8_metadata(num_gemms)
        if self.fp8:
            FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def get_extra_state(self) -> torch.Tensor:
        """A pickle as bytes. Before 2.4 without FP8, too: of None. In 2.18 only of recipes that keep something."""
        if not (self.fp8_meta["fp8_checkpoint"] or self.fp8):
            return _as_bytes(None) if not te.at_least(4) else torch.empty(0, dtype=torch.uint8)
        recipe = self.fp8_meta["recipe"]
        if te.at_least(18) and not recipe.delayed():
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"recipe": recipe}
        if recipe.delayed():
            for short in ("fwd", "bwd"):
                state[f"scale_{short}"] = self.fp8_meta[f"scaling_{short}"].scale
                state[f"amax_history_{short}"] = self.fp8_meta[f"scaling_{short}"].amax_history
        plain = {name: value for name, value in self.fp8_meta.items() if isinstance(value, (bool, int, float))}
        return _as_bytes({**state, "extra_fp8_variables": plain})

    def set_extra_state(self, state: torch.Tensor) -> None:
        raise NotImplementedError("2.18 refuses pickles")


def _as_bytes(state: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


class _Multiply(torch.autograd.Function):
    """Input and weight are cast in forward, the output's gradient in backward, after which the process's first module
    updates the scales of all."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, meta: dict[str, Any]) -> torch.Tensor:
        tokens = meta["scaling_fwd"].cast(tokens, 0)
        weight = meta["scaling_fwd"].cast(weight, 1)
        ctx.save_for_backward(tokens, weight)
        ctx.meta, ctx.first = meta, FP8GlobalStateManager.is_first_fp8_module()
        return tokens @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        gradient = ctx.meta["scaling_bwd"].cast(gradient, 0)
        of_weight = gradient.flatten(0, -2).t() @ tokens.flatten(0, -2)
        of_tokens = gradient @ weight
        if ctx.first:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return of_tokens, of_weight, None


class Linear(TransformerEngineBaseModule):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = True,
        return_bias: bool = False,
        parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32,
        tp_size: int = 1,
        **_more: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1, "the stand-in has no tensor parallelism"
        self.in_features, self.out_features, self.tp_size = in_features, out_features, tp_size
        self.use_bias, self.return_bias, self.parallel_mode = bias, return_bias, parallel_mode
        self.save_original_input = False  # since 2.6
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        with torch.no_grad():
            init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)) if bias else None

    def forward(self, tokens: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        self.prepare_forward()
        multiplied = (
            _Multiply.apply(tokens, self.weight, self.fp8_meta) if self.fp8 else F.linear(tokens, self.weight)
        )
        if self.return_bias:
            return multiplied, self.bias
        return multiplied if self.bias is None else multiplied + self.bias


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, *, eps: float = 1e-5, **more: Any) -> None:
        super().__init__(in_features, out_features, **more)
        self.eps = eps
        dtype = more["params_dtype"]
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(in_features, dtype=dtype))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=dtype))

    def forward(self, tokens: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        shape = (self.in_features,)
        return super().forward(F.layer_norm(tokens, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps))


class GroupedLinear(TransformerEngineBaseModule):
    """A weight for each expert, each a parameter of its own; the rows of all experts lie one after another."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = True,
        params_dtype: torch.dtype = torch.float32,
        tp_size: int = 1,
        **_more: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not bias, "the stand-in has no tensor parallelism, and no bias"
        self.num_gemms, self.use_bias = num_gemms, bias
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            with torch.no_grad():
                init_method(weight)
            self.register_parameter(f"weight{number}", weight)

    def forward(
        self, tokens: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        self.prepare_forward(self.num_gemms)
        assert not self.fp8, "the stand-in multiplies experts in full precision"
        of_each = enumerate(tokens.split(m_splits))
        return torch.cat([F.linear(rows, getattr(self, f"weight{number}")) for number, rows in of_each])


class DotProductAttention(TransformerEngineBaseModule):
    """Attention in full precision, as without ``fp8_dpa``; its three multiplications have scales all the same."""

    def __init__(self, attention_dropout: float, get_rng_state_tracker: Any, **_more: Any) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        # Without a tracker numbers come from the device's generator.
        self._fork = (lambda: get_rng_state_tracker().fork()) if get_rng_state_tracker else nullcontext

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_more: Any, **_: Any) -> Any:
        self.prepare_forward(num_gemms=3)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        with self._fork():
            found = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=self.attention_dropout
            )
        return found.permute(2, 0, 1, 3).flatten(2)


class BasicOperation(torch.nn.Module):
    """An operation that can be fused, such as a norm; this one casts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._fp8_metas: dict[str, Any] | None = None

    def num_quantizers(self, mode: str) -> int:
        return 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8) if te.at_least(4) else _as_bytes({})

    def set_extra_state(self, state: torch.Tensor) -> None:
        pass


class LayerNorm(BasicOperation):
    def __init__(self, hidden_size: int, eps: float, params_dtype: torch.dtype, **_more: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(tokens, self.weight.shape, self.weight, self.bias, self.eps)


class CudaRNGStatesTracker:
    """Has generators that are safe in CUDA graphs, not their states."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Generator] = {}

    def reset(self) -> None:
        self.states_ = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        generator = torch.cuda.default_generators[0].clone_state()
        generator.manual_seed(seed)
        self.states_[name] = generator

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Any:
        # The device's generator takes this one's state and gives it back: with CUDA both are one state.
        device, kept = torch.cuda.default_generators[0], self.states_[name]
        before = device.get_state()
        device.set_state(kept.get_state())
        try:
            yield
        finally:
            kept.set_state(device.get_state())
            device.set_state(before)


def checkpoint(function: Callable[..., Any], *args: Any, **_more: Any) -> Any:
    return function(*args)


@contextmanager
def activation_recompute_forward(**_more: Any) -> Any:
    yield
