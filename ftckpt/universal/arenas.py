"""Reads snapshots as they lie in arenas: of a job that has ended or still runs, or copies of its directories.

Nothing is written there, so a live job may overwrite what is being read: the record of a slot is looked at
before and after, and a snapshot that was given up is an error, never mixed with the next one.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ftckpt.arena.image import SlotImage
from ftckpt.arena.segment import CONTROL_NAME, Arena, list_arenas
from ftckpt.errors import ArenaError, ConvertError, FtckptError, MismatchError
from ftckpt.layout.shards import first_of_each_stage, shard_names
from ftckpt.state import objects
from ftckpt.universal.catalog import Bytes, Catalog, Source
from ftckpt.universal.shards import (
    Entry,
    derived_keys,
    logical_entries,
    objects_by_shard,
    padded_keys,
    without_doubles,
)

log = logging.getLogger("ftckpt")

_NO_PARITY = "ftckpt convert does not rebuild from parity: restart the job for that, or name an older --iteration"
_MOST_NAMED = 3
Snapshot = tuple[int, str]
"""Iteration, and lineage in hex."""


@dataclass
class _Slot:
    """A sealed slot; ``key`` names what was in it when it was found, ``good`` are chunks that were verified."""

    arena: Arena
    index: int
    key: tuple[bytes, int, int]
    good: set[int] = field(default_factory=set)
    touched: bool = False

    @property
    def image(self) -> SlotImage:
        return self.arena.image

    @property
    def where(self) -> str:
        return f"{self.arena.path}, slot {self.index}"

    def check(self) -> None:
        """Raise ConvertError unless the slot still holds what was found in it."""
        record = self.arena.control.record(self.index)
        if not record.sealed or (record.lineage, record.iteration, record.sequence) != self.key:
            raise ConvertError(
                f"{self.where}: the job moved on while iteration {self.key[1]} was read: start again, end the job "
                "first, or save from inside it with ftckpt.universal.save"
            )


def recognises(path: Path) -> bool:
    """Whether there are arenas in ``path``: a job's directory, a node's, one arena, or a copy."""
    return bool(_arena_paths(path))


class ArenaSource(Source):
    """The newest snapshot, or that of ``iteration``, that all shards of its layout have in ``paths``.

    ``paths`` are directories of nodes or of whole jobs, or copies of them, which together hold every shard.
    ``roles`` are those to be read, None means all; weights bring the masters that they are casts of. ``precision``
    is the type of weights that are casts of their masters, where the snapshot does not say it (``BF16``).

    Raises:
        ConvertError: no snapshot is whole, a shard is missing or damaged, arenas disagree on the layout, or the ranks
            do not agree on a tensor that is to be one.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        iteration: int | None = None,
        roles: Collection[str] | None = None,
        precision: str = "",
    ) -> None:
        self._guard = threading.Lock()
        self._arenas: list[Arena] = []
        try:
            problems = self._open(paths)
            self._slots = _choose(self._arenas, iteration, problems, paths)
            read = {*roles, "master"} if roles is not None and "weight" in roles else roles
            self._catalog, self._entries = self._make_catalog(read, precision)
        except BaseException:
            self.close()
            raise

    @property
    def catalog(self) -> Catalog:
        """See Source."""
        return self._catalog

    def read(self, index: int) -> Bytes:
        """See Source: chunks are compared with their checksums before anything of them is given out."""
        return self._read(self._entries[index])

    def confirm(self) -> None:
        """See Source: of all that was ever read."""
        for slot in self._slots.values():
            if slot.touched:
                slot.check()

    def fingerprint(self) -> str:
        """See Source: the lineage, and what was written into each slot when."""
        return ",".join(sorted({f"{slot.key[0].hex()}:{slot.key[2]}" for slot in self._slots.values()}))

    def close(self) -> None:
        """See Source."""
        for arena in self._arenas:
            arena.close()
        self._arenas = []

    def _open(self, paths: Sequence[Path]) -> list[str]:
        """Open every arena; texts about those that cannot be read."""
        problems = []
        for path in dict.fromkeys(found for given in paths for found in _arena_paths(given)):
            try:
                self._arenas.append(Arena.open(path))
            except FtckptError as error:
                problems.append(str(error))
        if not self._arenas:
            named = ", ".join(map(str, paths))
            raise ConvertError(f"{named}: no arena can be read{': ' if problems else ''}{_some(problems)}")
        return problems

    def _make_catalog(self, roles: Collection[str] | None, precision: str) -> tuple[Catalog, list[Entry]]:
        slots = self._slots
        for slot in slots.values():
            if not slot.arena.header_good(slot.index):
                raise ConvertError(f"{slot.where}: the header is damaged; {_NO_PARITY}")
        unchecked = [shard for shard, slot in slots.items() if slot.arena.unchecked(slot.index)]
        if unchecked:
            log.warning("ftckpt: no checksums were taken yet of %s: what is read cannot be checked", _some(unchecked))
        manifests = [slot.arena.manifest for slot in slots.values()]
        entries = without_doubles(
            logical_entries(manifests, roles), lambda entry: xxhash.xxh3_64_intdigest(self._read(entry).data)
        )
        fragments = tuple(entry.fragment for entry in entries)
        keys = {fragment.key for fragment in fragments}
        derived = derived_keys(manifests, keys, precision) if roles is None or "weight" in roles else {}
        first = next(iter(slots.values()))
        catalog = Catalog(
            origin="ftckpt",
            iteration=first.key[1],
            layout=dict(first.arena.manifest.layout),
            fragments=fragments,
            objects=objects_by_shard(first_of_each_stage(list(slots)), self._load_objects),
            padded=padded_keys(manifests, keys, derived),
            derived=derived,
        )
        self.confirm()
        return catalog, entries

    def _read(self, entry: Entry) -> Bytes:
        slot = self._slots[entry.shard]
        slot.touched = True
        begin = slot.image.offsets[entry.index]
        end = begin + entry.fragment.nbytes
        slot.check()
        self._verify(slot, begin, end, entry.fragment.key)
        slot.check()
        data: Bytes = np.frombuffer(slot.arena.slot(slot.index), np.uint8)[begin:end]
        return data

    def _verify(self, slot: _Slot, begin: int, end: int, key: str) -> None:
        hashes = slot.arena.hashes(slot.index)
        chunks = slot.image.chunks
        first = bisect_right(chunks, begin, key=lambda span: span.begin) - 1
        for chunk in range(first, len(chunks) if begin < end and hashes is not None else 0):
            if chunks[chunk].begin >= end:
                break
            with self._guard:
                known = chunk in slot.good
            if known:
                continue
            if hashes is not None and slot.arena.hash_chunk(slot.index, chunk) != int(hashes[chunk]):
                slot.check()  # it was written over: not damage
                raise ConvertError(f"{slot.where}: chunk {chunk}, which holds {key}, is damaged; {_NO_PARITY}")
            with self._guard:
                slot.good.add(chunk)

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
        below = [arena for arena in list_arenas(path) if _is_arena(arena)]
        return below or [arena for node in list_arenas(path) for arena in list_arenas(node) if _is_arena(arena)]
    except OSError:
        return []


