"""The rotating sample of replicas: its coverage, what it detects, and how the words of all ranks are compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture.sample import SAMPLE_BYTES, ends_of, num_positions, reduced, slices
from ftckpt.model.replicas import CUT_BYTES
from ftckpt.model.sampled import Comparison, SampleOutcome, position_of
from ftckpt.session.replica_check import ReplicaTrust


@given(st.lists(st.integers(0, 1 << 24), max_size=12), st.integers(1, 40))
def test_the_positions_cover_every_byte_exactly_once(sizes: list[int], positions: int) -> None:
    covered = [0] * len(sizes)
    for position in range(positions):
        for one in slices(ends_of(sizes), position, positions):
            assert one.begin == covered[one.piece]
            assert one.begin % CUT_BYTES == 0 and (one.end % CUT_BYTES == 0 or one.end == sizes[one.piece])
            covered[one.piece] = one.end
    assert covered == sizes


@given(st.integers(0, 1 << 40), st.integers(1, 5000))
def test_a_sample_is_small_and_the_positions_no_more_than_the_limit(largest: int, limit: int) -> None:
    positions = num_positions(largest, 0, limit)
    assert 1 <= positions <= max(1, limit - 1)
    assert positions >= limit - 1 or -(-largest // positions) <= SAMPLE_BYTES


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
def test_no_rhythm_of_skipped_snapshots_leaves_a_position_out(positions: int, every: int, begin: int) -> None:
    in_a_row = range(begin, begin + positions + 1)
    assert {position_of(number, positions) for number in in_a_row} == set(range(positions))
    taken = range(begin, begin + 16 * every * positions * positions, every)
    assert {position_of(number, positions) for number in taken} == set(range(positions))


@given(st.data())
def test_the_members_of_each_set_are_compared_and_no_others(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    ranks = st.sets(st.integers(0, num_ranks - 1), min_size=1)
    sets = data.draw(st.lists(ranks, max_size=5))
    members = [np.array(sorted(one), np.int32) for one in sets]
    comparison = Comparison.of(members, num_ranks)
    rows = np.zeros((num_ranks, comparison.width), np.int64)
    digests = data.draw(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=len(sets), max_size=len(sets)))
    for rank in range(num_ranks):
        own = [digest for one, digest in zip(sets, digests, strict=True) if rank in one]
        rows[rank, 1 : 1 + len(own)] = own
        rows[rank, 1 + len(own) :] = rank  # words of no set
    assert comparison.outcome(rows) == SampleOutcome.MATCHED
    shared = [number for number, one in enumerate(sets) if len(one) > 1]
    if shared:
        number = data.draw(st.sampled_from(shared))
        odd = data.draw(st.sampled_from(sorted(sets[number])))
        wrong = rows.copy()
        wrong[odd, 1 + sum(odd in one for one in sets[:number])] ^= 1 << data.draw(st.integers(0, 62))
        assert comparison.outcome(wrong) == SampleOutcome.DIFFER
    underived = rows.copy()
    underived[data.draw(st.integers(0, num_ranks - 1)), 0] = 3
    assert comparison.outcome(underived) == SampleOutcome.DIFFER
    underived[data.draw(st.integers(0, num_ranks - 1))] = comparison.unsampled()
    assert comparison.outcome(underived) == SampleOutcome.UNKNOWN, "a rank that has not sampled raises no alarm"


@pytest.mark.parametrize("item", [1, 2, 4, 8])
def test_the_sum_of_a_device_changes_with_every_element_and_with_their_order(item: int) -> None:
    generator = torch.Generator().manual_seed(item)
    data = torch.randint(0, 256, (64 * item,), dtype=torch.uint8, generator=generator)
    before = data.clone()
    whole = int(reduced({item: [data]}))
    assert torch.equal(data, before), "training's memory is read only"
    assert whole == int(reduced({item: [data[: 32 * item], data[32 * item :]]})), "in pieces as in one"
    for at in range(0, len(data), item):
        other = data.clone()
        other[at + item - 1] ^= 1 << 7  # the first that is lost where a weight is even
        assert int(reduced({item: [other]})) != whole
    swapped = torch.cat([data[item : 2 * item], data[:item], data[2 * item :]])
    assert int(reduced({item: [swapped]})) != whole


@given(st.integers(1, 6), st.lists(st.sampled_from(SampleOutcome), max_size=40))
def test_what_is_trusted_is_the_oldest_of_the_last_matches_of_each_position(
    n: int, outcomes: list[SampleOutcome]
) -> None:
    trust = ReplicaTrust(n, 0)
    matched: list[int] = []
    for number, outcome in enumerate(outcomes, start=1):
        if outcome == SampleOutcome.MATCHED:
            trust.match(number, number)
            matched.append(number)
        last = [max((one for one in matched if position_of(one, n) == position), default=0) for position in range(n)]
        assert trust.iteration == min(last)
    trust.prove(100)
    trust.match(1, 3)
    assert trust.iteration == 100, "a match that is read late takes nothing back"
