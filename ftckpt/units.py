"""How users write sizes and counts: ``4GiB``, ``34b``."""

from __future__ import annotations

import re
from collections.abc import Mapping

_AMOUNT = re.compile(r"([0-9.]+)\s*([a-z]+)", re.IGNORECASE)
_BYTES = {f"{letter}{suffix}": 1024**power for power, letter in enumerate("kmgt", 1) for suffix in ("", "ib", "b")}
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def sized(text: str, unit_bytes: int) -> float:
    """``4GiB``, ``512 MiB`` or ``2g``, each by 1024, in units of ``unit_bytes``, which a number alone is in.

    Raises:
        ValueError: it is none of these.
    """
    number, factor = _parts(text, _BYTES)
    return number if factor is None else number * factor / unit_bytes


def counted(text: str) -> float:
    """``34b``, ``175B``, ``1.5t`` or ``34e9``.

    Raises:
        ValueError: it is none of these.
    """
    number, factor = _parts(text, _COUNTS)
    return number if factor is None else number * factor


def _parts(text: str, units: Mapping[str, float]) -> tuple[float, float | None]:
    """The number, and what its unit stands for, if it has one."""
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return float(text), None
    if found[2].lower() not in units:
        raise ValueError(f"{text!r} has no unit that is known")
    return float(found[1]), units[found[2].lower()]
