"""The arenas of this node: who may write which, which ones are old, and whether memory suffices."""

from __future__ import annotations

from pathlib import Path

from ftckpt.arena.image import SlotImage
from ftckpt.arena.memory import check_budget
from ftckpt.arena.segment import (
    Arena,
    JobLock,
    arena_path,
    list_arenas,
    node_directory,
    remove_arena,
    remove_job_if_empty,
)
from ftckpt.comm import Group, together
from ftckpt.config import Config
from ftckpt.errors import ArenaError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.state.manifest import Manifest

_LARGE_BYTES = 4 << 30
"""Allocating this much takes seconds: people are told."""


class NodeArenas:
    """This rank's view of its node's directory. ``enter``, ``open`` and ``leave`` are collective.

    Old arenas, those that no rank of the node writes any more, are kept until a snapshot of the new lineage
    is whole: until then they may hold the only one.
    """

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self.path = Path()
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        self._leads = topology.is_node_leader
        self._job_lock: JobLock | None = None
        self._old: list[Path] = []
        self._own: Path | None = None

    def enter(self) -> None:
        """Make sure that no other live process uses this job's arenas on this node.

        Raises:
            ArenaError: the directory cannot be used, or a live process holds the job or one of its arenas.
        """
        together(self._group, self._enter)

    def open(self, manifest: Manifest, holds_snapshot: bool) -> Arena:
        """The locked arena for ``manifest``: the one that is there, or a new one.

        ``holds_snapshot``: the arenas that are there hold the snapshot that the job would restart from.

        Raises:
            MemoryBudgetError: the node has no room for its ranks' new arenas.
            ArenaError: held by another process, or not creatable.
        """
        path = arena_path(self.path, manifest)
        slots = self._config.slots
        existing = together(self._group, lambda: self._reuse(path))
        self._own = path
        self._set_aside_old(path, holds_snapshot)
        need = 0 if existing is not None else SlotImage.of(manifest).file_bytes * slots
        self._check_memory(need)
        if need > _LARGE_BYTES:
            self._events.tell(f"allocating {need / 1e9:.1f} GB of shared memory for each rank")
        arena = together(self._group, lambda: existing or Arena.create(self.path, manifest, slots))
        together(self._group, lambda: arena.lock(self._config.lock_timeout_secs))
        self._events.emit(
            "arena", path=str(path), reused=existing is not None, slots=slots, slot_bytes=arena.image.file_bytes
        )
        return arena

    def remove_old(self) -> None:
        """A snapshot of the new lineage is whole: nobody needs the old arenas."""
        for path in self._old:
            remove_arena(path)
        self._old.clear()

    def leave(self, arena: Arena | None) -> None:
        """Remove what this rank has, once all ranks are here.

        Raises:
            RuntimeError: a rank did not come; nothing was removed.
        """
        self._group.barrier()
        self.remove_old()
        if arena is not None:
            arena.remove()
        elif self._own is not None:
            remove_arena(self._own)
        self._group.barrier()
        if self._job_lock is not None:
            remove_job_if_empty(Path(self._config.arena), self._config.job, self._topology.me.node)

    def release(self) -> None:
        """Give the lock up; what is in the directory stays."""
        if self._job_lock is not None:
            self._job_lock.release()
            self._job_lock = None

    def _enter(self) -> None:
        self.path = node_directory(Path(self._config.arena), self._config.job, self._topology.me.node)
        if not self._leads:
            return
        _refuse_renamed(self.path, {member.node for member in self._topology.members})
        deadline_secs = self._config.lock_timeout_secs
        self._job_lock = JobLock(self.path, deadline_secs)
        for path in list_arenas(self.path):
            _wait_for_straggler(path, deadline_secs)

    def _set_aside_old(self, own: Path, holds_snapshot: bool) -> None:
        kept = set(self._group.gather(str(own).encode()))
        if not self._leads:
            return
        self._old = [path for path in list_arenas(self.path) if str(path).encode() not in kept]
        if not holds_snapshot:
            self.remove_old()

    def _check_memory(self, need_bytes: int) -> None:
        needs = [int(data) for data in self._group.gather(str(need_bytes).encode())]
        total = sum(needs[rank] for rank in self._topology.ranks_on(self._topology.me.node))
        together(self._group, lambda: check_budget(self.path, total) if self._leads and total else None)

    def _reuse(self, path: Path) -> Arena | None:
        """The arena at ``path`` with its damaged slots made new; None where nothing in it can be used."""
        if not path.exists():
            return None
        try:
            arena = Arena.open(path, writable=True)
        except ArenaError as error:
            self._events.emit("arena_problem", path=str(path), problems=[str(error)])
            remove_arena(path)
            return None
        for slot in range(arena.control.slots):
            if not arena.header_good(slot):
                arena = arena.renew(slot)
        return arena


def _refuse_renamed(node_dir: Path, nodes: set[str]) -> None:
    """Arenas under a node name that no rank has any more would be lost without a word."""
    for other in sorted(node_dir.parent.iterdir()):
        if other.name not in nodes and other.is_dir() and list_arenas(other):
            raise ArenaError(
                f"{other} holds snapshots of this job under the node name {other.name!r}, which no rank has now: "
                f"start with --ftckpt-node {other.name}, or remove them with 'ftckpt clean JOB'"
            )


def _wait_for_straggler(path: Path, deadline_secs: float) -> None:
    """An arena that a process of an earlier attempt still writes cannot be read."""
    try:
        arena = Arena.open(path)
    except FtckptError:
        return  # the inventory reports it
    try:
        arena.lock(deadline_secs)
    finally:
        arena.close()
