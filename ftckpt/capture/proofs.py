"""When it is proven again that replicas hold the same bits and derived pieces follow: the same on all ranks."""

from __future__ import annotations

WEIGH_AT = 16
"""The snapshot at which shares are fitted to the windows: by then these have been measured."""


class Proofs:
    """Which snapshots, counted from 1, come with a proof.

    What a configuration makes differ shows in the first optimizer steps, so proofs are close at first: at 1, 2, 4,
    8 … These count from where steps begin: while every step is skipped, as when a loss scale is being found, a
    proof proves nothing and the next snapshot has another.

    ``interval`` is the longest distance of proofs, in iterations; 0: only the first.
    """

    def __init__(self, interval: int) -> None:
        self.stepped = False
        """Whether stepped state of this rank may have changed since the start."""
        self._interval = interval
        self._begin = 0
        self._begun = False

    def due(self, iteration: int, number: int) -> bool:
        """Whether snapshot ``number`` has one. It is collective: every rank must come to the same answer, late or
        not, so this depends on nothing that only some ranks have heard."""
        since = number - self._begin
        often = bool(self._interval) and (since & (since - 1) == 0 or iteration % self._interval == 0)
        return number in (1, WEIGH_AT) or often

    def proved(self, number: int, stepped: bool) -> None:
        """Snapshot ``number`` had a proof; ``stepped``: on some rank, as all were told in it."""
        self._begun = self._begun or stepped
        if not self._begun:
            self._begin = number
