"""Python of Transformer Engine's own, out of a checkout, over torch in the place of what it compiles.

What it imports beside is there in name alone: it must not be called.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support import te

_COMPILED = "transformer_engine_torch"
_ABSENT = (
    "onnx", "onnxscript", "triton", "triton.language", "triton.language.extra", "triton.runtime", "triton.tools",
)  # fmt: skip
_DTYPES = ("Byte", "Int16", "Int32", "Int64", "Float32", "Float16", "BFloat16", "Float8E4M3", "Float8E5M2")
_NEWER_DTYPES = ("Float8E8M0", "Float4E2M1")


def load_optimizers(checkout: Path) -> None:
    """The real ``pytorch/optimizers``. Types of parameters that they ask for are empty: there is none here."""
    put_kernels(_COMPILED)
    dtypes = {"DType": SimpleNamespace(kFloat32=0, kFloat8E4M3=1)}
    vars(sys.modules[_COMPILED]).update(dtypes)
    te.put("transformer_engine.pytorch.constants", dtypes)
    te.put("transformer_engine.pytorch.quantized_tensor", {"QuantizedTensor": type("QuantizedTensor", (), {})})
    kinds = {name: type(name, (), {}) for name in ("Float8Tensor", "Float8Quantizer")}
    te.put("transformer_engine.pytorch.tensor.float8_tensor", kinds)
    load_package("transformer_engine.pytorch.optimizers", checkout / "transformer_engine/pytorch/optimizers")


def put_kernels(name: str) -> None:
    """Put kernels in torch under the name of the compiled ones."""
    from tests.support.te import fused_adam

    found = {each: value for each, value in vars(fused_adam).items() if each.startswith(("multi_tensor", "te_"))}
    te.put(name, found)
    sys.modules[name].__getattr__ = _anything  # type: ignore[method-assign]


def load_package(name: str, folder: Path) -> None:
    """Run the real one, whatever it is inside."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise FileNotFoundError(folder)
    sys.dont_write_bytecode = True  # nothing of ours stays in the checkout
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    parent, _, last = name.rpartition(".")
    setattr(sys.modules[parent], last, module)


def grouped_linear(checkout: Path) -> type:
    """The real ``GroupedLinear``, with all of the package that it imports, for computing without FP8."""
    sys.dont_write_bytecode = True
    with _aside(_COMPILED, "transformer_engine", *_ABSENT), _on_cpu():
        for name in _ABSENT:
            te.put(name, {})
            sys.modules[name].__getattr__ = _anything  # type: ignore[method-assign]
        for name in ("", ".common", ".pytorch", ".pytorch.module"):
            te.put(f"transformer_engine{name}", {})
            folder = checkout / f"transformer_engine{name}".replace(".", "/")
            sys.modules[f"transformer_engine{name}"].__path__ = [str(folder)]
        package: Any = sys.modules["transformer_engine.pytorch"]
        package.torch_version = lambda: tuple(map(int, torch.__version__.partition("+")[0].split(".")))
        put_kernels(_COMPILED)
        constants = (checkout / "transformer_engine/pytorch/constants.py").read_text()
        names = [f"k{name}" for name in (*_DTYPES, *_NEWER_DTYPES)]
        if "int(tex.DType." in constants:  # it wants no others than it has itself
            names = [name for name in names if f"tex.DType.{name})" in constants]
        sys.modules[_COMPILED].DType = enum.IntEnum("DType", names, start=0)  # type: ignore[attr-defined]
        if (checkout / "transformer_engine/pytorch/quantized_tensor.py").exists():
            importlib.import_module("transformer_engine.pytorch.tensor")  # first: the two import each other
        made: type = importlib.import_module("transformer_engine.pytorch.module.grouped_linear").GroupedLinear
    return made


@contextlib.contextmanager
def _aside(*packages: str) -> Iterator[None]:
    """Modules of ``packages`` that the block loads are unloaded after it."""

    def take() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in tops}

    tops = {package.split(".")[0] for package in packages}
    before = take()
    try:
        yield
    finally:
        take()
        sys.modules.update(before)


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    """Modules that are imported in it take their input where it is."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        spec = (
            importlib.machinery.PathFinder.find_spec(name, path) if name.startswith("transformer_engine.") else None
        )
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, _name: str) -> Any:
        return self.source_to_code(self.get_data(self.path).replace(b".is_cuda", b".is_cpu"), self.path)


class _Anything:
    """Decorators give back what they are given."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return _anything(name)

    def __index__(self) -> int:
        return 1

    def __getitem__(self, _key: Any) -> Any:
        return self

    def __or__(self, _other: Any) -> Any:
        return self

    def __mro_entries__(self, _bases: Any) -> tuple[type, ...]:
        return ()


def _anything(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything()
