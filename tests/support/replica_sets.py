"""Replica sets as a start finds them, in two collectives of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftckpt.model.fragment import Fragment
from ftckpt.model.replicas import Gather, Holdings, ReplicaSets, find_sharing


def replica_sets(
    gather: Gather,
    rank: int,
    num_ranks: int,
    fragments: Sequence[Fragment],
    contents: Callable[[Sequence[int]], Sequence[int]],
) -> ReplicaSets:
    """Find out together which ranks hold the same bits of the same fragments. Collective.

    ``contents`` is called once on every rank, with indices into ``fragments``, and answers a 64-bit hash of the
    bytes of each: only of fragments that several ranks hold. Messages per rank: that of ``find_sharing``; bytes and a
    digest per group; what ``ReplicaMap.sets`` needs.
    """
    sharing = find_sharing(gather, rank, num_ranks, fragments)
    holdings: Holdings | None = None

    def summary() -> bytes:
        nonlocal holdings
        holdings = sharing.look(contents)
        return holdings.summary()

    summaries = gather(summary)
    assert holdings is not None, "``gather`` raises where it failed"
    return sharing.sets(gather, holdings, summaries)
