"""What samples of all ranks mean together: whether the members of each replica set hold the same bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_UNSAMPLED = -1


class SampleOutcome(IntEnum):
    """The outcome of one sample: some member differs; a rank has not sampled; all that was sampled is the same."""

    DIFFER, UNKNOWN, MATCHED = -1, 0, 1


_GOLDEN = 40503
"""The golden ratio's fraction, times 2 to the 16th."""


def position_of(number: int, positions: int) -> int:
    """The one of ``positions`` at which the state of snapshot ``number`` is compared.

    Some turns through them, by the golden ratio, begin one further on than the turn before: whichever snapshots are
    skipped in a rhythm, no position is skipped for ever.
    """
    return (number - number // positions * _GOLDEN // (1 << 16)) % positions


@dataclass(frozen=True, eq=False)
class Comparison:
    """Compares the words of all ranks: a row for each, of ``width`` words.

    The first word is the number of elements that are not the cast of their masters, -1 where the rank has not
    sampled. A digest of each replica set of the rank follows, ascending by set.

    ``places`` are the digests' indices into the rows of all ranks, by set; each set begins at one of ``begins``.
    """

    width: int
    places: npt.NDArray[np.int64]
    begins: npt.NDArray[np.int64]

    @classmethod
    def of(cls, members: Sequence[npt.NDArray[np.int32]], num_ranks: int) -> Comparison:
        """The comparison of sets with these members."""
        ranks = np.concatenate([np.empty(0, np.int64), *members]).astype(np.int64)
        counts = np.bincount(ranks, minlength=num_ranks)
        width = 1 + int(counts.max(initial=0))
        # A stable sort by rank has the sets of each rank side by side, ascending.
        order = np.argsort(ranks, kind="stable")
        firsts = np.cumsum(counts) - counts
        places = np.empty(len(ranks), np.int64)
        places[order] = ranks[order] * width + 1 + np.arange(len(ranks)) - firsts[ranks[order]]
        return cls(width, places, np.cumsum([0, *map(len, members)])[:-1].astype(np.int64))

    def unsampled(self) -> npt.NDArray[np.int64]:
        """The words of a rank that has not sampled."""
        words = np.zeros(self.width, np.int64)
        words[0] = _UNSAMPLED
        return words

    def outcome(self, rows: npt.NDArray[np.int64]) -> SampleOutcome:
        """What the rows of all ranks say."""
        if rows[:, 0].any():
            return SampleOutcome.UNKNOWN if (rows[:, 0] == _UNSAMPLED).any() else SampleOutcome.DIFFER
        if len(self.begins):
            digests = rows.reshape(-1)[self.places]
            least, largest = np.minimum.reduceat(digests, self.begins), np.maximum.reduceat(digests, self.begins)
            if (least != largest).any():
                return SampleOutcome.DIFFER
        return SampleOutcome.MATCHED
