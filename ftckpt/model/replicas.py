"""Replica sets, and the bytes of each set that each of its ranks copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from ftckpt.array_types import Array
from ftckpt.model.fragment import Fragment
from ftckpt.model.replica_groups import DIFFERING, PRIVATE, WHOLE, Groups, distinct, find_groups, pack

CUT_BYTES = 64
"""Shares are cut at multiples of this inside a fragment, so that no two ranks copy parts of one cache line."""

Gather = Callable[[Callable[[], bytes]], list[bytes]]
"""A collective: the results of an action on all ranks, in rank order; if it fails on one, its error on all."""


@dataclass(frozen=True, eq=False)
class Run:
    """All fragments of one replica set, concatenated: its ``members``, ascending ranks, divide its ``nbytes``."""

    members: Array
    nbytes: int

    @property
    def cuts(self) -> Array:
        """Member ``k`` copies bytes ``cuts[k]`` to ``cuts[k + 1]``; int64."""
        return equal_cuts(self.nbytes, len(self.members))


def equal_cuts(nbytes: int, places: int) -> Array:
    """``nbytes * k // places`` for each ``k`` from 0 to ``places``, int64."""
    each, rest = divmod(nbytes, places)  # the product itself could exceed 64 bits
    place = np.arange(places + 1, dtype=np.int64)
    return place * each + place * rest // places


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """The replica sets of the job, and the set of each of this rank's fragments.

    ``runs``: equal on all ranks and in the same order, without fragments that differ between replicas.
    ``private[rank]``, int64: the bytes that only this rank copies for itself: fragments without replicas, differing
    ones, and those that all their ranks copy. ``group_of[i]``: the index in ``runs`` of this rank's fragment ``i``,
    or ``PRIVATE``, ``DIFFERING`` or ``WHOLE``. ``odd[i]``, for a differing fragment ``i`` of this rank: the ranks
    whose bits differ from those of the majority.
    """

    runs: tuple[Run, ...]
    private: Array
    group_of: Array
    odd: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


WHOLE_SHARE = 128
"""A run is divided if its bytes exceed 1/128 of the private bytes of the member that has the fewest."""


