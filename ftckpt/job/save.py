"""Writes the newest whole snapshot of a running job as a universal checkpoint, without gathering it anywhere."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType

import xxhash

from ftckpt.convert.arenas import (
    ShardFragment,
    logical_fragments,
    objects_by_shard,
    snapshot_catalog,
    without_doubles,
)
from ftckpt.convert.catalog import Bytes, Catalog, Rows, Tensor, Unit, tensors_of
from ftckpt.convert.consolidation import cast, master_of
from ftckpt.convert.safetensors import MAX_FILE_BYTES, TensorFile, strips
from ftckpt.convert.storage import Destination, explained
from ftckpt.convert.universal import UniversalWriter
from ftckpt.errors import ConvertError, LostError, MismatchError
from ftckpt.events import Events
from ftckpt.group import Group, together
from ftckpt.host_memory import host_memory
from ftckpt.model import codec, objects
from ftckpt.model.manifest import Manifest
from ftckpt.model.topology import Topology, first_of_each_stage
from ftckpt.restore.choice import newest_whole
from ftckpt.restore.inventory import ArenaReport, report_arena
from ftckpt.restore.load import execute, fetch, reader_for, transfers_of
from ftckpt.restore.locations import OpenArenas, SlotAt
from ftckpt.restore.offers import Index, Offer
from ftckpt.store.arena import Arena
from ftckpt.store.damage import Damage
from ftckpt.store.image import SlotImage

__all__ = ["BATCH_BYTES", "MAX_FILE_BYTES", "UniversalSave"]

BATCH_BYTES = 64 << 20
"""Extra memory of a rank beside that of the exchange: what it writes between two exchanges. One row may be more."""


@dataclass(frozen=True)
class WriteStep:
    """Rows that come next in the file of ``unit``; none in an empty file."""

    unit: Unit
    rows: Rows | None

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes if self.rows is not None else 0


def deal(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Who writes which files: the largest first, each to whom has least to write so far. The same on all ranks."""
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    # By name where sizes are the same: every rank must come to the same answer without a message.
    for unit in sorted(units, key=lambda unit: (-unit.nbytes, unit.name)):
        rank = load.index(min(load))
        dealt[rank].append(unit)
        load[rank] += unit.nbytes
    return dealt


def batches(units: Sequence[Unit], nbytes: int) -> Iterator[list[WriteStep]]:
    """What to write one batch after the other: at most ``nbytes`` each, or one step that is larger."""
    batch: list[WriteStep] = []
    room = nbytes
    for unit in units:
        for step in _steps(unit, nbytes):
            if batch and step.nbytes > room:
                yield batch
                batch, room = [], nbytes
            batch.append(step)
            room -= step.nbytes
    if batch:
        yield batch


def _steps(unit: Unit, nbytes: int) -> Iterator[WriteStep]:
    if unit.nbytes == 0:
        yield WriteStep(unit, None)
    for part in unit.parts:
        for first, last in strips(part, nbytes):
            yield WriteStep(unit, Rows(part.tensor, first, last))


@dataclass(frozen=True)
class _Shard:
    """One rank's shard of the snapshot, and how much of the room for objects is used."""

    source: SlotAt
    image: SlotImage
    objects_used: int


@dataclass(frozen=True)
class _RankReport:
    """What one rank reports: its arena, the manifest of that, and how much each slot uses of the room for objects."""

    arena: ArenaReport
    manifest: str
    objects_used: tuple[int, ...]


