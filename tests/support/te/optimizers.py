"""FusedAdam with masters of its own (``pytorch/optimizers/fused_adam.py``), and what Megatron sums gradients with."""

from __future__ import annotations

from typing import Any

import torch

FusedSGD = torch.optim.SGD


class FusedAdam(torch.optim.Optimizer):
    """State by parameter: ``exp_avg``, ``exp_avg_sq`` and, with ``master_weights``, ``master_param``. That is 16 bits
    beside a bf16 parameter where remainders are stored: the low ones of an fp32 master whose high ones the parameter
    has, rounded to nearest. The number of steps stands in the group."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"  # by which it is known

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
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
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                remainders = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, remainders)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._step_one(group, param, grad.float(), remainders)

    def _step_one(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, remainders: bool) -> None:
        state = self.state[param]
        if remainders:
            master = join(param, state["master_param"])
        elif self.master_weights and param.dtype != torch.float32:
            master = state["master_param"]
        else:
            master = param  # a master beside it stays what it was made as
        first, second, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        slope = first / (1 - beta1 ** group["step"])
        update = slope / ((second / (1 - beta2 ** group["step"])).sqrt() + group["eps"])
        master.sub_(group["lr"] * (update + group["weight_decay"] * master))
        if remainders:
            high, low = split(master)
            param.copy_(high)
            state["master_param"].copy_(low)
        elif master is not param:
            param.copy_(master)


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master: a remainder below zero says that the weight was rounded up."""
    high = weight.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    bits = master.view(torch.int32)
    low = (bits & 0xFFFF).to(torch.int16)
    high = (bits >> 16) + (low < 0).to(torch.int32)
    return high.to(torch.int16).view(torch.bfloat16), low


def multi_tensor_applier(operation: Any, overflow: torch.Tensor, lists: Any, *args: Any) -> Any:
    return operation(2048 * 32, overflow, lists, *args)


def multi_tensor_scale(_chunk: int, overflow: torch.Tensor, lists: Any, scale: float) -> None:
    for source, destination in zip(*lists, strict=True):
        destination.copy_(source * scale)


def multi_tensor_l2norm(_chunk: int, overflow: torch.Tensor, lists: Any, *_per_tensor: Any) -> Any:
    norms = [torch.linalg.vector_norm(tensor.float()) for tensor in lists[0]]
    return torch.linalg.vector_norm(torch.stack(norms)).view(1), None