def without_small(sets: ReplicaSets) -> ReplicaSets:
    """Makes small runs ``WHOLE``: each of their ranks copies all of them. Equal on all ranks.

    Dividing them saves almost no copies, but a restart would need a few bytes of every other shard, each with its
    entire chunk, also from other nodes. Examples: Adam's step counters under FSDP, norms under tensor parallelism.
    """
    if not sets.runs:
        return sets
    begins = np.cumsum([0, *(len(run.members) for run in sets.runs[:-1])])
    alone = np.minimum.reduceat(sets.private[np.concatenate([run.members for run in sets.runs])], begins)
    nbytes = np.array([run.nbytes for run in sets.runs])
    small = np.flatnonzero((nbytes > 0) & (nbytes <= alone // WHOLE_SHARE))
    private, runs = sets.private.copy(), list(sets.runs)
    for number in small.tolist():
        private[runs[number].members] += runs[number].nbytes
        runs[number] = replace(runs[number], nbytes=0)
    group_of = np.where(np.isin(sets.group_of, small), WHOLE, sets.group_of)
    return replace(sets, runs=tuple(runs), private=private, group_of=group_of)


def each_its_own(sets: ReplicaSets) -> ReplicaSets:
    """Makes every rank copy its own fragments under its own keys, for frameworks without guaranteed equal replicas.
    The result is equal on all ranks."""
    private = sets.private.copy()
    for run in sets.runs:
        private[run.members] += run.nbytes
    runs = tuple(replace(run, nbytes=0) for run in sets.runs)
    group_of = np.where(sets.group_of >= 0, DIFFERING, sets.group_of)
    return replace(sets, runs=runs, private=private, group_of=group_of)


def identity(fragment: Fragment) -> bytes:
    """A hash of key, type and geometry of a fragment, 16 bytes."""
    shape = ",".join(map(str, fragment.global_shape))
    return xxhash.xxh3_128_digest(f"{fragment.name}|{fragment.dtype}|{shape}".encode())


@dataclass(frozen=True, eq=False)
class Holdings:
    """One rank's fragments, as it reports them to the others.

    For fragment ``i``: ``group_of[i]`` as in ``ReplicaSets``, ``nbytes[i]``, and, in a group, ``hashes[i]`` (uint64)
    of its identity and content. ``order``: the indices of fragments in groups, by group, then in an order that is
    equal on all members.
    """

    group_of: Array
    nbytes: Array
    hashes: Array
    order: Array

    def of(self, group: int) -> Array:
        """Indices of the fragments of one group, in the order that is equal on all members."""
        members: Array = self.order[self.group_of[self.order] == group]
        return members

    def summary(self) -> bytes:
        """This rank's private bytes, then for each of its groups, ascending, a digest of ``hashes`` and the bytes."""
        words = [np.array([self.nbytes[self.group_of < 0].sum()], np.uint64)]
        for group in distinct(self.group_of[self.order]).tolist():
            index = self.of(group)
            value = xxhash.xxh3_64_intdigest(self.hashes[index].tobytes())
            words.append(np.array([value, int(self.nbytes[index].sum())], np.uint64))
        return np.concatenate(words).tobytes()

    def details(self, groups: Sequence[int]) -> bytes:
        """The hashes, then the sizes, of all fragments of each group."""
        members = (self.of(group) for group in groups)
        return b"".join(self.hashes[index].tobytes() + self.nbytes[index].tobytes() for index in members)


@dataclass(frozen=True, eq=False)
class ReplicaMap:
    """The ranks that describe the same fragments, regardless of their bytes.

    ``group_of``, ``nbytes`` and ``order`` as in ``Holdings``; ``identities``: those of this rank's fragments.
    """

    groups: Groups
    group_of: Array
    nbytes: Array
    order: Array
    identities: Sequence[bytes]
    num_ranks: int

    def look(self, contents: Callable[[Sequence[int]], Sequence[int]]) -> Holdings:
        """This rank's fragments with their present content. ``contents`` is called once, with the indices of
        replicated fragments, and returns a 64-bit hash of the bytes of each."""
        hashes = np.zeros(len(self.nbytes), np.uint64)
        indices = self.order.tolist()
        for index, content in zip(indices, contents(indices), strict=True):
            # With the identity, so that different fragments with the same code differ.
            hashes[index] = xxhash.xxh3_64_intdigest(self.identities[index] + content.to_bytes(8, "little"))
        # A copy: ``sets`` marks differing fragments in it.
        return Holdings(self.group_of.copy(), self.nbytes, hashes, self.order)

    def sets(self, gather: Gather, holdings: Holdings, summaries: list[bytes]) -> ReplicaSets:
        """The replica sets, from this rank's ``holdings`` and the summaries of all ranks. Collective only if replicas
        differ: then ranks exchange one message, with a hash per fragment of the differing groups."""
        private, totals, unequal = _compare(self.groups, summaries, self.num_ranks)
        odd: dict[int, tuple[int, ...]] = {}
        if unequal:
            details = gather(lambda: holdings.details(unequal))
            for group, hashes in _settle(self.groups, unequal, details, private, totals).items():
                own, holders, is_odd = holdings.of(group), self.groups.members[group], _is_odd(hashes)
                # ``own`` is empty if this rank is not a member.
                for place in np.flatnonzero(_differ(hashes)[: len(own)]).tolist():
                    odd[int(own[place])] = tuple(holders[is_odd[:, place]].tolist())
                holdings.group_of[list(odd)] = DIFFERING
        members = self.groups.members
        runs = tuple(Run(ranks, int(total)) for ranks, total in zip(members, totals, strict=True))
        return ReplicaSets(runs, private, holdings.group_of, odd)


def find_sharing(gather: Gather, rank: int, num_ranks: int, fragments: Sequence[Fragment]) -> ReplicaMap:
    """Finds the ranks that describe the same fragments: one message per rank, 8 bytes per fragment. Collective."""
    identities: list[bytes] = []
    mine: Array = np.empty(0, np.uint64)

    def codes() -> bytes:
        nonlocal identities, mine
        identities = [identity(fragment) for fragment in fragments]
        # Half of the bits halves the message; hashes in ``ReplicaMap.look`` separate fragments with the same code.
        mine = pack(np.frombuffer(b"".join(identities), np.uint64)[::2], rank, num_ranks)
        return mine.tobytes()

    entries = _joined(gather(codes))
    groups = find_groups(entries, num_ranks)
    # Frees the codes of all ranks, by far the largest array.
    del entries
    group_of = groups.find(mine, num_ranks)
    order = np.flatnonzero(group_of >= 0)
    # By group, then by code: all codes of a rank have the same low bits, so this order is equal on all members.
    order = order[np.lexsort((mine[order], group_of[order]))]
    nbytes = np.array([fragment.nbytes for fragment in fragments], np.int64)
    return ReplicaMap(groups, group_of, nbytes, order, identities, num_ranks)


def own_parts(fragments: Sequence[Fragment], sets: ReplicaSets, shard: str) -> list[tuple[int, Fragment]]:
    """The fragments that this rank must copy completely: private, differing and small ones.

    Differing ones get a key with the shard's name.
    """
    parts: list[tuple[int, Fragment]] = []
    for index, group in enumerate(sets.group_of.tolist()):
        if group == DIFFERING:
            parts.append((index, fragments[index].with_key(private_key(fragments[index].key, shard))))
        elif group in (PRIVATE, WHOLE) and fragments[index].numel > 0:
            parts.append((index, fragments[index]))
    return parts


def run_indices(fragments: Sequence[Fragment], sets: ReplicaSets) -> dict[int, list[int]]:
    """The indices of each run's fragments, sorted by name, so that the order is equal on all members."""
    runs: dict[int, list[int]] = {}
    for index, group in enumerate(sets.group_of.tolist()):
        if group >= 0:
            runs.setdefault(group, []).append(index)
    for indices in runs.values():
        indices.sort(key=lambda index: fragments[index].name)
    return runs


def run_share(
    fragments: Sequence[Fragment], indices: Sequence[int], cuts: Array, place: int
) -> list[tuple[int, Fragment]]:
    """The share of the member at ``place`` of a run: pairs of index and part, in the run's order.

    The run's fragments are concatenated and divided at ``cuts``, so that shares are exact to ``CUT_BYTES`` whatever
    the sizes of tensors. Every member computes the same for every member.
    """
    begin, end = int(cuts[place]), int(cuts[place + 1])
    parts: list[tuple[int, Fragment]] = []
    position = 0
    for index in indices:
        fragment = fragments[index]
        start, stop = _cut_inside(fragment, begin - position), _cut_inside(fragment, end - position)
        if stop > start:
            parts.append((index, fragment.part(start, stop)))
        position += fragment.nbytes
    return parts


def disagreement(copies: Iterable[tuple[Fragment, str, int]]) -> tuple[Fragment, str, str] | None:
    """The first two shards whose copies of one fragment differ, and that fragment; None if all copies agree.

    ``copies``: fragments, under the model's keys, with the shard that has its own copy and a hash of its bytes. Only
    if all agree may one of them be read for all.
    """
    first: dict[Fragment, tuple[str, int]] = {}
    for fragment, shard, content in copies:
        other, wanted = first.setdefault(fragment, (shard, content))
        if content != wanted:
            return fragment, other, shard
    return None


def private_key(key: str, shard: str) -> str:
    """The key of a tensor that only ``shard`` has."""
    return f"{key}@{shard}"


def _cut_inside(fragment: Fragment, cut_bytes: int) -> int:
    """The element at which a cut ``cut_bytes`` after the fragment's first byte falls."""
    if cut_bytes >= fragment.nbytes:
        return fragment.numel
    # Begin and end are both rounded down: the next share starts where this one ends.
    return max(0, cut_bytes) // CUT_BYTES * CUT_BYTES // fragment.item_bytes


def _joined(messages: list[bytes]) -> Array:
    """All messages of uint64 as one writable array."""
    return np.frombuffer(bytearray().join(messages), np.uint64)


def _compare(groups: Groups, summaries: list[bytes], num_ranks: int) -> tuple[Array, Array, list[int]]:
    """Private bytes by rank, bytes by group, and the groups whose members differ, from all summaries."""
    members = np.concatenate([np.empty(0, np.int32), *groups.members])
    values = _joined(summaries)
    # The start of each rank's summary: one word for private bytes, then two for each of its groups.
    heads = np.arange(num_ranks) + 2 * np.append(0, np.cumsum(np.bincount(members, minlength=num_ranks))[:-1])
    pairs = np.empty((len(members), 2), np.uint64)
    # Summaries have groups in ascending order, as does a stable sort of all members by rank.
    pairs[np.argsort(members, kind="stable")] = np.delete(values, heads).reshape(-1, 2)
    private = values[heads].astype(np.int64)
    if not groups.members:
        return private, np.empty(0, np.int64), []
    begins = np.cumsum([0, *map(len, groups.members)])[:-1]
    digests = pairs[:, 0]
    # All digests of a group are equal if the largest and the smallest are.
    agree = np.maximum.reduceat(digests, begins) == np.minimum.reduceat(digests, begins)
    return private, pairs[begins, 1].astype(np.int64), np.flatnonzero(~agree).tolist()


def _settle(
    groups: Groups, unequal: Sequence[int], details: Sequence[bytes], private: Array, totals: Array
) -> dict[int, Array]:
    """The hashes of all fragments of the ``unequal`` groups, with a row per member. Moves the bytes of differing
    fragments from ``totals`` to ``private``."""
    settled: dict[int, Array] = {}
    position = [0] * len(details)
    for group in unequal:
        members, length = groups.members[group], int(groups.lengths[group])
        rows = []
        for rank in members.tolist():
            # The hashes of the group's fragments, then their sizes. As int64: hashes are only compared.
            rows.append(np.frombuffer(details[rank], np.int64, 2 * length, position[rank]))
            position[rank] += 16 * length
        hashes, nbytes = np.split(np.stack(rows), 2, axis=1)
        differ = _differ(hashes)
        private[members] += (nbytes * differ).sum(axis=1)
        totals[group] = nbytes[0, ~differ].sum()
        settled[group] = hashes
    return settled


def _differ(hashes: Array) -> Array:
    """Whether each fragment differs between members, which have a row each."""
    differ: Array = (hashes != hashes[0]).any(axis=0)
    return differ


def _is_odd(hashes: Array) -> Array:
    """Whether the bits of each member and fragment differ from those of the majority; False without a majority."""
    # A value that more than half have is the median.
    middle = np.sort(hashes, axis=0)[len(hashes) // 2]
    others = hashes != middle
    odd: Array = others & (2 * others.sum(axis=0) < len(hashes))
    return odd
