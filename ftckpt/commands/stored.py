"""``ftckpt list`` and ``ftckpt verify``: what a job has on storage, and whether every byte of it is what it was."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import xxhash

from ftckpt.errors import StorageError
from ftckpt.events import Progress
from ftckpt.model.layouts import layout_name
from ftckpt.model.text import human
from ftckpt.persist.commit import committed, folder_of
from ftckpt.persist.place import snapshots_at
from ftckpt.persist.retention import VOID_MEANS, pinned, read_manifest, voided
from ftckpt.persist.shards import StoredShard
from ftckpt.persist.storage import Storage, open_storage

_READ_BYTES = 16 << 20


def add_list(commands: Any) -> None:
    """Add ``list`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("list", help="show the snapshots on storage, newest first")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_list)


def add_verify(commands: Any) -> None:
    """Add ``verify`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("verify", help="read every byte of snapshots on storage; status 1: something is bad")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("--iteration", type=int, metavar="N", help="only this one (default: all)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_verify)


def run_list(arguments: argparse.Namespace) -> int:
    """Print a line for each snapshot. Raises StorageError where the place cannot be read."""
    storage = open_storage(snapshots_at(arguments.where))
    listing = _listing(storage)
    if arguments.json:
        print(json.dumps(listing, indent=2))
    else:
        print("\n".join(_in_lines(listing, arguments.where)))
    return int(any(one["problem"] for one in listing["snapshots"]))


def _listing(storage: Storage) -> dict[str, Any]:
    """What ``ftckpt list --json`` prints.

    ``snapshots``: newest first; of one that cannot be used the ``problem`` alone beside its ``iteration``. ``void``:
    no restart takes it. ``pinned_away``: iterations that are pinned and not there.
    """
    iterations, pins, void = committed(storage), pinned(storage), voided(storage)
    snapshots: list[dict[str, Any]] = []
    for iteration in iterations:
        try:
            stored = read_manifest(storage, iteration)
        except StorageError as error:
            snapshots.append({"iteration": iteration, "problem": str(error)})
            continue
        snapshots.append({
            "iteration": iteration, "problem": "", "layout": layout_name(stored.layout),
            "shards": len(stored.shards), "bytes": stored.nbytes, "job": stored.job,
            "compressed": any(shard.frames is not None for shard in stored.shards.values()),
            "pinned": iteration in pins, "void": stored.snapshot in void,
        })  # fmt: skip
    return {"snapshots": snapshots, "pinned_away": sorted(pins.difference(iterations))}


def _in_lines(listing: dict[str, Any], where: str) -> Iterator[str]:
    for one in listing["snapshots"]:
        if one["problem"]:
            yield f"iteration {one['iteration']}: cannot be used: {one['problem']}"
            continue
        notes = [name for name in ("compressed", "pinned") if one[name]]
        notes += [f"void ({VOID_MEANS})"] if one["void"] else []
        size = f"{one['shards']} shards, {human(one['bytes'])}"
        yield ", ".join([f"iteration {one['iteration']}: {one['layout']}, {size}, of job {one['job']}", *notes])
    for iteration in listing["pinned_away"]:
        yield f"iteration {iteration}: pinned, and not there"
    if not listing["snapshots"]:
        yield f"{where}: no snapshot"


def run_verify(arguments: argparse.Namespace) -> int:
    """Print what is bad, and what a restart would take. Raises StorageError where the place cannot be read."""
    storage = open_storage(snapshots_at(arguments.where))
    wanted = [n for n in committed(storage) if arguments.iteration in (None, n)]
    if not wanted:
        which = "" if arguments.iteration is None else f" of iteration {arguments.iteration}"
        raise StorageError(f"{arguments.where}: no snapshot{which}", lasting=True)
    found: list[dict[str, Any]] = []
    for iteration in wanted:
        found.append(one := _verified(storage, iteration))
        if not arguments.json:  # at once: the next may take minutes
            print("\n".join(_verdict(one)))
    void = voided(storage)
    good = [one["iteration"] for one in found if not one["problems"]]
    usable = [iteration for iteration in good if read_manifest(storage, iteration).snapshot not in void]
    if arguments.json:
        print(json.dumps({"snapshots": found, "restart": usable[0] if usable else -1}, indent=2))
    else:
        print(f"a restart would take iteration {usable[0]}" if usable else "a restart could take none of them")
    return int(len(good) < len(wanted))


def _verified(storage: Storage, iteration: int) -> dict[str, Any]:
    """Every byte of it was read: its ``problems``, each a text."""
    try:
        stored = read_manifest(storage, iteration)
    except StorageError as error:
        return {"iteration": iteration, "problems": [str(error)]}
    progress, done, problems = Progress(f"verifying iteration {iteration}"), 0, list[str]()
    for shard, entry in stored.shards.items():
        if problem := _problem(storage, f"{folder_of(iteration)}/{entry.file}", entry):
            problems.append(f"{shard}: {problem}")
        done += entry.nbytes
        progress(done, stored.nbytes)
    return {"iteration": iteration, "problems": problems, "shards": len(stored.shards), "bytes": stored.nbytes}


def _verdict(verified: dict[str, Any]) -> Iterator[str]:
    name = f"iteration {verified['iteration']}"
    if not verified["problems"]:
        yield f"{name}: good, {verified['shards']} shards, {human(verified['bytes'])}"
    yield from (f"{name}: bad: {problem}" for problem in verified["problems"])


def _problem(storage: Storage, name: str, entry: StoredShard) -> str:
    """What is wrong with a file; "" if nothing is."""
    nbytes = storage.size(name)
    if nbytes != entry.nbytes:
        return f"{name} is missing" if nbytes is None else f"{name} has {nbytes} bytes, not {entry.nbytes}"
    digest = xxhash.xxh3_64()
    for begin in range(0, nbytes, _READ_BYTES):
        digest.update(storage.read(name, begin, min(_READ_BYTES, nbytes - begin)))
    return "" if digest.hexdigest() == entry.checksum else f"{name} does not match its checksum"


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
            if read_manifest(storage, iteration).snapshot not in void:
                usable.append(iteration)
    return usable
