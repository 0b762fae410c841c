"""A stand-in for Apex on a CPU, under its names: what Megatron-core and DeepSpeed take of it for their optimizers.

Its ``FusedAdam`` mirrors the sources from 23.05 to the newest: which state it keeps, when it makes it, and where it
counts steps. Given a checkout, that is the real one's Python over kernels in torch. ``install`` is for a process made
for one test.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support import te
from tests.support.te import kernels, real


class FusedAdam(torch.optim.Optimizer):
    """State by parameter: ``exp_avg`` and ``exp_avg_sq`` in fp32, from its first gradient on. The number of steps
    stands in the group."""

    __module__ = "apex.optimizers.fused_adam"  # by which it is known

    def __init__(
        self,
        params: Any,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        **settings: Any,
    ) -> None:
        defaults = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, defaults | settings)
        self.adam_w_mode, self.capturable, self.master_weights = int(adam_w_mode), capturable, master_weights

    @torch.no_grad()
    def step(self, closure: Any = None, **_deprecated: Any) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue  # nor is a step counted
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._step_one(group, param)

    def _step_one(self, group: dict[str, Any], param: torch.Tensor) -> None:
        state = self.state[param]
        if not state:
            state.update({name: torch.zeros_like(param.data).float() for name in ("exp_avg", "exp_avg_sq")})
        lists = [[param.grad], [param], [state["exp_avg"]], [state["exp_avg_sq"]]]
        settings = (group["eps"], group["step"], self.adam_w_mode, int(group["bias_correction"]))
        kernels.multi_tensor_adam(
            0, torch.zeros(1), lists, group["lr"], *group["betas"], *settings, group["weight_decay"]
        )


def install(checkout: Path | None = None) -> None:
    """From here on this process has Apex, and Megatron is imported by its next user."""
    from tests.support.standin.megatron import install_megatron
    from tests.support.te.optimizers import multi_tensor_applier

    real.put_kernels("amp_C")
    te.put("apex", {})
    te.put("apex.multi_tensor_apply", {"multi_tensor_applier": multi_tensor_applier})
    te.put("apex.optimizers", {"FusedAdam": FusedAdam, "FusedSGD": torch.optim.SGD})
    if checkout is not None:
        torch.cuda.IntTensor = torch.IntTensor  # type: ignore[assignment, misc]  # older ones ask for a flag so
        real.load_package("apex.multi_tensor_apply", checkout / "apex/multi_tensor_apply")
        # One file: others of this package want names of old releases of torch.
        package: Any = sys.modules["apex.optimizers"]
        package.__path__ = [str(checkout / "apex/optimizers")]
        package.FusedAdam = importlib.import_module("apex.optimizers.fused_adam").FusedAdam
    te.forget_megatron()
    install_megatron()
