"""The conformance suite on a real CUDA or ROCm device: real frameworks that train there, killed and brought back.

One rank over NCCL or RCCL; several ranks share the device, which these refuse, and talk over gloo. DeepSpeed chooses
its accelerator when the pool's server imports it: with DS_ACCELERATOR=cuda its cases run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.conformance.suite import CHECKS, Suite
from tests.support.real_device import needs_device

pytestmark = [*needs_device, pytest.mark.multiproc, pytest.mark.faults]
FRAMEWORKS = {"megatron": "megatron", "plain": "torch", "deepspeed": "deepspeed"}


def on_device(framework: str, configuration: str, ranks: int) -> Any:
    """An adapter of ``tests.support.adapters`` whose job runs on the device, with so many ranks."""
    adapters = importlib.import_module(f"tests.support.adapters.{framework}").ADAPTERS
    adapter = next(one for one in adapters if one.configuration == configuration)
    pool = {"on_device": True, "backend": "cpu:gloo,cuda:nccl" if ranks == 1 else "gloo"}
    return replace(adapter, ranks=ranks, pool=pool)


CASES = (
    ("megatron", "dp2-fp32", 1), ("megatron", "dp2-fp16", 1), ("megatron", "dp2-fp16", 2),
    ("megatron", "ep2", 2), ("megatron", "tp2pp2", 4),
    ("plain", "none", 1), ("plain", "ddp", 3), ("plain", "fsdp2", 2),
    ("deepspeed", "zero1", 1), ("deepspeed", "zero2", 1), ("deepspeed", "zero3", 1),
    ("deepspeed", "offload", 1), ("deepspeed", "bf16", 2), ("deepspeed", "pp2dp2", 4),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_conforms_on_the_device(case: tuple[str, str, int], arena_root: Path) -> None:
    framework = case[0]
    if importlib.util.find_spec(FRAMEWORKS[framework]) is None:
        pytest.skip(f"{framework} is not installed")
    if framework == "deepspeed" and os.environ.get("DS_ACCELERATOR") != "cuda":
        pytest.skip("DeepSpeed trains on the CPU here: set DS_ACCELERATOR=cuda")
    suite, failures = Suite(on_device(*case), arena_root), dict[str, str]()
    for name in CHECKS:
        try:
            suite.check(name)
        except Exception as error:  # noqa: BLE001 - all of a case at once: its jobs serve several checks
            failures[name] = str(error)[-2000:]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