class UniversalSave:
    """One save of a job's newest snapshot, whose shard of this rank is in ``arena``.

    Every method that is not about this rank's own slot or files is collective.
    """

    def __init__(self, group: Group, topology: Topology, node_dir: Path, arena: Arena | None, events: Events) -> None:
        self._group = group
        self._topology = topology
        self._arena = arena
        self._events = events
        self._arenas = OpenArenas(node_dir)
        self._leads = group.rank == 0
        self._shards: dict[str, _Shard] = {}

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
                self._write(entries, {tensor.key: tensor for tensor in stored}, units, writer)
                # Every rank's files are on the disk: ``_write`` ends with what all did together.
                together(self._group, lambda: writer.finish(catalog, units) if self._leads else None)
            except BaseException:
                # Ranks fail together, so that none writes there any more.
                if self._leads:
                    shutil.rmtree(destination.partial, ignore_errors=True)
                raise
        finally:
            destination.release()
            self._arenas.close()
        nbytes, secs = sum(unit.nbytes for unit in units), time.perf_counter() - begin
        self._events.emit("saved", path=str(path), iteration=iteration, total_bytes=nbytes, blocked_secs=secs)
        self._events.announce(f"iteration {iteration} saved at {path}: {nbytes / 1e9:.1f} GB in {secs:.1f} s")
        return path

    def _report_own(self) -> list[_RankReport]:
        """What this rank's arena holds; nothing where it has none."""
        arena = self._arena
        if arena is None:
            return []
        used = tuple(arena.control.record(slot).objects_used for slot in range(arena.control.slots))
        report = report_arena(arena, self._topology.me.node)
        return [_RankReport(report, arena.manifest.encode().decode(), used)]

    def _choose(self) -> int:
        """Decide on the newest snapshot that all ranks have sealed; every rank has verified its shard of it."""
        gathered = codec.gather(self._group, together(self._group, self._report_own), list[_RankReport])
        by_shard = {each.arena.shard: each for reports in gathered for each in reports}
        try:
            decision = newest_whole([each.arena for each in by_shard.values()], self._topology)
        except MismatchError as error:
            raise ConvertError(str(error)) from None
        except LostError:
            raise ConvertError("no snapshot is whole on all ranks yet: save after one was taken") from None
        for member in self._topology.members:
            theirs, at = by_shard[member.shard], decision.sources[member.shard]
            image = SlotImage.of(Manifest.decode(theirs.manifest.encode()))
            self._shards[member.shard] = _Shard(at, image, theirs.objects_used[at.slot])
        # Before anything is read: a rank whose slot is damaged must stop all of them.
        together(self._group, self._verify)
        return decision.snapshot.iteration

    def _verify(self) -> None:
        own = self._own.source
        damage = self._arena.verify(own.slot) if self._arena is not None else Damage(reason="no arena")
        if damage:
            raise ConvertError(f"{own.arena}, slot {own.slot}: damaged: {', '.join(damage.names[:3])}")

    @property
    def _own(self) -> _Shard:
        return self._shards[self._topology.me.shard]

    def _make_catalog(self, iteration: int, precision: str) -> tuple[Catalog, list[ShardFragment]]:
        manifests = [shard.image.manifest for shard in self._shards.values()]
        entries = self._each_once(logical_fragments(manifests))
        return snapshot_catalog(iteration, manifests, entries, self._fetch_objects(), precision), entries

    def _each_once(self, entries: Sequence[ShardFragment]) -> list[ShardFragment]:
        """Of what several ranks hold each for itself they compare hashes."""
        me = self._topology.me.shard
        times = Counter(entry.fragment for entry in entries)

        def hash_mine() -> list[tuple[int, int]]:
            mine = [entry.index for entry in entries if entry.shard == me and times[entry.fragment] > 1]
            return [(index, xxhash.xxh3_64_intdigest(self._bytes(index))) for index in mine]

        gathered = codec.gather(self._group, together(self._group, hash_mine), list[tuple[int, int]])
        members = zip(self._topology.members, gathered, strict=True)
        hashes = {(member.shard, index): value for member, pairs in members for index, value in pairs}
        return without_doubles(entries, lambda entry: hashes[entry.shard, entry.index])

    def _bytes(self, index: int) -> memoryview:
        begin = self._own.image.offsets[index]
        return self._arenas.view(self._own.source)[begin : begin + self._own.image.manifest.fragments[index].nbytes]

    def _fetch_objects(self) -> Mapping[str, object]:
        """What the first ranks of all stages saved; rank 0 alone has it, and writes it."""
        names = first_of_each_stage(list(self._shards)) if self._leads else ()
        buffers = {name: host_memory(self._shards[name].objects_used) for name in names}
        transfers = []
        for name, buffer in buffers.items():
            shard = self._shards[name]
            reader = reader_for(self._topology, shard.source)
            transfers.append(fetch(shard.source, reader, (shard.image.objects.begin, buffer)))
        # On all ranks: those that fetch nothing are read from.
        execute(self._group, lambda: transfers, self._arenas)
        return together(
            self._group,
            lambda: objects_by_shard(names, lambda name: objects.decode(buffers[name].numpy().tobytes())),
        )

    def _write(
        self,
        entries: Sequence[ShardFragment],
        stored: Mapping[str, Tensor],
        units: Sequence[Unit],
        writer: UniversalWriter,
    ) -> None:
        """Batch by batch each rank takes what comes next in its files, and writes it."""
        sources = [shard.source for shard in self._shards.values()]
        numbers = {shard: number for number, shard in enumerate(self._shards)}
        index = Index(
            Offer(numbers[entry.shard], entry.fragment, self._shards[entry.shard].image.offsets[entry.index])
            for entry in entries
        )
        dealt = deal(units, self._group.size)
        mine = list(batches(dealt[self._group.rank], BATCH_BYTES))
        # As many batches on every rank as the busiest has: each of them is collective.
        num_batches = max(sum(1 for _ in batches(share, BATCH_BYTES)) for share in dealt)
        with OpenFile(writer) as file:
            for number in range(num_batches):
                batch = _Batch(mine[number] if number < len(mine) else [], stored)
                execute(self._group, partial(transfers_of, self._topology, index, batch.needs, sources), self._arenas)
                together(self._group, partial(batch.write, file))


