"""Parsing of sizes, rates, times and counts: ``64MiB``, ``16Gbit/s``, ``40h``, ``34b``."""

from __future__ import annotations

import math
import re

_AMOUNT = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z/]*)", re.IGNORECASE)
_BYTES = re.compile(r"([kKMGT]?)(i?)(B|bit)")  # without a lowercase b, which may mean bits
_SECS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def size(text: str) -> int:
    """Parses a size in bytes: ``64MiB`` (powers of 1024) or ``64MB`` (powers of 1000); ``0`` needs no unit.

    Raises:
        ValueError: it is not a size; the message has an example.
    """
    return round(_in_bytes(text, "", "400GiB or 64MB"))


def rate(text: str) -> float:
    """Parses a rate in bytes per second: ``2GB/s``, ``500MiB/s`` or ``16Gbit/s``; ``0`` needs no unit.

    Raises:
        ValueError: it is not a rate; the message has an example.
    """
    return _in_bytes(text, "/s", "2GB/s or 16Gbit/s")


def seconds(text: str) -> float:
    """Parses a time in seconds: ``500ms``, ``90s``, ``5min``, ``40h`` or ``7d``.

    Raises:
        ValueError: it is not a time; the message has an example.
    """
    number, unit = _parts(text)
    if unit not in _SECS:
        raise ValueError(f"{text!r} is not a time with its unit, such as 90s or 40h")
    return number * _SECS[unit]


def counted(text: str) -> float:
    """Parses a count: ``34b``, ``175B``, ``1.5t`` or ``34e9``.

    Raises:
        ValueError: it is not a count.
    """
    number, unit = _parts(text)
    return number * _COUNTS[unit.lower()] if unit.lower() in _COUNTS else float(text)


def in_words(bytes_per_sec: float) -> str:
    """Formats a rate for ``rate``, with four digits."""
    power = min(4, max(0, int(math.log10(bytes_per_sec)) // 3)) if bytes_per_sec >= 1 else 0
    return f"{bytes_per_sec / 1000**power:.4g}{('', 'k', 'M', 'G', 'T')[power]}B/s"


def _in_bytes(text: str, per: str, example: str) -> float:
    """Parses a number of bytes whose unit ends with ``per``."""
    number, unit = _parts(text)
    if number == 0 and not unit:
        return 0.0
    found = _BYTES.fullmatch(unit.removesuffix(per)) if unit.endswith(per) else None
    if found is None or (found[3] == "bit" and not per):
        raise ValueError(f"{text!r} is not a {'rate' if per else 'size'} with its unit, such as {example}")
    factor = float(1024 if found[2] else 1000) ** " KMGT".index(found[1].upper() or " ")
    return number * factor * (1 if found[3] == "bit" else 8) / 8


def _parts(text: str) -> tuple[float, str]:
    """The number and its unit; nan if it is not a number."""
    found = _AMOUNT.fullmatch(text.strip())
    return (float(found[1]), found[2]) if found is not None else (math.nan, "")
