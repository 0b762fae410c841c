"""torch's rendezvous of agents, patched for speed: it completes as soon as all agents have joined, lets a standby
wait, drops an agent as soon as its process has ended, and restarts as soon as one agent does.

The patched names are private to torch: if one is missing, nothing is patched.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError, dynamic_rendezvous

from ftckpt.runner.agent_ring import AgentRing

_LEAST_SECS, _MOST_SECS = 0.05, 1.0
_MANY_NODES = 1000
"""With this many nodes an agent polls once a second, as torch's agents do with any number."""
_STANDBY_SECS = 0.3
"""How long a node must be missing before a standby replaces it: a restarting node leaves for a moment."""
_LONG_AGO = datetime.min.replace(tzinfo=timezone.utc)
_NAMES = ("_delay", "_RendezvousJoinOp", "_Action", "_should_keep_alive", "_remove_participant_epilogue")


def poll_often(handler: Any, meanwhile: Callable[[], None]) -> None:
    """Makes ``handler`` detect joining agents within a fraction of a second, and call ``meanwhile`` while it waits.

    A waiting agent reads the state of all agents, so the store's traffic grows with the square of their number. The
    interval limits it to that of ``_MANY_NODES`` polling once a second.
    """
    module: Any = dynamic_rendezvous
    holder: Any = getattr(handler, "_state_holder", None)
    nodes = getattr(getattr(handler, "_settings", None), "max_nodes", None)
    if nodes is None or not hasattr(holder, "_cache_duration") or not all(hasattr(module, name) for name in _NAMES):
        return
    secs, delay = min(_MOST_SECS, max(_LEAST_SECS, (nodes / _MANY_NODES) ** 2)), module._delay

    def look_and_delay(seconds: Any) -> None:
        meanwhile()
        if seconds == 1:
            delay(secs)
        elif not holder.state.complete:  # torch's random delay of first joins, which it also applies to later ones
            delay(seconds)

    holder._cache_duration, module._delay = secs, look_and_delay
    module._RendezvousJoinOp = _with_standby(module._RendezvousJoinOp)
    num_waiting = handler.num_nodes_waiting

    # Otherwise training would restart for a standby without a place, and again for the node that it replaces.
    def num_nodes_waiting() -> int:
        waiting: int = num_waiting()  # reads the state
        return waiting if _num_missing(holder.state, nodes) > 0 else 0

    handler.num_nodes_waiting = num_nodes_waiting


def leave(handler: Any) -> None:
    """Leaves this rendezvous round and joins the next one, so that the other agents restart at once.

    Otherwise they would restart when their own workers have failed, or when this agent has ended all its workers.
    """
    module: Any = dynamic_rendezvous

    def next_action(ctx: Any, _: float) -> Any:
        state, node = ctx.state, ctx.node
        if node in state.participants:
            # The write that takes it out also lets it wait: until its workers have ended, which can take longer than
            # ``_STANDBY_SECS``, nothing else tells a standby that it is coming back. Its heartbeat stays: if it dies
            # meanwhile, it is removed.
            del state.participants[node]
            state.wait_list.add(node)
            module._remove_participant_epilogue(state, ctx.settings)
            return module._Action.KEEP_ALIVE
        return module._Action.FINISH if node in state.wait_list else module._Action.ADD_TO_WAIT_LIST

    has_all = all(hasattr(handler, name) for name in ("_op_executor", "_heartbeat_lock"))
    if has_all and hasattr(module, "_remove_participant_epilogue"):
        # An error would repeat in the next round, which reports it.
        with suppress(RendezvousError), handler._heartbeat_lock:
            handler._op_executor.run(next_action, 0.0)


def drop_ended(handler: Any, store: Any) -> None:
    """Makes ``handler`` treat an agent whose process has ended like one whose heartbeats are overdue."""
    holder: Any = getattr(handler, "_state_holder", None)
    sanitize = getattr(holder, "_sanitize", None)
    if store is None or sanitize is None or not hasattr(handler, "_this_node"):
        return
    with suppress(OSError, RuntimeError):  # without a port, or with a broken store, heartbeats decide
        ring = AgentRing(store, handler._this_node)

        def drop_and_sanitize() -> None:
            heartbeats = holder.state.last_heartbeats
            ring.poll(heartbeats)
            if ended := heartbeats.keys() & ring.ended:
                heartbeats.update(dict.fromkeys(ended, _LONG_AGO))
                holder.mark_dirty()  # publishes what only this agent has detected
            sanitize()

        holder._sanitize = drop_and_sanitize


def _num_missing(state: Any, nodes: int) -> int:
    return nodes - len(state.participants)


def _with_standby(join: Any) -> Any:
    """A subclass of the join operation in which a standby leaves the places of restarting nodes to them."""
    module: Any = dynamic_rendezvous

    class Join(join):  # type: ignore[misc]
        _missing_since = math.inf

        def __call__(self, ctx: Any, deadline: float) -> Any:
            state, nodes = ctx.state, ctx.settings.max_nodes
            if state.complete and not _num_missing(state, nodes) and ctx.node in state.wait_list:
                state.wait_list.remove(ctx.node)
                return module._Action.ADD_TO_REDUNDANCY_LIST
            if ctx.node not in state.redundancy_list or state.closed:
                self._missing_since = math.inf
                return super().__call__(ctx, deadline)
            is_full = len({*state.participants, *state.wait_list}) >= nodes
            # Of a poll that saw it missing, not of the last that did not: polls can be further apart than that.
            self._missing_since = math.inf if is_full else min(self._missing_since, time.monotonic())
            if time.monotonic() - self._missing_since >= _STANDBY_SECS:
                return super().__call__(ctx, deadline)
            return module._Action.KEEP_ALIVE if module._should_keep_alive(ctx) else module._Action.SYNC

    return Join
