"""The damage that the fault campaign does to the memory of a job without trainers, and the promise that remains."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ftckpt.errors import FtckptError
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import CONTROL_NAME
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.memory.package import mirror_dir
from ftckpt.memory.slots import slot_name
from ftckpt.model.lineage import UNKNOWN, Lineage, is_doubtful, newest
from ftckpt.parity.groups import mirrors, node_groups, peer_groups, slot_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.parity.survive import Forecast


@dataclass
class Job:
    """The memory of a job: its folder, its content before any damage, and the damage.

    ``whole`` and ``protected`` are iterations, -1: none. ``sealed`` has the iterations in the slots of each shard.
    ``lost_packages`` are pairs of shard and node. ``head`` is the lineage that a start finds.
    """

    folder: Path
    holdings: list[ArenaLayout]
    modes: Modes
    whole: int
    protected: int
    lost_shards: set[str] = field(default_factory=set)
    lost_nodes: set[str] = field(default_factory=set)
    lost_packages: set[tuple[str, str]] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)
    sealed: dict[str, set[int]] = field(default_factory=dict)
    head: Lineage = UNKNOWN

    def doubts(self, iteration: int) -> bool:
        """Whether the snapshot of ``iteration`` may mix states of ranks that differ, as was noticed."""
        return is_doubtful(self.head, iteration, self.head)

    def look(self) -> None:
        """Find the ``head``: it may change until all ranks are dead, and be lost with nodes."""
        self.head = newest(read_lineage(node) for node in self.folder.iterdir()) if self.folder.is_dir() else UNKNOWN

    @property
    def all_lost(self) -> bool:
        """Whether nothing is left that could tell that there ever was a snapshot."""
        return bool(self.holdings) and self.lost_nodes >= {holding.node for holding in self.holdings}

    @property
    def promise(self) -> int | None:
        """The iteration that a restart must reach at least, -1 for any, None where it may refuse."""
        if not (self.lost_shards or self.lost_nodes or self.lost_packages):
            sealed = set[int].intersection(*self.sealed.values()) if self.doubts(self.whole) else {self.whole}
            return max((one for one in sealed if one <= self.whole and not self.doubts(one)), default=None)
        # Two arenas of a shard: slots were reallocated, and this does not track which of them is protected.
        if self.protected < 0 or self.doubts(self.protected) or len(self.holdings) > len(self.sealed):
            return None
        groups = peer_groups(self.holdings, self.modes) + slot_groups(self.holdings)
        groups += node_groups(self.holdings) if self.modes.node else []
        packages = {
            shard: tuple(node for node in nodes if (shard, node) not in self.lost_packages)
            for shard, nodes in mirrors(self.holdings, self.modes).items()
        }
        lost = Forecast(groups, packages, self.holdings).unrecoverable(self.lost_shards, self.lost_nodes)
        return None if lost else self.protected

    def arenas(self) -> list[Path]:
        """Arenas that are there and were not damaged yet."""
        arenas = [path for node in sorted(self.folder.iterdir()) if node.is_dir() for path in list_arenas(node)]
        return [path for path in arenas if path.name.rpartition(".")[0] not in self.lost_shards]

    def lose(self, path: Path, how: str) -> None:
        """Count the arena at ``path`` as lost: whatever is wrong with it, it must be made up for."""
        self.lost_shards.add(path.name.rpartition(".")[0])
        self.faults.append(f"{how} of {path.parent.name}/{path.name}")


def survey(folder: Path, modes: Modes) -> Job:
    """Look at a job's arenas below ``folder`` before they are damaged."""
    job = Job(folder, [], modes, -1, -1)
    for path in job.arenas():
        with closing(Arena.open(path)) as arena:
            holding, control = arena.image.holding(path.parent.name, "", path.name), arena.control
            job.holdings.append(holding)
            slots = job.sealed.setdefault(holding.shard, set())
            slots |= {one.iteration for slot in range(control.slots) if (one := control.snapshot(slot))}
            whole, protected = control.whole(), control.protected()
            job.whole = max(job.whole, whole.iteration if whole else -1)
            job.protected = max(job.protected, protected.iteration if protected else -1)
    job.look()
    return job


