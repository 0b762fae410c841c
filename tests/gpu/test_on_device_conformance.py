"""The conformance suite on a real CUDA or ROCm device: real frameworks that train there, killed and brought back.

One rank over NCCL or RCCL; several ranks share the device, which these refuse, and talk over gloo. DeepSpeed chooses
its accelerator when the pool's server imports it: with DS_ACCELERATOR=cuda its cases run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance.suite import CHECKS, Suite
from tests.support.real_device import needs_device

pytestmark = [*needs_device, pytest.mark.multiproc, pytest.mark.faults]
FRAMEWORKS = {"megatron": "megatron", "plain": "torch", "deepspeed": "deepspeed"}


@dataclass(frozen=True)
class OnDevice:
    """An adapter of ``tests.support.adapters`` whose job runs on the device, with as many ranks as are named."""

    framework: str
    configuration: str
    ranks: int

    @property
    def _adapter(self) -> Any:
        adapters = importlib.import_module(f"tests.support.adapters.{self.framework}").ADAPTERS
        return next(one for one in adapters if one.configuration == self.configuration)

    @property
    def masters(self) -> bool:
        return bool(self._adapter.masters)

    @property
    def pool(self) -> Mapping[str, Any]:
        return {"on_device": True, "backend": "cpu:gloo,cuda:nccl" if self.ranks == 1 else "gloo"}

    def build(self) -> Any:
        return self._adapter.build()


CASES = (
    OnDevice("megatron", "dp2-fp32", 1), OnDevice("megatron", "dp2-fp16", 1), OnDevice("megatron", "dp2-fp16", 2),
    OnDevice("megatron", "ep2", 2), OnDevice("megatron", "tp2pp2", 4),
    OnDevice("plain", "none", 1), OnDevice("plain", "ddp", 3), OnDevice("plain", "fsdp2", 2),
    OnDevice("deepspeed", "zero1", 1), OnDevice("deepspeed", "zero2", 1), OnDevice("deepspeed", "zero3", 1),
    OnDevice("deepspeed", "offload", 1), OnDevice("deepspeed", "bf16", 2), OnDevice("deepspeed", "pp2dp2", 4),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda one: f"{one.framework}-{one.configuration}-{one.ranks}")
def test_conforms_on_the_device(case: OnDevice, arena_root: Path) -> None:
    if importlib.util.find_spec(FRAMEWORKS[case.framework]) is None:
        pytest.skip(f"{case.framework} is not installed")
    if case.framework == "deepspeed" and os.environ.get("DS_ACCELERATOR") != "cuda":
        pytest.skip("DeepSpeed trains on the CPU here: set DS_ACCELERATOR=cuda")
    suite, failures = Suite(case, arena_root), dict[str, str]()
    for name in CHECKS:
        try:
            suite.check(name)
        except Exception as error:  # noqa: BLE001 - all of a case at once: its jobs serve several checks
            failures[name] = str(error)[-2000:]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
