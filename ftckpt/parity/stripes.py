"""The geometry of a parity group: which chunks a stripe joins and where its blocks lie. Pure arithmetic.

``xor`` and ``rs`` with N members and m blocks: the holders of stripe s are members (s + j) mod N for j < m, and every
other member contributes its next chunk. Each member contributes to N - m of any N stripes in a row.
``mirror``: each chunk is a stripe of its own, with a block at the member behind its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from ftckpt.parity.groups import ParityGroup


@dataclass(frozen=True, slots=True)
class Stripe:
    """Chunks and the blocks computed from them.

    ``data`` are pairs of member index and chunk, counted from the member's first; chunk -1: the member has none here
    and counts as zeros. ``blocks[j]``, parity row j, is a pair of the holder's member index and the block's index
    among those of the holder. ``length`` is that of the longest chunk and of the blocks, in bytes.
    """

    data: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    length: int


def num_stripes(group: ParityGroup) -> int:
    """How many stripes hold all chunks of all members."""
    if group.code == "mirror":
        return group.chunk_ends[-1]
    known: dict[str, int] = vars(group)  # past the frozen dataclass, as cached_property does: each stripe needs it
    if "_num_stripes" not in known:
        sizes = [len(member.lengths) for member in group.members]
        last = [stripe_of(group, index, size - 1) for index, size in enumerate(sizes) if size]
        known["_num_stripes"] = max(last, default=-1) + 1
    return known["_num_stripes"]


def stripe_of(group: ParityGroup, member: int, chunk: int) -> int:
    """The stripe of a member's chunk; raises IndexError if the member has no such chunk."""
    if not 0 <= chunk < len(group.members[member].lengths):
        raise IndexError(f"parity group {group.name}: member {member} has no chunk {chunk}")
    if group.code == "mirror":
        return _begin(group, member) + chunk
    members, losses = len(group.members), group.losses
    # In each period of ``members`` stripes a member contributes to all but the ``losses`` whose holder it is.
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
    """How many blocks member ``holder`` has."""
    if group.code == "mirror":
        return len(group.members[holder - 1].lengths)
    return _blocks_before(num_stripes(group), holder, len(group.members), group.losses)


def stripe_of_block(group: ParityGroup, holder: int, block: int) -> int:
    """The stripe of a holder's block; raises IndexError if it has no such block."""
    if not 0 <= block < num_blocks(group, holder):
        raise IndexError(f"parity group {group.name}: member {holder} has no block {block}")
    if group.code == "mirror":
        return _begin(group, holder - 1) + block
    members, losses = len(group.members), group.losses
    # The stripes of a period whose holder it is, ascending: its blocks are numbered in the order of stripes.
    periods, rest = divmod(block, losses)
    return periods * members + sorted((holder - row) % members for row in range(losses))[rest]


def block_length(group: ParityGroup, holder: int, block: int) -> int:
    """Bytes of a holder's block: those of the longest chunk of its stripe; 0 where the stripe has none."""
    return _stripe(group, stripe_of_block(group, holder, block)).length


def blocks_bytes(group: ParityGroup, holder: int) -> int:
    """End of a holder's last block, if block b begins at b * chunk_bytes; 0 where it has none with any bytes."""
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
            # Also without a chunk: coefficients count the places of contributing members, which must not shift.
            data.append((member, chunk if chunk < len(lengths) else -1))
    rows = [(index + row) % members for row in range(losses)]
    return Stripe(tuple(data), tuple((h, _blocks_before(index, h, members, losses)) for h in rows), length)


def _blocks_before(index: int, member: int, members: int, losses: int) -> int:
    """Stripes before ``index`` of which ``member`` is a holder."""
    periods, rest = divmod(index, members)
    # In a period it is holder of ``losses`` stripes in a row up to number ``member``; where the first is below 0 the
    # row goes around: to the front of the period up to ``member``, and to its end.
    first = member - losses + 1
    if first >= 0:
        return periods * losses + min(max(rest - first, 0), losses)
    return periods * losses + min(rest, member + 1) + max(rest - members - first, 0)


def _own_before(member: int, rest: int, members: int, losses: int) -> int:
    """Stripes of a period whose holder ``member`` is, before the one with its chunk ``rest`` of that period."""
    first = member - losses + 1
    if first < 0:
        return member + 1
    # Chunks before the row of its stripes come first, those behind it skip the whole row.
    return losses if rest >= first else 0


def _begin(group: ParityGroup, member: int) -> int:
    return group.chunk_ends[member] - len(group.members[member].lengths)