class OpenFile:
    """The file that is being written; one that is not complete at the end, or on an error, is removed."""

    def __init__(self, writer: UniversalWriter) -> None:
        self._writer = writer
        self._stack = ExitStack()
        self._file: TensorFile | None = None

    def __enter__(self) -> OpenFile:
        return self

    def put(self, step: WriteStep, data: Bytes) -> None:
        """The next bytes of a file; its first ones open it, its last ones complete it.

        Raises:
            ConvertError: no room, no permission, or the disk fails.
        """
        destination = self._writer.destination
        with explained(destination.partial / step.unit.name):
            if self._file is None:
                opened = self._stack.enter_context(destination.file(step.unit.name))
                self._file = self._writer.begin_file(step.unit, opened)
            if len(data):
                self._file.put(data)
            if self._file.complete:
                self._file.end()
                self._file = None
                self._stack.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, trace)


class _Batch:
    """What one rank writes at a time, with the memory it comes into."""

    def __init__(self, steps: Sequence[WriteStep], stored: Mapping[str, Tensor]) -> None:
        self._steps = steps
        self._sources = [_source_rows(step.rows, stored) for step in steps]
        wanted = [rows.fragment for rows in self._sources if rows is not None]
        self.needs = [(need, host_memory(need.nbytes)) for need in wanted]

    def write(self, file: OpenFile) -> None:
        """Write what has come, cast where weights are derived from masters."""
        arrived = (buffer for _, buffer in self.needs)
        for step, source in zip(self._steps, self._sources, strict=True):
            if step.rows is None or source is None:
                file.put(step, host_memory(0).numpy())
                continue
            file.put(step, cast(next(arrived).numpy(), source.tensor.dtype, step.rows.tensor.dtype))


def _source_rows(rows: Rows | None, stored: Mapping[str, Tensor]) -> Rows | None:
    """The rows that are read for ``rows``: of the tensor itself, or of the master that it is derived from."""
    if rows is None or rows.tensor.key in stored:
        return rows
    return replace(rows, tensor=stored[master_of(rows.tensor.key)])


def _require_shared(destination: Destination) -> None:
    if not destination.partial.is_dir():
        raise ConvertError(
            f"{destination.partial}: rank 0 has made it, and it is not here: name storage that all nodes share"
        )
