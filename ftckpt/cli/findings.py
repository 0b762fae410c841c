"""What ``ftckpt check`` finds: rows of its table, and of its JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.errors import in_words

PASSED, WARNED, FAILED, SKIPPED = "passed", "warned", "failed", "skipped"


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at. ``remedy`` is there unless it passed; ``figures`` are what was measured, with
    their units in their names."""

    area: str
    name: str
    state: str
    text: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Result(NamedTuple):
    """The outcome of one look; fields as in ``CheckResult``."""

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


def attempt(area: str, name: str, look: Callable[[], Result]) -> CheckResult:
    """What ``look`` finds; what it raises is a failure of that one thing, and others are looked at all the same."""
    try:
        return CheckResult(area, name, *look())
    except Exception as error:  # noqa: BLE001 - whatever a driver or a kernel says is what the user must see
        return CheckResult(area, name, FAILED, in_words(error), "mend what it says, then check again")
