"""The packages of a node: of its own shards, of those that it pulls from other nodes, and which are kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path

from ftckpt.arena import package
from ftckpt.arena.control import Snapshot
from ftckpt.errors import CorruptError, MismatchError
from ftckpt.smp.held import Found, Held
from ftckpt.smp.peers import Fetch
from ftckpt.smp.sources import Sources
from ftckpt.smp.wire import Kind, Request
from ftckpt.smp.work import Work, in_thread

_PULLED_AT_ONCE = 4


def exists(node_dir: Path, shard: str, snapshot: Snapshot) -> bool:
    """Whether there is a package of that name, sound or not."""
    return package.package_path(node_dir, shard, *snapshot).is_file()


def kept(node_dir: Path, shard: str, snapshot: Snapshot) -> bool:
    """Whether the package is there and sound; all of it is read."""
    if not exists(node_dir, shard, snapshot):
        return False
    try:
        found = package.load(package.package_path(node_dir, shard, *snapshot))
    except (CorruptError, MismatchError):
        return False
    return (found.shard, found.lineage, found.iteration) == (shard, *snapshot)


def pack(sources: Sources, held: Held, found: Found) -> Work[None]:
    """Store the package of a slot on which the caller has a lease; raises as ``package.pack`` and ``store``."""
    yield from sources.pace.memory(held.arena.image.volatile.nbytes)
    data = package.pack(held.arena, found.slot)
    yield from in_thread(partial(package.store, sources.held.node_dir, data))


def pull(sources: Sources, snapshot: Snapshot, wanted: Sequence[tuple[str, str]]) -> Work[None]:
    """Fetch and store the packages of ``wanted``, pairs of node and shard.

    Raises:
        CannotError: a node has failed for too long.
        ArenaError, MemoryBudgetError: as ``package.store``.
    """
    for begin in range(0, len(wanted), _PULLED_AT_ONCE):
        asked: list[tuple[str, str, Fetch]] = []
        try:
            for node, shard in wanted[begin : begin + _PULLED_AT_ONCE]:
                request = Request(Kind.PACKAGE, shard, *snapshot)
                asked.append((node, shard, (yield from sources.ask(node, request, package.MAX_PACKAGE_BYTES))))
            for node, shard, fetch in asked:
                data = bytes(
                    (yield from sources.take(node, fetch, partial(_problem, shard=shard, snapshot=snapshot)))
                )
                yield from in_thread(partial(package.store, sources.held.node_dir, data))
        finally:
            for _, _, fetch in asked:
                fetch.cancel()


def prune(node_dir: Path, shards: Collection[str], marks: Collection[Snapshot], target: Snapshot) -> None:
    """Before ``target`` is covered: bound what is kept, so that targets given up one after the other do not add up.

    What is marked and the target stay, and the newest older ones that are complete: one of them may be the only
    one that is protected on all nodes.

    Args:
        shards: of which the node keeps packages now. A snapshot with packages of others is one of another
            layout; whether it is complete cannot be known, and it counts as such. Without marks two of those are
            kept: the newest may be one that was being protected.
        marks: snapshots marked as protected.
    """
    keep = {_key(snapshot) for snapshot in (*marks, target)}
    sets: dict[tuple[str, int], set[str]] = {}
    for name in package.list_packages(node_dir):
        sets.setdefault((name.lineage8, name.iteration), set()).add(name.shard)
    complete = [key for key, found in sets.items() if key not in keep and not found < set(shards)]
    most = package.MAX_SETS if marks else package.MAX_SETS - 1
    newest = sorted(complete, key=lambda key: key[1], reverse=True)
    kept = keep | set(newest[: max(0, most - len(keep))])
    foreign = [key for key in newest if not sets[key] <= set(shards)] if not marks else []
    package.prune(node_dir, kept | set(foreign[: package.MAX_SETS - 1]))


def prune_covered(node_dir: Path, marks: Collection[Snapshot], target: Snapshot) -> None:
    """After ``target`` was covered: it stays, and what is marked as protected.

    Without a mark all stays that ``prune`` left: until all nodes have covered the target, what a lost node would be
    brought back to is a snapshot of another layout or of other shares, which these arenas do not name.
    """
    if marks:
        package.prune(node_dir, {_key(snapshot) for snapshot in (*marks, target)})


def _key(snapshot: Snapshot) -> tuple[str, int]:
    return snapshot[0].hex()[:8], snapshot[1]


def _problem(data: bytearray, shard: str, snapshot: Snapshot) -> str:
    """What is wrong with what came as a package; "" if nothing is."""
    try:
        found = package.unpack(data)
    except (CorruptError, MismatchError) as error:
        return str(error)
    same = (found.shard, found.lineage, found.iteration) == (shard, *snapshot)
    return "" if same else f"a package of {found.shard} at {found.iteration}"
