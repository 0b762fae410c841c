"""Which ranks take longer for their work than others take for the same.

An iteration takes all ranks equally long, as they wait for the slowest. So what is compared is what each of them
takes for its own compute steps, forward and backward, between ranks of one stage of the pipeline, which have the same
to do. Steps in which a rank waits for its replicas are as long as those that wait, and would make the fastest rank
the slow one: a door names them, and they do not count; where there are no others nothing is compared. Ranks that
reduce over tensor parallelism inside a step wait there for each other, and are slow together.

What ranks have measured goes with the rounds of the agreement, a few ranks at a time, so that nobody waits for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from ftckpt.config import Config
from ftckpt.job.actions import Announcement
from ftckpt.job.agreement import NO_TIMES, UNKNOWN_TIME, Verdict
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology

_ITERATIONS = 100
"""Between two comparisons, where nothing makes snapshots rarer."""

_MOST_TOLD = 8
"""Ranks in one line of the log, and in an event: the slowest."""

_WORDS = len(NO_TIMES)


class SlowRanks:
    """Of one job, as each of its ranks sees it."""

    def __init__(self, config: Config, topology: Topology) -> None:
        self._share = config.slow_rank_share
        self._topology = topology
        self._sweep = ceil(len(topology.members) / _WORDS)
        # Counted in rounds, whose numbers all ranks have alike. In the first of them each rank has its turn.
        self._rounds = max(self._sweep, ceil(_ITERATIONS / config.least_interval))
        self._times = [0] * len(topology.members)
        self.compute_secs = 0.0
        """What this rank has posted last."""
        self.has_me = False
        """Whether this rank was among them when ranks were compared last."""

    def post(self, number: int, compute_secs: Callable[[], float]) -> tuple[int, ...]:
        """What goes into round ``number``: microseconds of the ranks whose turn it is, as far as this one is among
        them. As many numbers in each round: ranks that have lost count of rounds must still fit each other.

        ``compute_secs`` gives what an iteration's compute steps take this rank, 0 where it does not know; only asked
        where it is needed: of a long pipeline it is the sum of thousands.
        """
        times, place = list(NO_TIMES), self._topology.rank - _WORDS * (number % self._rounds)
        if self._share and 0 <= place < _WORDS:
            self.compute_secs = compute_secs()
            times[place] = round(self.compute_secs * 1e6)
        return tuple(times)

    def look(self, verdicts: Sequence[Verdict]) -> Iterator[Announcement]:
        """What verdicts that were read say of slow ranks; told by one rank."""
        for verdict in verdicts:
            turn = verdict.number % self._rounds
            if not self._share or turn >= self._sweep:
                continue
            known = zip(range(_WORDS * turn, len(self._times)), verdict.times, strict=False)
            for rank, micros in known:
                self._times[rank] = micros if micros < UNKNOWN_TIME else 0
            if turn < self._sweep - 1:
                continue
            slow = self._slow()
            self.has_me = any(one["rank"] == self._topology.rank for one in slow)
            if slow and self._topology.rank == 0:
                ordered = sorted(slow, key=lambda one: float(one["median_secs"]) / float(one["compute_secs"]))
                fields = {"ranks": ordered[:_MOST_TOLD], "num": len(slow), "slow_rank_share": self._share}
                yield Announcement("slow_ranks", fields, _in_words(ordered))

    def _slow(self) -> list[dict[str, int | float | str]]:
        stages: dict[int, dict[int, int]] = {}
        for rank, micros in enumerate(self._times):
            if micros > 0:
                stages.setdefault(self._topology.members[rank].coords.get("pp", 0), {})[rank] = micros
        # The lower of two medians: of two ranks one is to count as slow, and by what the other takes.
        medians = {stage: statistics.median_low(micros.values()) for stage, micros in stages.items()}
        return [
            {
                "rank": rank,
                "node": self._topology.members[rank].node,
                "compute_secs": micros / 1e6,
                "median_secs": medians[stage] / 1e6,
            }
            for stage, ranks in sorted(stages.items())
            for rank, micros in ranks.items()
            if micros > (1 + self._share) * medians[stage]
        ]


def _in_words(slow: Sequence[dict[str, int | float | str]]) -> str:
    each = [
        f"rank {one['rank']} on {one['node']} ({float(one['compute_secs']) / float(one['median_secs']):.2f} times)"
        for one in slow[:_MOST_TOLD]
    ]
    more = f" and {len(slow) - _MOST_TOLD} more" if len(slow) > _MOST_TOLD else ""
    return f"slower than the median of their stage at computing: {listed(each)}{more}; all other ranks wait for them"
