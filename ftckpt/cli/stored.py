"""``ftckpt list``, ``verify``, ``pin`` and ``unpin``: lists checkpoints on storage, verifies their checksums, and
excludes them from retention."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from ftckpt.errors import StorageError
from ftckpt.model.layouts import layout_name
from ftckpt.model.lineage import is_doubtful, last_shared, newest
from ftckpt.model.text import human
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import (
    OWNER_NAME,
    CheckpointName,
    checkpoints,
    claimed_lineage,
    folder_of,
    read_manifest,
)
from ftckpt.persist.paths import locate
from ftckpt.persist.retention import VOID_MEANS, pin, pinned, unpin, usable, voided
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage
from ftckpt.restore.progress import Progress

_READ_BYTES = 16 << 20


def add_list(commands: Any) -> None:
    """Adds ``list`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("list", help="show the checkpoints on storage, newest first")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_list)


def add_verify(commands: Any) -> None:
    """Adds ``verify`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("verify", help="read every byte of checkpoints on storage; status 1: some are bad")
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("--iteration", type=int, metavar="N", help="only this one (default: all)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run_verify)


def run_list(arguments: argparse.Namespace) -> int:
    """Prints a line per checkpoint; status 1: some are unusable. Raises StorageError if storage is unreadable."""
    storage, wanted = found_at(arguments.where)
    listing = _listing(storage, wanted)
    if arguments.json:
        print(json.dumps(listing, indent=2))
    else:
        print("\n".join(_in_lines(listing, arguments.where)))
    return int(any(one["problem"] for one in listing["snapshots"]))


def found_at(where: str) -> tuple[Storage, int | None]:
    """The storage of ``where``, and its iteration if ``where`` names a single checkpoint.

    Raises:
        StorageError: storage is unreadable, or contains something else.
    """
    located = locate(where)
    storage = open_storage(located.where)
    if "://" in where or storage.size(OWNER_NAME) is not None or checkpoints(storage):
        return storage, located.iteration
    # Imported late: torch takes seconds to load, and listing does not need it.
    from ftckpt.universal.formats import description

    path = Path(located.where)
    if not any(path.iterdir()):
        return storage, None
    there = description(path) or "has no snapshots, and no checkpoint of another known kind"
    raise StorageError(f"{where} {there}", lasting=True)


def _listing(storage: Storage, wanted: int | None = None) -> dict[str, Any]:
    """The object that ``ftckpt list --json`` prints, for all iterations or the one ``wanted``.

    ``snapshots``: newest first; an unusable one has only ``name``, ``iteration`` and ``problem``. ``void``:
    invalidated. ``abandoned``: the iteration before it at which the job has branched off; null if it is in the
    job's past. ``doubtful``: its replicas may have differed. ``pinned_away``: pinned names that do not exist.
    """
    names, pins, void = _names(storage, wanted), pinned(storage), voided(storage)
    read = {name: _read(storage, name) for name in names}
    head = newest(
        [claimed_lineage(storage), *(one.lineage for one in read.values() if isinstance(one, StoredSnapshot))]
    )
    snapshots: list[dict[str, Any]] = []
    for name, stored in read.items():
        listed: dict[str, Any] = {"name": str(name), "iteration": name.iteration, "problem": ""}
        snapshots.append(listed)
        if not isinstance(stored, StoredSnapshot):
            listed["problem"] = stored
            continue
        since = last_shared(stored.lineage, head)
        listed |= {
            "layout": layout_name(stored.layout),
            "shards": len(stored.shards),
            "bytes": stored.nbytes,
            "job": stored.job,
            "compressed": any(shard.frames is not None for shard in stored.shards.values()),
            "pinned": name in pins,
            "void": stored.snapshot in void,
            "abandoned": since if name.iteration > since else None,
            "doubtful": is_doubtful(stored.lineage, name.iteration, head),
        }
    away = sorted(str(name) for name in pins.difference(checkpoints(storage)))
    return {"snapshots": snapshots, "pinned_away": away}


def _names(storage: Storage, wanted: int | None) -> list[CheckpointName]:
    return [name for name in checkpoints(storage) if wanted in (None, name.iteration)]


def _read(storage: Storage, name: CheckpointName) -> StoredSnapshot | str:
    """The manifest, or the error of reading it."""
    try:
        return read_manifest(storage, name)
    except StorageError as error:
        return str(error)


def _in_lines(listing: dict[str, Any], where: str) -> Iterator[str]:
    for one in listing["snapshots"]:
        if one["problem"]:
            yield f"{one['name']}: cannot be used: {one['problem']}"
            continue
        notes = [name for name in ("compressed", "pinned", "doubtful") if one[name]]
        notes += [f"void ({VOID_MEANS})"] if one["void"] else []
        if (since := one["abandoned"]) is not None:
            notes.append(
                f"abandoned: the job has branched at {since}"
                if since >= 0
                else "abandoned: the job has started again"
            )
        size = f"{one['shards']} shards, {human(one['bytes'])}"
        yield ", ".join([f"{one['name']}: {one['layout']}, {size}, of job {one['job']}", *notes])
    for name in listing["pinned_away"]:
        yield f"{name}: pinned, but missing"
    if not listing["snapshots"]:
        yield f"{where}: no snapshot"


def run_verify(arguments: argparse.Namespace) -> int:
    """Prints the result for each checkpoint, and which one a restart would restore; exit status 1: some are bad.

    Raises:
        StorageError: storage is unreadable, or has no such checkpoint.
    """
    storage, named = found_at(arguments.where)
    iteration = named if arguments.iteration is None else arguments.iteration
    wanted = _names(storage, iteration)
    if not wanted:
        which = "" if iteration is None else f" of iteration {iteration}"
        raise StorageError(f"{arguments.where}: no snapshot{which}", lasting=True)
    found: list[dict[str, Any]] = []
    for name in wanted:
        found.append(one := _verified(storage, name))
        if not arguments.json:  # at once: the next may take minutes
            print("\n".join(_verdict(one)))
    good = [one["name"] for one in found if not one["problems"]]
    usable = [str(name) for name in usable_at(storage.where) if str(name) in good]
    if arguments.json:
        print(json.dumps({"snapshots": found, "restart": usable[0] if usable else None}, indent=2))
    else:
        print(f"a restart would take {usable[0]}" if usable else "a restart could take none of them")
    return int(len(good) < len(wanted))


def _verified(storage: Storage, name: CheckpointName) -> dict[str, Any]:
    """Reads every byte of a checkpoint; ``problems`` has a text per bad file."""
    which = {"name": str(name), "iteration": name.iteration}
    stored = _read(storage, name)
    if isinstance(stored, str):
        return {**which, "problems": [stored]}
    progress, done, problems = Progress(f"verifying {name}"), 0, list[str]()
    for shard, entry in stored.shards.items():
        if problem := _problem(storage, f"{folder_of(name.iteration)}/{entry.file}", entry):
            problems.append(f"{shard}: {problem}")
        done += entry.nbytes
        progress(done, stored.nbytes)
    return {**which, "problems": problems, "shards": len(stored.shards), "bytes": stored.nbytes}


def _verdict(verified: dict[str, Any]) -> Iterator[str]:
    name = verified["name"]
    if not verified["problems"]:
        yield f"{name}: good, {verified['shards']} shards, {human(verified['bytes'])}"
    yield from (f"{name}: bad: {problem}" for problem in verified["problems"])


def _problem(storage: Storage, name: str, entry: StoredShard) -> str:
    """The problem of a file, or ""."""
    nbytes = storage.size(name)
    if nbytes != entry.nbytes:
        return f"{name} is missing" if nbytes is None else f"{name} has {nbytes} bytes, not {entry.nbytes}"
    digest = xxhash.xxh3_64()
    for begin in range(0, nbytes, _READ_BYTES):
        digest.update(storage.read(name, begin, min(_READ_BYTES, nbytes - begin)))
    return "" if digest.hexdigest() == entry.checksum else f"{name} does not match its checksum"


def usable_at(where: str) -> list[CheckpointName]:
    """The checkpoints at ``where`` that a restart may use, newest first. Shards are not read.

    Raises:
        StorageError: storage is unreadable.
    """
    return list(usable(open_storage(where)))


def add_pin(commands: Any) -> None:
    """Adds ``pin`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("pin", help="pin a checkpoint on storage: no job removes or replaces it")
    _add_name(parser)
    parser.set_defaults(run=run_pin)


def add_unpin(commands: Any) -> None:
    """Adds ``unpin`` to the parser of ``ftckpt``."""
    parser = commands.add_parser("unpin", help="unpin a checkpoint: retention may remove it")
    _add_name(parser)
    parser.set_defaults(run=run_unpin)


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("where", metavar="STORAGE", help="directory or URL, as --ftckpt-persist has it")
    parser.add_argument("name", metavar="NAME", type=_name, help="as 'ftckpt list' prints it, or an iteration")


def _name(text: str) -> CheckpointName:
    if (name := CheckpointName.of(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a name such as iter_0000012 nor an iteration")
    return name


def run_pin(arguments: argparse.Namespace) -> int:
    """Pins the checkpoint. Raises StorageError if it does not exist."""
    is_void = pin(found_at(arguments.where)[0], arguments.name)
    print(f"{arguments.name} is pinned")
    if is_void:
        print("it is invalidated and may be about to be removed; 'ftckpt list' shows whether it stays")
    return 0


def run_unpin(arguments: argparse.Namespace) -> int:
    """Unpins the checkpoint; retention may remove it after the next flush."""
    was_pinned = unpin(found_at(arguments.where)[0], arguments.name)
    print(f"{arguments.name} is {'no longer' if was_pinned else 'not'} pinned")
    return 0
