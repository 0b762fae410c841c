"""The flush interval that loses the least work to failures which memory does not survive.

A flush costs training ``cost_secs``, and a failure loses half an interval on average. With one failure in
``mtbf_secs`` the sum is least at ``sqrt(2 * cost_secs * mtbf_secs)``: J. W. Young, A first order approximation to the
optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A higher order estimate of the optimum checkpoint interval
for restart dumps, Future Generation Computer Systems 22 (2006), whose further terms matter only where a flush costs a
good part of ``mtbf_secs``.
"""

from __future__ import annotations

import math

from ftckpt.units import seconds

_NODE_SECS = 1000 * 86400 / 6.5
"""Between two failures of one node: 6.5 in 1000 days of a node on a cluster of 16,000 A100 (A. Kokolis et al.,
Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, arXiv 2410.21680)."""

_MAX_MTBF_SECS = 7 * 86400.0
"""However few its nodes, a job loses its memory once a week: an assumption, as nobody has published how often all of
a job is lost."""


def mtbf_secs(setting: str, nodes: int) -> float:
    """Between two failures that lose memory, of a job of so many nodes: as ``setting`` says, a time or ``auto``. That
    assumes that each second failure of a node takes its memory along."""
    return min(2 * _NODE_SECS / nodes, _MAX_MTBF_SECS) if setting == "auto" else seconds(setting)


def best_interval_secs(cost_secs: float, flush_secs: float, mtbf_secs: float) -> float:
    """Training between two snapshots that go to storage, of which each takes ``flush_secs`` to get there.

    At least twice ``flush_secs``, as storage has other users, and at most ``mtbf_secs``.
    """
    return max(2 * flush_secs, min(math.sqrt(2 * cost_secs * mtbf_secs), mtbf_secs))
