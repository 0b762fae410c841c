"""Which ranks hold the same things, by one sort over what all of them hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftckpt.array_types import Array

PRIVATE, DIFFERING, WHOLE = -1, -2, -3
"""In place of a group: only this rank holds the fragment; its holders do not agree on the bits; each of them copies
all of it."""

_BLOCK = 1 << 18
"""Entries that are looked at together: temporary arrays stay small beside the entries themselves."""


@dataclass(frozen=True, eq=False)
class Groups:
    """Ranks that hold the same fragments: ``members[g]``, ascending, hold ``lengths[g]`` fragments in common.

    ``hashes``, ascending, are the hashed identities that several ranks hold, ``group_of_hash`` their groups.
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
        # Past the last hash there is none to compare with: any other gives the same answer, "not equal".
        at = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        return np.where(self.hashes[at] == wanted, self.group_of_hash[at], PRIVATE).astype(np.int64)


def pack(hashes: Array, rank: int, num_ranks: int) -> Array:
    """One uint64 per 64-bit hash, uint64: its upper bits, and ``rank`` in the lowest ones.

    One in-place sort of all ranks' codes brings the holders of a hash together, in order. 50 bits of hash remain
    for 16,384 ranks.
    """
    low = (np.uint64(1) << _rank_bits(num_ranks)) - np.uint64(1)
    packed: Array = hashes & ~low | np.uint64(rank)
    return packed


def find_groups(entries: Array, num_ranks: int) -> Groups:
    """The groups in the codes of all ranks, which are sorted in place and otherwise overwritten.

    A group is named by the sum, modulo 2**64, of one random word per member (Zobrist, 1970). A hash that one rank
    has twice is in no group: its holders are ``DIFFERING``.
    """
    bits = _rank_bits(num_ranks)
    entries.sort()
    entries = _without_private(entries, bits)
    starts, doubles = _starts(entries, bits)
    usable = np.ones(len(starts), bool)
    usable[np.searchsorted(starts, doubles, side="right") - 1] = False  # one rank, twice the same hash
    low = (np.uint64(1) << bits) - np.uint64(1)
    # Two sets of ranks with one sum: as likely as two equal random numbers of 64 bits.
    sums = _sums(entries, starts, low, _words(num_ranks))
    names = distinct(sums[usable])
    group_of_hash = np.full(len(starts), DIFFERING, np.int32)
    group_of_hash[usable] = np.searchsorted(names, sums[usable])
    del sums
    lengths = np.bincount(group_of_hash[usable], minlength=len(names))
    stops = np.append(starts[1:], len(entries))
    # The first run of each group, from which its members are read: written backwards, the first one stays.
    first = np.zeros(len(names), np.int64)
    backwards = np.flatnonzero(usable)[::-1]
    first[group_of_hash[backwards]] = backwards
    members = tuple((entries[starts[run] : stops[run]] & low).astype(np.int32) for run in first.tolist())
    return Groups(members, lengths, entries[starts] >> bits, group_of_hash)


def distinct(values: Array) -> Array:
    """Each of ``values`` once, ascending. ``np.unique`` imports ``numpy.ma`` when it is first called, which takes
    longer than all that a start does with replicas."""
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
    """Whether the hash of each entry is that of the next one; False for the last."""
    same = np.zeros(len(entries), bool)
    # Block by block: shifted copies of all ranks' entries would double the memory.
    for begin in range(0, len(entries) - 1, _BLOCK):
        end = min(begin + _BLOCK, len(entries) - 1)
        same[begin:end] = (entries[begin:end] ^ entries[begin + 1 : end + 1]) >> bits == 0
    return same


def _without_private(entries: Array, bits: np.uint64) -> Array:
    """The entries whose hash occurs more than once, moved to the front of the same memory."""
    shared = _same_as_next(entries, bits)
    # The last entry of a run equals the one before it. A copy, as the two views overlap.
    shared[1:] |= shared[:-1].copy()
    num_shared = 0
    for begin in range(0, len(entries), _BLOCK):
        block = entries[begin : begin + _BLOCK][shared[begin : begin + _BLOCK]]
        entries[num_shared : num_shared + len(block)] = block
        num_shared += len(block)
    return entries[:num_shared]


def _starts(entries: Array, bits: np.uint64) -> tuple[Array, Array]:
    """Where each run of one hash begins, and where an entry is the same as the next one."""
    same = _same_as_next(entries, bits)
    # The first of all begins a run, and each that differs from the one before.
    starts = np.flatnonzero(np.append(True, ~same[:-1])) if len(entries) else np.empty(0, np.int64)
    return starts, np.flatnonzero(_same_as_next(entries, np.uint64(0)))


def _sums(entries: Array, starts: Array, low: np.uint64, words: Array) -> Array:
    """The sum of the words of the ranks of each run, modulo 2**64."""
    sums = np.empty(len(starts), np.uint64)
    first = 0
    while first < len(starts):
        last = max(first + 1, int(np.searchsorted(starts, starts[first] + _BLOCK)))
        end = starts[last] if last < len(starts) else len(entries)
        ranks = (entries[starts[first] : end] & low).astype(np.int64)
        sums[first:last] = np.add.reduceat(words[ranks], starts[first:last] - starts[first])
        first = last
    return sums
