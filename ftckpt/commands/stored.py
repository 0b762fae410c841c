"""``ftckpt list`` and ``ftckpt verify``: what a job has on storage, and whether every byte of it is what it was."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.errors import StorageError
from ftckpt.events import Progress
from ftckpt.model.layouts import layout_name
from ftckpt.model.text import human
from ftckpt.model.tiers import KINDS
from ftckpt.persist.commit import OWNER_NAME, committed, folder_of
from ftckpt.persist.failures import last_attempt
from ftckpt.persist.place import locate
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
    storage, wanted = found_at(arguments.where)
    listing = _listing(storage, wanted)
    if arguments.json:
        print(json.dumps(listing, indent=2))
    else:
        print("\n".join(_in_lines(listing, arguments.where)))
    return int(any(one["problem"] for one in listing["snapshots"]))


def found_at(where: str) -> tuple[Storage, int | None]:
    """The storage that lies at ``where``, and the iteration that this names, if it is one snapshot.

    Raises:
        StorageError: the place cannot be read, or has something else.
    """
    located = locate(where)
    storage = open_storage(located.where)
    if "://" in where or storage.size(OWNER_NAME) is not None or committed(storage):
        return storage, located.iteration
    # Here: torch takes seconds to load, and snapshots need none of it.
    from ftckpt.convert.formats import description

    path = Path(located.where)
    if not any(path.iterdir()):
        return storage, None
    there = description(path) or "has no snapshots, and no checkpoint of another kind that is known here"
    raise StorageError(f"{where} {there}", lasting=True)


def _listing(storage: Storage, wanted: int | None = None) -> dict[str, Any]:
    """What ``ftckpt list --json`` prints, of all iterations or the one that is ``wanted``.

    ``snapshots``: newest first; of one that cannot be used the ``problem`` alone beside its ``iteration``. ``void``:
    no restart takes it. ``pinned_away``: iterations that are pinned and not there. ``failures``: of the job that
    trained last, null where nothing is known.
    """
    iterations, pins, void = _iterations(storage, wanted), pinned(storage), voided(storage)
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
    failures = None
    if (last := last_attempt(storage)) is not None:
        record = last.counted()
        seen = {kind: record.seen.get(kind, 0) for kind in KINDS}
        failures = {"job": record.job, "attempt": last.record.number, "seen": seen, "hours": record.secs / 3600}
    away = sorted(pins.difference(committed(storage)))
    return {"snapshots": snapshots, "pinned_away": away, "failures": failures}


def _iterations(storage: Storage, wanted: int | None) -> list[int]:
    return [iteration for iteration in committed(storage) if wanted in (None, iteration)]


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
    if (failures := listing["failures"]) is not None:
        seen = ", ".join(f"{kind} {number}" for kind, number in failures["seen"].items())
        attempt = f"job {failures['job']}: failures before attempt {failures['attempt']}"
        yield f"{attempt}: {seen}; {failures['hours']:.3g} h of training"


def run_verify(arguments: argparse.Namespace) -> int:
    """Print what is bad, and what a restart would take. Raises StorageError where the place cannot be read."""
    storage, named = found_at(arguments.where)
    iteration = named if arguments.iteration is None else arguments.iteration
    wanted = _iterations(storage, iteration)
    if not wanted:
        which = "" if iteration is None else f" of iteration {iteration}"
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
