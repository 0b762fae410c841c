"""Snapshots as checkpoints: what of their shards is part of the logical model, and a reader of arenas.

Arenas are those of a job that has ended or still runs, or copies of its directories. Nothing is written there, so
that a live job may overwrite what is being read: the record of a slot is looked at before and after, and a snapshot
that was given up is an error, never mixed with the next one.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ArenaError, ConvertError, FtckptError, LostError, MismatchError
from ftckpt.memory.arena import CONTROL_NAME, Arena
from ftckpt.memory.control_block import SealId
from ftckpt.memory.directory import list_directories
from ftckpt.memory.image import SlotImage
from ftckpt.model import objects
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import disagreement, private_key
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import first_of_each_stage
from ftckpt.restore.decide import newest_whole
from ftckpt.restore.inventory import ArenaReport, report_arena
from ftckpt.universal.catalog import Catalog, Reader
from ftckpt.universal.consolidation import MASTER, WEIGHT, master_of
from ftckpt.universal.storage import CheckedOnce

LOCAL = "local"
"""Role of tensors that belong to one rank and mean nothing in another layout."""
_DUPLICATES = ("copy", "parity")
"""Kinds of sections that hold, or protect, what other shards hold."""


@dataclass(frozen=True)
class ShardFragment:
    """Fragment ``index`` of the manifest of ``shard``; ``fragment`` has its key without the name of the shard."""

    shard: str
    index: int
    fragment: Fragment


def logical_fragments(manifests: Iterable[Manifest], roles: Collection[str] | None = None) -> list[ShardFragment]:
    """All of the logical model that shards hold, in the order of shards, replicas' own copies included.

    ``roles``: only keys of these; None: all but ``local``. Copies of other shards' sections and parity are left out.
    """
    entries = []
    for manifest in manifests:
        for index, fragment in _own(manifest):
            # What replicas hold each for itself has the shard's name behind its key; here it is one tensor again.
            key = fragment.key.removesuffix(private_key("", manifest.shard))
            role = key.partition("/")[0]
            if role != LOCAL and (roles is None or role in roles):
                entries.append(ShardFragment(manifest.shard, index, fragment.with_key(key)))
    return entries


def without_doubles(entries: Sequence[ShardFragment], content: Callable[[ShardFragment], int]) -> list[ShardFragment]:
    """One of all entries that hold the same fragment, the first; ``content`` gives a hash of the bytes of one.

    Raises:
        ConvertError: two of them hold different bytes; names the tensor and the shards.
    """
    by_fragment: dict[Fragment, list[ShardFragment]] = {}
    for entry in entries:
        by_fragment.setdefault(entry.fragment, []).append(entry)
    doubles = [entry for same in by_fragment.values() if len(same) > 1 for entry in same]
    # As they lie: a chunk that was read, or unpacked, is at hand for all that it has of them.
    doubles.sort(key=lambda entry: (entry.shard, entry.index))
    differing = disagreement((entry.fragment, entry.shard, content(entry)) for entry in doubles)
    if differing is not None:
        fragment, one, other = differing
        raise ConvertError(
            f"{fragment.key} differs between {one} and {other}: it belongs to ranks, not to the model; leave its "
            "role out with --roles, or make it the same on all of them"
        )
    return [same[0] for same in by_fragment.values()]


def snapshot_catalog(
    iteration: int,
    manifests: Sequence[Manifest],
    entries: Iterable[ShardFragment],
    objects: Mapping[str, object],
    precision: str = "",
) -> Catalog:
    """The catalog of a snapshot whose shards have these ``manifests``, with ``entries`` of them, each element once.

    Weights that are not stored are casts of their masters, of the type that the manifests say; ``precision`` is the
    type where they do not say it or say several. Where none is known nothing is derived.
    """
    fragments = tuple(entry.fragment for entry in entries)
    keys = {fragment.key for fragment in fragments}
    dtypes = {dtype for manifest in manifests for dtype in manifest.derived}
    dtype = precision or (dtypes.pop() if len(dtypes) == 1 else "")
    weights = (WEIGHT + key.removeprefix(MASTER) for key in sorted(keys) if key.startswith(MASTER))
    derived = {weight: dtype for weight in weights if dtype and weight not in keys}
    rounded_up = {key for manifest in manifests for key in manifest.padded}
    padded = rounded_up.intersection(keys) | {key for key in derived if master_of(key) in rounded_up}
    return Catalog(
        origin="ftckpt",
        iteration=iteration,
        layout=dict(manifests[0].layout),
        fragments=fragments,
        objects=objects,
        padded=frozenset(padded),
        derived=derived,
    )


def read_catalog(
    iteration: int,
    manifests: Sequence[Manifest],
    roles: Collection[str] | None,
    read: Callable[[ShardFragment], Bytes],
    load: Callable[[str], object],
) -> tuple[Catalog, list[ShardFragment]]:
    """The catalog of a snapshot with keys of ``roles`` (None: all), and what each of its fragments is.

    Args:
        read: the bytes of a fragment.
        load: the objects of a shard.
    """
    # Weights may have been left out as casts of their masters: these are needed to make them.
    wanted = {*roles, "master"} if roles is not None and "weight" in roles else roles
    entries = without_doubles(
        logical_fragments(manifests, wanted), lambda entry: xxhash.xxh3_64_intdigest(read(entry).data)
    )
    objects = objects_by_shard(first_of_each_stage([manifest.shard for manifest in manifests]), load)
    catalog = snapshot_catalog(iteration, manifests, entries, objects)
    if roles is not None and "weight" not in roles:
        # What derives from masters that are read for themselves is no part of what was asked for.
        catalog = replace(catalog, derived={}, padded=catalog.padded & {e.fragment.key for e in entries})
    return catalog, entries


def objects_by_shard(shards: Iterable[str], load: Callable[[str], object]) -> Mapping[str, object]:
    """The catalog's objects: what the ranks of ``shards`` saved."""
    return {"shards": {shard: load(shard) for shard in shards}}


