"""Samples of all ranks compared: whether the members of each replica set have the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_UNSAMPLED = -1


class SampleOutcome(IntEnum):
    """The outcome of a sample: some members differ; a rank has not sampled; all members match."""

    DIFFER, UNKNOWN, MATCHED = -1, 0, 1


_GOLDEN = 40503
"""The golden ratio's fraction, times 2 to the 16th."""


def position_of(number: int, positions: int) -> int:
    """The one of ``positions`` at which the state of snapshot ``number`` is compared.

    Successive passes over the positions are shifted, at intervals given by the golden ratio, so that snapshots that
    are skipped periodically never exclude a position.
    """
    return (number - number // positions * _GOLDEN // (1 << 16)) % positions


@dataclass(frozen=True, eq=False)
class Comparison:
    """Compares the rows of all ranks, of ``width`` words each.

    The first word of a row is the number of elements that are not the cast of their masters, or -1 if the rank has
    not sampled. A digest of each replica set of the rank follows, ascending by set.

    ``places``: indices of the digests in the flattened rows, grouped by set; ``begins``: the start of each set in it.
    """

    width: int
    places: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]

    @classmethod
    def of(cls, members: Sequence[npt.NDArray[np.int32]], num_ranks: int) -> Comparison:
        """The comparison for replica sets with these members."""
        ranks = np.concatenate([np.empty(0, np.int64), *members]).astype(np.int64)
        counts = np.bincount(ranks, minlength=num_ranks)
        width = 1 + int(counts.max(initial=0))
        # A stable sort by rank puts the sets of each rank next to each other, ascending.
        order = np.argsort(ranks, kind="stable")
        firsts = np.cumsum(counts) - counts
        places = np.empty(len(ranks), np.int64)
        places[order] = ranks[order] * width + 1 + np.arange(len(ranks)) - firsts[ranks[order]]
        return cls(width, places, np.cumsum([0, *map(len, members)])[:-1].astype(np.int64))

    def unsampled(self) -> npt.NDArray[np.int64]:
        """The row of a rank that has not sampled."""
        words = np.zeros(self.width, np.int64)
        words[0] = _UNSAMPLED
        return words

    def outcome(self, rows: npt.NDArray[np.int64]) -> SampleOutcome:
        """The outcome of the rows of all ranks."""
        if rows[:, 0].any():
            return SampleOutcome.UNKNOWN if (rows[:, 0] == _UNSAMPLED).any() else SampleOutcome.DIFFER
        if len(self.begins):
            digests = rows.reshape(-1)[self.places]
            least, largest = np.minimum.reduceat(digests, self.begins), np.maximum.reduceat(digests, self.begins)
            if (least != largest).any():
                return SampleOutcome.DIFFER
        return SampleOutcome.MATCHED
