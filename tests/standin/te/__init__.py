"""A stand-in for Transformer Engine, and for Apex, on a CPU under their names: real Megatron-core trains with it.

TE cannot be built without CUDA. Mirrored from its sources at v2.2, v2.4 and v2.18 (``RELEASES``): which tensors
delayed scaling has, under which attributes, when they are made, reduced and updated; what ``get_extra_state`` gives;
FusedAdam's state. FP8 values are those of torch's types; sums are torch's own. Differences of releases are noted.

``install`` replaces the package and reloads Megatron, in a process made for one test. Given a checkout, its
optimizers are the real Python over kernels in torch (``real.py``).
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

RELEASES = ("2.2", "2.4", "2.18")

release = RELEASES[-1]
"""Which one is mirrored."""


def at_least(minor: int) -> bool:
    """Whether the release that is mirrored is 2.``minor`` or newer."""
    return int(release.partition(".")[2]) >= minor


def install(of_release: str, checkout: Path | None = None) -> None:
    """From here on this process has Transformer Engine, and Megatron is imported by its next user."""
    global release
    release = of_release
    from tests.standin.te import fused_adam, modules

    tree = {
        "": {"__version__": f"{of_release}.0"},
        "common": {},
        "common.recipe": _names(modules, "Recipe", "DelayedScaling", "Float8CurrentScaling", "Format"),
        "pytorch": {
            **_names(modules, "fp8_autocast", "fp8_model_init", "Linear", "LayerNormLinear", "GroupedLinear"),
            **_names(modules, "DotProductAttention", "LayerNorm"),
        },
        "pytorch.fp8": _names(modules, "FP8GlobalStateManager", "fp8_autocast", "fp8_model_init"),
        "pytorch.module": {},
        "pytorch.module.base": _names(modules, "TransformerEngineBaseModule"),
        # Names that Megatron wants when it is imported; with 2.7 and newer the router's, too.
        "pytorch.ops": {"Sequential": None, "FusibleOperation": None, "BasicOperation": modules.BasicOperation},
        "pytorch.distributed": _names(modules, "CudaRNGStatesTracker", "checkpoint", "activation_recompute_forward"),
        "pytorch.tensor": _names(modules, "QuantizedTensor"),
        "pytorch.router": dict.fromkeys(
            ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
        ),
        "pytorch.optimizers": _names(
            fused_adam, "FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_scale", "multi_tensor_l2norm"
        ),
    }
    for path, contents in tree.items():
        put(f"transformer_engine.{path}".rstrip("."), contents)
    if checkout is not None:
        from tests.standin.te import real

        real.load_optimizers(checkout)
    _forget_megatron()


def install_apex(checkout: Path | None = None) -> None:
    """Install the parts of Apex that Megatron-core and DeepSpeed use for their optimizers."""
    from tests.standin.te import fused_adam, real

    real.put_kernels("amp_C")
    put("apex", {})
    put("apex.multi_tensor_apply", _names(fused_adam, "multi_tensor_applier"))
    put("apex.optimizers", {"FusedAdam": fused_adam.ApexFusedAdam, "FusedSGD": fused_adam.FusedSGD})
    if checkout is not None:
        real.load_apex(checkout)
    _forget_megatron()


def _forget_megatron() -> None:
    """Unload Megatron, which looks for these packages when it is imported."""
    from tests.standin.megatron import install_megatron

    for name in [name for name in sys.modules if name.startswith(("megatron", "ftckpt.megatron", "train_gpt"))]:
        del sys.modules[name]
    install_megatron()  # once more, for the modules that are imported now


def _names(module: ModuleType, *names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def put(name: str, contents: dict[str, Any]) -> None:
    """A package that has ``contents``."""
    module = ModuleType(name)
    module.__path__ = []
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