def _own(manifest: Manifest) -> Iterator[tuple[int, Fragment]]:
    kinds = [section.kind for section in manifest.sections for _ in range(section.fragments)]
    # Sections divide the stepped fragments alone, or there are none at all: what they do not name is private.
    kinds += ["private"] * (len(manifest.fragments) - len(kinds))
    for index, (kind, fragment) in enumerate(zip(kinds, manifest.fragments, strict=True)):
        if kind not in _DUPLICATES:
            yield index, fragment


log = logging.getLogger("ftckpt")

_NO_PARITY = "ftckpt convert does not rebuild from parity: restart the job for that, or name an older --iteration"


@dataclass
class _Slot:
    """A sealed slot; ``seal_id`` names what was in it when it was chosen."""

    arena: Arena
    index: int
    seal_id: SealId | None
    snapshot: SnapshotId
    checked: CheckedOnce[int] = field(default_factory=CheckedOnce)
    touched: bool = False

    @property
    def image(self) -> SlotImage:
        return self.arena.image

    @property
    def where(self) -> str:
        return f"{self.arena.path}, slot {self.index}"

    def check(self) -> None:
        """Raise ConvertError unless the slot still holds what it held when it was chosen."""
        # The seal's sequence tells the same iteration, written anew, from the one before it.
        if self.seal_id is None or self.arena.control.record(self.index).seal_id != self.seal_id:
            raise ConvertError(
                f"{self.where}: the job moved on while iteration {self.snapshot.iteration} was read: start again, "
                "end the job first, or save from inside it with Checkpointer.save_universal"
            )


def recognises(path: Path) -> bool:
    """Whether there are arenas in ``path``: a job's directory, a node's, one arena, or a copy."""
    return bool(_arena_paths(path))


