"""Compares the logs of a probe's runs: to the last digit, or within rounding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from math import inf, isfinite

Lines = dict[str, set[str]]
"""A log without times: by ``iteration 3/ 9`` or the like, every line about it."""

_ROUNDED = {
    "lm loss": 1.0,
    "lm loss value": 1.0,
    "lm loss PPL": 10.0,
    "grad norm": 20.0,
    "params norm": 1.0,
    "norm": 20.0,
}
"""How many times farther off than a loss each may be: of norms of gradients three digits are logged."""
_COUNTED = "num zeros"
"""Whether an element's gradient is exactly zero depends on the rounding of sums."""
_LOSS = re.compile(r"lm loss: (\d\S+)")
_LAST_DIGIT = 1e-6
_ITERATION = re.compile(r"iteration +(\d+)")


def iteration_of(key: str) -> int:
    """The iteration that lines of this key are about."""
    match = _ITERATION.search(key)
    return int(match[1]) if match else 0


def after(lines: Lines, iteration: int) -> Lines:
    """The lines of later iterations."""
    return {key: set(rows) for key, rows in lines.items() if iteration_of(key) > iteration}


def resumed(lines: Lines, iteration: int) -> Lines:
    """The lines that Megatron-LM logs where it starts after ``iteration``, if it logs each iteration.

    It logs the first one and continues the sum: the loss that it logs for the second is the mean of both.
    """
    later = after(lines, iteration)
    trained = {iteration_of(key): key for key in later if key.startswith("iteration")}
    first, second = (trained.get(iteration + more) for more in (1, 2))
    if first is not None and second is not None:
        later[second] = {row for one in later[first] for other in later[second] for row in _means(one, other)}
    return later


def _means(first: str, second: str) -> Iterator[str]:
    """The second line with the mean of both losses, which the logged digits determine up to one in the last."""
    first_loss, second_loss = _LOSS.search(first), _LOSS.search(second)
    if first_loss is None or second_loss is None:
        return
    mean = (float(first_loss[1]) + float(second_loss[1])) / 2
    for off in (-_LAST_DIGIT, 0.0, _LAST_DIGIT):
        yield _LOSS.sub(f"lm loss: {mean + off:.6E}", second)


def join(lines: Lines, more: Lines) -> None:
    """Add what another run logged."""
    for key, rows in more.items():
        lines[key] = lines.get(key, set()) | rows


def compare(expected: Lines, actual: Lines, rounding: float = 0.0) -> tuple[int, list[str]]:
    """The number of iterations or evaluations with only expected lines, and all other lines.

    ``rounding``: by how much losses may differ, as a part of their size, and norms in proportion; all else is equal.
    """

    def fits(key: str) -> bool:
        rows, right = actual.get(key, set()), expected.get(key, set())
        return bool(rows) and (rows <= right or (rounding > 0 and all(_off(row, right) <= rounding for row in rows)))

    wrong = [key for key in {**expected, **actual} if not fits(key)]
    shown = [
        f"{sign} {row}"
        for key in wrong
        for sign, side in (("-", expected), ("+", actual))
        for row in side.get(key, ())
    ]
    return len(expected.keys() - set(wrong)), shown


def farthest(expected: Lines, actual: Lines) -> float:
    """The least ``rounding`` with which all lines fit."""
    return max((_off(row, expected.get(key, ())) for key, rows in actual.items() for row in rows), default=0.0)


def _off(row: str, expected: Iterable[str]) -> float:
    """How far a line is from the nearest of those that are expected; infinitely where more than rounding differs."""
    return min((_between(row, other) for other in expected), default=inf)


def _number(text: str) -> float:
    return float.fromhex(text) if "0x" in text else float(text)


def _between(one: str, other: str) -> float:
    if one == other:
        return 0.0
    off = 0.0
    for field, wanted in zip_longest(one.split("|"), other.split("|"), fillvalue=""):
        name, _, value = field.strip().partition(": ")
        wanted_name, _, wanted_value = wanted.strip().partition(": ")
        if name == wanted_name and name in _ROUNDED:
            found, right = _number(value), _number(wanted_value)
            between = abs(found - right) / (abs(right) or 1.0) / _ROUNDED[name]
            off = max(off, between if isfinite(between) else inf)
        elif field.strip() != wanted.strip() and not (name == wanted_name == _COUNTED):
            return inf
    return off
