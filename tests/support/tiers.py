"""Selects the cases of a table that run by default: those that guard what others do not. Others are ``slow``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def by_default(cases: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """``cases`` for ``parametrize``, in their order; those that are not ``quick`` are in the slow tier. A case of
    several arguments is a tuple.

    Raises:
        ValueError: ``quick`` names a case that is not there.
    """
    cases, quick = list(cases), list(quick)
    if strange := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases: {strange}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
