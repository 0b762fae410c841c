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
from ftckpt.model.fragment import Fragment
from ftckpt.model.text import listed
from ftckpt.restore.blocks import Block, Region, block_of, common, joined, regions_of, run, without
from ftckpt.restore.index import Index, Offer

Interval = tuple[int, int]


@dataclass(frozen=True)
class ReadItem:
    """Elements to copy from one offer into the need of that index; ``blocks`` are of elements, and disjoint."""

    offer: Offer
    need: int
    blocks: tuple[Block, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes that this read moves."""
        return sum(block.numel for block in self.blocks) * self.offer.fragment.item_bytes


def plan(
    offers: Iterable[Offer] | Index,
    needs: Sequence[Fragment],
    cost: Callable[[int], int],
    padded: frozenset[str] = frozenset(),
    turn: int = 0,
) -> list[ReadItem]:
    """Reads that fill every element of every need exactly once, in the order of the needs.

    ``cost(source)`` orders the sources: cheaper ones are taken first. Of those that cost the same, the one that this
    plan has read the fewest bytes from; where that is the same too, in the order given, beginning with the
    ``turn``-th: ranks that plan alike and pass their own number do not all go to the same one.

    Offers of another global shape than the need's are not used. The exception are ``padded`` keys, whose dimension 0
    may differ: rows that both have are read, those that no source has are not needed.

    Raises:
        LostError: some element is in no source; the text names the tensors.
    """
    index = offers if isinstance(offers, Index) else Index(offers)
    costs: dict[int, int] = {}
    taken: dict[int, int] = {}

    def rank(offer: Offer, place: int, count: int) -> tuple[int, int, int]:
        source = offer.source
        if source not in costs:
            costs[source] = cost(source)
        return costs[source], taken.get(source, 0), (place - turn) % count

    reads: list[ReadItem] = []
    missing: list[str] = []
    for number, need in enumerate(needs):
        last_row, useful = _useful(index, need, need.key in padded)
        ranks = {id(offer): rank(offer, place, len(useful)) for place, offer in enumerate(useful)}
        useful.sort(key=lambda offer: ranks[id(offer)])
        filled, complete = _fill(need, useful, last_row)
        for offer, blocks in filled:
            read = ReadItem(offer, number, blocks)
            reads.append(read)
            taken[offer.source] = taken.get(offer.source, 0) + read.nbytes
        if not complete:
            missing.append(need.name)
    if missing:
        raise LostError(f"no source holds all of {listed(missing)}")
    return reads


def overlap(have: Fragment, need: Fragment) -> tuple[Block, ...]:
    """The elements that both fragments hold, as copies from the one's memory into the other's.

    Global shapes must be the same, or differ in dimension 0 alone.
    """
    filled, _ = _fill(need, [Offer(0, have, 0)], None)
    return filled[0][1] if filled else ()


def _useful(index: Index, need: Fragment, padded: bool) -> tuple[int | None, list[Offer]]:
    """The first row that is not needed (None: all are), and the offers that may hold something of ``need``."""
    usable = index.usable(need, padded)
    useful = [offer for offers in usable for offer in offers.touching(need)]
    if not padded or not usable or not need.global_shape:
        return None, useful
    return max(offers.tensor.shape[0] for offers in usable), useful


Filled = list[tuple[Offer, tuple[Block, ...]]]


def _fill(need: Fragment, offers: Sequence[Offer], last_row: int | None) -> tuple[Filled, bool]:
    """What to read from each offer, in the order of ``offers``, and whether that is all of ``need``."""
    if all(_flat_alike(offer.fragment, need) for offer in offers):
        return _fill_flat(need, offers, last_row)
    left = regions_of(need)
    if last_row is not None:
        above = Region((0,) * len(need.global_shape), (last_row, *need.global_shape[1:]))
        left = [needed for region in left if (needed := common(region, above)) is not None]
    filled: Filled = []
    for offer in offers:
        if not left:
            break
        left, shared = _take(left, regions_of(offer.fragment))
        if shared:
            blocks = [block_of(region, offer.fragment, need) for region in shared]
            filled.append((offer, joined(blocks)))
    return filled, not left


def _take(left: list[Region], offered: Sequence[Region]) -> tuple[list[Region], list[Region]]:
    """What remains of the disjoint boxes ``left`` without the disjoint boxes ``offered``, and what they share."""
    shared: list[Region] = []
    for taken in offered:
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


def _fill_flat(need: Fragment, offers: Sequence[Offer], last_row: int | None) -> tuple[Filled, bool]:
    begin, end = _interval(need)
    left = [(begin, end)]
    if last_row is not None:
        left = [(begin, min(end, last_row * math.prod(need.box.shape[1:])))]
    left = [(lo, hi) for lo, hi in left if lo < hi]
    filled: Filled = []
    for offer in offers:
        if not left:
            break
        start, stop = _interval(offer.fragment)
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
            filled.append((offer, tuple(blocks)))
    return filled, not left


def _interval(fragment: Fragment) -> Interval:
    """The fragment's range counted from the first row of the tensor, in rows of its own box."""
    offset = fragment.box.offset
    above = offset[0] * math.prod(fragment.box.shape[1:]) if offset else 0
    return above + fragment.start, above + fragment.stop
