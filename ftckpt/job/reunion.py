"""How ranks that have lost each other agree on the boundary at which all of them connect anew.

No collective can carry that, so it goes through the job's store, and no rank waits for another one before all are
known to come. One attempt follows another:

1. Each rank counts itself as ``lost``. They notice at different boundaries; the last one names a boundary ahead.
2. A rank that reads of it in time counts itself as ``ready``.
3. At that boundary each of these asks once whether all are ready. The first answer binds all of them: go, or no.
   A rank that heard too late says no.

After ``no``, and after connections that failed, comes the next attempt, whose boundary is twice as far ahead. Ranks
train the same iterations, so a boundary that all come to is found without a message from one to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from ftckpt.notice import PATIENCE_SECS, Call

_FIRST_MARGIN, _LONGEST_MARGIN = 4, 4096
"""Iterations from where the last rank has noticed to where all connect anew."""

GO, NO = "go", "no"


class Board(Protocol):
    """What is needed of the job's store."""

    def add(self, key: str, number: int, /) -> int:
        """Add to a count, of 0 at first, and return it."""

    def set(self, key: str, text: str, /) -> None:
        """Write it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def get(self, key: str, /) -> bytes:
        """Read what is there."""

    def compare_set(self, key: str, expected: str, text: str, /) -> bytes:
        """Write ``text`` if there is nothing yet, and return what is there then."""


class Reunion:
    """One rank's part of it, under ``name``, which is the same on all ``size`` ranks and new in ``board``."""

    def __init__(self, board: Board, name: str, size: int, ask: Callable[[Callable[[], Any]], Any] = Call) -> None:
        self.name = name
        self.stopped = ""
        """Why another rank does not come any more; "" while all may."""
        self._board = board
        self._size = size
        self._ask = ask
        self._attempt = 0
        self._margin = _FIRST_MARGIN
        self._place, self._at = "", cast(int | None, None)
        self._told = self._ready = False
        self._call: Any = None
        self._begin()

    def meets(self, iteration: int) -> str:
        """At each boundary while ranks are lost: the name under which all connect anew at this one, or ""."""
        if self._call is not None and self._call.ended(0.0):
            answer, self._call = self._call.value, None
            if isinstance(answer, tuple):
                self._at, self.stopped = answer
        if self._at is not None and iteration >= self._at:
            return self._vote()
        if self._call is None and self._at is None:
            self._call = self._ask(lambda: self._look(iteration))
        elif self._call is None and not self._ready:
            # Begun before that boundary, so this rank will ask there, whatever became of the call by then.
            self._ready = True
            self._call = self._ask(lambda: self._board.add(f"{self._place}/ready", 1))
        return ""

    def ended(self, well: bool) -> None:
        """All have connected anew, or this rank could not: a next time is another attempt."""
        self._attempt += 1
        self._margin = _FIRST_MARGIN if well else min(2 * self._margin, _LONGEST_MARGIN)
        self._begin()

    def stop(self, reason: str) -> None:
        """This rank does not come any more: the others need not look for it."""
        place = self._place
        self._ask(lambda: self._board.set(f"{self.name}/stopped", reason))
        self._ask(lambda: self._board.compare_set(f"{place}/verdict", "", NO))

    def _begin(self) -> None:
        self._place = f"{self.name}/{self._attempt}"
        self._at, self._told, self._ready, self._call = None, False, False, None

    def _look(self, iteration: int) -> tuple[int | None, str]:
        board, place = self._board, self._place
        if not self._told:
            self._told = True  # before it is said: once too seldom is a late end, twice would be a lie
            if board.add(f"{place}/lost", 1) == self._size:
                board.set(f"{place}/at", str(iteration + self._margin))
        at = int(board.get(f"{place}/at")) if board.check([f"{place}/at"]) else None
        stopped = board.get(f"{self.name}/stopped").decode() if board.check([f"{self.name}/stopped"]) else ""
        return at, stopped

    def _vote(self) -> str:
        name, place, ready = f"{self._place}/group", self._place, self._ready
        if self._call is not None and not self._call.ended():
            ready = False

        def vote() -> str:
            all_ready = ready and self._board.add(f"{place}/ready", 0) == self._size
            return self._board.compare_set(f"{place}/verdict", "", GO if all_ready else NO).decode()

        call = self._ask(vote)
        if call.ended(PATIENCE_SECS) and call.value == GO:
            return name
        self.ended(well=False)
        return ""
