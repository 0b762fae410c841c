"""Who has which elements × who needs which elements → what to read: geometry alone.

Every needed element is read exactly once, from the cheapest source that has it. Restoring the same layout
is the case in which boxes coincide and each read is one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ftckpt.errors import LostError
from ftckpt.restore.blocks import Block, Region, block_of, common, joined, regions_of, run, without
from ftckpt.restore.index import Have, Index
from ftckpt.state.fragment import Fragment

__all__ = ["Have", "Index", "Read", "overlap", "plan"]

Interval = tuple[int, int]


@dataclass(frozen=True)
class Read:
    """Elements to copy from one have into the need of that index; ``blocks`` are of elements, and disjoint."""

    have: Have
    need: int
    blocks: tuple[Block, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that this read moves."""
        return sum(block.numel for block in self.blocks) * self.have.fragment.item_bytes


def plan(
    haves: Iterable[Have] | Index,
    needs: Sequence[Fragment],
    cost: Callable[[int], int],
    padded: frozenset[str] = frozenset(),
    turn: int = 0,
) -> list[Read]:
    """Reads that fill every element of every need exactly once, in the order of the needs.

    ``cost(source)`` orders the sources: cheaper ones are taken first. Of those that cost the same, the one that this
    plan has read the fewest bytes from; where that is the same too, in the order given, beginning with the
    ``turn``-th: ranks that plan alike and pass their own number do not all go to the same one.

    Haves of another global shape than the need's are not used. The exception are ``padded`` keys, whose dimension 0
    may differ: rows that both have are read, those that no source has are not needed.

    Raises:
        LostError: some element is in no source; the text names the tensors.
    """
    index = haves if isinstance(haves, Index) else Index(haves)
    costs: dict[int, int] = {}
    taken: dict[int, int] = {}

    def rank(have: Have, place: int, count: int) -> tuple[int, int, int]:
        source = have.source
        if source not in costs:
            costs[source] = cost(source)
        return costs[source], taken.get(source, 0), (place - turn) % count

    reads: list[Read] = []
    missing: list[str] = []
    for number, need in enumerate(needs):
        last_row, found = _candidates(index, need, need.key in padded)
        ranks = {id(have): rank(have, place, len(found)) for place, have in enumerate(found)}
        found.sort(key=lambda have: ranks[id(have)])
        filled, complete = _fill(need, found, last_row)
        for have, blocks in filled:
            read = Read(have, number, blocks)
            reads.append(read)
            taken[have.source] = taken.get(have.source, 0) + read.nbytes
        if not complete:
            missing.append(need.name)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise LostError(f"no source holds all of {', '.join(missing[:3])}{more}")
    return reads


def overlap(have: Fragment, need: Fragment) -> tuple[Block, ...]:
    """The elements that both fragments hold, as copies from the one's memory into the other's.

    Global shapes must be the same, or differ in dimension 0 alone.
    """
    found, _ = _fill(need, [Have(0, have, 0)], None)
    return found[0][1] if found else ()


def _candidates(index: Index, need: Fragment, padded: bool) -> tuple[int | None, list[Have]]:
    """The first row that is not needed (None: all are), and the haves that may hold something of ``need``."""
    usable = index.usable(need, padded)
    found = [have for alike in usable for have in alike.touching(need)]
    if not padded or not usable or not need.global_shape:
        return None, found
    return max(alike.kind.shape[0] for alike in usable), found


Filled = list[tuple[Have, tuple[Block, ...]]]


def _fill(need: Fragment, haves: Sequence[Have], last_row: int | None) -> tuple[Filled, bool]:
    """What to read from each have, in the order of ``haves``, and whether that is all of ``need``."""
    if all(_flat_alike(have.fragment, need) for have in haves):
        return _fill_flat(need, haves, last_row)
    left = regions_of(need)
    if last_row is not None:
        above = Region((0,) * len(need.global_shape), (last_row, *need.global_shape[1:]))
        left = [kept for region in left if (kept := common(region, above)) is not None]
    filled: Filled = []
    for have in haves:
        if not left:
            break
        left, shared = _take(left, regions_of(have.fragment))
        if shared:
            blocks = [block_of(region, have.fragment, need) for region in shared]
            filled.append((have, joined(blocks)))
    return filled, not left


def _take(left: list[Region], held: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """What remains of the disjoint boxes ``left`` without the disjoint boxes ``held``, and what they share."""
    shared: list[Region] = []
    for taken in held:
        rest: list[Region] = []
        for region in left:
            both = common(region, taken)
            if both is None:
                rest.append(region)
            else:
                shared.append(both)
                rest += without(region, both)
        left = rest
    return left, shared


def _flat_alike(have: Fragment, need: Fragment) -> bool:
    """Whether the two boxes differ in dimension 0 alone: then what they share is one run of each."""
    one, other = have.box, need.box
    return one.shape[1:] == other.shape[1:] and one.offset[1:] == other.offset[1:]


def _fill_flat(need: Fragment, haves: Sequence[Have], last_row: int | None) -> tuple[Filled, bool]:
    begin, end = _interval(need)
    left = [(begin, end)]
    if last_row is not None:
        left = [(begin, min(end, last_row * math.prod(need.box.shape[1:])))]
    left = [(lo, hi) for lo, hi in left if lo < hi]
    filled: Filled = []
    for have in haves:
        if not left:
            break
        start, stop = _interval(have.fragment)
        rest: list[Interval] = []
        blocks: list[Block] = []
        for lo, hi in left:
            first, last = max(lo, start), min(hi, stop)
            if first >= last:
                rest.append((lo, hi))
                continue
            blocks.append(run(first - start, first - begin, last - first))
            rest += [part for part in ((lo, first), (last, hi)) if part[0] < part[1]]
        left = rest
        if blocks:
            filled.append((have, tuple(blocks)))
    return filled, not left


def _interval(fragment: Fragment) -> Interval:
    """The fragment's range counted from the first row of the tensor, in rows of its own box."""
    offset = fragment.box.offset
    above = offset[0] * math.prod(fragment.box.shape[1:]) if offset else 0
    return above + fragment.start, above + fragment.stop
