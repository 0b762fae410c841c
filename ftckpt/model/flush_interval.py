"""The flush interval that minimizes the work lost to failures that memory does not survive.

A flush costs training ``cost_secs``, and a failure loses half an interval on average. With one failure per
``mtbf_secs`` the sum is minimal at ``sqrt(2 * cost_secs * mtbf_secs)``: J. W. Young, A first order approximation to
the optimum checkpoint interval, CACM 17 (1974); J. T. Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, Future Generation Computer Systems 22 (2006). Daly's further terms matter only if a flush
costs a large part of ``mtbf_secs``.
"""

from __future__ import annotations

import math

from ftckpt.units import seconds

_NODE_SECS = 1000 * 86400 / 6.5
"""Mean time between failures of a node: 6.5 per 1000 node days on a cluster of 16,000 A100 (A. Kokolis et al.,
Revisiting Reliability in Large-Scale Machine Learning Research Clusters, HPCA 2025, arXiv 2410.21680)."""

_MAX_MTBF_SECS = 7 * 86400.0
"""An assumption: a job of any size loses its memory once a week. There are no published numbers."""


def mtbf_secs(setting: str, nodes: int) -> float:
    """The mean time between failures that lose the memory of a job of so many nodes. ``setting`` is a time, or
    ``auto``, which assumes that every second failure of a node loses its memory."""
    return min(2 * _NODE_SECS / nodes, _MAX_MTBF_SECS) if setting == "auto" else seconds(setting)


def best_interval_secs(cost_secs: float, flush_secs: float, mtbf_secs: float) -> float:
    """The optimal time between two flushes that take ``flush_secs`` each.

    At least twice ``flush_secs``, as storage has other users, and at most ``mtbf_secs``.
    """
    return max(2 * flush_secs, min(math.sqrt(2 * cost_secs * mtbf_secs), mtbf_secs))