def lose_node(job: Job, dice: random.Random) -> None:
    """Deletes all memory of a node; its SMP was killed before."""
    nodes = sorted({path.parent.name for path in job.arenas()})
    node = dice.choice(nodes)
    shutil.rmtree(job.folder / node)
    job.lost_nodes.add(node)
    job.lost_shards |= {holding.shard for holding in job.holdings if holding.node == node}
    job.faults.append(f"all of {node}")


def delete_arena(job: Job, dice: random.Random) -> None:
    """Delete one arena."""
    path = dice.choice(job.arenas())
    shutil.rmtree(path)
    job.lose(path, "deletion")


def flip_slot(job: Job, dice: random.Random) -> None:
    """Flip bits in a slot that has checksums: before they are taken nobody promises anything."""
    path = dice.choice(job.arenas())
    with closing(Arena.open(path)) as arena:
        slots = [
            slot
            for slot in range(arena.control.slots)
            if arena.slot_error(slot) is None and arena.control.record(slot).sealed and not arena.unchecked(slot)
        ]
        begin = len(arena.image.header)
    if slots:
        _flip(path / slot_name(dice.choice(slots)), dice, begin)
        job.lose(path, "flipped bits in a slot")


def truncate_slot(job: Job, dice: random.Random) -> None:
    """Cut a slot's file."""
    path = dice.choice(job.arenas())
    slot = dice.choice(sorted(path.glob("slot*")))
    os.truncate(slot, dice.randrange(slot.stat().st_size))
    job.lose(path, f"truncation of {slot.name}")


def flip_control(job: Job, dice: random.Random) -> None:
    """Flip bits in a control block."""
    path = dice.choice(job.arenas())
    _flip(path / CONTROL_NAME, dice, 0)
    job.lose(path, "flipped bits in the control block")


def spoil(job: Job, dice: random.Random, pattern: str) -> None:
    """Flip bits in a file of an arena, or delete it."""
    path = dice.choice(job.arenas())
    files = sorted(path.glob(pattern))
    if files:
        chosen = dice.choice(files)
        _flip_or_delete(chosen, dice)
        job.lose(path, f"damage to {chosen.name}")


def spoil_package(job: Job, dice: random.Random) -> None:
    """Flip bits in the packages of a shard on one node, or delete them."""
    nodes = [node for node in sorted(job.folder.iterdir()) if mirror_dir(node).is_dir()]
    names = sorted((node.name, path.name.split(".")[0]) for node in nodes for path in mirror_dir(node).iterdir())
    if names:
        node, shard = dice.choice(names)
        for path in mirror_dir(job.folder / node).glob(f"{shard}.*"):
            _flip_or_delete(path, dice)
        job.lost_packages.add((shard, node))
        job.faults.append(f"packages of {shard} on {node}")


spoil_checks, spoil_parity = partial(spoil, pattern="checks"), partial(spoil, pattern="parity.*")
LIVE_DAMAGES = (delete_arena, flip_slot, spoil_checks, spoil_parity, spoil_package)
"""Faults that are possible while trainers and SMPs map the memory, without killing them."""
DAMAGES: Sequence[Callable[[Job, random.Random], None]] = (
    *(lose_node, lose_node, delete_arena, flip_slot, flip_slot, truncate_slot, flip_control),
    *(spoil_checks, spoil_parity, spoil_package),
)
"""Drawn from with equal chances: those named twice are twice as likely."""


def damage(job: Job, dice: random.Random, live: bool = False) -> None:
    """One fault, if there is anything left to damage; ``live``: while the job trains."""
    if job.arenas():
        try:
            dice.choice(LIVE_DAMAGES if live else DAMAGES)(job, dice)
        except (FtckptError, OSError) as error:  # an SMP that lives may repair or replace a file meanwhile
            job.faults.append(f"nothing: {error}")


def _flip_or_delete(path: Path, dice: random.Random) -> None:
    if dice.random() < 0.5:
        path.unlink()
    else:
        _flip(path, dice, 0)


def _flip(path: Path, dice: random.Random, begin: int) -> None:
    with open(path, "r+b") as file:
        nbytes = file.seek(0, os.SEEK_END)
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(begin, nbytes)
            file.seek(at)
            # XOR with one bit: the byte always changes.
            value = file.read(1)[0] ^ (1 << dice.randrange(8))
            file.seek(at)
            file.write(bytes([value]))
