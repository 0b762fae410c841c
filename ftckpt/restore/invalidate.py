"""Invalidation of snapshots in memory: the protection that could reconstruct them is deleted before their slots."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ftckpt.errors import ArenaError, FtckptError
from ftckpt.memory.control_block import ControlBlock, open_control
from ftckpt.memory.directory import list_arenas
from ftckpt.memory.lineage_file import read_lineage, write_lineage
from ftckpt.memory.package import list_packages
from ftckpt.memory.parity_file import list_parity, snapshot_of
from ftckpt.model.lineage import NO_LIMIT, Lineage, last_shared


def invalidate(node_dir: Path, newest: int, *, abandons: bool = False) -> list[str]:
    """Invalidate every snapshot of a node that is newer than iteration ``newest`` (-1: all); returns the names of the
    arenas that had any. ``abandons``: none of them counts as lost.

    A kill at any point leaves newer snapshots that can still be restored; the next start invalidates them.
    """
    # Before the slots: a kill after this line leaves slots without protection, never parity that reconstructs an
    # invalidated one.
    remove_protection(node_dir, newest)
    affected: list[str] = []
    for path in list_arenas(node_dir):
        with suppress(ArenaError), open_control(path, writable=True) as control:
            # ArenaError: a damaged arena has no usable slot, and its protection is deleted.
            had, whole = _invalidate_slots(control, newest), control.whole()
            if (abandons or newest < 0) and whole is not None and whole.iteration > newest:
                # The next start would take the mark as proof of a lost snapshot, and refuse.
                control.mark_whole(None)
            affected += [path.name] if had else []
    return affected


def adopt(node_dir: Path, head: Lineage, assumed: Lineage) -> list[str]:
    """Make ``head`` the lineage of a node, after invalidating the node's snapshots that are not in its past; returns
    the names of arenas that had any. ``assumed``: the lineage of a node that has recorded none.

    A kill at any point leaves the node's old lineage, and the next start repeats it.

    Raises:
        ArenaError: the lineage cannot be written to the node's directory.
    """
    own = read_lineage(node_dir)
    last = last_shared(own if own.branches else assumed, head)
    abandoned = invalidate(node_dir, last, abandons=True) if last < NO_LIMIT else []
    write_lineage(node_dir, head)
    return abandoned


def _invalidate_slots(control: ControlBlock, newest: int) -> bool:
    """Invalidate slots with newer snapshots, and unsealed ones; returns whether there was a newer snapshot."""
    snapshots = [control.record(index).snapshot for index in range(control.slots)]
    for index, snapshot in enumerate(snapshots):
        # None: a torn record, or a slot being written; neither may become valid later.
        if snapshot is None or snapshot.iteration > newest:
            control.void(index)
    return any(snapshot is not None and snapshot.iteration > newest for snapshot in snapshots)


def remove_protection(node_dir: Path, newest: int) -> None:
    """Delete a node's parity and packages of snapshots newer than iteration ``newest``.

    An incomplete parity file, which has no snapshot yet, stays unless ``newest`` is -1.
    """
    for parity in list_parity(node_dir):
        try:
            snapshot = snapshot_of(parity.path)
        except FtckptError:
            # An unreadable file protects nothing, and its age is unknown.
            snapshot = None
        gone = newest < 0 if snapshot is None else snapshot.iteration > newest
        if gone:
            parity.path.unlink(missing_ok=True)
    for package in list_packages(node_dir):
        if package.snapshot.iteration > newest:
            package.path.unlink(missing_ok=True)
