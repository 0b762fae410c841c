"""The arenas of this node as the SMP holds them: mapped, with their checks and the leases on their slots."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftckpt.arena.checks import Check, Checks
from ftckpt.arena.control import MAX_SLOTS, SlotRecord, Snapshot
from ftckpt.arena.segment import CONTROL_NAME, Arena, slot_name
from ftckpt.errors import FtckptError
from ftckpt.smp.parity_files import ParityFiles

LEASE_SECS = 20.0
_OPEN_AGAIN_SECS = 1.0
_LOOK_AGAIN_SECS = 0.2


@dataclass(frozen=True)
class Found:
    """A checked slot that holds a snapshot."""

    slot: int
    record: SlotRecord
    check: Check

    @property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """One xxh3-64 per chunk."""
        return self.check.chunk_hashes


class Held:
    """One arena. ``record``, ``found``, ``same`` and ``lease`` may be called from any thread.

    What another thread reads while the arena is closed raises ValueError or ArenaError; memory it has a view
    of stays mapped.

    Raises:
        FtckptError: the arena cannot be opened, or its file of checks not be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Asked before anything is mapped: what is replaced in between counts as another file.
        identities = _identities(path, MAX_SLOTS)
        self.arena = Arena.open(path)
        self._identities = identities[: self.arena.control.slots + 1]
        try:
            control = self.arena.control
            self.checks = Checks.create_or_open(
                path, control.slots, control.num_chunks, control.digest, writable=True
            )
        except BaseException:
            self.arena.close()
            raise
        self._guard = threading.Lock()
        self._leases: dict[int, int] = {}

    @property
    def name(self) -> str:
        """Name of the arena's directory."""
        return self.path.name

    @property
    def shard(self) -> str:
        """The shard that it holds."""
        return self.arena.control.shard

    @property
    def stale(self) -> bool:
        """Whether a file of the arena was replaced, made or deleted since it was mapped: open it again."""
        return self.checks.replaced or self._identities != _identities(self.path, self.arena.control.slots)

    @property
    def vanished(self) -> bool:
        """Whether the arena was deleted."""
        return not self.path.exists()

    def identity(self, slot: int) -> tuple[int, int] | None:
        """Of the file of ``slot`` that is mapped here."""
        return self._identities[1 + slot]

    def same(self, slot: int, record: SlotRecord) -> bool:
        """Whether ``slot`` still holds the snapshot of ``record``, in the file that is mapped here."""
        now = self.arena.control.record(slot)
        return now.sealed and _key(now) == _key(record) and self._current(slot)

    def found(self, snapshot: Snapshot) -> Found | None:
        """The slot that holds ``snapshot`` and is CHECKED, or None."""
        for slot in range(self.arena.control.slots):
            record = self.arena.control.record(slot)
            if record.sealed and (record.lineage, record.iteration) == snapshot and self._current(slot):
                check = self.checks.read(slot)
                if check is not None and check.key == _key(record):
                    return Found(slot, record, check)
        return None

    @contextmanager
    def lease(self, slot: int) -> Iterator[None]:
        """Hold a lease on ``slot``; whoever holds one for long renews it with ``renew``."""
        with self._guard:
            self._leases[slot] = self._leases.get(slot, 0) + 1
            self.checks.lease(slot, _until())
        try:
            yield
        finally:
            with self._guard:
                self._leases[slot] -= 1
                if self._leases[slot] == 0:
                    self._let_go(slot)

    def renew(self, slot: int) -> None:
        """Prolong a lease that the caller holds."""
        with self._guard:
            self.checks.lease(slot, _until())

    def close(self) -> None:
        """Unmap; leases end."""
        with self._guard:
            for slot, holders in self._leases.items():
                if holders:
                    self._let_go(slot)
            self.checks.close()
        self.arena.close()

    def _let_go(self, slot: int) -> None:
        with suppress(ValueError):  # closed meanwhile, which ended it
            self.checks.release(slot)

    def _current(self, slot: int) -> bool:
        return self.identity(slot) == _identity(self.path / slot_name(slot))


class HeldArenas:
    """The arenas of a node that a live trainer writes. All but ``by_shard`` belongs to one thread."""

    def __init__(self, node_dir: Path) -> None:
        self.node_dir = node_dir
        self.by_shard: Mapping[str, Held] = {}
        self.parity = ParityFiles()
        self.problems: dict[str, str] = {}
        """Why an arena cannot be used, by its name."""
        self.gone: set[str] = set()
        """Those that were open here and have been deleted since."""
        self._wanted: tuple[str, ...] = ()
        self._try_again = self._look_again = 0.0

    @property
    def all(self) -> list[Held]:
        """Those that are open."""
        return list(self.by_shard.values())

    @property
    def complete(self) -> bool:
        """Whether all that are wanted are open."""
        return len(self.by_shard) == len(self._wanted)

    def want(self, names: Iterator[str] | list[str]) -> None:
        """Directory names of the arenas to hold from now on."""
        self._wanted = tuple(dict.fromkeys(names))
        self.gone.clear()
        self._try_again = 0.0

    @property
    def changed(self) -> bool:
        """Whether ``refresh`` has something to do."""
        names = {held.name for held in self.all}
        missing = set(self._wanted) - names
        if names - set(self._wanted) or (missing and time.monotonic() >= self._try_again):
            return True
        if time.monotonic() < self._look_again:
            return False
        self._look_again = time.monotonic() + _LOOK_AGAIN_SECS
        return any(held.stale for held in self.all)

    def refresh(self) -> None:
        """Open what is wanted and not open, and again what was replaced; close the rest."""
        self._try_again = time.monotonic() + _OPEN_AGAIN_SECS
        keep = {held.name: held for held in self.all if held.name in self._wanted and not held.stale}
        gone = [held for held in self.all if held.name not in keep]
        self.gone |= {held.name for held in gone if held.name in self._wanted and held.vanished}
        self.problems.clear()
        for name in self._wanted:
            if name in keep or (name in self.gone and not (self.node_dir / name).exists()):
                continue
            try:
                keep[name] = Held(self.node_dir / name)
            except (FtckptError, OSError) as error:
                self.problems[name] = str(error)
        self.gone -= keep.keys()
        self.by_shard = {held.shard: held for held in keep.values()}
        self.parity.keep(lambda directory: directory.name in keep)
        for held in gone:
            held.close()

    def close(self) -> None:
        """Unmap all."""
        arenas, self.by_shard = self.all, {}
        self.parity.keep(lambda directory: False)
        for held in arenas:
            held.close()


def common_mark(marks: list[Snapshot | None]) -> Snapshot | None:
    """The snapshot that all of ``marks`` name, or None."""
    return marks[0] if marks and all(mark == marks[0] for mark in marks) else None


def _key(record: SlotRecord) -> tuple[bytes, int, int]:
    return record.lineage, record.iteration, record.sequence


def _until() -> int:
    return time.monotonic_ns() + int(LEASE_SECS * 1e9)


def _identities(path: Path, slots: int) -> tuple[tuple[int, int] | None, ...]:
    """Of the control block, then of each slot."""
    return tuple(map(_identity, (path / CONTROL_NAME, *(path / slot_name(slot) for slot in range(slots)))))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
