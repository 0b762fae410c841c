"""What protection takes of a node's memory beside what is there already: as long as old arenas stay, and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftckpt.arena.leftovers import used_bytes
from ftckpt.arena.memory import check_budget, once_given_back, size_of
from ftckpt.arena.package import list_packages
from ftckpt.arena.segment import list_arenas
from ftckpt.errors import MemoryBudgetError
from ftckpt.protect.groups import ParityGroup
from ftckpt.protect.holding import Holding
from ftckpt.protect.parity_file import parity_path

PARITY_FILES = 2
"""Parity files of an arena for each mode."""


@dataclass(frozen=True)
class Room:
    """Bytes that a node needs beside those in use.

    ``now_bytes``: for parity and packages while old arenas are there, which keep theirs until a snapshot in the new
    ones is protected. ``later_bytes``: once those have gone, for the slots that wait for their memory as well; less
    than nothing where the old ones were larger.
    """

    now_bytes: int
    later_bytes: int

    def check(self, node_dir: Path, modes: Sequence[str]) -> str:
        """Why there is no room now, though there will be when old arenas have gone; empty where there is.

        Raises:
            MemoryBudgetError: there will be none then either. ``modes`` are those of the text.
        """
        try:
            once_given_back(node_dir, lambda: check_budget(node_dir, max(0, self.later_bytes)))
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"no room for what protects the snapshots (protect: {','.join(modes)}): {error}; "
                "or protect less (--ftckpt-protect)"
            ) from None
        try:
            check_budget(node_dir, self.now_bytes)
        except MemoryBudgetError as error:
            return str(error)
        return ""


def room_for(
    node_dir: Path,
    node: str,
    need_bytes: int,
    *,
    holdings: Iterable[Holding],
    groups: Iterable[ParityGroup],
    kept: Mapping[str, Sequence[str]],
    slots: int,
) -> Room:
    """What ``node`` needs for protection.

    Args:
        need_bytes: parity files and packages in all (``Report.smp_bytes``).
        holdings: arenas that are written now, of all nodes; all others of this node are old.
        groups: whose parity the SMPs keep: only files of these, in those arenas, are written over.
        kept: the nodes that keep the package of each shard; snapshots with packages of others go with old arenas.
        slots: of an arena that has all.
    """
    arenas = {holding.arena for holding in holdings if holding.node == node}
    shards = {shard for shard, nodes in kept.items() if node in nodes}
    paths = {
        parity_path(node_dir / member.arena, group.mode, index)
        for group in groups
        for member in group.members
        if member.node == node and member.arena in arenas
        for index in range(PARITY_FILES)
    }
    packages: dict[tuple[str, int], list[Path]] = {}
    foreign = set()
    for name in list_packages(node_dir):
        packages.setdefault((name.lineage8, name.iteration), []).append(name.path)
        if name.shard not in shards:
            foreign.add((name.lineage8, name.iteration))
    reused = sum(map(size_of, paths))
    leaving = sum(used_bytes(path) for path in list_arenas(node_dir) if path.name not in arenas)
    for snapshot, files in packages.items():
        if snapshot in foreign:
            leaving += sum(map(size_of, files))
        else:
            reused += sum(map(size_of, files))
    now = max(0, need_bytes - reused)
    waiting = sum(_lacking_bytes(node_dir / name, slots) for name in arenas)
    return Room(now, now + waiting - leaving)


def _lacking_bytes(arena: Path, slots: int) -> int:
    """What the slots take that an arena does not have yet."""
    sizes = [size_of(path) for path in arena.glob("slot*")]
    return max(0, slots - len(sizes)) * max(sizes, default=0)
