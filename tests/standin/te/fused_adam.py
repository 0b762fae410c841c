"""FusedAdam of Transformer Engine and of Apex, and in torch what they compile.

Compiled (``transformer_engine_torch``, ``amp_C``), kernels write by address, which torch does not count; here they
write so, too. Mirrored are ``pytorch/optimizers/fused_adam.py`` and Apex from 23.05 to the newest: which state they
have, when they make it, and where they count steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

Lists = list[list[torch.Tensor]]


def multi_tensor_adam(_chunk: int, _overflow: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """``lists``: gradients, parameters, first and second moments and, where the optimizer has them, fp32 masters."""
    for grad, param, first, second, *masters in _of_each(lists):
        master = masters[0] if masters else param
        stepped = _adam(grad.float(), master.float(), first, second, *settings)
        master.copy_(stepped)
        param.copy_(stepped)


def multi_tensor_adam_param_remainder(_chunk: int, _overflow: torch.Tensor, lists: Lists, *settings: Any) -> None:
    """The last list has the 16 bits of masters that bf16 parameters lack."""
    for grad, param, first, second, remainder in _of_each(lists):
        high, low = split(_adam(grad.float(), join(param, remainder), first, second, *settings))
        param.copy_(high)
        remainder.copy_(low)


def multi_tensor_scale(_chunk: int, _overflow: torch.Tensor, lists: Lists, scale: float) -> None:
    for source, destination in _of_each(lists):
        destination.copy_(source * scale)


def multi_tensor_l2norm(_chunk: int, _overflow: torch.Tensor, lists: Lists, *_per_tensor: Any) -> Any:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None


def _of_each(lists: Lists) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(tensor.data for tensor in tensors) for tensors in zip(*lists, strict=True)]


def _adam(
    grad: torch.Tensor, master: torch.Tensor, first: torch.Tensor, second: torch.Tensor, *settings: Any
) -> torch.Tensor:
    """The next master."""
    lr, beta1, beta2, eps, step, decoupled, bias_correction, weight_decay = settings
    if not decoupled:
        grad = grad + weight_decay * master
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + eps)
    if decoupled:
        update = update + weight_decay * master
    return master - lr * update


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master: a remainder below zero means that the weight was rounded up."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low


FusedSGD = torch.optim.SGD
DEFAULTS = {
    "lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
}  # fmt: skip


class FusedAdam(torch.optim.Optimizer):
    """State by parameter: ``exp_avg``, ``exp_avg_sq`` and, with ``master_weights``, ``master_param``. That is 16 bits
    beside a bf16 parameter where remainders are stored: the low ones of an fp32 master whose high ones the parameter
    has, rounded to nearest. The number of steps stands in the group."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"  # by which it is known

    def __init__(
        self,
        params: Any,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(params, DEFAULTS | settings)
        self.adam_w_mode, self.capturable, self.master_weights = int(adam_w_mode), capturable, master_weights
        self.master_weight_dtype, self.use_decoupled_grad = master_weight_dtype, use_decoupled_grad
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self._scales: dict[Any, Any] = {}
        fp32 = master_weight_dtype == torch.float32
        self.store_param_remainders = store_param_remainders and master_weights and fp32

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Since 2.1 with two arguments; Megatron-core, up to 0.19, calls it with one."""
        state = self.state[param]
        state["exp_avg"] = torch.zeros_like(param, dtype=self.exp_avg_dtype)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=self.exp_avg_sq_dtype)
        if self.master_weights and store_param_remainders:
            state["master_param"] = torch.zeros_like(param, dtype=torch.int16)
        elif self.master_weights:
            state["master_param"] = param.clone().detach().float()

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        kept: torch.Tensor = self.state[param][state_name]
        return kept

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        self.state[param][state_name].copy_(unscaled_state)

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group, param in _stepping(self.param_groups):
            remainders = self.store_param_remainders and param.dtype == torch.bfloat16
            if not self.state[param]:
                self.initialize_state(param, remainders)
            grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
            if grad is None:
                continue
            lists = _lists(self.state[param], param, grad)
            # Of an fp32 parameter a master beside it stays what it was made as.
            if self.master_weights and param.dtype != torch.float32:
                lists.append([self.state[param]["master_param"]])
            _step(multi_tensor_adam_param_remainder if remainders else multi_tensor_adam, self, group, lists)


class ApexFusedAdam(torch.optim.Optimizer):
    """Apex's: ``exp_avg`` and ``exp_avg_sq`` in fp32, from the first gradient of a parameter on."""

    __module__ = "apex.optimizers.fused_adam"  # by which it is known, and by its name
    __qualname__ = "FusedAdam"

    def __init__(
        self, params: Any, *, adam_w_mode: bool = True, capturable: bool = False, master_weights: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(params, DEFAULTS | settings)
        self.adam_w_mode, self.capturable, self.master_weights = int(adam_w_mode), capturable, master_weights

    @torch.no_grad()
    def step(self, closure: Any = None, **_deprecated: Any) -> None:
        for group, param in _stepping(self.param_groups):
            if param.grad is None:
                continue
            if not self.state[param]:
                moments = {name: torch.zeros_like(param.data).float() for name in ("exp_avg", "exp_avg_sq")}
                self.state[param].update(moments)
            _step(multi_tensor_adam, self, group, _lists(self.state[param], param, param.grad))


def _stepping(groups: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Parameters with their groups; a step of a group without any is not counted."""
    for group in groups:
        if group["params"]:
            group["step"] = group.get("step", 0) + 1
            yield from ((group, param) for param in group["params"])


def _lists(state: dict[str, Any], param: torch.Tensor, grad: torch.Tensor) -> Lists:
    return [[grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]


def _step(operation: Any, optimizer: Any, group: dict[str, Any], lists: Lists) -> None:
    settings = (optimizer.adam_w_mode, int(group["bias_correction"]), group["weight_decay"])
    multi_tensor_applier(operation, None, lists, group["lr"], *group["betas"], group["eps"], group["step"], *settings)


def multi_tensor_applier(operation: Any, overflow: Any, lists: Any, *args: Any) -> Any:
    """Kernels see what this rank has of a DTensor."""
    mine = [[getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for tensors in lists]
    return operation(2048 * 32, overflow, mine, *args)
