"""Torch's rendezvous of agents, made to look at its store as often as a restart needs."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

_LEAST_SECS, _MOST_SECS = 0.05, 1.0
_MANY_NODES = 1000
"""With so many an agent looks once a second, as torch's do with any number."""


def look_often(handler: Any) -> None:
    """Have ``handler`` see within a fraction of a second that other agents have come, or wait to be let in.

    An agent that waits reads the state of all of them, so that what the store sends in a second grows with the square
    of their number. It is never more than what it sends to ``_MANY_NODES`` once a second.
    """
    module: Any = dynamic_rendezvous
    holder: Any = getattr(handler, "_state_holder", None)
    nodes, delay = getattr(getattr(handler, "_settings", None), "max_nodes", None), getattr(module, "_delay", None)
    if nodes is None or delay is None or not hasattr(holder, "_cache_duration"):
        return  # another rendezvous, or another torch: as often as that looks
    secs = min(_MOST_SECS, max(_LEAST_SECS, (nodes / _MANY_NODES) ** 2))
    holder._cache_duration = secs
    module._delay = lambda seconds: delay(secs if seconds == 1 else seconds)
