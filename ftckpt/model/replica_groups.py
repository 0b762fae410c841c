"""Finds the ranks that have the same fragments, by one sort over the hashes of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftckpt.array_types import Array

PRIVATE, DIFFERING, WHOLE = -1, -2, -3
"""Values in place of a group: only this rank has the fragment; its bits differ between ranks; each rank copies all
of it."""

_BLOCK = 1 << 18
"""Entries processed at a time, so that temporary arrays are small compared to all entries."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of ranks with the same fragments: ``members[g]``, ascending, have ``lengths[g]`` fragments in common.

    ``hashes``, ascending: the hashed identities that several ranks have; ``group_of_hash``: their groups.
    """

    members: tuple[Array, ...]
    lengths: Array
    hashes: Array
    group_of_hash: Array

    def find(self, mine: Array, num_ranks: int) -> Array:
        """The group of each code of one rank (see ``pack``), or ``PRIVATE`` or ``DIFFERING``; int64."""
        if len(self.hashes) == 0:
            return np.full(len(mine), PRIVATE, np.int64)
        wanted = mine >> _rank_bits(num_ranks)
        # Beyond the last hash, comparing with the last one also gives "not equal".
        at = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        return np.where(self.hashes[at] == wanted, self.group_of_hash[at], PRIVATE).astype(np.int64)


def pack(hashes: Array, rank: int, num_ranks: int) -> Array:
    """Codes: one uint64 per 64-bit hash, with its upper bits, and ``rank`` in the lowest bits.

    One in-place sort of all ranks' codes groups the ranks of each hash, in order. With 16,384 ranks, 50 bits of hash
    remain.
    """
    low = (np.uint64(1) << _rank_bits(num_ranks)) - np.uint64(1)
    packed: Array = hashes & ~low | np.uint64(rank)
    return packed


def find_groups(entries: Array, num_ranks: int) -> Groups:
    """The groups in the codes of all ranks; ``entries`` is overwritten.

    A group is identified by the sum, modulo 2**64, of one random word per member (Zobrist, 1970). A hash that one
    rank has twice is in no group: it is ``DIFFERING``.
    """
    bits = _rank_bits(num_ranks)
    entries.sort()
    entries = _without_private(entries, bits)
    starts, doubles = _starts(entries, bits)
    usable = np.ones(len(starts), bool)
    usable[np.searchsorted(starts, doubles, side="right") - 1] = False  # a rank has the same hash twice
    low = (np.uint64(1) << bits) - np.uint64(1)
    # Two sets of ranks have the same sum with the probability of a collision of two random 64-bit numbers.
    sums = _sums(entries, starts, low, _words(num_ranks))
    names = distinct(sums[usable])
    group_of_hash = np.full(len(starts), DIFFERING, np.int32)
    group_of_hash[usable] = np.searchsorted(names, sums[usable])
    del sums
    lengths = np.bincount(group_of_hash[usable], minlength=len(names))
    stops = np.append(starts[1:], len(entries))
    # The first run of each group, for its members: assigned in reverse, so that the first run is the last write.
    first = np.zeros(len(names), np.int64)
    backwards = np.flatnonzero(usable)[::-1]
    first[group_of_hash[backwards]] = backwards
    members = tuple((entries[starts[run] : stops[run]] & low).astype(np.int32) for run in first.tolist())
    return Groups(members, lengths, entries[starts] >> bits, group_of_hash)


def distinct(values: Array) -> Array:
    """The distinct ``values``, ascending. ``np.unique`` imports ``numpy.ma`` at its first call, which takes longer
    than all work on replicas at a start."""
    ordered = np.sort(values)
    return np.concatenate([ordered[:1], ordered[1:][ordered[1:] != ordered[:-1]]])


def _rank_bits(num_ranks: int) -> np.uint64:
    bits: np.uint64 = np.uint64((num_ranks - 1).bit_length())
    return bits


def _words(num_ranks: int) -> Array:
    """One random-looking uint64 per rank: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word: Array = np.arange(1, num_ranks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word ^= word >> np.uint64(31)
    return word


def _same_as_next(entries: Array, bits: np.uint64) -> Array:
    """Whether each entry has the same hash as the next one; False for the last."""
    same = np.zeros(len(entries), bool)
    # In blocks: shifted copies of all entries would double the memory.
    for begin in range(0, len(entries) - 1, _BLOCK):
        end = min(begin + _BLOCK, len(entries) - 1)
        same[begin:end] = (entries[begin:end] ^ entries[begin + 1 : end + 1]) >> bits == 0
    return same


def _without_private(entries: Array, bits: np.uint64) -> Array:
    """The entries whose hash occurs more than once, moved to the front of the same memory."""
    shared = _same_as_next(entries, bits)
    # Marks the last entry of each run, too. A copy, as the two views overlap.
    shared[1:] |= shared[:-1].copy()
    num_shared = 0
    for begin in range(0, len(entries), _BLOCK):
        block = entries[begin : begin + _BLOCK][shared[begin : begin + _BLOCK]]
        entries[num_shared : num_shared + len(block)] = block
        num_shared += len(block)
    return entries[:num_shared]


def _starts(entries: Array, bits: np.uint64) -> tuple[Array, Array]:
    """The start of each run of one hash, and the indices of entries that equal the next one."""
    same = _same_as_next(entries, bits)
    # A run starts at the first entry, and at each that differs from the one before.
    starts = np.flatnonzero(np.append(True, ~same[:-1])) if len(entries) else np.empty(0, np.int64)
    return starts, np.flatnonzero(_same_as_next(entries, np.uint64(0)))


def _sums(entries: Array, starts: Array, low: np.uint64, words: Array) -> Array:
    """The sum of the words of each run's ranks, modulo 2**64."""
    sums = np.empty(len(starts), np.uint64)
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK)))
        end = starts[last] if last < len(starts) else len(entries)
        ranks = (entries[starts[first] : end] & low).astype(np.int64)
        sums[first:last] = np.add.reduceat(words[ranks], starts[first:last] - starts[first])
        first = last
    return sums