class ArenaReader(Reader):
    """The newest snapshot, or that of ``iteration``, that all shards of its layout have in ``paths``.

    ``paths`` are directories of nodes or of whole jobs, or copies of them, which together hold every shard.
    ``roles`` are those to be read, None means all; weights bring the masters that they are casts of.

    Raises:
        ConvertError: no snapshot is whole, a shard is missing or damaged, arenas disagree on the layout, or the ranks
            do not agree on a tensor that is to be one.
    """

    def __init__(
        self, paths: Sequence[Path], iteration: int | None = None, roles: Collection[str] | None = None
    ) -> None:
        self._arenas: dict[Path, Arena] = {}
        try:
            self._slots = self._choose(paths, iteration)
            self._check_headers()
            snapshot = next(iter(self._slots.values())).snapshot
            manifests = [slot.arena.manifest for slot in self._slots.values()]
            self.catalog, self._entries = read_catalog(
                snapshot.iteration, manifests, roles, self._read, self._load_objects
            )
            self.confirm()
        except BaseException:  # nobody else would unmap what was opened
            self.close()
            raise

    def read(self, index: int) -> Bytes:
        """Chunks are compared with their checksums before anything of them is given out."""
        return self._read(self._entries[index])

    def confirm(self) -> None:
        """Of all that was ever read."""
        for slot in self._slots.values():
            if slot.touched:
                slot.check()

    def fingerprint(self) -> str:
        """The lineage, and what was written into each slot when."""
        ids = [slot.seal_id for slot in self._slots.values() if slot.seal_id is not None]
        return ",".join(sorted({f"{snapshot}:{sequence}" for snapshot, sequence in ids}))

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _choose(self, paths: Sequence[Path], iteration: int | None) -> dict[str, _Slot]:
        """By shard the slots of the snapshot to read, in the order of shards."""
        reports = self._open(paths)
        named = ", ".join(map(str, paths))
        if not self._arenas:
            problems = listed([text for report in reports for text in report.problems])
            raise ConvertError(f"{named}: no arena can be read{': ' if problems else ''}{problems}")
        try:
            # The same choice as that of a restart, but for parity: nothing is rebuilt outside of a job.
            decision = newest_whole(reports, iteration=iteration)
        except LostError as error:
            which = "" if iteration is None else f" of iteration {iteration}"
            raise ConvertError(f"{named}: no snapshot{which} is whole: {error}; {_NO_PARITY}") from None
        except MismatchError as error:
            raise ConvertError(f"{named}: {error}") from None
        slots = {}
        for shard, at in decision.sources.items():
            arena = self._arenas[Path(at.node) / at.arena]
            seal_id = arena.control.record(at.slot).seal_id
            # A live job may have moved on since the report: then there is nothing to hold on to.
            is_chosen = seal_id is not None and seal_id[0] == decision.snapshot
            slots[shard] = _Slot(arena, at.slot, seal_id if is_chosen else None, decision.snapshot)
            slots[shard].check()
        return slots

    def _open(self, paths: Sequence[Path]) -> list[ArenaReport]:
        """Open every arena, and report on all; its directory stands for the node of each."""
        reports = []
        for path in dict.fromkeys(arena for given in paths for arena in _arena_paths(given)):
            # Copies of several nodes' directories may have the same names inside: the path keeps them apart.
            node, name = str(path.parent), path.name
            try:
                self._arenas[path] = arena = Arena.open(path)
                reports.append(report_arena(arena, node))
            except FtckptError as error:
                reports.append(ArenaReport(node, name, name, problems=(str(error),)))
        return reports

    def _check_headers(self) -> None:
        for slot in self._slots.values():
            if not slot.arena.header_good(slot.index):
                raise ConvertError(f"{slot.where}: the header is damaged; {_NO_PARITY}")
        unchecked = [shard for shard, slot in self._slots.items() if slot.arena.unchecked(slot.index)]
        if unchecked:
            log.warning(
                "ftckpt: no checksums were taken yet of %s: what is read cannot be checked", listed(unchecked)
            )

    def _read(self, entry: ShardFragment) -> Bytes:
        slot = self._slots[entry.shard]
        slot.touched = True
        begin = slot.image.offsets[entry.index]
        end = begin + entry.fragment.nbytes
        slot.check()
        self._verify(slot, begin, end, entry.fragment.key)
        # Again: what was verified may have been overwritten since.
        slot.check()
        data: Bytes = np.frombuffer(slot.arena.slot(slot.index), np.uint8)[begin:end]
        return data

    def _verify(self, slot: _Slot, begin: int, end: int, key: str) -> None:
        hashes = slot.arena.hashes(slot.index)
        if hashes is None:
            return
        chunks = slot.image.chunks
        # Chunks lie in the order of their begins: the one in which ``begin`` lies is the last that begins at or
        # before it.
        first = bisect_right(chunks, begin, key=lambda span: span.begin) - 1
        for chunk in range(first, len(chunks) if begin < end else 0):
            if chunks[chunk].begin >= end:
                break
            slot.checked.check(chunk, partial(self._compare, slot, chunk, int(hashes[chunk]), key))

    def _compare(self, slot: _Slot, chunk: int, expected: int, key: str) -> None:
        if slot.arena.hash_chunk(slot.index, chunk) != expected:
            slot.check()  # it was written over: not damage
            raise ConvertError(f"{slot.where}: chunk {chunk}, which holds {key}, is damaged; {_NO_PARITY}")

    def _load_objects(self, shard: str) -> Any:
        slot = self._slots[shard]
        slot.touched = True
        try:
            encoded = bytes(slot.arena.read_objects(slot.index))
            slot.check()
            if xxhash.xxh3_64_intdigest(encoded) != slot.arena.control.record(slot.index).objects_hash:
                raise ConvertError(f"{slot.where}: the objects of {shard} are damaged; {_NO_PARITY}")
            return objects.decode(encoded)
        except ArenaError as error:
            raise ConvertError(f"{slot.where}: the objects of {shard} cannot be read: {error}") from None


def _arena_paths(path: Path) -> list[Path]:
    """Arenas in a directory: itself, those of a node, or those of all nodes of a job."""
    if _is_arena(path):
        return [path]
    try:
        below = list_directories(path)
        inside = [arena for node in below for arena in list_directories(node)]
        return [*filter(_is_arena, below)] or [*filter(_is_arena, inside)]
    except OSError:
        return []


def _is_arena(path: Path) -> bool:
    return (path / CONTROL_NAME).is_file()
