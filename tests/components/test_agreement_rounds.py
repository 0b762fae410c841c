"""The input and the result of the all-reduce."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.session.vote import Readiness, TaskState, Vote, VoteResult

ROUNDS = st.lists(
    st.builds(
        Vote,
        number=st.just(7),
        newest=st.integers(-1, 3),
        will=st.sampled_from(Readiness),
        stretch=st.integers(1, 1000),
        cost=st.integers(0, 1 << 40),
        flush_interval=st.integers(0, 1 << 30),
        target=st.integers(-1, 3),
        cover=st.sampled_from(TaskState),
        flush=st.integers(-1, 3),
        flushed=st.sampled_from(TaskState),
        step=st.integers(1, 1 << 40),
    ),
    min_size=1,
    max_size=4,
)


@given(ROUNDS)
def test_a_verdict_is_what_all_rounds_mean_together(rounds: list[Vote]) -> None:
    minima = [min(words) for words in zip(*(vote.words() for vote in rounds), strict=True)]
    newest, targets = {vote.newest for vote in rounds}, {vote.target for vote in rounds}
    flushes = {vote.flush for vote in rounds}
    assert VoteResult.of(minima) == VoteResult(
        number=7,
        newest=newest.pop() if len(newest) == 1 else -1,
        will=min(vote.will for vote in rounds),
        stretch=max(vote.stretch for vote in rounds),
        cost=max(vote.cost for vote in rounds),
        flush_interval=max(vote.flush_interval for vote in rounds),
        target=targets.pop() if len(targets) == 1 else -1,
        cover=min(vote.cover for vote in rounds),
        flush=flushes.pop() if len(flushes) == 1 else -1,
        flushed=min(vote.flushed for vote in rounds),
        step=max(vote.step for vote in rounds),
    )
