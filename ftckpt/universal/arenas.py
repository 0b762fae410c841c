"""Snapshots as checkpoints: the fragments of their shards that belong to the logical model, and a reader of arenas.

Arenas belong to a running or finished job, or are copies of its directories. The reader writes nothing to them and
takes no lock, so a live job may overwrite a slot while it is read. The slot's record is therefore compared before and
after each read: an overwritten snapshot is an error, and never mixed with the next one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ftckpt.array_types import Bytes
from ftckpt.errors import ArenaError, ConvertError, FtckptError, LostError, MismatchError
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import CONTROL_NAME, SealId
from ftckpt.memory.directory import list_directories
from ftckpt.memory.image import SlotImage, Span
from ftckpt.memory.inventory import ArenaReport, report_arena
from ftckpt.model import objects
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import disagreement, private_key
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import first_of_each_stage
from ftckpt.restore.decide import newest_whole
from ftckpt.universal.catalog import Catalog, Reader
from ftckpt.universal.consolidation import derived_weights, master_of
from ftckpt.universal.storage import CheckedOnce

LOCAL = "local"
"""Role of tensors that belong to one rank and have no meaning in another layout."""
_DUPLICATES = ("copy", "parity")
"""Kinds of sections that copy or protect data of other shards."""


@dataclass(frozen=True)
class ShardFragment:
    """Fragment ``index`` in the manifest of ``shard``; the key of ``fragment`` omits the shard's name."""

    shard: str
    index: int
    fragment: Fragment


def logical_fragments(manifests: Iterable[Manifest], roles: Collection[str] | None = None) -> list[ShardFragment]:
    """All fragments of the logical model, in the order of shards; each replica's own copy is included.

    ``roles``: only keys of these roles; None: all but ``local``. Copies of other shards' sections and parity are
    left out.
    """
    entries = []
    for manifest in manifests:
        for index, fragment in _own(manifest):
            # A fragment private to a replica has the shard's name as suffix of its key; here it is one tensor again.
            key = fragment.key.removesuffix(private_key("", manifest.shard))
            role = key.partition("/")[0]
            if role != LOCAL and (roles is None or role in roles):
                entries.append(ShardFragment(manifest.shard, index, fragment.with_key(key)))
    return entries


def without_doubles(entries: Sequence[ShardFragment], content: Callable[[ShardFragment], int]) -> list[ShardFragment]:
    """The first entry of each fragment; ``content`` returns a hash of an entry's bytes.

    Raises:
        ConvertError: two entries of a fragment hold different bytes; names the tensor and the shards.
    """
    by_fragment: dict[Fragment, list[ShardFragment]] = {}
    for entry in entries:
        by_fragment.setdefault(entry.fragment, []).append(entry)
    doubles = [entry for same in by_fragment.values() if len(same) > 1 for entry in same]
    # In storage order: a chunk is read, and decompressed, once for all the entries in it.
    doubles.sort(key=lambda entry: (entry.shard, entry.index))
    differing = disagreement((entry.fragment, entry.shard, content(entry)) for entry in doubles)
    if differing is not None:
        fragment, one, other = differing
        raise ConvertError(
            f"{fragment.key} differs between {one} and {other}: it is state of a rank, not of the model; exclude its "
            "role with --roles, or make it the same on all ranks"
        )
    return [same[0] for same in by_fragment.values()]


def snapshot_catalog(
    iteration: int,
    manifests: Sequence[Manifest],
    entries: Iterable[ShardFragment],
    objects: Mapping[str, object],
) -> Catalog:
    """The catalog of a snapshot of shards with these ``manifests``; ``entries`` hold each element once.

    Weights that are not stored are derived: casts of their masters to the type that the manifests give. If they give
    none or several, nothing is derived.
    """
    fragments = tuple(entry.fragment for entry in entries)
    keys = {fragment.key for fragment in fragments}
    dtypes = {dtype for manifest in manifests for dtype in manifest.derived}
    derived = derived_weights(keys, dtypes.pop() if len(dtypes) == 1 else "")
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


class ShardSource(Protocol):
    """One shard of a snapshot. Any thread may read."""

    @property
    def image(self) -> SlotImage: ...

    def read(self, span: Span, key: str) -> Bytes:
        """Verified bytes of the image; ``key`` names them in errors."""

    def objects(self) -> object:
        """The decoded objects, verified."""


