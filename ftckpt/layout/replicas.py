"""Replica sets, and which bytes of each set every one of its ranks copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import xxhash

from ftckpt.state.fragment import Fragment

CUT_BYTES = 64
"""Shares are cut at multiples of this many bytes inside a fragment, so that no cache line has two copiers."""


@dataclass(frozen=True)
class Holding:
    """What one rank says of one fragment: its identity and a hash of the bytes it holds."""

    identity: bytes
    content: int


@dataclass(frozen=True)
class ReplicaSets:
    """``members[identity]``: ranks that hold the same bits of a fragment, ascending.

    ``differing`` holds identities whose holders do not agree on the bits; each holder keeps its own.
    """

    members: Mapping[bytes, tuple[int, ...]]
    differing: frozenset[bytes]


def identity(fragment: Fragment) -> bytes:
    """16 bytes that name key, type and geometry of a fragment."""
    shape = ",".join(map(str, fragment.global_shape))
    return xxhash.xxh3_128_digest(f"{fragment.name}|{fragment.dtype}|{shape}".encode())


def replica_sets(holdings: Sequence[Sequence[Holding]]) -> ReplicaSets:
    """Group equal fragments of all ranks; ``holdings[rank]`` is what that rank has."""
    members: dict[bytes, list[int]] = {}
    content: dict[bytes, int] = {}
    differing: set[bytes] = set()
    for rank, held in enumerate(holdings):
        for holding in held:
            members.setdefault(holding.identity, []).append(rank)
            if content.setdefault(holding.identity, holding.content) != holding.content:
                differing.add(holding.identity)
    return ReplicaSets({key: tuple(ranks) for key, ranks in members.items()}, frozenset(differing))


def share(fragments: Sequence[Fragment], sets: ReplicaSets, rank: int, shard: str) -> list[tuple[int, Fragment]]:
    """The parts of ``fragments`` that ``rank`` copies: pairs of index into ``fragments`` and the part.

    The fragments of all sets with the same members are laid end to end in the order of their names and cut
    into as many equal runs of bytes as there are members, so the work is even to ``CUT_BYTES`` whatever
    the sizes of single tensors. Fragments whose replicas differ are taken whole by every holder, under a
    key that carries the shard's name. Deterministic: every rank computes the same cut.
    """
    parts: list[tuple[int, Fragment]] = []
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, fragment in enumerate(fragments):
        key = identity(fragment)
        if key in sets.differing:
            parts.append((index, fragment.with_key(private_key(fragment.key, shard))))
        else:
            groups.setdefault(sets.members[key], []).append(index)
    for ranks, indices in groups.items():
        indices.sort(key=lambda i: fragments[i].name)
        parts += _cut([(i, fragments[i]) for i in indices], ranks.index(rank), len(ranks))
    return sorted(parts, key=lambda part: part[0])


def private_key(key: str, shard: str) -> str:
    """The key of a tensor that only the rank at ``shard`` can give back."""
    return f"{key}@{shard}"


def _cut(run: list[tuple[int, Fragment]], place: int, places: int) -> list[tuple[int, Fragment]]:
    total = sum(fragment.nbytes for _, fragment in run)
    begin, end = total * place // places, total * (place + 1) // places
    parts: list[tuple[int, Fragment]] = []
    position = 0
    for index, fragment in run:
        start, stop = _cut_inside(fragment, begin - position), _cut_inside(fragment, end - position)
        if stop > start:
            parts.append((index, fragment.part(start, stop)))
        position += fragment.nbytes
    return parts


def _cut_inside(fragment: Fragment, cut_bytes: int) -> int:
    """The element at which a cut ``cut_bytes`` after the fragment's first byte falls."""
    if cut_bytes >= fragment.nbytes:
        return fragment.numel
    return max(0, cut_bytes) // CUT_BYTES * CUT_BYTES // fragment.item_bytes