def _is_arena(path: Path) -> bool:
    return (path / CONTROL_NAME).is_file()


def _choose(
    arenas: Sequence[Arena], iteration: int | None, problems: Sequence[str], paths: Sequence[Path]
) -> dict[str, _Slot]:
    """By shard the slots of the snapshot to read, in the order of shards."""
    found, damaged = _sealed(arenas)
    problems = [*damaged, *problems]
    reasons = []
    for snapshot in sorted(found, reverse=True):
        if iteration is not None and snapshot[0] != iteration:
            continue
        wanted = _wanted(snapshot, found[snapshot])
        missing = [shard for shard in wanted if shard not in found[snapshot]]
        if not missing:
            return {shard: found[snapshot][shard] for shard in wanted}
        reasons.append(f"iteration {snapshot[0]} lacks {_some(missing)} of {len(wanted)} shards")
    what = "a snapshot" if iteration is None else f"a snapshot of iteration {iteration}"
    there = sorted({str(number) for number, _ in found})
    causes = [*reasons[:_MOST_NAMED], *problems[:_MOST_NAMED]] or [f"there are iterations {_some(there) or 'none'}"]
    named = ", ".join(map(str, paths))
    raise ConvertError(f"{named}: no {what.removeprefix('a ')} is whole: {'; '.join(causes)}; {_NO_PARITY}")


def _sealed(arenas: Sequence[Arena]) -> tuple[dict[Snapshot, dict[str, _Slot]], list[str]]:
    """What is in the slots, by snapshot and shard, and what is wrong with slots that should hold something."""
    found: dict[Snapshot, dict[str, _Slot]] = {}
    problems = []
    for arena in arenas:
        for index in range(arena.control.slots):
            record, error = arena.control.record(index), arena.slot_error(index)
            if record.torn:
                problems.append(f"{arena.path}, slot {index}: torn record")
            elif record.sealed and error is not None:
                problems.append(error)
            elif record.sealed:
                slot = _Slot(arena, index, (record.lineage, record.iteration, record.sequence))
                found.setdefault((record.iteration, record.lineage.hex()), {}).setdefault(arena.manifest.shard, slot)
    return found, problems


def _wanted(snapshot: Snapshot, slots: Mapping[str, _Slot]) -> Sequence[str]:
    """All shards of a snapshot's layout, which its arenas agree on."""
    first = next(iter(slots.values())).arena.manifest
    for slot in slots.values():
        if dict(slot.arena.manifest.layout) != dict(first.layout):
            layouts = f"layout {dict(slot.arena.manifest.layout)}, {first.shard} in {dict(first.layout)}"
            raise ConvertError(
                f"iteration {snapshot[0]}: {slot.arena.path} was written in {layouts}; name directories of one job"
            )
    try:
        return shard_names(first.layout, tuple(first.coords))
    except MismatchError as error:
        raise ConvertError(f"iteration {snapshot[0]}: {error}") from None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
