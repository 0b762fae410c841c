"""Writes the newest committed snapshot of a running job as a universal checkpoint, without gathering it anywhere."""

from __future__ import annotations

import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from ftckpt.array_types import Buffer, Bytes
from ftckpt.errors import ConvertError, LostError, MismatchError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, together
from ftckpt.host_memory import host_memory
from ftckpt.memory.arena import Arena
from ftckpt.memory.corruption import Corruption
from ftckpt.memory.image import SlotImage
from ftckpt.memory.inventory import ArenaReport, report_arena
from ftckpt.memory.locations import OpenArenas, SlotAt
from ftckpt.model import codec, objects
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.topology import Topology, first_of_each_stage
from ftckpt.restore.decide import newest_whole
from ftckpt.restore.load import Reads, Transfer, execute, fetch, reader_for, transfers_of
from ftckpt.restore.reconstruction_plan import in_batches
from ftckpt.restore.tensor_index import Index, ShardEntry
from ftckpt.universal.arenas import (
    ShardFragment,
    logical_fragments,
    objects_by_shard,
    snapshot_catalog,
    without_doubles,
)
from ftckpt.universal.catalog import Catalog, Rows, Tensor, Unit, tensors_of
from ftckpt.universal.consolidation import deriving, master_of
from ftckpt.universal.safetensors import MAX_FILE_BYTES, strips
from ftckpt.universal.storage import Destination
from ftckpt.universal.universal_format import UniversalWriter

__all__ = ["BATCH_BYTES", "MAX_FILE_BYTES", "UniversalSave"]

BATCH_BYTES = 64 << 20
"""Memory of a rank for the rows of one exchange, in addition to the exchange's own. A single row may exceed it."""


