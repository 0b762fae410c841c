"""Lets Megatron-DeepSpeed's script train on CPU ranks, and log exact numbers; for the probe alone.

Python imports a module of this name from PYTHONPATH by itself, in each process that it starts.

* Of modules that are not there (of transformers, torchvision, an older DeepSpeed) it imports names, and calls none.
* Its attention calls ``view()`` on slices, which are contiguous on a GPU alone.
* Only the first rank of a tensor group has data loaders, and ``iter(DataLoader)`` draws from what is the device's
  generator on a CPU: afterwards dropout would differ within the group.
* gloo's threads may abort an interpreter that ends with process groups.
* Losses are logged with seven digits and norms with three: ``bits at iteration`` has all of them.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_EMPTY = {
    "transformers": ("AutoTokenizer",),
    "megatron.model.vision.knn_monitor": ("compute_feature_bank",),
    "deepspeed.compression.compress": ("init_compression", "redundancy_clean"),
}


class _Watch(importlib.abc.MetaPathFinder):
    """Lets the other finders find a module, and changes it once it has been executed."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._changes or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute, change, loader = spec.loader.exec_module, self._changes[fullname], spec.loader

            def exec_module(module: ModuleType) -> None:
                execute(module)
                change(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _let_slices_be_viewed(transformer: Any) -> None:
    attend = transformer.CoreAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return attend(self, query.contiguous(), key.contiguous(), value.contiguous(), *rest)

    transformer.CoreAttention.forward = forward


def _stand_in(training: Any) -> None:
    build, log = training.build_train_valid_test_data_iterators, training.training_log

    @functools.wraps(build)
    def build_and_keep_generator(*args: Any) -> Any:
        state = training.torch.get_rng_state()
        made = build(*args)
        training.torch.set_rng_state(state)
        return made

    @functools.wraps(log)
    def log_bits(losses: Any, sums: Any, rate: float, iteration: int, *args: Any) -> Any:
        engine = args[6]
        norm = engine[0].get_global_grad_norm()
        values = {**{name: float(loss) for name, loss in losses.items()}, "learning rate": rate}
        values["norm"] = -1.0 if norm is None else float(norm)
        exact = " | ".join(f"{name}: {value.hex()}" for name, value in values.items())
        training.print_rank_last(f"bits at iteration {iteration} | {exact}")
        return log(losses, sums, rate, iteration, *args)

    training.build_train_valid_test_data_iterators, training.training_log = build_and_keep_generator, log_bits


def _end_groups() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


if "LOCAL_WORLD_SIZE" in os.environ:  # of ranks, and of the server that they are forked from
    for name, functions in _EMPTY.items():
        sys.modules[name] = empty = ModuleType(name)
        vars(empty).update(dict.fromkeys(functions))
    changes = {"megatron.model.transformer": _let_slices_be_viewed, "megatron.training": _stand_in}
    sys.meta_path.insert(0, _Watch(changes))
    atexit.register(_end_groups)
