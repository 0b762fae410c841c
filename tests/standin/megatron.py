"""The details of Megatron's modules that fail without a GPU, fixed as those modules are imported."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

_Around = Callable[[], AbstractContextManager[None]]
_After = Callable[[ModuleType], None]


def install_megatron() -> None:
    _on_import("megatron.core.transformer.moe.moe_utils", after=_bind_router_gemm)
    _on_import("megatron.core.tensor_parallel.random", after=_drop_rng_warning)
    _on_import("megatron.core.transformer.custom_layers.batch_invariant_kernels", around=_import_without_triton)
    _on_import("megatron.core.transformer.moe.paged_stash", around=_import_without_triton)  # 0.18
    _on_import("megatron.core.transformer.moe.ops.paged_stash", around=_import_without_triton)  # 0.19
    _on_import("megatron.legacy.fused_kernels", after=_load_no_kernels)
    _on_import("megatron.core.transformer.torch_norm", after=_let_norms_be_sequence_parallel)
    _on_import("megatron.core.optimizer.distrib_optimizer", after=_let_torch_adam_load)


def _bind_router_gemm(moe_utils: ModuleType) -> None:
    # Without Transformer Engine 0.16.1 never binds this name and then compares it with None.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def _load_no_kernels(fused_kernels: ModuleType) -> None:
    # It asks nvcc for its version and then builds nothing.
    fused_kernels.load = lambda _args: None  # type: ignore[attr-defined]


def _let_norms_be_sequence_parallel(torch_norm: ModuleType) -> None:
    # Without Apex or Transformer Engine 0.16.1 refuses. What theirs do is mark the weights, so that gradients are
    # summed over the ranks that hold parts of a sequence.
    build = torch_norm.WrappedTorchNorm.__new__

    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = new


def _drop_rng_warning(random: ModuleType) -> None:
    # Forking the device generator warns when the CPU generator moved: here they are the same.
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")

    logging.getLogger(random.__name__).addFilter(keep)


def _let_torch_adam_load(distrib_optimizer: ModuleType) -> None:
    # Without Apex or Transformer Engine 0.16.1 cannot load what it saved: it asks a new optimizer for the common
    # step of its state, where there is none before the first step, and then keeps that in the place of the saved one.
    # What can be loaded into other layouts it copies entry by entry and misses the step, which is not among it.
    kind = distrib_optimizer.DistributedOptimizer
    describe, load, copy_into = (
        kind.sharded_state_dict,
        kind.load_state_dict,
        kind._set_main_param_and_optimizer_states,
    )

    @functools.wraps(describe)
    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.optimizer
        if isinstance(inner, torch.optim.Adam) and not inner.state:
            for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return describe(self, *args, **kwargs)

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = load(self, state_dict)
        steps = {float(group["step"]) for group in state_dict["optimizer"]["param_groups"] if "step" in group}
        for state in self.optimizer.state.values():
            if "step" in state and len(steps) == 1:
                state["step"] = torch.tensor(next(iter(steps)))
        return result

    @functools.wraps(copy_into)
    def without_step(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step", None)
        copy_into(self, model_param, tensors)
        if step is not None:
            state["step"] = step

    kind.sharded_state_dict, kind.load_state_dict = sharded_state_dict, load_state_dict
    kind._set_main_param_and_optimizer_states = without_step


class _Decorator:
    """Stands for anything in triton: decorators return their function, nothing else is called."""

    def __getattr__(self, _name: str) -> _Decorator:
        return self

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        return args[0] if args else self


@contextlib.contextmanager
def _import_without_triton() -> Iterator[None]:
    # Megatron-LM imports this module, and the module defines triton kernels, even if none is used.
    # triton goes away again: others take its presence for a sign that it works.
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        yield
        return
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.language = language  # type: ignore[attr-defined]
    for module in (triton, language):
        module.__getattr__ = lambda _name: _Decorator()  # type: ignore[method-assign]
    sys.modules.update({"triton": triton, "triton.language": language})
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


def _on_import(name: str, around: _Around = contextlib.nullcontext, after: _After = lambda _module: None) -> None:
    """Runs the module's code inside `around()` and then `after(module)`, at once if it is loaded."""
    module = sys.modules.get(name)
    if module is not None:
        after(module)
    else:
        sys.meta_path.insert(0, _ImportHook(name, around, after))


class _ImportHook(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module and wraps its execution."""

    def __init__(self, name: str, around: _Around, after: _After) -> None:
        self._name = name
        self._around = around
        self._after = after

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self._around():
                execute(module)
            self._after(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