def deal(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Assign files to ranks: largest first, each to the rank with the least load. The same on all ranks."""
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    # Ties by name: all ranks must compute the same assignment.
    for unit in sorted(units, key=lambda unit: (-unit.nbytes, unit.name)):
        rank = load.index(min(load))
        dealt[rank].append(unit)
        load[rank] += unit.nbytes
    return dealt


@dataclass(frozen=True)
class _Shard:
    """One rank's shard of the snapshot, and the bytes of its encoded objects."""

    source: SlotAt
    image: SlotImage
    objects_used: int


@dataclass(frozen=True)
class _RankReport:
    """One rank's report: its arena and manifest, and for each slot the bytes of encoded objects and the time that its
    snapshot was, or has been, without checksums."""

    arena: ArenaReport
    manifest: str
    objects_used: tuple[int, ...]
    gap_secs: tuple[float, ...]


class UniversalSave:
    """One save of a job's newest committed snapshot. ``arena`` has this rank's shard.

    ``run`` is collective; so are all its parts that need other ranks' data.
    """

    def __init__(self, group: Group, topology: Topology, node_dir: Path, arena: Arena | None, events: Events) -> None:
        self._group = group
        self._topology = topology
        self._arena = arena
        self._events = events
        self._arenas = OpenArenas(node_dir)
        self._leads = group.rank == 0
        self._shards: dict[str, _Shard] = {}
        self._gap_secs = 0.0

    def run(self, path: Path, max_file_bytes: int, precision: str) -> Path:
        """See ``Checkpointer.save_universal``: batches of ``BATCH_BYTES``, read from the arenas of all nodes."""
        begin = time.perf_counter()
        writer = UniversalWriter(path, max_file_bytes)
        destination = writer.destination
        try:
            iteration = self._choose()
            catalog, entries = self._make_catalog(iteration, precision)
            stored = tensors_of(catalog.fragments, lambda index: entries[index].shard)
            units = writer.plan(catalog, stored)
            together(self._group, lambda: destination.begin(fresh=True) if self._leads else None)
            try:
                together(self._group, lambda: _require_shared(destination))
                self._write(catalog, entries, stored, units, writer)
                # All ranks' files are durable: ``_write`` ends with a collective.
                together(self._group, lambda: writer.finish(catalog, units) if self._leads else None)
            except BaseException:
                # Ranks fail together: none still writes there.
                if self._leads:
                    shutil.rmtree(destination.partial, ignore_errors=True)
                raise
        finally:
            destination.release()
            self._arenas.close()
        nbytes, secs = sum(unit.nbytes for unit in units), time.perf_counter() - begin
        self._events.emit("saved", path=str(path), iteration=iteration, total_bytes=nbytes, blocked_secs=secs)
        self._events.announce(
            f"iteration {iteration} saved at {path}: {nbytes / 1e9:.1f} GB in {secs:.1f} s; it was in memory without "
            f"checksums for {self._gap_secs:.1f} s, and corruption in that time is not detected"
        )
        return path

    def _report_own(self) -> list[_RankReport]:
        """The report on this rank's arena; empty if it has none."""
        arena = self._arena
        if arena is None:
            return []
        slots, report = range(arena.control.slots), report_arena(arena, self._topology.me.node)
        used = tuple(arena.control.record(slot).objects_used for slot in slots)
        gap_secs = tuple(arena.gap_secs(slot) for slot in slots)
        return [_RankReport(report, arena.manifest.encode().decode(), used, gap_secs)]

    def _choose(self) -> int:
        """Choose the newest snapshot that all ranks have sealed, and verify it; returns its iteration."""
        gathered = gather_all(self._group, self._report_own, list[_RankReport])
        by_shard = {each.arena.shard: each for reports in gathered for each in reports}
        try:
            decision = newest_whole([each.arena for each in by_shard.values()], self._topology)
        except MismatchError as error:
            raise ConvertError(str(error)) from None
        except LostError:
            raise ConvertError("no snapshot is committed yet: save after one has been taken") from None
        for member in self._topology.members:
            theirs, at = by_shard[member.shard], decision.sources[member.shard]
            image = SlotImage.of(Manifest.decode(theirs.manifest.encode()))
            self._shards[member.shard] = _Shard(at, image, theirs.objects_used[at.slot])
            self._gap_secs = max(self._gap_secs, theirs.gap_secs[at.slot])
        # Before anything is read: one corrupt slot must stop all ranks.
        together(self._group, self._verify)
        return decision.snapshot.iteration

    def _verify(self) -> None:
        own = self._own.source
        damage = self._arena.verify(own.slot) if self._arena is not None else Corruption(reason="no arena")
        if damage:
            raise ConvertError(f"{own.arena}, slot {own.slot}: corrupt: {', '.join(damage.names[:3])}")

    @property
    def _own(self) -> _Shard:
        return self._shards[self._topology.me.shard]

    def _make_catalog(self, iteration: int, precision: str) -> tuple[Catalog, list[ShardFragment]]:
        manifests = [shard.image.manifest for shard in self._shards.values()]
        entries = self._each_once(logical_fragments(manifests))
        return snapshot_catalog(iteration, manifests, entries, self._fetch_objects(), precision), entries

    def _each_once(self, entries: Sequence[ShardFragment]) -> list[ShardFragment]:
        """Deduplicate fragments that several shards have; their hashes must be equal."""
        me = self._topology.me.shard
        times = Counter(entry.fragment for entry in entries)

        def hash_mine() -> list[tuple[int, int]]:
            mine = [entry.index for entry in entries if entry.shard == me and times[entry.fragment] > 1]
            return [(index, xxhash.xxh3_64_intdigest(self._bytes(index))) for index in mine]

        gathered = gather_all(self._group, hash_mine, list[tuple[int, int]])
        members = zip(self._topology.members, gathered, strict=True)
        hashes = {(member.shard, index): value for member, pairs in members for index, value in pairs}
        return without_doubles(entries, lambda entry: hashes[entry.shard, entry.index])

    def _bytes(self, index: int) -> memoryview:
        begin = self._own.image.offsets[index]
        return self._arenas.view(self._own.source)[begin : begin + self._own.image.manifest.fragments[index].nbytes]

    def _fetch_objects(self) -> Mapping[str, object]:
        """Fetch the objects of the first rank of each stage to rank 0, which writes them; empty on other ranks."""
        names = first_of_each_stage(list(self._shards)) if self._leads else ()
        encoded: dict[str, Buffer] = {}

        def plan() -> Reads:
            transfers = []
            for name, shard in ((name, self._shards[name]) for name in names):
                if shard.source.node == self._topology.me.node:
                    encoded[name] = self._arenas.shard(shard.source).objects()
                    continue
                buffer = host_memory(shard.objects_used)
                encoded[name] = buffer.numpy().data
                reader = reader_for(self._topology, shard.source)
                transfers.append(fetch(shard.source, reader, (shard.image.objects.begin, buffer)))
            return Reads.of(self._group.rank, transfers, self._arenas.shard)

        # On all ranks: the others must serve the reads.
        execute(self._group, plan, self._arenas)
        return together(
            self._group, lambda: objects_by_shard(names, lambda name: objects.decode(bytes(encoded[name])))
        )

    def _write(
        self, catalog: Catalog, entries: Sequence[ShardFragment], stored: Sequence[Tensor], units: Sequence[Unit],
        writer: UniversalWriter,
    ) -> None:  # fmt: skip
        """Write this rank's files; the rows arrive in batches."""
        sources = [shard.source for shard in self._shards.values()]
        numbers = {shard: number for number, shard in enumerate(self._shards)}
        index = Index(
            ShardEntry(numbers[entry.shard], entry.fragment, self._shards[entry.shard].image.offsets[entry.index])
            for entry in entries
        )
        mine = deal(units, self._group.size)[self._group.rank]
        arrivals = _Arrivals(
            self._group, self._arenas, in_batches(_read_rows(mine, stored), lambda rows: rows.nbytes, BATCH_BYTES),
            lambda needs: transfers_of(self._topology, index, needs, sources),
        )  # fmt: skip
        get, problem = deriving(catalog, stored, arrivals.get), None
        try:
            for unit in mine:
                writer.write(unit, get)
        except Exception as error:  # noqa: BLE001 - raised by ``finish``: this rank must still serve reads
            problem = error
        arrivals.finish(problem)


class _Arrivals:
    """The rows that this rank writes. All ranks exchange their rows in batches.

    Construction and ``finish`` are collective, and so is a ``get`` that starts a batch.
    """

    def __init__(
        self, group: Group, arenas: OpenArenas, batched: Sequence[Sequence[Rows]],
        plan: Callable[[Sequence[tuple[Fragment, torch.Tensor]]], Sequence[Transfer]],
    ) -> None:  # fmt: skip
        self._group, self._arenas, self._plan = group, arenas, plan
        self._batched = iter(batched)
        self._left = max(codec.gather(group, len(batched), int))  # exchanges, the same number on all ranks
        self._here: deque[tuple[Rows, torch.Tensor]] = deque()
        self._failed = False  # an exchange has failed, on all ranks

    def get(self, tensor: Tensor, first: int, last: int) -> Bytes:
        """The next rows, which must be the planned ones."""
        if not self._here:
            self._bring()
        rows, buffer = self._here.popleft()
        assert (rows.tensor.key, rows.first, rows.last) == (tensor.key, first, last), "files are written as planned"
        return buffer.numpy()

    def finish(self, problem: Exception | None) -> None:
        """Serve other ranks' reads until all have finished. Raises the ``problem`` of any rank on all of them."""
        if problem is not None and self._failed:
            raise problem
        while self._left:
            self._bring(problem)
        together(self._group, lambda: _raise(problem))

    def _bring(self, problem: Exception | None = None) -> None:
        self._here.extend((rows, host_memory(rows.nbytes)) for rows in next(self._batched, ()))

        def plan() -> Reads:
            _raise(problem)
            transfers = self._plan([(rows.fragment, buffer) for rows, buffer in self._here])
            return Reads.of(self._group.rank, transfers, self._arenas.shard)

        self._left, self._failed = self._left - 1, True
        execute(self._group, plan, self._arenas)
        self._failed = False


def _raise(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


def _read_rows(units: Sequence[Unit], stored: Iterable[Tensor]) -> Iterator[Rows]:
    """The rows to read for ``units``, in the order in which they are written: those of a tensor itself, or of the
    master weight that it is derived from."""
    there = {tensor.key: tensor for tensor in stored}
    for part in (part for unit in units for part in unit.parts):
        key = part.tensor.key
        for first, last in strips(part):
            yield Rows(there[key if key in there else master_of(key)], first, last)


def _require_shared(destination: Destination) -> None:
    if not destination.partial.is_dir():
        raise ConvertError(
            f"{destination.partial}: rank 0 created it, but it is missing here: use storage that all nodes share"
        )