class ShardReader(Reader):
    """Reads keys of ``roles`` (None: all) from all ``shards`` of a snapshot of ``iteration``."""

    def __init__(self, iteration: int, shards: Mapping[str, ShardSource], roles: Collection[str] | None) -> None:
        self._shards = shards
        manifests = [shard.image.manifest for shard in shards.values()]
        # Weights that are not stored are cast from their masters.
        wanted = {*roles, "master"} if roles is not None and "weight" in roles else roles
        self._entries = without_doubles(
            logical_fragments(manifests, wanted),
            lambda entry: xxhash.xxh3_64_intdigest(self._read(entry, 0, entry.fragment.nbytes).data),
        )
        objects = objects_by_shard(first_of_each_stage(list(shards)), lambda shard: shards[shard].objects())
        self.catalog = snapshot_catalog(iteration, manifests, self._entries, objects)
        if roles is not None and "weight" not in roles:
            # Weights that derive from requested masters were not requested.
            keys = {entry.fragment.key for entry in self._entries}
            self.catalog = replace(self.catalog, derived={}, padded=self.catalog.padded & keys)

    def read(self, index: int) -> Bytes:
        return self.read_part(index, 0, self.catalog.fragments[index].nbytes)

    def read_part(self, index: int, begin: int, end: int) -> Bytes:
        if not self._shards:
            raise ConvertError("the snapshot was closed")
        return self._read(self._entries[index], begin, end)

    def where(self, index: int) -> object:
        return self._entries[index].shard

    def close(self) -> None:
        self._shards = {}

    def _read(self, entry: ShardFragment, begin: int, end: int) -> Bytes:
        shard = self._shards[entry.shard]
        offset = shard.image.offsets[entry.index]
        return shard.read(Span(offset + begin, offset + end), entry.fragment.key)


def touched(chunks: Sequence[Span], wanted: Span) -> range:
    """The chunks, which are sorted, that overlap ``wanted``."""
    if not wanted.nbytes:
        return range(0)
    # The chunk that contains the first byte is the last one that starts at or before it.
    first = bisect_right(chunks, wanted.begin, key=lambda span: span.begin) - 1
    return range(first, bisect_left(chunks, wanted.end, key=lambda span: span.begin))


def objects_by_shard(shards: Iterable[str], load: Callable[[str], object]) -> Mapping[str, object]:
    """The catalog's objects: those that the ranks of ``shards`` saved."""
    return {"shards": {shard: load(shard) for shard in shards}}


def _own(manifest: Manifest) -> Iterator[tuple[int, Fragment]]:
    kinds = [section.kind for section in manifest.sections for _ in range(section.fragments)]
    # Sections cover only optimizer-updated fragments, or there are none at all: all other fragments are private.
    kinds += ["private"] * (len(manifest.fragments) - len(kinds))
    for index, (kind, fragment) in enumerate(zip(kinds, manifest.fragments, strict=True)):
        if kind not in _DUPLICATES:
            yield index, fragment


log = logging.getLogger("ftckpt")

_NO_PARITY = "ftckpt convert does not reconstruct from parity: restart the job for that, or give an older --iteration"


@dataclass
class _Slot:
    """A sealed slot; ``seal_id`` identifies its content when it was chosen."""

    arena: Arena
    index: int
    seal_id: SealId | None
    snapshot: SnapshotId
    checked: CheckedOnce[int] = field(default_factory=CheckedOnce)
    is_read: bool = False

    @property
    def image(self) -> SlotImage:
        return self.arena.image

    @property
    def where(self) -> str:
        return f"{self.arena.path}, slot {self.index}"

    def check(self) -> None:
        """Raise ConvertError if the slot was rewritten since it was chosen."""
        # The seal's sequence number distinguishes two snapshots of the same iteration.
        if self.seal_id is None or self.arena.control.record(self.index).seal_id != self.seal_id:
            raise ConvertError(
                f"{self.where}: the job moved on while iteration {self.snapshot.iteration} was read: start again, "
                "stop the job first, or let it export with --ftckpt-persist-format"
            )

    def read(self, span: Span, key: str) -> Bytes:
        """See ``ShardSource``."""
        self.is_read = True
        self.check()
        hashes = self.arena.hashes(self.index)
        if hashes is not None:
            for chunk in touched(self.image.chunks, span):
                self.checked.check(chunk, partial(self._compare, chunk, int(hashes[chunk]), key))
        # Again: the job may have overwritten the slot during verification.
        self.check()
        data: Bytes = np.frombuffer(self.arena.slot(self.index), np.uint8)[span.begin : span.end]
        return data

    def _compare(self, chunk: int, expected: int, key: str) -> None:
        if self.arena.hash_chunk(self.index, chunk) != expected:
            self.check()  # an overwritten chunk is not a corrupt one
            raise ConvertError(f"{self.where}: chunk {chunk}, which holds {key}, is corrupt; {_NO_PARITY}")

    def objects(self) -> object:
        """See ``ShardSource``."""
        self.is_read = True
        try:
            encoded = bytes(self.arena.read_objects(self.index))
            self.check()
            if xxhash.xxh3_64_intdigest(encoded) != self.arena.control.record(self.index).objects_hash:
                raise ConvertError(f"{self.where}: the objects are corrupt; {_NO_PARITY}")
            return objects.decode(encoded)
        except ArenaError as error:
            raise ConvertError(f"{self.where}: the objects cannot be read: {error}") from None


