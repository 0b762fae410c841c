"""The division of a dimension over ranks: the entries of each, in the stored and in the logical tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ftckpt.errors import SpecError
from ftckpt.universal.language.patterns import Value, evaluate
from ftckpt.universal.language.spec import Cut, SubParameter


class Extent(NamedTuple):
    """``size`` entries of a dimension, by their offsets in the stored and in the logical tensor."""

    local: int
    whole: int
    size: int


def extents(
    cut: Cut, sizes: Mapping[int, int], num: int, values: Mapping[str, Value], variables: Mapping[str, int]
) -> tuple[list[tuple[Extent, ...]], int]:
    """The extents of each of ``num`` ranks, and the logical size of the dimension.

    ``sizes``: the size on each rank, by coordinate.

    Raises:
        SpecError: the sizes contradict the rule.
    """
    absent = [rank for rank in range(num) if rank not in sizes]
    if absent:
        raise SpecError(f"{cut.axis} rank {', '.join(map(str, absent))} does not hold it")
    counts = [sizes[rank] for rank in range(num)]
    if not cut.uneven and not any(part.unit is not None for part in cut.parts) and len(set(counts)) > 1:
        raise SpecError(f"the ranks of {cut.axis} hold {counts} in dimension {cut.dim}; set uneven: true if they may")
    parts = [_widths(part, cut, counts, values, variables) for part in cut.parts]
    return extents_by_rank(parts or [consecutive(counts)], counts)


class AxisPart(NamedTuple):
    """A sub-parameter: its logical size, and the first and last (exclusive) entry of each rank."""

    width: int
    ranges: list[tuple[int, int]]


def extents_by_rank(parts: Sequence[AxisPart], sizes: Sequence[int]) -> tuple[list[tuple[Extent, ...]], int]:
    """The extents of each rank, which holds ``sizes`` entries of all ``parts``, and the size of all.

    Raises:
        SpecError: a rank's parts are not as large as what it holds.
    """
    ranks: list[tuple[Extent, ...]] = []
    for rank, size in enumerate(sizes):
        local = whole = 0
        extents = []
        for part in parts:
            first, last = part.ranges[rank]
            if last > first:
                extents.append(Extent(local, whole + first, last - first))
            local += last - first
            whole += part.width
        if local != size:
            raise SpecError(f"its parts make up {local} of the {size} entries of rank {rank}")
        ranks.append(tuple(extents))
    return ranks, sum(part.width for part in parts)


def _widths(
    part: SubParameter, cut: Cut, sizes: Sequence[int], values: Mapping[str, Value], variables: Mapping[str, int]
) -> AxisPart:
    num = len(sizes)
    if part.width is None:
        if any(size % len(cut.parts) for size in sizes):
            raise SpecError(f"{len(cut.parts)} equal parts do not divide the sizes {list(sizes)}")
        return consecutive([size // len(cut.parts) for size in sizes])
    width = evaluate(part.width, values, variables)
    unit = evaluate(part.unit, values, variables) if part.unit is not None else 0
    if unit:
        return _by_units(part.name, width, unit, num)
    if width < 0 or width % num:
        raise SpecError(
            f"part {part.name}: width {width} does not divide over {num} ranks of {cut.axis}; give a unit"
        )
    return consecutive([width // num] * num)


def _by_units(name: str, width: int, unit: int, num: int) -> AxisPart:
    units, rest = divmod(width, unit) if unit > 0 else (0, 1)
    if rest or units < 1:
        raise SpecError(f"part {name}: width {width} is no multiple of the unit {unit}")
    if units >= num:
        # If units do not divide evenly, the first ranks have one more.
        return consecutive([(units // num + (rank < units % num)) * unit for rank in range(num)])
    if num % units:
        raise SpecError(f"part {name}: {num} ranks cannot share {units} units evenly")
    # Fewer units than ranks, as in grouped-query attention: neighbours hold the same unit.
    first = [rank * units // num * unit for rank in range(num)]
    return AxisPart(width, [(begin, begin + unit) for begin in first])


def consecutive(widths: Sequence[int]) -> AxisPart:
    """The part of which each rank holds the entries after those of the rank before it."""
    ends = list(accumulate(widths, initial=0))
    return AxisPart(ends[-1], list(pairwise(ends)))
