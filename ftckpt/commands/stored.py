"""``ftckpt list`` and ``ftckpt verify``: what a job has on storage, and whether every byte of it is what it was."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import Any

import xxhash

from ftckpt.errors import StorageError
from ftckpt.events import Progress
from ftckpt.model.layouts import layout_name
from ftckpt.model.text import human
from ftckpt.model.tiers import KINDS
from ftckpt.persist.commit import MANIFEST_NAME, committed, folder_of
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.place import snapshots_at
from ftckpt.persist.retention import pinned, voided
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage, open_storage

_READ_BYTES = 16 << 20
_VOID = "bad, or of a past that the job has left: no restart takes it"


def add_list(commands: Any) -> None:
    """Add ``list`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("list", help="show the snapshots on storage, newest first")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.set_defaults(run=run_list)


def add_verify(commands: Any) -> None:
    """Add ``verify`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("verify", help="read every byte of snapshots on storage; status 1: something is bad")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("--iteration", type=int, metavar="N", help="only this one (default: all)")
    parser.set_defaults(run=run_verify)


def run_list(arguments: argparse.Namespace) -> int:
    """Print a line for each snapshot. Raises StorageError where the place cannot be read."""
    storage, bad = open_storage(snapshots_at(arguments.where)), False
    iterations, pins, void = committed(storage), pinned(storage), voided(storage)
    for iteration in iterations:
        try:
            stored = manifest_of(storage, iteration)
        except StorageError as error:
            print(f"iteration {iteration}: cannot be used: {error}")
            bad = True
            continue
        size, layout = human(stored.nbytes), layout_name(stored.layout)
        notes = ", compressed" if any(shard.frames is not None for shard in stored.shards.values()) else ""
        notes += ", pinned" if iteration in pins else ""
        notes += f", void ({_VOID})" if stored.snapshot in void else ""
        print(f"iteration {iteration}: {layout}, {len(stored.shards)} shards, {size}, of job {stored.job}{notes}")
    for iteration in sorted(pins.difference(iterations)):
        print(f"iteration {iteration}: pinned, and not there")
    if not iterations:
        print(f"{arguments.where}: no snapshot")
    if (last := last_attempt(storage)) is not None:
        record = last.counted()
        seen = ", ".join(f"{kind} {record.seen.get(kind, 0)}" for kind in KINDS)
        hours = record.secs / 3600
        print(f"job {record.job}: failures before attempt {last.record.number}: {seen}; {hours:.3g} h of training")
    return int(bad)


def run_verify(arguments: argparse.Namespace) -> int:
    """Print what is bad, and what a restart would take. Raises StorageError where the place cannot be read."""
    storage = open_storage(snapshots_at(arguments.where))
    wanted = [n for n in committed(storage) if arguments.iteration in (None, n)]
    if not wanted:
        which = "" if arguments.iteration is None else f" of iteration {arguments.iteration}"
        raise StorageError(f"{arguments.where}: no snapshot{which}", lasting=True)
    good, void = [iteration for iteration in wanted if _is_good(storage, iteration)], voided(storage)
    usable = [iteration for iteration in good if manifest_of(storage, iteration).snapshot not in void]
    print(f"a restart would take iteration {usable[0]}" if usable else "a restart could take none of them")
    return int(len(good) < len(wanted))


def _is_good(storage: Storage, iteration: int) -> bool:
    try:
        stored = manifest_of(storage, iteration)
    except StorageError as error:
        print(f"iteration {iteration}: bad: {error}")
        return False
    progress, done, problems = Progress(f"verifying iteration {iteration}"), 0, list[str]()
    for shard, entry in stored.shards.items():
        if problem := _problem(storage, f"{folder_of(iteration)}/{entry.file}", entry):
            problems.append(f"{shard}: {problem}")
        done += entry.nbytes
        progress(done, stored.nbytes)
    for problem in problems:
        print(f"iteration {iteration}: bad: {problem}")
    if not problems:
        print(f"iteration {iteration}: good, {len(stored.shards)} shards, {human(stored.nbytes)}")
    return not problems


def _problem(storage: Storage, name: str, entry: StoredShard) -> str:
    """What is wrong with a file; "" if nothing is."""
    nbytes = storage.size(name)
    if nbytes != entry.nbytes:
        return f"{name} is missing" if nbytes is None else f"{name} has {nbytes} bytes, not {entry.nbytes}"
    digest = xxhash.xxh3_64()
    for begin in range(0, nbytes, _READ_BYTES):
        digest.update(storage.read(name, begin, min(_READ_BYTES, nbytes - begin)))
    return "" if digest.hexdigest() == entry.checksum else f"{name} does not match its checksum"


def manifest_of(storage: Storage, iteration: int) -> StoredSnapshot:
    """Of a committed snapshot; raises StorageError."""
    name = f"{folder_of(iteration)}/{MANIFEST_NAME}"
    return StoredSnapshot.decode(storage.read(name), f"{storage.where}/{name}")


def usable_at(where: str) -> list[int]:
    """Iterations of the snapshots that a restart may take of what lies at ``where``, newest first; no byte of their
    shards is read.

    Raises:
        StorageError: the place cannot be read.
    """
    storage, usable = open_storage(where), list[int]()
    void = voided(storage)
    for iteration in committed(storage):
        with suppress(StorageError):
            if manifest_of(storage, iteration).snapshot not in void:
                usable.append(iteration)
    return usable
