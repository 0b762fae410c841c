"""Replicas that begin to differ in the first step that is not skipped, as while an fp16 loss scale is found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import plain
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

SKIPPED = 4  # a number of proofs that takes the next one to 8


def differ_at_last(rank: int, world_size: int, settings: dict[str, Any], stepping: list[int]) -> None:
    """Skips steps, then takes one whose outcome differs by rank; ``stepping`` ranks have fenced it."""
    checkpointer, state = plain.make(rank, world_size, settings)
    assert checkpointer.restore() is None
    for iteration in range(1, SKIPPED + 1):
        state.iteration = iteration
        checkpointer.step(iteration)
    if rank in stepping:
        checkpointer.fence()
        state.advance(SKIPPED + 1, float(SKIPPED + 1 + rank))
    state.iteration = SKIPPED + 1
    checkpointer.step(SKIPPED + 1)
    checkpointer.close(remove=False)


@pytest.mark.parametrize("stepping", [[0, 1], [1]], ids=["all step", "one steps"])
def test_the_first_step_that_counts_is_proven(stepping: list[int], settings: dict[str, Any]) -> None:
    run_ranks(differ_at_last, 2, settings, stepping)
    results = [result.value for result in run_ranks(plain.restored, 2, settings)]
    values = [[float(SKIPPED + 1 + rank) if rank in stepping else 0.0] for rank in range(2)]
    assert results == [(SKIPPED + 1, SKIPPED + 1, value, value) for value in values]
