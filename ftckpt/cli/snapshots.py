"""``ftckpt list``, ``verify`` and ``pin``: lists snapshots on storage or in memory, verifies their checksums, and
excludes checkpoints from retention."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import xxhash

from ftckpt.cli.answers import Answer, Lines, ProgressLine, alarming
from ftckpt.cli.options import add_arena
from ftckpt.cli.slots import slots_at
from ftckpt.cli.targets import memory_at, storage_at
from ftckpt.errors import ConfigError, StorageError
from ftckpt.model.layouts import layout_name
from ftckpt.model.lineage import is_doubtful, last_shared, newest
from ftckpt.model.text import human
from ftckpt.persist.backend import open_storage
from ftckpt.persist.commit import CheckpointName, checkpoints, claimed_lineage, folder_of, read_manifest
from ftckpt.persist.retention import VOID_MEANS, pin, pinned, restorable, unpin, voided
from ftckpt.persist.shards import StoredShard, StoredSnapshot
from ftckpt.persist.storage import Storage

_READ_BYTES = 16 << 20


def add_list(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``list``."""
    text = "storage, as --ftckpt-persist has it, or one checkpoint in it; or a job's name, or a path of arenas"
    parser.add_argument("what", metavar="STORAGE|JOB", help=text)
    add_arena(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``verify``."""
    add_list(parser)
    parser.add_argument("--iteration", type=int, metavar="N", help="on storage, only this one (default: all)")


def run_list(arguments: argparse.Namespace) -> Lines:
    """A line per checkpoint or slot; status 1: some are unusable. Raises StorageError if storage is unreadable."""
    if (memory := memory_at(arguments.what, arguments.arena)) is not None:
        yield from slots_at(memory, verify=False)
        return
    storage, wanted = storage_at(arguments.what, arguments.arena)
    found = listing(storage, wanted)
    yield from _in_lines(found, arguments.what)
    yield Answer(found, int(any(one["problem"] for one in found["snapshots"])))


def listing(storage: Storage, wanted: int | None = None) -> dict[str, Any]:
    """The object that ``ftckpt list --json`` prints, for all iterations or the one ``wanted``.

    ``snapshots``: newest first; an unusable one has only ``name``, ``iteration`` and ``problem``. ``void``:
    invalidated. ``abandoned``: the iteration before it at which the job has branched off; null if it is in the
    job's past. ``doubtful``: its replicas may have differed. ``restorable``: a restart may take it.
    ``pinned_away``: pinned names that do not exist.
    """
    pins, void = pinned(storage), voided(storage)
    read = {name: _read(storage, name) for name in checkpoints(storage)}
    lineages = {name: stored.lineage for name, stored in read.items() if isinstance(stored, StoredSnapshot)}
    head = newest([claimed_lineage(storage), *lineages.values()])
    certain = restorable(lineages, head)
    snapshots: list[dict[str, Any]] = []
    for name, stored in read.items():
        listed: dict[str, Any] = {"name": str(name), "iteration": name.iteration, "problem": ""}
        if isinstance(stored, str):
            listed["problem"] = stored
        else:
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
                "restorable": name in certain and stored.snapshot not in void,
            }
        if wanted in (None, name.iteration):
            snapshots.append(listed)
    return {"snapshots": snapshots, "pinned_away": sorted(map(str, pins - read.keys()))}


def usable_at(where: str) -> list[int]:
    """Iterations of the checkpoints at ``where`` that a restart may use, newest first. Shards are not read.

    Raises:
        StorageError: storage is unreadable.
    """
    snapshots = listing(open_storage(where))["snapshots"]
    return [one["iteration"] for one in snapshots if one.get("restorable")]


def _read(storage: Storage, name: CheckpointName) -> StoredSnapshot | str:
    """The manifest, or the error of reading it."""
    try:
        return read_manifest(storage, name)
    except StorageError as error:
        return str(error)


def _in_lines(found: dict[str, Any], where: str) -> Iterator[str]:
    for one in found["snapshots"]:
        if one["problem"]:
            yield alarming(f"{one['name']}: cannot be used: {one['problem']}")
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
    for name in found["pinned_away"]:
        yield alarming(f"{name}: pinned, but missing")
    if not found["snapshots"]:
        yield f"{where}: no snapshot"


def run_verify(arguments: argparse.Namespace) -> Lines:
    """The result for each checkpoint or slot, and which checkpoint a restart would restore; status 1: some are bad.

    Raises:
        StorageError: storage is unreadable, or has no such checkpoint.
    """
    if (memory := memory_at(arguments.what, arguments.arena)) is not None:
        yield from slots_at(memory, verify=True)
        return
    storage, named = storage_at(arguments.what, arguments.arena)
    iteration = named if arguments.iteration is None else arguments.iteration
    found: list[dict[str, Any]] = []
    for name in (one for one in checkpoints(storage) if iteration in (None, one.iteration)):
        found.append(one := _verified(storage, name))
        if one["problems"]:
            yield from (alarming(f"{name}: bad: {problem}") for problem in one["problems"])
        else:
            yield f"{name}: good, {one['shards']} shards, {human(one['bytes'])}"
    if not found:
        which = "" if iteration is None else f" of iteration {iteration}"
        raise StorageError(f"{arguments.what}: no snapshot{which}", lasting=True)
    good = {one["name"] for one in found if not one["problems"]}
    newest_first = (one["name"] for one in listing(storage)["snapshots"] if one.get("restorable"))
    usable = next((name for name in newest_first if name in good), None)
    yield f"a restart would take {usable}" if usable else alarming("a restart could take none of them")
    yield Answer({"snapshots": found, "restart": usable}, int(len(good) < len(found)))


def _verified(storage: Storage, name: CheckpointName) -> dict[str, Any]:
    """Reads every byte of a checkpoint; ``problems`` has a text per bad file."""
    which = {"name": str(name), "iteration": name.iteration}
    stored = _read(storage, name)
    if isinstance(stored, str):
        return {**which, "problems": [stored]}
    with ProgressLine(f"verifying {name}", stored.nbytes) as progress:
        problems = [
            f"{shard}: {problem}"
            for shard, entry in stored.shards.items()
            if (problem := _problem(storage, f"{folder_of(name.iteration)}/{entry.file}", entry, progress))
        ]
    return {**which, "problems": problems, "shards": len(stored.shards), "bytes": stored.nbytes}


def _problem(storage: Storage, name: str, entry: StoredShard, progress: ProgressLine) -> str:
    """The problem of a file, or ""."""
    nbytes = storage.size(name)
    if nbytes != entry.nbytes:
        return f"{name} is missing" if nbytes is None else f"{name} has {nbytes} bytes, not {entry.nbytes}"
    digest = xxhash.xxh3_64()
    for begin in range(0, nbytes, _READ_BYTES):
        part = storage.read(name, begin, min(_READ_BYTES, nbytes - begin))
        digest.update(part)
        progress(len(part))
    return "" if digest.hexdigest() == entry.checksum else f"{name} does not match its checksum"


def add_pin(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``pin``."""
    text = "storage, as --ftckpt-persist has it, or one checkpoint in it"
    parser.add_argument("what", metavar="STORAGE", help=text)
    text = "as 'ftckpt list' prints it, or an iteration, if STORAGE is not one checkpoint"
    parser.add_argument("name", metavar="NAME", nargs="?", type=_name, help=text)
    parser.add_argument("--remove", action="store_true", help="unpin it: retention may remove it")
    add_arena(parser)


def _name(text: str) -> CheckpointName:
    if (name := CheckpointName.of(text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a name such as iter_0000012 nor an iteration")
    return name


def run_pin(arguments: argparse.Namespace) -> Lines:
    """Pins the checkpoint, or unpins it. Raises StorageError if it does not exist."""
    storage, iteration = storage_at(arguments.what, arguments.arena)
    name = arguments.name or (CheckpointName(iteration) if iteration is not None else None)
    if name is None:
        raise ConfigError(f"NAME: {arguments.what} has several checkpoints; name one, as 'ftckpt list' prints it")
    if arguments.remove:
        yield f"{name} is {'no longer' if unpin(storage, name) else 'not'} pinned"
    else:
        is_void = pin(storage, name)
        yield f"{name} is pinned"
        if is_void:
            yield alarming("it is invalidated and may be about to be removed; 'ftckpt list' shows whether it stays")
    yield Answer({"name": str(name), "pinned": not arguments.remove})
