"""Replica sets, and which bytes of each set every one of its ranks copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from ftckpt.array_types import Array
from ftckpt.model.fragment import Fragment
from ftckpt.model.replica_groups import DIFFERING, PRIVATE, WHOLE, Groups, distinct, find_groups, pack
from ftckpt.model.shares import Run

CUT_BYTES = 64
"""Shares are cut at multiples of this many bytes inside a fragment, so that no cache line has two copiers."""

Gather = Callable[[Callable[[], bytes]], list[bytes]]
"""A collective: what the action returns on every rank, in rank order; where it fails on one, its error on all."""


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """The replica sets of the job, and where this rank's fragments belong.

    ``runs`` are the same on all ranks, in the same order, without fragments whose holders differ.
    ``private[rank]``, int64, are bytes that this rank copies by itself: fragments of its own, differing ones, and
    those that each holder copies. ``group_of[i]`` is the index into ``runs`` of this rank's fragment ``i``, or
    ``PRIVATE``, ``DIFFERING`` or ``WHOLE``.
    ``again`` tells later whether all holders still agree. ``odd[i]``, where this rank's fragment ``i`` differs: ranks
    that hold other bits of it than more than half of its holders do.
    """

    runs: tuple[Run, ...]
    private: Array
    group_of: Array
    again: Recheck
    odd: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


WHOLE_SHARE = 128
"""What several ranks hold is dealt where it is more than one part in so many of what some of them holds alone."""


def without_small(sets: ReplicaSets) -> ReplicaSets:
    """Small runs are left to each of their ranks, ``WHOLE``; the same on all ranks.

    To deal them spares a rank next to nothing of its copies. A restart would want a few bytes of every other shard,
    each in a chunk that must be read as a whole, on other nodes too: of Adam's counts of steps under FSDP, of norms
    under tensor parallelism.
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
    """Every rank copies its own of what several describe, under a key of its own: nobody promises that they stay the
    same. The same on all ranks."""
    private = sets.private.copy()
    for run in sets.runs:
        private[run.members] += run.nbytes
    runs = tuple(replace(run, nbytes=0) for run in sets.runs)
    group_of = np.where(sets.group_of >= 0, DIFFERING, sets.group_of)
    return replace(sets, runs=runs, private=private, group_of=group_of)


def identity(fragment: Fragment) -> bytes:
    """16 bytes that name key, type and geometry of a fragment."""
    shape = ",".join(map(str, fragment.global_shape))
    return xxhash.xxh3_128_digest(f"{fragment.name}|{fragment.dtype}|{shape}".encode())


@dataclass(frozen=True, eq=False)
class Holdings:
    """One rank's fragments, as it reports them to the others.

    Of fragment ``i``: ``group_of[i]`` as in ``ReplicaSets``, ``nbytes[i]`` and ``hashes[i]`` (uint64) of its
    identity and content, where it is in a group. ``order`` are the indices of those that are in groups, by group,
    then in an order that all members have.
    """

    group_of: Array
    nbytes: Array
    hashes: Array
    order: Array

    def of(self, group: int) -> Array:
        """Indices of the fragments of one group, in the order that all members have."""
        members: Array = self.order[self.group_of[self.order] == group]
        return members

    def summary(self, digest: Callable[[Sequence[int]], int] | None = None) -> bytes:
        """Bytes that this rank holds alone, then of each of its groups, ascending, a digest and the bytes.

        The digest is of ``hashes``, or what ``digest`` gives for the indices of the group's fragments.
        """
        words = [np.array([self.nbytes[self.group_of < 0].sum()], np.uint64)]
        for group in distinct(self.group_of[self.order]).tolist():
            index = self.of(group)
            hashes = self.hashes[index].tobytes()
            value = xxhash.xxh3_64_intdigest(hashes) if digest is None else digest(index.tolist())
            words.append(np.array([value, int(self.nbytes[index].sum())], np.uint64))
        return np.concatenate(words).tobytes()

    def details(self, groups: Sequence[int]) -> bytes:
        """Of each group: content hashes, then bytes, of every fragment in it."""
        members = (self.of(group) for group in groups)
        return b"".join(self.hashes[index].tobytes() + self.nbytes[index].tobytes() for index in members)


