"""Snapshots that must never be taken again: slots are void, and what could bring them back is gone before."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ftckpt.errors import ArenaError, FtckptError
from ftckpt.model.snapshot import SnapshotId
from ftckpt.store.arena import open_control
from ftckpt.store.control import ControlBlock
from ftckpt.store.directory import list_arenas
from ftckpt.store.package import list_packages
from ftckpt.store.parity_file import list_parity, snapshot_of


def void(node_dir: Path, newest: int) -> None:
    """Make every snapshot of a node that is newer than iteration ``newest`` unusable, all of them where it is -1.

    Parity and packages go first: they could bring a slot back that is void, but not the other way round. A kill at
    any point leaves some newer snapshots that can still be taken, and the next start voids them again.
    """
    # Before the slots: a kill behind this line leaves slots without protection, never parity that brings back a void
    # one.
    remove_protection(node_dir, newest)
    for path in list_arenas(node_dir):
        void_arena(path, newest)


def void_arena(path: Path, newest: int) -> None:
    with suppress(ArenaError), open_control(path, writable=True) as control:
        # ArenaError: nothing of a damaged arena can be taken, and what could have rebuilt it is gone.
        _void_slots(control, newest)
        if newest < 0:
            # Otherwise the next start would take the mark as proof that something was lost, and refuse.
            control.mark_whole(None)


def undo_arena(path: Path, newest: int) -> None:
    """What an arena has that is newer than ``newest`` never happened: that it was whole proves no loss.

    Raises:
        ArenaError: the arena cannot be opened.
    """
    with open_control(path, writable=True) as control:
        _void_slots(control, newest)
        whole = control.whole()
        if whole is not None and whole.iteration > newest:
            control.mark_whole(None)


def _void_slots(control: ControlBlock, newest: int) -> None:
    for index in range(control.slots):
        snapshot = control.record(index).snapshot
        # None: a torn record, or a slot in the middle of a copy; neither may pass for anything later.
        if snapshot is None or snapshot.iteration > newest:
            control.void(index)


def remove_protection(node_dir: Path, newest: int, keep: Collection[SnapshotId] = ()) -> None:
    """Delete a node's parity and packages of snapshots newer than iteration ``newest``, but for those in ``keep``.

    A parity file without snapshot, because it was being written, stays unless all goes, where ``newest`` is -1.
    """
    for parity in list_parity(node_dir):
        try:
            snapshot = snapshot_of(parity.path)
        except FtckptError:
            # A file that cannot be read protects nothing, and says nothing of its age.
            snapshot = None
        gone = newest < 0 if snapshot is None else snapshot.iteration > newest and snapshot not in keep
        if gone:
            parity.path.unlink(missing_ok=True)
    for package in list_packages(node_dir):
        if package.snapshot.iteration > newest and package.snapshot not in keep:
            package.path.unlink(missing_ok=True)
