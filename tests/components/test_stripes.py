"""Stripes: every chunk in exactly one, no holder guards itself, any losses of members solvable, arithmetic exact."""

from __future__ import annotations

from itertools import combinations

from hypothesis import example, given
from hypothesis import strategies as st

from ftckpt.parity.groups import Member, ParityGroup
from ftckpt.parity.stripes import (
    Stripe,
    block_length,
    blocks_bytes,
    num_blocks,
    num_stripes,
    stripe,
    stripe_of_block,
    stripes,
)

CHUNK = 16


def group_of(code: str, losses: int, lengths: list[list[int]]) -> ParityGroup:
    members = [Member(f"s{i}", f"n{i}", f"a{i}", 3 * i, tuple(own)) for i, own in enumerate(lengths)]
    return ParityGroup.of("copy" if code == "mirror" else "peer", losses, CHUNK, members)


@st.composite
def drawn_groups(draw: st.DrawFn, most: int = 8) -> ParityGroup:
    members = draw(st.integers(2, most))
    code = draw(st.sampled_from(["xor", "rs", "mirror"]))
    losses = draw(st.integers(1, members - 1)) if code == "rs" else 1
    own = st.lists(st.integers(1, CHUNK), max_size=draw(st.sampled_from([0, 3, 40])))
    return group_of(code, losses, draw(st.lists(own, min_size=members, max_size=members)))


def brute(group: ParityGroup) -> list[Stripe]:
    """The stripes by the words of their definition: holders rotate, others hand in their next chunk."""
    members, losses = len(group.members), group.losses
    blocks = [0] * members
    found = []
    if group.code == "mirror":
        for member, own in enumerate(group.members):
            for chunk, nbytes in enumerate(own.lengths):
                found.append(Stripe(((member, chunk),), (((member + 1) % members, chunk),), nbytes))
        return found
    nexts = [0] * members
    while any(nexts[i] < len(own.lengths) for i, own in enumerate(group.members)):
        holders = [(len(found) + j) % members for j in range(losses)]
        data, longest = [], 0
        for member, own in enumerate(group.members):
            if member not in holders:
                there = nexts[member] < len(own.lengths)
                data.append((member, nexts[member] if there else -1))
                longest = max(longest, own.lengths[nexts[member]] if there else 0)
                nexts[member] += 1
        found.append(Stripe(tuple(data), tuple((holder, blocks[holder]) for holder in holders), longest))
        for holder in holders:
            blocks[holder] += 1
    return found


@given(drawn_groups())
@example(group_of("xor", 1, [[], []]))
@example(group_of("mirror", 1, [[], []]))
def test_closed_forms_equal_the_definition(group: ParityGroup) -> None:
    expected = brute(group)
    assert list(stripes(group)) == expected
    assert num_stripes(group) == len(expected)
    assert [stripe(group, index) for index in range(len(expected))] == expected
    for holder in range(len(group.members)):
        own = {b: (s, e.length) for s, e in enumerate(expected) for h, b in e.blocks if h == holder}
        assert sorted(own) == list(range(num_blocks(group, holder)))
        assert {b: (stripe_of_block(group, holder, b), block_length(group, holder, b)) for b in own} == own
        ends = [b * CHUNK + length for b, (_, length) in own.items() if length]
        assert blocks_bytes(group, holder) == max(ends, default=0)


@given(drawn_groups(most=6))
def test_any_losses_of_members_leave_every_stripe_solvable(group: ParityGroup) -> None:
    for lost in combinations(range(len(group.members)), group.losses):
        for found in stripes(group):
            unknown = sum(member in lost and chunk >= 0 for member, chunk in found.data)
            assert unknown <= sum(holder not in lost for holder, _ in found.blocks)


@given(st.integers(2, 8), st.integers(1, 7), st.integers(1, 60))
def test_parity_is_spread_evenly_and_as_small_as_can_be(members: int, losses: int, chunks: int) -> None:
    losses = min(losses, members - 1)
    group = group_of("rs", losses, [[CHUNK] * chunks] * members)
    held = [num_blocks(group, holder) for holder in range(members)]
    assert max(held) - min(held) <= losses
    assert max(held) <= -(-chunks * losses // (members - losses)) + losses
