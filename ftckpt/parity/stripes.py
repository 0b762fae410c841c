"""The geometry of a parity group: the chunks of each stripe and the holders of its blocks. Pure arithmetic.

``xor`` and ``rs`` with N members and m blocks: the holders of stripe s are members (s + j) mod N for j < m, and every
other member contributes its next chunk. Each member contributes to N - m of any N consecutive stripes.
``mirror``: each chunk is a stripe of its own, and the next member holds its block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ftckpt.parity.groups import ParityGroup


@dataclass(frozen=True, slots=True)
class Stripe:
    """Chunks and the parity blocks computed from them.

    ``data``: pairs of member index and chunk, counted from the member's first; chunk -1: the member has no chunk left
    and counts as zeros. ``blocks[j]``, parity row j: the holder's member index and the block's index among the
    holder's blocks. ``length``: bytes of the longest chunk and of each block.
    """

    data: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    length: int


def num_stripes(group: ParityGroup) -> int:
    """The number of stripes of all members' chunks."""
    if group.code == "mirror":
        return group.chunk_ends[-1]
    known: dict[str, int] = vars(group)  # cached in the frozen dataclass, as cached_property does it
    if "_num_stripes" not in known:
        sizes = [len(member.lengths) for member in group.members]
        last = [stripe_of(group, index, size - 1) for index, size in enumerate(sizes) if size]
        known["_num_stripes"] = max(last, default=-1) + 1
    return known["_num_stripes"]


def stripe_of(group: ParityGroup, member: int, chunk: int) -> int:
    """The stripe index of a member's chunk; raises IndexError if the member has no such chunk."""
    if not 0 <= chunk < len(group.members[member].lengths):
        raise IndexError(f"parity group {group.name}: member {member} has no chunk {chunk}")
    if group.code == "mirror":
        return _begin(group, member) + chunk
    members, losses = len(group.members), group.losses
    # In each period of ``members`` stripes a member contributes to all but the ``losses`` that it is a holder of.
    periods, rest = divmod(chunk, members - losses)
    return periods * members + rest + _own_before(member, rest, members, losses)


def stripe(group: ParityGroup, index: int) -> Stripe:
    """The stripe ``index``; raises IndexError if there is none."""
    if not 0 <= index < num_stripes(group):
        raise IndexError(f"parity group {group.name}: no stripe {index}")
    return _stripe(group, index)


def stripes(group: ParityGroup) -> Iterator[Stripe]:
    for index in range(num_stripes(group)):
        yield _stripe(group, index)


def num_blocks(group: ParityGroup, holder: int) -> int:
    """The number of blocks of member ``holder``."""
    if group.code == "mirror":
        return len(group.members[holder - 1].lengths)
    return _blocks_before(num_stripes(group), holder, len(group.members), group.losses)


def stripe_of_block(group: ParityGroup, holder: int, block: int) -> int:
    """The stripe index of a holder's block; raises IndexError if it has no such block."""
    if not 0 <= block < num_blocks(group, holder):
        raise IndexError(f"parity group {group.name}: member {holder} has no block {block}")
    if group.code == "mirror":
        return _begin(group, holder - 1) + block
    members, losses = len(group.members), group.losses
    # Blocks are numbered in stripe order: sort the stripes of a period that it is a holder of.
    periods, rest = divmod(block, losses)
    return periods * members + sorted((holder - row) % members for row in range(losses))[rest]


def block_length(group: ParityGroup, holder: int, block: int) -> int:
    """Bytes of a holder's block, equal to the longest chunk of its stripe; 0 if the stripe has no chunks."""
    return _stripe(group, stripe_of_block(group, holder, block)).length


def blocks_bytes(group: ParityGroup, holder: int) -> int:
    """End of a holder's last non-empty block if block b starts at b * chunk_bytes; 0 if all are empty."""
    for block in range(num_blocks(group, holder) - 1, -1, -1):
        length = block_length(group, holder, block)
        if length:
            return block * group.chunk_bytes + length
    return 0


def _stripe(group: ParityGroup, index: int) -> Stripe:
    members, losses = len(group.members), group.losses
    if group.code == "mirror":
        member = bisect_right(group.chunk_ends, index)
        chunk = index - _begin(group, member)
        return Stripe(((member, chunk),), (((member + 1) % members, chunk),), group.members[member].lengths[chunk])
    data, length = [], 0
    for member in range(members):
        if (member - index) % members >= losses:
            lengths = group.members[member].lengths
            chunk = index - _blocks_before(index, member, members, losses)
            if chunk < len(lengths):
                length = max(length, lengths[chunk])
            # Appended without a chunk too: coefficients depend on the position among contributing members.
            data.append((member, chunk if chunk < len(lengths) else -1))
    rows = [(index + row) % members for row in range(losses)]
    return Stripe(tuple(data), tuple((h, _blocks_before(index, h, members, losses)) for h in rows), length)


def _blocks_before(index: int, member: int, members: int, losses: int) -> int:
    """The number of stripes before ``index`` that ``member`` is a holder of."""
    periods, rest = divmod(index, members)
    # In a period it is a holder of ``losses`` consecutive stripes up to number ``member``. If the first is below 0
    # they wrap around: to the start of the period up to ``member``, and to its end.
    first = member - losses + 1
    if first >= 0:
        return periods * losses + min(max(rest - first, 0), losses)
    return periods * losses + min(rest, member + 1) + max(rest - members - first, 0)


def _own_before(member: int, rest: int, members: int, losses: int) -> int:
    """The number of a period's stripes that ``member`` is a holder of before the stripe with its chunk ``rest``."""
    first = member - losses + 1
    if first < 0:
        return member + 1
    # Chunks before these consecutive stripes skip none of them, later chunks skip all.
    return losses if rest >= first else 0


def _begin(group: ParityGroup, member: int) -> int:
    return group.chunk_ends[member] - len(group.members[member].lengths)
