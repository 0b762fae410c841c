"""The results of ``ftckpt check``: rows of its table and of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.errors import in_words

PASSED, WARNED, FAILED, SKIPPED = "passed", "warned", "failed", "skipped"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check. ``remedy`` is empty if it passed; names of ``figures`` end in their units."""

    area: str
    name: str
    state: str
    text: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Result(NamedTuple):
    """The outcome of a check's function; fields as in ``CheckResult``."""

    state: str
    text: str
    remedy: str = ""
    figures: Mapping[str, float] = {}


def passed(text: str, **figures: float) -> Result:
    return Result(PASSED, text, "", figures)


def warned(text: str, remedy: str, **figures: float) -> Result:
    return Result(WARNED, text, remedy, figures)


def failed(text: str, remedy: str, **figures: float) -> Result:
    return Result(FAILED, text, remedy, figures)


def skipped(text: str) -> Result:
    return Result(SKIPPED, text)


def attempt(area: str, name: str, check: Callable[[], Result]) -> CheckResult:
    """Runs one check; an exception is a failed check and does not stop the others."""
    try:
        return CheckResult(area, name, *check())
    except Exception as error:  # noqa: BLE001 - the user must see any error of a driver or a kernel
        return CheckResult(area, name, FAILED, in_words(error), "fix the cause, then check again")
