"""The real Python of FusedAdam, of Transformer Engine or Apex, from a checkout, over kernels in torch.

Its other imports exist in name alone: they must not be called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.standin import te
from tests.standin.te import fused_adam

_COMPILED = "transformer_engine_torch"


def load_optimizers(checkout: Path) -> None:
    """Load Transformer Engine's ``pytorch/optimizers``. Types of parameters that it imports are empty."""
    dtypes = {"DType": SimpleNamespace(kFloat32=0, kFloat8E4M3=1)}
    put_kernels(_COMPILED, **dtypes)
    te.put("transformer_engine.pytorch.constants", dtypes)
    te.put("transformer_engine.pytorch.quantized_tensor", {"QuantizedTensor": type("QuantizedTensor", (), {})})
    kinds = {name: type(name, (), {}) for name in ("Float8Tensor", "Float8Quantizer")}
    te.put("transformer_engine.pytorch.tensor.float8_tensor", kinds)
    _load_package("transformer_engine.pytorch.optimizers", checkout / "transformer_engine/pytorch/optimizers")


def load_apex(checkout: Path) -> None:
    """Load Apex's FusedAdam."""
    torch.cuda.IntTensor = torch.IntTensor  # type: ignore[assignment, misc]  # older releases make a flag of it
    _load_package("apex.multi_tensor_apply", checkout / "apex/multi_tensor_apply")
    # One file: others of this package import names of old releases of torch.
    package: Any = sys.modules["apex.optimizers"]
    package.__path__ = [str(checkout / "apex/optimizers")]
    package.FusedAdam = importlib.import_module("apex.optimizers.fused_adam").FusedAdam


def put_kernels(name: str, **more: Any) -> None:
    """Put kernels in torch under the name of the compiled ones; any other name is None."""
    found = {each: value for each, value in vars(fused_adam).items() if each.startswith("multi_tensor")}
    te.put(name, found | more)
    sys.modules[name].__getattr__ = _absent  # type: ignore[method-assign]


def _absent(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def _load_package(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder)
    sys.dont_write_bytecode = True  # the checkout stays as it is
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)
