"""Maps the tensors of each rank's files to boxes of logical tensors, as a specification describes their sharding.

spec = Spec.load("llama", {"kv_heads": 2})
placements = place(spec, [LocalTensor("decoder...weight", (96, 64), {"tp": 0, "pp": 1}), ...], vars(arguments))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from ftckpt.errors import SpecError
from ftckpt.model.fragment import Box, Shape
from ftckpt.universal.language.extents import Extent, consecutive, extents, extents_by_rank
from ftckpt.universal.language.patterns import Pattern, Value, evaluate, fill_template
from ftckpt.universal.language.spec import Cut, Matches, Rule, Spec

LAYER = "layer"
"""The capture that is a layer's number on its stage, to which ``offset`` is added."""
_USES_OFFSET = re.compile(r"\{[^{}]*\boffset\b[^{}]*\}")

Stage = tuple[int, int]
"""Model chunk and pipeline stage; sorted, they are in the order of layers."""
Coords = Mapping[str, int]


@dataclass(frozen=True)
class LocalTensor:
    """A tensor in a rank's file. ``coords`` are the rank's: ``tp``, ``pp``, ``vpp`` (model chunk), ``ep``, ``etp``,
    …, each from 0; an absent one is 0."""

    name: str
    shape: Shape
    coords: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class BoxMap:
    """A box ``local`` of a stored tensor, and the ``box`` of the logical tensor that it holds. ``box`` has the
    leading axes that ``stack`` adds, of size 1 each; otherwise both have the same shape."""

    local: Box
    box: Box


@dataclass(frozen=True)
class Placement:
    """The boxes of a stored tensor in the logical tensor ``name`` (without role) of ``shape``."""

    name: str
    shape: Shape
    boxes: tuple[BoxMap, ...]
    average: bool
    padded: bool

    def of_number(self, shape: Shape) -> tuple[Shape, Box]:
        """The shape of a tensor with one number per stored tensor of ``shape``, and the box of this one's number."""
        outer = len(self.shape) - len(shape)
        counts, at = (self.shape[:outer], self.boxes[0].box.offset[:outer]) if outer else ((1,), (0,))
        return counts, Box(at, (1,) * len(counts))


@dataclass(frozen=True)
class _Holder:
    """A stored tensor with its rule and the values that its name and rank give."""

    index: int
    tensor: LocalTensor
    rule: Rule
    values: Mapping[str, Value]
    name: str
    stack: tuple[int, ...]


def place(spec: Spec, stored: Sequence[LocalTensor], arguments: Mapping[str, Any]) -> tuple[Placement | None, ...]:
    """The placement of each of ``stored``, None if a rule drops it. ``stored`` must be complete.

    ``arguments``: those of the checkpoint, from which variables take their values.

    Raises:
        SpecError: no rule or several match a name, a rule matches nothing, a variable has no value, or shapes
            contradict their rule; the text names the tensor.
    """
    matches = spec.match((each.name for each in stored), arguments)
    variables = spec.values(arguments)
    sizes = _axis_sizes(stored)
    tensors: dict[tuple[str, tuple[int, ...]], list[_Holder]] = {}
    for holder in _named(matches, stored, variables):
        tensors.setdefault((holder.name, holder.stack), []).append(holder)
    stacks = _stacks(tensors)
    placements: list[Placement | None] = [None] * len(stored)
    for (name, stack), holders in tensors.items():
        try:
            _check_holders(holders, sizes)
            for holder, boxes, shape in _placed(holders, sizes, variables):
                leading, ones = stacks[name], (1,) * len(stack)
                stacked = (BoxMap(b.local, Box(stack + b.box.offset, ones + b.box.shape)) for b in boxes)
                average = holder.rule.kind == "average"
                placements[holder.index] = Placement(
                    name, leading + shape, tuple(stacked), average, holder.rule.padded
                )
        except SpecError as error:
            raise SpecError(
                f"{spec.origin}, rule {holders[0].rule.number}: {holders[0].tensor.name}: {error}"
            ) from None
    _check_shapes(spec, placements)
    return tuple(placements)