def recognises(path: Path) -> bool:
    """Whether ``path`` holds arenas: the directory of a job, of a node or of one arena, or a copy of one."""
    return bool(_arena_paths(path))


class ArenaReader(ShardReader):
    """Reads the newest snapshot, or that of ``iteration``, of which ``paths`` hold all shards.

    ``paths`` are directories of nodes or jobs, or copies of them, which together hold every shard. ``roles``: the
    roles to read, None for all; with weights, the masters that they derive from are read too.

    Raises:
        ConvertError: no snapshot is complete, a shard is missing or corrupt, arenas disagree on the layout, or ranks
            hold different bytes of one tensor.
    """

    def __init__(
        self, paths: Sequence[Path], iteration: int | None = None, roles: Collection[str] | None = None
    ) -> None:
        self._arenas: dict[Path, Arena] = {}
        try:
            self._slots = self._choose(paths, iteration)
            self._check_headers()
            snapshot = next(iter(self._slots.values())).snapshot
            super().__init__(snapshot.iteration, self._slots, roles)
            self.confirm()
        except BaseException:  # the caller has no reader to close
            self.close()
            raise

    def confirm(self) -> None:
        """Checks every slot that was read."""
        for slot in self._slots.values():
            if slot.is_read:
                slot.check()

    def fingerprint(self) -> str:
        """The snapshot and the sequence numbers of the slots' seals."""
        ids = [slot.seal_id for slot in self._slots.values() if slot.seal_id is not None]
        return ",".join(sorted({f"{snapshot}:{sequence}" for snapshot, sequence in ids}))

    def close(self) -> None:
        super().close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _choose(self, paths: Sequence[Path], iteration: int | None) -> dict[str, _Slot]:
        """The slots of the snapshot to read, by shard, in the order of shards."""
        reports = self._open(paths)
        named = ", ".join(map(str, paths))
        if not self._arenas:
            problems = listed([text for report in reports for text in report.problems])
            raise ConvertError(f"{named}: no arena can be read{': ' if problems else ''}{problems}")
        try:
            # A restart decides the same, except for parity: only a job reconstructs.
            decision = newest_whole(reports, iteration=iteration)
        except LostError as error:
            which = "" if iteration is None else f" of iteration {iteration}"
            raise ConvertError(f"{named}: no snapshot{which} is complete: {error}; {_NO_PARITY}") from None
        except MismatchError as error:
            raise ConvertError(f"{named}: {error}") from None
        slots = {}
        for shard, at in decision.sources.items():
            arena = self._arenas[Path(at.node) / at.arena]
            seal_id = arena.control.record(at.slot).seal_id
            # A live job may have rewritten the slot since the report: without a seal ID ``check`` fails.
            is_chosen = seal_id is not None and seal_id[0] == decision.snapshot
            slots[shard] = _Slot(arena, at.slot, seal_id if is_chosen else None, decision.snapshot)
            slots[shard].check()
        return slots

    def _open(self, paths: Sequence[Path]) -> list[ArenaReport]:
        """Opens and reports on every arena; its parent directory identifies its node."""
        reports = []
        for path in dict.fromkeys(arena for given in paths for arena in _arena_paths(given)):
            # Copies of several nodes' directories may share names: only the full path is unique.
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
                raise ConvertError(f"{slot.where}: the header is corrupt; {_NO_PARITY}")
        unchecked = [shard for shard, slot in self._slots.items() if slot.arena.unchecked(slot.index)]
        if unchecked:
            log.warning(
                "ftckpt: %s: not verified: the SMP has not computed checksums of the slots yet", listed(unchecked)
            )


def _arena_paths(path: Path) -> list[Path]:
    """The arenas of a directory: itself, those of a node, or those of all nodes of a job."""
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
