"""Geometry for checkpoints that carry none: tensors as files hold them, and a specification → boxes of whole tensors.

spec = Spec.load("llama", {"kv_heads": 2})
placements = place(spec, [Stored("decoder...weight", (96, 64), {"tp": 0, "pp": 1}), ...], vars(arguments))
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ftckpt.errors import SpecError
from ftckpt.state.fragment import Box, Fragment, Shape
from ftckpt.universal.language.cuts import Extent, extents
from ftckpt.universal.language.numbering import Numbering, stage_of
from ftckpt.universal.language.patterns import Value, evaluate, fill_template
from ftckpt.universal.language.rules import Cut, Rule
from ftckpt.universal.language.spec import Matches, Spec

_EXPRESSION = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True)
class Stored:
    """One tensor as one file holds it. ``coords`` are the file's: ``tp``, ``pp``, ``vpp`` (model chunk), ``ep``,
    ``etp``, …, each from 0; what is absent is 0."""

    name: str
    shape: Shape
    coords: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """A box of a stored tensor and the box of the whole tensor that it is. ``box`` has the leading axes that
    ``stack`` adds, of size 1 each; otherwise both have the same shape."""

    local: Box
    box: Box

    def within(self, shape: Shape, start: int, stop: int) -> tuple[int, int]:
        """Which elements of this box, in its own row-major order, the range ``start`` to ``stop`` of the stored
        tensor of ``shape``, flattened, holds. They are as consecutive as those are."""
        first, last = (_before(shape, self.local, position) for position in (start, stop))
        return first, last


@dataclass(frozen=True)
class Placement:
    """Where a stored tensor lies: in the logical tensor ``name`` (without role) of ``shape``."""

    name: str
    shape: Shape
    spans: tuple[Span, ...]
    average: bool
    padded: bool

    def fragments(self, role: str, dtype: str) -> tuple[Fragment, ...]:
        """One whole fragment for each span, of ``ROLE/NAME``."""
        return tuple(Fragment.whole(f"{role}/{self.name}", dtype, self.shape, span.box) for span in self.spans)


@dataclass(frozen=True)
class _Held:
    """A stored tensor with what its name says."""

    index: int
    stored: Stored
    rule: Rule
    values: Mapping[str, Value]
    name: str
    stack: tuple[int, ...]


def place(spec: Spec, stored: Sequence[Stored], arguments: Mapping[str, Any]) -> tuple[Placement | None, ...]:
    """Where each of ``stored`` lies, None for what a rule drops. ``stored`` has to be all that the checkpoint holds.

    ``arguments``: the checkpoint's own, from which variables take their values.

    Raises:
        SpecError: a name that no rule or several match, a rule that nothing matches, a variable without a value, or
            shapes that do not fit their rule; the text names the tensor.
    """
    matches = spec.match((each.name for each in stored), arguments)
    variables = spec.values(arguments)
    sizes = _axis_sizes(stored)
    slots: dict[tuple[str, tuple[int, ...]], list[_Held]] = {}
    for held in _named(matches, stored, sizes, variables):
        slots.setdefault((held.name, held.stack), []).append(held)
    stacks = _stacks(slots)
    placements: list[Placement | None] = [None] * len(stored)
    for (name, stack), holders in slots.items():
        try:
            _check_holders(holders, sizes)
            for held, spans, shape in _placed(holders, sizes, variables):
                leading = stacks[name]
                moved = [Span(s.local, Box(stack + s.box.offset, (1,) * len(stack) + s.box.shape)) for s in spans]
                average = held.rule.kind == "average"
                placements[held.index] = Placement(name, leading + shape, tuple(moved), average, held.rule.padded)
        except SpecError as error:
            raise SpecError(
                f"{spec.origin}, rule {holders[0].rule.number}: {holders[0].stored.name}: {error}"
            ) from None
    _check_shapes(spec, placements)
    return tuple(placements)


def _axis_sizes(stored: Iterable[Stored]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for each in stored:
        for axis, coordinate in each.coords.items():
            sizes[axis] = max(sizes.get(axis, 1), coordinate + 1)
    return sizes


def _named(
    matches: Matches, stored: Sequence[Stored], sizes: Mapping[str, int], variables: Mapping[str, int]
) -> Iterable[_Held]:
    numbering = Numbering(matches, ((each.name, each.coords) for each in stored), sizes)
    for index, each in enumerate(stored):
        rule, pattern, captured = matches[each.name]
        if rule.kind == "drop":
            continue
        values: dict[str, Value] = {**each.coords, **captured}
        values |= numbering.numbers(rule, pattern, each.name, each.coords, captured)
        try:
            name = fill_template(rule.rename, values, variables) if rule.rename else each.name
            stack = tuple(evaluate(number, values, variables) for number in rule.stack)
        except SpecError as error:
            raise SpecError(f"rule {rule.number}: {each.name}: {error}") from None
        yield _Held(index, each, rule, values, name, stack)


def _stacks(slots: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Shape]:
    """The sizes of the leading axes of each logical tensor."""
    sizes: dict[str, Shape] = {}
    for name, stack in slots:
        known = sizes.setdefault(name, tuple(number + 1 for number in stack))
        if len(known) != len(stack):
            raise SpecError(f"{name}: its rules stack over different numbers")
        sizes[name] = tuple(max(old, number + 1) for old, number in zip(known, stack, strict=True))
    return sizes


def _check_holders(holders: Sequence[_Held], sizes: Mapping[str, int]) -> None:
    first = holders[0]
    seen: dict[tuple[tuple[str, int], ...], str] = {}
    for held in holders:
        if held.rule is not first.rule:
            raise SpecError(f"becomes {first.name}, and so does {held.stored.name} of rule {held.rule.number}")
        coords = tuple(sorted(held.stored.coords.items()))
        if coords in seen:
            raise SpecError(f"{seen[coords]} and {held.stored.name} of {dict(coords)} both become {first.name}")
        seen[coords] = held.stored.name
    stages = sorted({stage_of(held.stored.coords) for held in holders})
    if len(stages) > 1 and not first.rule.pipeline_replicated:
        told = ", ".join(str(stage[1]) for stage in stages)
        raise SpecError(f"pipeline stages {told} hold it; say pipeline_replicated if they may, or number the layers")
    if first.rule.kind == "unique" and len(holders) > 1:
        raise SpecError(f"is unique, but {len(holders)} files hold it")
    if first.rule.kind in ("replicated", "average"):
        axis = "etp" if first.rule.expert is not None and "etp" in sizes else "tp"
        absent = set(range(sizes.get(axis, 1))) - {held.stored.coords.get(axis, 0) for held in holders}
        if absent:
            told = ", ".join(map(str, sorted(absent)))
            raise SpecError(
                f"is {first.rule.kind}, but {axis} rank {told} does not hold it; say unique if that is right"
            )


def _placed(
    holders: Sequence[_Held], sizes: Mapping[str, int], variables: Mapping[str, int]
) -> Iterable[tuple[_Held, list[Span], Shape]]:
    """Each holder with its spans and the whole shape, without stacked axes."""
    dims = {len(held.stored.shape) for held in holders}
    rule = holders[0].rule
    for cut in rule.cuts:
        if cut.dim >= min(dims):
            raise SpecError(f"has no dimension {cut.dim}; its shape is {holders[0].stored.shape}")
    cuts = [(cut, _axis_of(cut, sizes)) for cut in rule.cuts]
    along = {cut.dim: _along(cut, axis, holders, sizes, variables) for cut, axis in cuts}
    axes = {cut.dim: axis for cut, axis in cuts}
    kept = evaluate(rule.vocabulary, holders[0].values, variables) if rule.vocabulary is not None else None
    for held in holders:
        ranges: list[Sequence[Extent]] = []
        shape: list[int] = []
        for dim, size in enumerate(held.stored.shape):
            if dim in along:
                ranks, whole = along[dim]
                ranges.append(ranks[held.stored.coords.get(axes[dim], 0)])
            else:
                ranges.append((Extent(0, 0, size),))
                whole = size
            shape.append(whole)
        if kept is not None:
            ranges[0], shape[0] = _kept(ranges[0], shape[0], kept), kept
        yield held, [_span(parts) for parts in product(*ranges)], tuple(shape)


def _axis_of(cut: Cut, sizes: Mapping[str, int]) -> str:
    """Files that do not tell expert tensor parallelism apart have as much of it as of the other."""
    return "tp" if cut.axis == "etp" and "etp" not in sizes else cut.axis


def _along(
    cut: Cut, axis: str, holders: Sequence[_Held], sizes: Mapping[str, int], variables: Mapping[str, int]
) -> tuple[list[tuple[Extent, ...]], int]:
    held_sizes: dict[int, int] = {}
    for held in holders:
        rank, size = held.stored.coords.get(axis, 0), held.stored.shape[cut.dim]
        if held_sizes.setdefault(rank, size) != size:
            raise SpecError(
                f"copies of {axis} rank {rank} differ in dimension {cut.dim}: {held_sizes[rank]} and {size}"
            )
    return extents(cut, held_sizes, sizes.get(axis, 1), holders[0].values, variables)


def _kept(parts: Sequence[Extent], rows: int, kept: int) -> list[Extent]:
    """Without the rows that fill up a vocabulary."""
    if not 0 < kept <= rows:
        raise SpecError(f"has {rows} rows, fewer than the vocabulary of {kept}")
    return [Extent(p.local, p.whole, min(p.size, kept - p.whole)) for p in parts if p.whole < kept]


def _span(parts: Sequence[Extent]) -> Span:
    size = tuple(part.size for part in parts)
    return Span(Box(tuple(part.local for part in parts), size), Box(tuple(part.whole for part in parts), size))


def _check_shapes(spec: Spec, placements: Iterable[Placement | None]) -> None:
    shapes: dict[str, Shape] = {}
    for placement in placements:
        if placement and shapes.setdefault(placement.name, placement.shape) != placement.shape:
            told = f"{shapes[placement.name]} and {placement.shape}"
            raise SpecError(f"{spec.origin}: {placement.name}: ranks that hold it disagree about its shape: {told}")


def _before(shape: Shape, box: Box, position: int) -> int:
    """Number of elements of ``box`` whose flat position in an array of ``shape`` is less than ``position``."""
    if position >= math.prod(shape):
        return box.numel
    count, rest = 0, position
    for dim in range(len(shape)):
        at, rest = divmod(rest, math.prod(shape[dim + 1 :]))
        inner = math.prod(box.shape[dim + 1 :])
        inside = at - box.offset[dim]
        if not 0 <= inside < box.shape[dim]:
            return count + (0 if inside < 0 else box.shape[dim] * inner)
        count += inside * inner
    return count
