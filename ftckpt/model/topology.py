"""The layout of a job, the place of every rank in it, and the names of its shards."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ftckpt.errors import ConfigError, MismatchError
from ftckpt.model.manifest import shard_name


@dataclass(frozen=True)
class RankPlace:
    """One rank: its coordinates in the layout and the name of its node."""

    coords: Mapping[str, int]
    node: str

    @property
    def shard(self) -> str:
        """The name of the rank's shard."""
        return shard_name(self.coords)


@dataclass(frozen=True)
class Topology:
    """The job: ``members[rank]``, this process's ``rank``, and the layout's sizes.

    Raises:
        ConfigError: two ranks claim the same coordinates.
    """

    rank: int
    members: tuple[RankPlace, ...]
    layout: Mapping[str, int | str | bool]

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for rank, member in enumerate(self.members):
            if member.shard in seen:
                raise ConfigError(f"ranks {seen[member.shard]} and {rank} both claim the place {member.shard}")
            seen[member.shard] = rank

    @property
    def me(self) -> RankPlace:
        return self.members[self.rank]

    @cached_property
    def rank_of(self) -> dict[str, int]:
        return {member.shard: rank for rank, member in enumerate(self.members)}

    def ranks_on(self, node: str) -> list[int]:
        """Ranks of one node, ascending."""
        return [rank for rank, member in enumerate(self.members) if member.node == node]

    def named(self, ranks: Iterable[int]) -> list[str]:
        """Ranks for messages: ``rank 5 on n1``."""
        return [f"rank {rank} on {self.members[rank].node}" for rank in ranks]

    @property
    def is_node_leader(self) -> bool:
        """Whether this is the lowest rank of its node."""
        return self.ranks_on(self.me.node)[0] == self.rank


def layouts_differ(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """A text such as ``tp 2 → 4`` for every size in which two layouts differ (theirs → mine)."""
    axes: Sequence[str] = sorted(set(mine) | set(theirs))
    return [f"{axis} {theirs.get(axis)} → {mine.get(axis)}" for axis in axes if mine.get(axis) != theirs.get(axis)]


MAX_SHARDS = 1 << 20
"""More than any job has: a layout with more is corrupt."""

# The axis matches as little as possible, so that all digits belong to the index: ``e10`` is axis e, place 10.
_PLACE = re.compile(r"(.+?)([0-9]+)")


def coordinates_of(shard: str) -> dict[str, int]:
    """Inverse of ``RankPlace.shard``: ``tp0-pp1-dp0`` gives tp 0, pp 1, dp 0.

    Raises:
        MismatchError: not the name of a shard.
    """
    return dict(_places(shard))


def axes_of(shard: str) -> tuple[str, ...]:
    """The axes in the name of a shard, in its order: ``tp0-pp1-dp0`` gives tp, pp, dp.

    Raises:
        MismatchError: not the name of a shard.
    """
    return tuple(axis for axis, _ in _places(shard))


def shard_names(layout: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    """All shards of a layout; the last of ``axes`` varies fastest. ``layout`` has the size of each axis.

    Raises:
        MismatchError: an axis without a size, or more than ``MAX_SHARDS`` shards.
    """
    sizes = tuple((axis, layout.get(axis)) for axis in axes)
    for axis, size in sizes:
        # A layout also has strings and booleans; True is an int.
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MismatchError(f"layout {dict(layout)}: {axis} has no size, so the shards of it cannot be known")
    if math.prod(size for _, size in sizes if size) > MAX_SHARDS:
        raise MismatchError(f"layout {dict(layout)}: more than {MAX_SHARDS} shards")
    return _names(sizes)


def first_of_each_stage(shards: Sequence[str]) -> tuple[str, ...]:
    """The ``shards`` that are first along every axis except ``pp``, in the order of pipeline stages.

    Raises:
        MismatchError: not the name of a shard.
    """
    firsts = []
    for shard in shards:
        places = dict(_places(shard))
        if not any(index for axis, index in places.items() if axis != "pp"):
            firsts.append((places.get("pp", 0), shard))
    return tuple(shard for _, shard in sorted(firsts))


@lru_cache(maxsize=8)
def _names(sizes: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    axes = [axis for axis, _ in sizes]
    places = itertools.product(*(range(size) for _, size in sizes))
    return tuple(shard_name(dict(zip(axes, place, strict=True))) for place in places)


def _places(shard: str) -> list[tuple[str, int]]:
    matches = [_PLACE.fullmatch(part) for part in shard.split("-")]
    if not all(matches):
        raise MismatchError(f"{shard!r} is not the name of a shard, such as tp0-pp1-dp0")
    return [(match[1], int(match[2])) for match in matches if match]
