"""Who is who: each rank's place in the parallel layout, and the node it runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ftckpt.errors import ConfigError
from ftckpt.state.manifest import shard_name


@dataclass(frozen=True)
class Member:
    """One rank: its coordinates in the layout and the name of its node."""

    coords: Mapping[str, int]
    node: str

    @property
    def shard(self) -> str:
        """The coordinates as a name."""
        return shard_name(self.coords)

    def to_json(self) -> dict[str, Any]:
        """A JSON value for ``from_json``."""
        return {"coords": list(self.coords.items()), "node": self.node}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Member:
        """Inverse of ``to_json``."""
        return cls({str(axis): int(index) for axis, index in value["coords"]}, str(value["node"]))


@dataclass(frozen=True)
class Topology:
    """The job as every rank sees it: ``members[rank]``, this process's ``rank``, and the layout's sizes.

    Raises:
        ConfigError: two ranks claim the same coordinates.
    """

    rank: int
    members: tuple[Member, ...]
    layout: Mapping[str, int | str | bool]

    def __post_init__(self) -> None:
        seen: dict[str, int] = {}
        for rank, member in enumerate(self.members):
            if member.shard in seen:
                raise ConfigError(f"ranks {seen[member.shard]} and {rank} both claim the place {member.shard}")
            seen[member.shard] = rank

    @property
    def me(self) -> Member:
        """This rank."""
        return self.members[self.rank]

    @cached_property
    def rank_of(self) -> dict[str, int]:
        """Shard name → rank."""
        return {member.shard: rank for rank, member in enumerate(self.members)}

    def ranks_on(self, node: str) -> list[int]:
        """Ranks of one node, ascending."""
        return [rank for rank, member in enumerate(self.members) if member.node == node]

    @property
    def is_node_leader(self) -> bool:
        """Whether this is the lowest rank of its node."""
        return self.ranks_on(self.me.node)[0] == self.rank


def layouts_differ(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Texts such as ``tp 2 → 4`` for every size in which two layouts differ (theirs → mine)."""
    axes: Sequence[str] = sorted(set(mine) | set(theirs))
    return [f"{axis} {theirs.get(axis)} → {mine.get(axis)}" for axis in axes if mine.get(axis) != theirs.get(axis)]
