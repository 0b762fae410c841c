"""Ranks that have lost each other: how one of them notices, searches, and goes on with all others."""

from __future__ import annotations

import time

from ftckpt.errors import LaunchError
from ftckpt.events import Events
from ftckpt.job.actions import Action
from ftckpt.job.links import Links
from ftckpt.job.session import RankState


class Losses:
    """One rank's part; what follows for its session it returns."""

    def __init__(self, links: Links, state: RankState, events: Events) -> None:
        self._links = links
        self._state = state
        self._events = events

    def note(self, error: Exception) -> list[Action] | None:
        """After an error: None where ranks reach each other. Both groups are given up with one, as all ranks leave
        both together."""
        if not self._links.lost:
            return None
        self._links.give_up(str(error))
        return self._state.lose(str(error))

    def meet(self, iteration: int) -> list[Action]:
        """At the boundary of ``iteration``, while ranks are lost and search: where all have agreed on it they connect
        anew."""
        state, links = self._state, self._links
        name = links.meets(iteration) if not state.off else ""
        if links.stopped and not state.off:
            return [state.turn_off(f"the ranks have lost each other: {links.stopped}")]
        if not name:
            return []
        try:
            standings = links.renew(name, state.standing)
        except (LaunchError, RuntimeError) as error:
            self._events.emit("reunion_failed", iteration=iteration, error=str(error))
            return []
        return state.reunite(standings, iteration, time.monotonic())