@dataclass(frozen=True, eq=False)
class Recheck:
    """Whether the holders of each fragment still hold the same bytes: a word for each group of a rank, no more.

    ``differ``: some of them do not, as it was found; what came of that must be found out anew.
    """

    groups: Groups
    holdings: Holdings
    differ: bool

    @property
    def needed(self) -> bool:
        """Whether several ranks hold anything; the same on all ranks."""
        return bool(self.groups.members)

    def digests(self, digest: Callable[[Sequence[int]], int]) -> bytes:
        """What this rank has to say; ``digest`` gives 64 bits of the bytes of fragments, which are named by index."""
        return self.holdings.summary(digest)

    def agree(self, messages: list[bytes]) -> bool:
        """What ``digests`` gave on all ranks says that each group holds the same bytes."""
        return not self.differ and not _compare(self.groups, messages, len(messages))[2]


@dataclass(frozen=True, eq=False)
class ReplicaMap:
    """Which ranks hold the same fragments, whatever their bytes are: it follows from what state is described as.

    ``group_of``, ``nbytes`` and ``order`` are those of ``Holdings``; ``identities`` of this rank's fragments.
    """

    groups: Groups
    group_of: Array
    nbytes: Array
    order: Array
    identities: Sequence[bytes]
    num_ranks: int

    def look(self, contents: Callable[[Sequence[int]], Sequence[int]]) -> Holdings:
        """What this rank holds now; ``contents`` is called once, with indices of fragments that several ranks hold,
        and answers a 64-bit hash of the bytes of each."""
        hashes = np.zeros(len(self.nbytes), np.uint64)
        indices = self.order.tolist()
        for index, content in zip(indices, contents(indices), strict=True):
            # With the identity: different fragments that were given one code cannot pass for equal.
            hashes[index] = xxhash.xxh3_64_intdigest(self.identities[index] + content.to_bytes(8, "little"))
        # A copy: what differs is marked there.
        return Holdings(self.group_of.copy(), self.nbytes, hashes, self.order)

    def sets(self, gather: Gather, holdings: Holdings, summaries: list[bytes]) -> ReplicaSets:
        """The replica sets, by what ``look`` gave here, and what ``summary`` of that gave on all ranks. Collective
        only where replicas differ: then it takes one message, the hash of each fragment of the groups that do."""
        private, totals, unequal = _compare(self.groups, summaries, self.num_ranks)
        again = Recheck(self.groups, holdings, bool(unequal))
        odd: dict[int, tuple[int, ...]] = {}
        if unequal:
            details = gather(lambda: holdings.details(unequal))
            for group, hashes in _settle(self.groups, unequal, details, private, totals).items():
                own, holders, is_odd = holdings.of(group), self.groups.members[group], _is_odd(hashes)
                # Nothing where this rank is no member.
                for place in np.flatnonzero(_differ(hashes)[: len(own)]).tolist():
                    odd[int(own[place])] = tuple(holders[is_odd[:, place]].tolist())
                holdings.group_of[list(odd)] = DIFFERING
        members = self.groups.members
        runs = tuple(Run(ranks, int(total)) for ranks, total in zip(members, totals, strict=True))
        return ReplicaSets(runs, private, holdings.group_of, again, odd)


def find_sharing(gather: Gather, rank: int, num_ranks: int, fragments: Sequence[Fragment]) -> ReplicaMap:
    """Find out together which ranks hold the same fragments: one message per rank, of 8 bytes per fragment.
    Collective."""
    identities: list[bytes] = []
    mine: Array = np.empty(0, np.uint64)

    def codes() -> bytes:
        nonlocal identities, mine
        identities = [identity(fragment) for fragment in fragments]
        # Half of the bits, for half the message; in ``ReplicaMap.look`` hashes part fragments that got one code.
        mine = pack(np.frombuffer(b"".join(identities), np.uint64)[::2], rank, num_ranks)
        return mine.tobytes()

    entries = _joined(gather(codes))
    groups = find_groups(entries, num_ranks)
    # The codes of all ranks: by far the largest array, and of no use from here on.
    del entries
    group_of = groups.find(mine, num_ranks)
    order = np.flatnonzero(group_of >= 0)
    # By group, then by code: the rank in a code is the same for all of one rank's, so members agree on this order.
    order = order[np.lexsort((mine[order], group_of[order]))]
    nbytes = np.array([fragment.nbytes for fragment in fragments], np.int64)
    return ReplicaMap(groups, group_of, nbytes, order, identities, num_ranks)


