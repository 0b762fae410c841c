"""FusedAdam with masters of its own (``pytorch/optimizers/fused_adam.py``), and what calls kernels."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.te import kernels

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
            if not group["params"]:
                continue  # nor is a step counted
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                remainders = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, remainders)
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._step_one(group, param, grad, remainders)

    def _step_one(self, group: dict[str, Any], param: torch.Tensor, grad: torch.Tensor, remainders: bool) -> None:
        state = self.state[param]
        lists = [[grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]
        # Of an fp32 parameter a master beside it stays what it was made as.
        if self.master_weights and param.dtype != torch.float32:
            lists.append([state["master_param"]])
        operation = kernels.multi_tensor_adam_param_remainder if remainders else kernels.multi_tensor_adam
        settings = (group["eps"], group["step"], self.adam_w_mode, 1, group["weight_decay"])
        multi_tensor_applier(operation, None, lists, group["lr"], *group["betas"], *settings)


def multi_tensor_applier(operation: Any, overflow: Any, lists: Any, *args: Any) -> Any:
    """Kernels see what this rank has of a DTensor."""
    mine = [[getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for tensors in lists]
    return operation(2048 * 32, overflow, mine, *args)
