"""Every integration in every configuration, one suite. ``-k conformance -v`` prints the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.adapters import ADAPTERS
from tests.integrations.conformance import CHECKS, Suite
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

CASES = {f"{a.framework}-{a.configuration}-{check}": (a, check) for a in ADAPTERS for check in CHECKS}
VARIANTS = {
    "megatron": ("dp2-fp16", "dp2-fp32", "ep2"),
    "plain": ("none", "ddp", "ddp-fp16-sgd", "fsdp2-bf16", "hsdp"),
    "deepspeed": (
        *("zero0", "bf16", "fp16", "bf16-optimizer", "zero1", "zero2"),
        *("zero3-four", "offload", "moe", "2x2x2"),
    ),
}
"""Configurations that take the way of another one, in the slow tier."""
HOOKS = ("deepspeed-bf16-hooks", "deepspeed-bf16-optimizer-hooks", "deepspeed-zero1-hooks")
"""Optimizers that are fenced elsewhere."""
QUICK = [case for case, (a, _) in CASES.items() if case in HOOKS or a.configuration not in VARIANTS[a.framework]]


@pytest.fixture(scope="module")
def suite_of(module_root: Path) -> Callable[[Any], Suite]:
    """One suite per adapter, so that its checks share jobs."""
    suites: dict[Any, Suite] = {}

    def suite(adapter: Any) -> Suite:
        if adapter not in suites:
            folder = module_root / f"{adapter.framework}-{adapter.configuration}"
            folder.mkdir(parents=True)
            suites[adapter] = Suite(adapter, folder)
        return suites[adapter]

    return suite


@pytest.mark.parametrize("case", by_default(CASES, QUICK))
def test_conformance(case: str, suite_of: Callable[[Any], Suite]) -> None:
    adapter, check = CASES[case]
    suite_of(adapter).check(check)