def own_parts(fragments: Sequence[Fragment], sets: ReplicaSets, shard: str) -> list[tuple[int, Fragment]]:
    """What no other rank copies for this one: fragments of its own, and its bits of those whose holders differ.

    The latter under a key that carries the shard's name.
    """
    parts: list[tuple[int, Fragment]] = []
    for index, group in enumerate(sets.group_of.tolist()):
        if group == DIFFERING:
            parts.append((index, fragments[index].with_key(private_key(fragments[index].key, shard))))
        elif group in (PRIVATE, WHOLE) and fragments[index].numel > 0:
            parts.append((index, fragments[index]))
    return parts


def run_indices(fragments: Sequence[Fragment], sets: ReplicaSets) -> dict[int, list[int]]:
    """By run, the indices of its fragments in the order that all members have: that of their names."""
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
    """What the member at ``place`` of a run copies of it: pairs of index and part, in the run's order.

    The run's fragments stand end to end and are cut where ``cuts`` says, so the work is as dealt to ``CUT_BYTES``
    whatever the sizes of single tensors. Every member computes the same for every member.
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
    """The first two shards whose copies of one fragment differ, and that fragment; None where all copies agree.

    ``copies`` are fragments, under the key of the model, with the shard that holds each for itself and a hash of its
    bytes. Only where they agree may one of them be read for all.
    """
    first: dict[Fragment, tuple[str, int]] = {}
    for fragment, shard, content in copies:
        other, wanted = first.setdefault(fragment, (shard, content))
        if content != wanted:
            return fragment, other, shard
    return None


def private_key(key: str, shard: str) -> str:
    """The key of a tensor that only the rank at ``shard`` can give back."""
    return f"{key}@{shard}"


def _cut_inside(fragment: Fragment, cut_bytes: int) -> int:
    """The element at which a cut ``cut_bytes`` after the fragment's first byte falls."""
    if cut_bytes >= fragment.nbytes:
        return fragment.numel
    # Rounded down for begin and end alike: the neighbour's share begins where this one ends.
    return max(0, cut_bytes) // CUT_BYTES * CUT_BYTES // fragment.item_bytes


def _joined(messages: list[bytes]) -> Array:
    """All messages of uint64 as one array that may be written to."""
    return np.frombuffer(bytearray().join(messages), np.uint64)


def _compare(groups: Groups, summaries: list[bytes], num_ranks: int) -> tuple[Array, Array, list[int]]:
    """From all summaries: private bytes by rank, bytes by group, and groups whose members do not agree."""
    members = np.concatenate([np.empty(0, np.int32), *groups.members])
    values = _joined(summaries)
    # Where each rank's summary begins: one word of its own, then two for each of its groups.
    heads = np.arange(num_ranks) + 2 * np.append(0, np.cumsum(np.bincount(members, minlength=num_ranks))[:-1])
    pairs = np.empty((len(members), 2), np.uint64)
    # A summary has its rank's groups in ascending order: a stable sort of all members by rank is that order.
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
    """Of the ``unequal`` groups the hashes of their fragments, a row for each member; the bytes of those that differ
    are moved from ``totals`` to ``private``."""
    settled: dict[int, Array] = {}
    position = [0] * len(details)
    for group in unequal:
        members, length = groups.members[group], int(groups.lengths[group])
        rows = []
        for rank in members.tolist():
            # Hashes, then bytes, 8 each, of the group's fragments. As int64: hashes are only compared.
            rows.append(np.frombuffer(details[rank], np.int64, 2 * length, position[rank]))
            position[rank] += 16 * length
        hashes, nbytes = np.split(np.stack(rows), 2, axis=1)
        differ = _differ(hashes)
        private[members] += (nbytes * differ).sum(axis=1)
        totals[group] = nbytes[0, ~differ].sum()
        settled[group] = hashes
    return settled


def _differ(hashes: Array) -> Array:
    """Which fragments are not the same on all members, who have a row each."""
    differ: Array = (hashes != hashes[0]).any(axis=0)
    return differ


def _is_odd(hashes: Array) -> Array:
    """By member and fragment, whether it holds other bits than more than half of them do."""
    # What more than half hold lies in the middle of all in order. Of two, nobody can say which is right.
    middle = np.sort(hashes, axis=0)[len(hashes) // 2]
    others = hashes != middle
    odd: Array = others & (2 * others.sum(axis=0) < len(hashes))
    return odd