def _axis_sizes(stored: Iterable[LocalTensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for each in stored:
        for axis, coordinate in each.coords.items():
            sizes[axis] = max(sizes.get(axis, 1), coordinate + 1)
    return sizes


def _named(matches: Matches, stored: Sequence[LocalTensor], variables: Mapping[str, int]) -> Iterable[_Holder]:
    global_numbers = GlobalNumbers(matches, stored)
    for index, each in enumerate(stored):
        rule, pattern, captured = matches[each.name]
        if rule.kind == "drop":
            continue
        values: dict[str, Value] = {**each.coords, **captured}
        values |= global_numbers.of(rule, pattern, each.name, each.coords, captured)
        try:
            name = fill_template(rule.rename, values, variables) if rule.rename else each.name
            stack = tuple(evaluate(number, values, variables) for number in rule.stack)
        except SpecError as error:
            raise SpecError(f"rule {rule.number}: {each.name}: {error}") from None
        yield _Holder(index, each, rule, values, name, stack)


def _stacks(names: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Shape]:
    """The sizes of the leading axes of each logical tensor."""
    sizes: dict[str, Shape] = {}
    for name, stack in names:
        known = sizes.setdefault(name, tuple(number + 1 for number in stack))
        if len(known) != len(stack):
            raise SpecError(f"{name}: its rules stack over different numbers")
        sizes[name] = tuple(max(old, number + 1) for old, number in zip(known, stack, strict=True))
    return sizes


def _check_holders(holders: Sequence[_Holder], sizes: Mapping[str, int]) -> None:
    first = holders[0]
    seen: dict[tuple[tuple[str, int], ...], str] = {}
    for holder in holders:
        # Two rules with one logical name would define its elements twice.
        if holder.rule is not first.rule:
            raise SpecError(f"becomes {first.name}, and so does {holder.tensor.name} of rule {holder.rule.number}")
        coords = tuple(sorted(holder.tensor.coords.items()))
        if coords in seen:
            raise SpecError(f"{seen[coords]} and {holder.tensor.name} of {dict(coords)} both become {first.name}")
        seen[coords] = holder.tensor.name
    stages = sorted({stage_of(holder.tensor.coords) for holder in holders})
    # Layers that a rule does not number would become one tensor of several stages.
    if len(stages) > 1 and not first.rule.pipeline_replicated:
        named = ", ".join(str(stage[1]) for stage in stages)
        raise SpecError(f"pipeline stages {named} hold it; set pipeline_replicated if they may, or number the layers")
    if first.rule.kind == "unique" and len(holders) > 1:
        raise SpecError(f"is unique, but {len(holders)} files hold it")
    if first.rule.kind in ("replicated", "average"):
        axis = "etp" if first.rule.expert is not None and "etp" in sizes else "tp"
        absent = set(range(sizes.get(axis, 1))) - {holder.tensor.coords.get(axis, 0) for holder in holders}
        if absent:
            named = ", ".join(map(str, sorted(absent)))
            raise SpecError(
                f"is {first.rule.kind}, but {axis} rank {named} does not hold it; use unique if that is right"
            )


def _placed(
    holders: Sequence[_Holder], sizes: Mapping[str, int], variables: Mapping[str, int]
) -> Iterable[tuple[_Holder, list[BoxMap], Shape]]:
    """Each holder with its boxes and the logical shape, both without stacked axes."""
    dims = {len(holder.tensor.shape) for holder in holders}
    rule = holders[0].rule
    for cut in rule.cuts:
        if cut.dim >= min(dims):
            raise SpecError(f"has no dimension {cut.dim}; its shape is {holders[0].tensor.shape}")
    cuts = [(cut, _axis_of(cut, sizes)) for cut in rule.cuts]
    along = {cut.dim: _along(cut, axis, holders, sizes, variables) for cut, axis in cuts}
    axes = {cut.dim: axis for cut, axis in cuts}
    vocabulary = evaluate(rule.vocabulary, holders[0].values, variables) if rule.vocabulary is not None else None
    for holder in holders:
        ranges: list[Sequence[Extent]] = []
        shape: list[int] = []
        for dim, size in enumerate(holder.tensor.shape):
            if dim in along:
                ranks, whole = along[dim]
                ranges.append(ranks[holder.tensor.coords.get(axes[dim], 0)])
            else:
                ranges.append((Extent(0, 0, size),))
                whole = size
            shape.append(whole)
        yield holder, *_boxes(ranges, shape, vocabulary)


def place_parts(
    name: str, shapes: Sequence[Shape], dim: int, parts: Sequence[Sequence[int]], vocabulary: int | None
) -> list[Placement]:
    """The placement of each rank's part of a tensor that is sharded along ``dim``.

    ``parts``: sub-parameters, each by its size on every rank. ``vocabulary``: see ``padded_vocabulary``.

    Raises:
        SpecError: the shapes contradict the sizes.
    """
    others = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(others) > 1 or any(len(part) != len(shapes) for part in parts):
        raise SpecError(f"parts of sizes {list(map(list, parts))} do not make up shapes {list(shapes)}")
    ranks, whole = extents_by_rank(list(map(consecutive, parts)), [shape[dim] for shape in shapes])
    placements = []
    for local, own in zip(shapes, ranks, strict=True):
        ranges = [own if axis == dim else (Extent(0, 0, size),) for axis, size in enumerate(local)]
        boxes, shape = _boxes(ranges, [*local[:dim], whole, *local[dim + 1 :]], vocabulary)
        placements.append(Placement(name, shape, tuple(boxes), False, vocabulary is not None))
    return placements


def place_whole(name: str, shape: Shape, vocabulary: int | None = None) -> Placement:
    """The placement of a tensor that each rank holds completely; for ``vocabulary`` see ``padded_vocabulary``."""
    boxes, shape = _boxes([(Extent(0, 0, size),) for size in shape], shape, vocabulary)
    return Placement(name, shape, tuple(boxes), False, vocabulary is not None)


def _boxes(
    ranges: Sequence[Sequence[Extent]], shape: Sequence[int], vocabulary: int | None
) -> tuple[list[BoxMap], Shape]:
    """The boxes of a tensor's ``ranges`` by dimension, and its logical shape, without the padding of a vocabulary."""
    if vocabulary is not None:
        ranges, shape = [_without_padding(ranges[0], shape[0], vocabulary), *ranges[1:]], [vocabulary, *shape[1:]]
    return [_box_map(parts) for parts in product(*ranges)], tuple(shape)


def _axis_of(cut: Cut, sizes: Mapping[str, int]) -> str:
    """The axis of a cut: files without ``etp`` coordinates have as many expert tensor-parallel ranks as ``tp``."""
    return "tp" if cut.axis == "etp" and "etp" not in sizes else cut.axis


def _along(
    cut: Cut, axis: str, holders: Sequence[_Holder], sizes: Mapping[str, int], variables: Mapping[str, int]
) -> tuple[list[tuple[Extent, ...]], int]:
    rank_sizes: dict[int, int] = {}
    for holder in holders:
        rank, size = holder.tensor.coords.get(axis, 0), holder.tensor.shape[cut.dim]
        if rank_sizes.setdefault(rank, size) != size:
            raise SpecError(
                f"copies of {axis} rank {rank} differ in dimension {cut.dim}: {rank_sizes[rank]} and {size}"
            )
    return extents(cut, rank_sizes, sizes.get(axis, 1), holders[0].values, variables)


def _without_padding(parts: Sequence[Extent], rows: int, vocabulary: int) -> list[Extent]:
    """The extents without the rows that pad the vocabulary."""
    if not 0 < vocabulary <= rows:
        raise SpecError(f"has {rows} rows, fewer than the vocabulary of {vocabulary}")
    return [Extent(p.local, p.whole, min(p.size, vocabulary - p.whole)) for p in parts if p.whole < vocabulary]


def _box_map(parts: Sequence[Extent]) -> BoxMap:
    size = tuple(part.size for part in parts)
    return BoxMap(Box(tuple(part.local for part in parts), size), Box(tuple(part.whole for part in parts), size))


def _check_shapes(spec: Spec, placements: Iterable[Placement | None]) -> None:
    shapes: dict[str, Shape] = {}
    for placement in placements:
        if placement and shapes.setdefault(placement.name, placement.shape) != placement.shape:
            both = f"{shapes[placement.name]} and {placement.shape}"
            raise SpecError(f"{spec.origin}: {placement.name}: ranks that hold it disagree about its shape: {both}")


def stage_of(coords: Coords) -> Stage:
    """The stage of a rank."""
    return coords.get("vpp", 0), coords.get("pp", 0)


def uses_offset(rule: Rule) -> bool:
    """Whether the rule numbers layers across stages."""
    return bool(_USES_OFFSET.search(rule.rename))


class GlobalNumbers:
    """The ``offset`` of each stage's layers and the number of experts per rank, counted in the checkpoint."""

    def __init__(self, matches: Matches, tensors: Iterable[LocalTensor]) -> None:
        layers: dict[str, dict[Stage, set[int]]] = {}
        experts: dict[tuple[Stage, str], dict[int, set[int]]] = {}
        for name, coords in ((each.name, each.coords) for each in tensors):
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

    def of(
        self, rule: Rule, pattern: Pattern, name: str, coords: Coords, captured: Mapping[str, Value]
    ) -> dict[str, Value]:
        """``offset`` and the expert's global number, if the rule uses them."""
        numbers: dict[str, Value] = {}
        stage = stage_of(coords)
        if uses_offset(rule):
            numbers["offset"] = self._offsets[pattern.before(name, LAYER)][stage]
        if rule.expert is not None and rule.expert.local:
            number = _number(captured, rule.expert.number, rule, name)
            each = self._experts[stage, pattern.before(name, rule.expert.number)]
            numbers[rule.expert.number] = number + coords.get(rule.expert.axis, 0) * each
        return numbers


def _number(captured: Mapping[str, Value], what: str, rule: Rule, name: str) -> int:
    number = captured.get(what)
    if not isinstance(number, int):
        raise SpecError(f"rule {rule.number}: {name}: its pattern captures no number {what!r}")
    return number


def _offsets(family: str, stages: Mapping[Stage, set[int]]) -> dict[Stage, int]:
    offsets: dict[Stage, int] = {}
    total = 0
    # By chunk, then by stage: the order of layers in an interleaved pipeline.
    for stage in sorted(stages):
        _check_gapless(stages[stage], f"{family}N of pipeline stage {stage[1]}, chunk {stage[0]}")
        offsets[stage] = total
        total += len(stages[stage])
    return offsets


def _experts(family: str, ranks: Mapping[int, set[int]]) -> int:
    """The number of experts of each rank, the same on all."""
    for rank, numbers in ranks.items():
        _check_gapless(numbers, f"{family}N of expert rank {rank}")
    counts = {len(numbers) for numbers in ranks.values()}
    if len(counts) > 1:
        raise SpecError(f"{family}N: expert ranks hold {sorted(counts)} of them; they have to hold equally many")
    return counts.pop()


def _check_gapless(numbers: set[int], what: str) -> None:
    absent = set(range(max(numbers) + 1)) - numbers
    if absent:
        raise SpecError(
            f"{what}: {', '.join(map(str, sorted(absent)))} missing; numbers have to start at 0 on each rank"
        )
