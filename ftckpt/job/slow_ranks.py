"""Which ranks take longer for their work than others take for the same.

An iteration takes all ranks equally long, as they wait for the slowest. So what is compared is what each of them
takes for its own compute steps, forward and backward, between ranks of one stage of the pipeline, which have the same
to do. Ranks that reduce over tensor parallelism inside a step wait there for each other, and are slow together.

What a rank has measured goes with one round of the agreement in a hundred iterations: nobody waits for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from math import ceil

from ftckpt.config import Config
from ftckpt.job.actions import Announcement
from ftckpt.job.agreement import Verdict
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology

_ITERATIONS = 100
"""Between two comparisons."""

_OTHERS = 1 << 62
"""What a rank posts in the places of others, so that the minimum of all is what each has posted in its own. 0 there:
it has not measured anything."""

_MOST_TOLD = 8
"""Ranks in one line of the log."""


class SlowRanks:
    """Of one job, as each of its ranks sees it."""

    def __init__(self, config: Config, topology: Topology) -> None:
        self._share = config.slow_rank_share
        # Counted in rounds, whose numbers all ranks have alike.
        self._rounds = ceil(_ITERATIONS / config.least_interval)
        self._topology = topology
        self.compute_secs = 0.0
        """What this rank has posted last."""
        self.has_me = False
        """Whether this rank was among them when ranks were compared last."""

    def post(self, number: int, compute_secs: Callable[[], float]) -> tuple[int, ...]:
        """What goes into round ``number``: of each rank microseconds, or nothing; of the same length on all ranks.

        ``compute_secs`` gives what an iteration's compute steps take this rank, 0 where it does not know; only asked
        where it is needed: of a long pipeline it is the sum of thousands.
        """
        if not self._share or number == 0 or number % self._rounds:
            return ()
        times = [_OTHERS] * len(self._topology.members)
        self.compute_secs = compute_secs()
        times[self._topology.rank] = round(self.compute_secs * 1e6)
        return tuple(times)

    def look(self, verdicts: Sequence[Verdict]) -> Iterator[Announcement]:
        """What verdicts that were read say of slow ranks."""
        for verdict in verdicts:
            if not verdict.times:
                continue
            slow = self._slow(verdict.times)
            self.has_me = any(one["rank"] == self._topology.rank for one in slow)
            if slow:
                yield Announcement("slow_ranks", {"ranks": slow, "slow_rank_share": self._share}, _in_words(slow))

    def _slow(self, times: Sequence[int]) -> list[dict[str, int | float | str]]:
        stages: dict[int, dict[int, int]] = {}
        for rank, micros in enumerate(times):
            if 0 < micros < _OTHERS:
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
    ordered = sorted(slow, key=lambda one: float(one["median_secs"]) / float(one["compute_secs"]))
    each = [
        f"rank {one['rank']} on {one['node']} ({float(one['compute_secs']) / float(one['median_secs']):.2f} times)"
        for one in ordered[:_MOST_TOLD]
    ]
    more = f" and {len(slow) - _MOST_TOLD} more" if len(slow) > _MOST_TOLD else ""
    return f"slower than the median of their stage at computing: {listed(each)}{more}; all other ranks wait for them"
