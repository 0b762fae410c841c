"""Layers and experts that each rank numbers from 0, numbered through all ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ftckpt.errors import SpecError
from ftckpt.universal.language.patterns import Pattern, Value
from ftckpt.universal.language.rules import Rule

LAYER = "layer"
"""The capture that is a layer's number, which ``offset`` belongs to."""
_USES_OFFSET = re.compile(r"\{[^{}]*\boffset\b[^{}]*\}")

Stage = tuple[int, int]
"""Model chunk and pipeline stage: in this order layers follow each other."""
Coords = Mapping[str, int]
Matches = Mapping[str, tuple[Rule, Pattern, Mapping[str, Value]]]


def stage_of(coords: Coords) -> Stage:
    """The stage of a file."""
    return coords.get("vpp", 0), coords.get("pp", 0)


def uses_offset(rule: Rule) -> bool:
    """Whether the rule numbers layers through the stages."""
    return bool(_USES_OFFSET.search(rule.rename))


class Numbering:
    """What ``offset`` is for each stage, counted from the layers that stages hold, and the experts of each rank."""

    def __init__(self, matches: Matches, stored: Iterable[tuple[str, Coords]], sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        layers: dict[str, dict[Stage, set[int]]] = {}
        experts: dict[tuple[Stage, str], dict[int, set[int]]] = {}
        for name, coords in stored:
            rule, pattern, captured = matches[name]
            stage = stage_of(coords)
            if uses_offset(rule):
                number = _number(captured, LAYER, rule, name)
                layers.setdefault(pattern.before(name, LAYER), {}).setdefault(stage, set()).add(number)
            if rule.expert is not None and rule.expert.local:
                number = _number(captured, rule.expert.number, rule, name)
                family = (stage, pattern.before(name, rule.expert.number))
                ranks = experts.setdefault(family, {})
                ranks.setdefault(coords.get(rule.expert.axis, 0), set()).add(number)
        self._offsets = {family: _offsets(family, stages) for family, stages in layers.items()}
        self._experts = {family: _experts(family[1], ranks) for family, ranks in experts.items()}

    def numbers(
        self, rule: Rule, pattern: Pattern, name: str, coords: Coords, captured: Mapping[str, Value]
    ) -> dict[str, Value]:
        """``offset`` and the expert's number among all, where the rule asks for them."""
        found: dict[str, Value] = {}
        stage = stage_of(coords)
        if uses_offset(rule):
            found["offset"] = self._offsets[pattern.before(name, LAYER)][stage]
        if rule.expert is not None and rule.expert.local:
            number = _number(captured, rule.expert.number, rule, name)
            each = self._experts[stage, pattern.before(name, rule.expert.number)]
            found[rule.expert.number] = number + coords.get(rule.expert.axis, 0) * each
        return found


def _number(captured: Mapping[str, Value], what: str, rule: Rule, name: str) -> int:
    number = captured.get(what)
    if not isinstance(number, int):
        raise SpecError(f"rule {rule.number}: {name}: its pattern captures no number {what!r}")
    return number


def _offsets(family: str, stages: Mapping[Stage, set[int]]) -> dict[Stage, int]:
    offsets: dict[Stage, int] = {}
    total = 0
    for stage in sorted(stages):
        _check_gapless(stages[stage], f"{family}N of pipeline stage {stage[1]}, chunk {stage[0]}")
        offsets[stage] = total
        total += len(stages[stage])
    return offsets


def _experts(family: str, ranks: Mapping[int, set[int]]) -> int:
    """How many each rank has."""
    for rank, numbers in ranks.items():
        _check_gapless(numbers, f"{family}N of expert rank {rank}")
    counts = {len(numbers) for numbers in ranks.values()}
    if len(counts) > 1:
        raise SpecError(f"{family}N: expert ranks hold {sorted(counts)} of them; they have to hold as many each")
    return counts.pop()


def _check_gapless(numbers: set[int], what: str) -> None:
    absent = set(range(max(numbers) + 1)) - numbers
    if absent:
        raise SpecError(
            f"{what}: {', '.join(map(str, sorted(absent)))} missing; numbers have to begin at 0 on each rank"
        )
