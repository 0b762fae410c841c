"""Ranks that compute longer than others of their stage are named, by what all have posted in one round."""

from __future__ import annotations

from functools import partial

from ftckpt.config import Config
from ftckpt.job.actions import Announcement
from ftckpt.job.agreement import NO_TIMES, Round, Verdict
from ftckpt.job.slow_ranks import SlowRanks
from ftckpt.model.topology import RankPlace, Topology


def job(rank: int, num_dp: int, num_pp: int = 1) -> Topology:
    """Two ranks of a node follow each other."""
    places = [{"pp": pp, "dp": dp} for pp in range(num_pp) for dp in range(num_dp)]
    members = tuple(RankPlace(coords, f"n{at // 2}") for at, coords in enumerate(places))
    return Topology(rank, members, {"pp": num_pp, "dp": num_dp})


def told(secs: list[float], num_pp: int = 1, **settings: object) -> list[Announcement]:
    """What is said where each rank computes for so many seconds; rounds are as all-reduce makes them."""
    config, num_dp = Config(**settings), len(secs) // num_pp  # type: ignore[arg-type]
    ranks = [SlowRanks(config, job(rank, num_dp, num_pp)) for rank in range(len(secs))]
    said: list[list[Announcement]] = [[] for _ in ranks]
    for number in range(200, 300):
        posts = [one.post(number, partial(float, mine)) for one, mine in zip(ranks, secs, strict=True)]
        rounds = [Round(number, 7, times=times).words() for times in posts]
        assert len({len(words) for words in rounds}) == 1
        verdict = Verdict.of(number, [min(column) for column in zip(*rounds, strict=True)])
        for one, lines in zip(ranks, said, strict=True):
            lines.extend(one.look([verdict]))
    assert not any(said[1:]), "one rank tells it"
    named = {one["rank"] for news in said[0] for one in news.fields["ranks"]}
    assert len(named) >= 8 or {rank for rank, one in enumerate(ranks) if one.has_me} == named
    return said[0]


def test_a_rank_that_computes_longer_is_named_with_its_node() -> None:
    (news,) = told([1.0, 1.1, 1.0, 1.5])
    assert news.event == "slow_ranks"
    assert news.fields == {
        "ranks": [{"rank": 3, "node": "n1", "compute_secs": 1.5, "median_secs": 1.0}], "num": 1,
        "slow_rank_share": 0.2,
    }  # fmt: skip
    assert news.text == (
        "slower than the median of their stage at computing: rank 3 on n1 (1.50 times); all other ranks wait for them"
    )


def test_ranks_are_compared_with_those_that_have_the_same_to_do() -> None:
    """The last stage has the head of the model, too."""
    assert not told([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], num_pp=2)
    (news,) = told([1.0, 1.0, 1.0, 2.0, 2.5, 2.0], num_pp=2)
    assert [one["rank"] for one in news.fields["ranks"]] == [4]


def test_of_two_ranks_one_is_slow_and_alone_none_is() -> None:
    (news,) = told([2.0, 1.0])
    assert [one["rank"] for one in news.fields["ranks"]] == [0]
    assert not told([1.0, 2.0], num_pp=2)


def test_who_has_measured_nothing_is_left_out() -> None:
    assert not told([0.0, 0.0, 1.0])
    assert [one["rank"] for one in told([0.0, 1.0, 1.3])[0].fields["ranks"]] == [2]


def test_the_share_is_a_setting_and_0_compares_nothing() -> None:
    assert not told([1.0, 1.0, 1.3], slow_rank_share=0.5)
    assert not told([1.0, 1.0, 9.0], slow_rank_share=0.0)


def test_rounds_fit_each_other_whatever_ranks_were_told() -> None:
    """One that was given other settings, or has lost count, must not break the collective of all others."""
    ranks = [SlowRanks(Config(slow_rank_share=0.0), job(0, 99)), SlowRanks(Config(interval=7), job(1, 99))]
    assert {len(one.post(number, lambda: 1.0)) for one in ranks for number in range(300)} == {len(NO_TIMES)}


def test_what_takes_long_to_know_is_asked_once_in_a_hundred_iterations() -> None:
    asked = []

    def compute_secs() -> float:
        asked.append(number)
        return 1.0

    ranks = SlowRanks(Config(), job(9, 20))
    for number in range(301):
        ranks.post(number, compute_secs)
    assert asked == [1, 101, 201, 301][:3] and ranks.compute_secs == 1.0
    ranks, asked[:] = SlowRanks(Config(interval=30), job(0, 2)), []
    for number in range(9):
        ranks.post(number, compute_secs)
    assert asked == [0, 4, 8]


def test_many_slow_ranks_are_one_line() -> None:
    (news,) = told([1.0] * 20 + [2.0] * 12)
    assert len(news.fields["ranks"]) == 8 and news.fields["num"] == 12
    assert "and 4 more" in news.text and len(news.text) < 500
