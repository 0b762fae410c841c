"""The conformance suite on a real CUDA or ROCm device: real frameworks train there, are killed and restart.

One rank over NCCL or RCCL; several ranks share the device, which these refuse, and talk over gloo. DeepSpeed chooses
its accelerator when the pool's server imports it: with DS_ACCELERATOR=cuda its cases run.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.real_device import needs_device
from tests.integrations.adapters import ADAPTERS, Adapter
from tests.integrations.conformance import CHECKS, Suite

pytestmark = [*needs_device, pytest.mark.multiproc, pytest.mark.faults]


def on_device(framework: str, configuration: str, ranks: int) -> Adapter:
    """An adapter whose job runs on the device, with so many ranks."""
    found = [one for one in ADAPTERS if (one.framework, one.configuration) == (framework, configuration)]
    if not found:
        pytest.skip(f"{framework} is not installed")
    pool = {"on_device": True, "backend": "cpu:gloo,cuda:nccl" if ranks == 1 else "gloo"}
    return replace(found[0], ranks=ranks, pool=pool)


CASES = (
    ("megatron", "dp2-fp32", 1), ("megatron", "dp2-fp16", 1), ("megatron", "dp2-fp16", 2),
    ("megatron", "ep2", 2), ("megatron", "tp2pp2", 4),
    ("plain", "none", 1), ("plain", "ddp", 3), ("plain", "fsdp2", 2),
    ("deepspeed", "zero1", 1), ("deepspeed", "zero2", 1), ("deepspeed", "zero3", 1),
    ("deepspeed", "offload", 1), ("deepspeed", "bf16", 2), ("deepspeed", "pp2dp2", 4),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_conforms_on_the_device(case: tuple[str, str, int], arena_root: Path) -> None:
    if case[0] == "deepspeed" and os.environ.get("DS_ACCELERATOR") != "cuda":
        pytest.skip("DeepSpeed trains on the CPU here: set DS_ACCELERATOR=cuda")
    suite, failures = Suite(on_device(*case), arena_root), dict[str, str]()
    for name in CHECKS:
        try:
            suite.check(name)
        except Exception as error:  # noqa: BLE001 - all of a case at once: its jobs serve several checks
            failures[name] = str(error)[-2000:]
    assert not failures, "\n".join(f"{name}: {text}" for name, text in failures.items())
