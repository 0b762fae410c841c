"""How one dimension of a tensor is cut over ranks: sub-parameters, heads, uneven sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from ftckpt.errors import SpecError
from ftckpt.universal.language.patterns import Value, evaluate
from ftckpt.universal.language.rules import Cut, SubParameter


class Extent(NamedTuple):
    """``size`` entries of a dimension: where they lie in the stored tensor, and where in the whole one."""

    local: int
    whole: int
    size: int


def extents(
    cut: Cut, sizes: Mapping[int, int], num: int, values: Mapping[str, Value], variables: Mapping[str, int]
) -> tuple[list[tuple[Extent, ...]], int]:
    """For each of ``num`` ranks the extents of its part, and the size of the whole dimension.

    ``sizes``: what each rank has, by its coordinate; a rank may be absent only where the rule says that it has
    nothing.

    Raises:
        SpecError: the sizes do not fit the rule.
    """
    said = [evaluate(size, values, variables) for size in cut.sizes]
    if said and len(said) != num:
        raise SpecError(f"uneven lists {len(said)} sizes; there are {num} ranks of {cut.axis}")
    absent = [rank for rank in range(num) if rank not in sizes and not (said and said[rank] == 0)]
    if absent:
        raise SpecError(f"{cut.axis} rank {', '.join(map(str, absent))} does not hold it")
    found = [sizes.get(rank, 0) for rank in range(num)]
    if said and found != said:
        raise SpecError(f"uneven says sizes {said}; the ranks of {cut.axis} hold {found}")
    if not cut.uneven and not any(part.unit is not None for part in cut.parts) and len(set(found)) > 1:
        raise SpecError(f"the ranks of {cut.axis} hold {found} in dimension {cut.dim}; say uneven: true if they may")
    if not cut.parts:
        ends = list(accumulate(found, initial=0))
        return [(Extent(0, ends[rank], found[rank]),) if found[rank] else () for rank in range(num)], ends[-1]
    owned = [_widths(part, cut, found, values, variables) for part in cut.parts]
    return _laid_out(owned, found)


class _Part(NamedTuple):
    width: int
    """Of the whole sub-parameter."""
    ranges: list[tuple[int, int]]
    """First and last (exclusive) entry of each rank."""


def _laid_out(parts: Sequence[_Part], sizes: Sequence[int]) -> tuple[list[tuple[Extent, ...]], int]:
    ranks: list[tuple[Extent, ...]] = []
    for rank, size in enumerate(sizes):
        local = whole = 0
        held = []
        for part in parts:
            first, last = part.ranges[rank]
            if last > first:
                held.append(Extent(local, whole + first, last - first))
            local += last - first
            whole += part.width
        if local != size:
            raise SpecError(f"its parts make up {local} of the {size} entries of rank {rank}")
        ranks.append(tuple(held))
    return ranks, sum(part.width for part in parts)


def _widths(
    part: SubParameter, cut: Cut, sizes: Sequence[int], values: Mapping[str, Value], variables: Mapping[str, int]
) -> _Part:
    num = len(sizes)
    if part.width is None:
        shares = [evaluate(other.share, values, variables) for other in cut.parts]
        share, total = evaluate(part.share, values, variables), sum(shares)
        if min(shares) < 0 or total <= 0 or any(size * share % total for size in sizes):
            raise SpecError(f"part {part.name}: share {share} of {total} does not divide the sizes {list(sizes)}")
        return _consecutive([size * share // total for size in sizes])
    width = evaluate(part.width, values, variables)
    unit = evaluate(part.unit, values, variables) if part.unit is not None else 0
    if unit:
        return _by_units(part.name, width, unit, num)
    if width < 0 or width % num:
        raise SpecError(
            f"part {part.name}: width {width} does not divide over {num} ranks of {cut.axis}; give a unit"
        )
    return _consecutive([width // num] * num)


def _by_units(name: str, width: int, unit: int, num: int) -> _Part:
    units, rest = divmod(width, unit) if unit > 0 else (0, 1)
    if rest or units < 1:
        raise SpecError(f"part {name}: width {width} is no multiple of the unit {unit}")
    if units >= num:
        return _consecutive([(units // num + (rank < units % num)) * unit for rank in range(num)])
    if num % units:
        raise SpecError(f"part {name}: {num} ranks cannot share {units} units evenly")
    first = [rank * units // num * unit for rank in range(num)]
    return _Part(width, [(begin, begin + unit) for begin in first])


def _consecutive(widths: Sequence[int]) -> _Part:
    ends = list(accumulate(widths, initial=0))
    return _Part(ends[-1], list(pairwise(ends)))
