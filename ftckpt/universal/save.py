"""Writes the newest whole snapshot of a running job as a universal checkpoint, without gathering it anywhere."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ftckpt.arena.image import SlotImage
from ftckpt.arena.segment import Arena
from ftckpt.comm import Group, together
from ftckpt.errors import ConvertError
from ftckpt.events import Events
from ftckpt.layout.shards import first_of_each_stage
from ftckpt.layout.topology import Topology
from ftckpt.restore.load import OpenArenas, Transfer, execute, fetch, transfer
from ftckpt.restore.plan import Have, Index, Read, plan
from ftckpt.restore.source import Source
from ftckpt.state import objects
from ftckpt.state.fragment import Box, Fragment
from ftckpt.state.manifest import Manifest
from ftckpt.universal.catalog import Catalog, Part, Tensor, Unit
from ftckpt.universal.derived import cast, master_of
from ftckpt.universal.rounds import OpenFiles, Step, deal, rounds
from ftckpt.universal.shards import (
    Entry,
    derived_keys,
    logical_entries,
    objects_by_shard,
    padded_keys,
    tensors_of,
    without_doubles,
)
from ftckpt.universal.writer import MAX_FILE_BYTES, UniversalSink

if TYPE_CHECKING:
    from ftckpt.checkpointer import Checkpointer

ROUND_BYTES = 64 << 20
"""Extra memory of a rank beside that of the exchange: what it writes between two exchanges. One row may be more."""


def save_universal(
    checkpointer: Checkpointer, destination: Path, max_file_bytes: int = MAX_FILE_BYTES, precision: str = ""
) -> Path:
    """Write the newest snapshot that every rank has sealed to the directory ``destination``, which all nodes reach.

    Collective, called by the training thread at a boundary, after ``step``; training waits for it. Each rank writes
    files of its own and takes what goes into them from the arenas of all nodes, in rounds of ``ROUND_BYTES``. Nothing
    has the name ``destination`` before all of it is on the disk; ``destination.partial``, which a killed job leaves,
    is removed by the next call. ``precision`` is the type of weights that are casts of their masters (``BF16``),
    where the snapshot does not say it.

    Raises:
        ConvertError: on all ranks together: no snapshot is whole yet, bytes are damaged, ranks do not agree on one
            tensor, or the destination exists, is full, or is not shared by all nodes.
        RuntimeError: a rank is gone.
    """
    shard = checkpointer._shard
    capture = shard.capture if shard is not None else None
    arena = capture.arena if capture is not None else None
    saving = _Saving(checkpointer._group, checkpointer.topology, checkpointer._arenas.path, arena)
    return saving.run(UniversalSink(destination, max_file_bytes), precision, checkpointer.events)


@dataclass(frozen=True)
class _Held:
    """One rank's shard of the snapshot, and how much of the room for objects is used."""

    source: Source
    image: SlotImage
    objects_used: int


class _Saving:
    """One save. Every method that is not about this rank's own slot or files is collective."""

    def __init__(self, group: Group, topology: Topology, node_dir: Path, arena: Arena | None) -> None:
        self._group = group
        self._topology = topology
        self._arena = arena
        self._arenas = OpenArenas(node_dir)
        self._leads = group.rank == 0
        self._held: dict[str, _Held] = {}

    def run(self, sink: UniversalSink, precision: str, events: Events) -> Path:
        begin, destination = time.perf_counter(), sink.destination
        try:
            iteration = self._choose()
            manifests = [held.image.manifest for held in self._held.values()]
            entries = self._logical(manifests)
            catalog = self._make_catalog(iteration, manifests, entries, precision)
            units = sink.plan(catalog, tensors_of(entries))
            together(self._group, lambda: destination.begin(fresh=True) if self._leads else None)
            try:
                together(self._group, lambda: _require_shared(destination.partial))
                self._write(entries, units, sink)
                together(self._group, lambda: sink.finish(catalog, units) if self._leads else None)
            except BaseException:
                if self._leads:
                    shutil.rmtree(destination.partial, ignore_errors=True)
                raise
        finally:
            destination.release()
            self._arenas.close()
        nbytes, secs = sum(unit.nbytes for unit in units), time.perf_counter() - begin
        events.emit("saved", path=str(destination.path), iteration=iteration, total_bytes=nbytes, blocked_secs=secs)
        events.tell(f"iteration {iteration} saved at {destination.path}: {nbytes / 1e9:.1f} GB in {secs:.1f} s")
        return destination.path

    def _choose(self) -> int:
        """The newest snapshot that all ranks have sealed; every rank has verified its shard of it."""
        arena, members = self._arena, self._topology.members
        mine: dict[str, Any] = {"sealed": _sealed(arena)}
        if arena is not None:
            mine.update(arena=arena.path.name, manifest=arena.manifest.encode().decode())
        told = [json.loads(data) for data in self._group.gather(json.dumps(mine).encode())]
        slots = [{(iteration, lineage): (slot, used) for iteration, lineage, slot, used in t["sealed"]} for t in told]
        common = set.intersection(*map(set, slots))
        if not common:
            raise ConvertError("no snapshot is whole on all ranks yet: save after one was taken")
        snapshot = max(common)
        for member, has, rank in zip(members, slots, told, strict=True):
            slot, used = has[snapshot]
            image = SlotImage.of(Manifest.decode(rank["manifest"].encode()))
            self._held[member.shard] = _Held(Source(member.node, rank["arena"], slot), image, used)
        together(self._group, self._verify)
        iteration: int = snapshot[0]
        return iteration

    def _verify(self) -> None:
        own = self._own.source
        bad = self._arena.verify(own.slot) if self._arena is not None else ["no arena"]
        if bad:
            raise ConvertError(f"{own.arena}, slot {own.slot}: damaged: {', '.join(bad[:3])}")

    @property
    def _own(self) -> _Held:
        return self._held[self._topology.me.shard]

    def _logical(self, manifests: Sequence[Manifest]) -> list[Entry]:
        """All of the model, each element once; of what several ranks hold each for itself they compare hashes."""
        entries, me = logical_entries(manifests), self._topology.me.shard
        times = Counter(entry.fragment for entry in entries)

        def hash_mine() -> list[tuple[int, int]]:
            mine = [entry.index for entry in entries if entry.shard == me and times[entry.fragment] > 1]
            return [(index, xxhash.xxh3_64_intdigest(self._bytes(index))) for index in mine]

        told = self._group.gather(json.dumps(together(self._group, hash_mine)).encode())
        members = zip(self._topology.members, told, strict=True)
        hashes = {(member.shard, index): value for member, data in members for index, value in json.loads(data)}
        return without_doubles(entries, lambda entry: hashes[entry.shard, entry.index])

    def _bytes(self, index: int) -> memoryview:
        begin = self._own.image.offsets[index]
        return self._arenas.view(self._own.source)[begin : begin + self._own.image.manifest.fragments[index].nbytes]

    def _make_catalog(
        self, iteration: int, manifests: Sequence[Manifest], entries: Sequence[Entry], precision: str
    ) -> Catalog:
        keys = {entry.fragment.key for entry in entries}
        derived = derived_keys(manifests, keys, precision)
        return Catalog(
            origin="ftckpt",
            iteration=iteration,
            layout=dict(self._topology.layout),
            fragments=tuple(entry.fragment for entry in entries),
            objects=self._fetch_objects(),
            padded=padded_keys(manifests, keys, derived),
            derived=derived,
        )

    def _fetch_objects(self) -> Mapping[str, object]:
        """What the first ranks of all stages saved; rank 0 alone has it, and writes it."""
        shards = first_of_each_stage(list(self._held)) if self._leads else ()
        buffers = {shard: torch.empty(self._held[shard].objects_used, dtype=torch.uint8) for shard in shards}
        transfers = []
        for shard, buffer in buffers.items():
            held = self._held[shard]
            transfers.append(fetch(held.source, self._reader(shard), held.image.objects.begin, buffer))
        execute(self._group, transfers, self._arenas)

        def decode(shard: str) -> object:
            return objects.decode(buffers[shard].numpy().tobytes())

        return together(self._group, lambda: objects_by_shard(shards, decode))

    def _write(self, entries: Sequence[Entry], units: Sequence[Unit], sink: UniversalSink) -> None:
        """Round by round each rank takes what comes next in its files, and writes it."""
        shards = list(self._held)
        places = {shard: place for place, shard in enumerate(shards)}
        index = Index(
            Have(places[entry.shard], entry.fragment, self._held[entry.shard].image.offsets[entry.index])
            for entry in entries
        )
        stored = {tensor.key: tensor for tensor in tensors_of(entries)}
        dealt = deal(units, self._group.size)
        mine = list(rounds(dealt[self._group.rank], ROUND_BYTES))
        with OpenFiles(sink) as files:
            for number in range(max(sum(1 for _ in rounds(share, ROUND_BYTES)) for share in dealt)):
                steps = mine[number] if number < len(mine) else []
                round_ = _Round(steps, stored)
                transfers = together(self._group, lambda r=round_: self._plan(r, index, shards))  # type: ignore[misc]
                execute(self._group, transfers, self._arenas)
                together(self._group, lambda r=round_: r.put(files))  # type: ignore[misc]

    def _plan(self, round_: _Round, index: Index, shards: Sequence[str]) -> list[Transfer]:
        here = self._topology.me.node
        reads = plan(
            index,
            round_.needs,
            lambda place: int(self._held[shards[place]].source.node != here),
            turn=self._group.rank,
        )
        by_shard: dict[str, list[Read]] = {}
        for read in reads:
            by_shard.setdefault(shards[read.have.source], []).append(read)
        return [
            transfer(self._held[shard].source, self._reader(shard), found, round_.buffers)
            for shard, found in by_shard.items()
        ]

    def _reader(self, shard: str) -> int:
        """A rank reads what lies on its own node by itself."""
        on_node = self._held[shard].source.node == self._topology.me.node
        return self._group.rank if on_node else self._topology.rank_of[shard]


class _Round:
    """What one rank writes in one round, with the memory it comes into."""

    def __init__(self, steps: Sequence[Step], stored: Mapping[str, Tensor]) -> None:
        self._steps = steps
        self._sources = [_stored(step.part, stored) for step in steps]
        self.needs = [_rows(source) for source in self._sources if source is not None]
        self.buffers = [torch.empty(need.nbytes, dtype=torch.uint8) for need in self.needs]

    def put(self, files: OpenFiles) -> None:
        """Write what has come, cast where weights are derived from masters."""
        arrived = iter(self.buffers)
        for step, source in zip(self._steps, self._sources, strict=True):
            if step.part is None or source is None:
                files.put(step, torch.empty(0, dtype=torch.uint8).numpy())
                continue
            files.put(step, cast(next(arrived).numpy(), source.tensor.dtype, step.part.tensor.dtype))


def _stored(part: Part | None, stored: Mapping[str, Tensor]) -> Part | None:
    """The rows that are read for ``part``: of itself, or of the master that it is derived from."""
    if part is None or part.tensor.key in stored:
        return part
    return replace(part, tensor=stored[master_of(part.tensor.key)])


def _rows(part: Part) -> Fragment:
    shape = part.tensor.shape
    offset, size = (0,) * len(shape), shape
    if shape:
        offset, size = (part.first, *offset[1:]), (part.last - part.first, *shape[1:])
    return Fragment.whole(part.tensor.key, part.tensor.dtype, shape, Box(offset, size))


def _sealed(arena: Arena | None) -> list[tuple[int, str, int, int]]:
    """Iteration, lineage, slot and bytes of objects of every snapshot in an arena."""
    if arena is None:
        return []
    records = enumerate(map(arena.control.record, range(arena.control.slots)))
    return [(r.iteration, r.lineage.hex(), slot, r.objects_used) for slot, r in records if r.sealed]


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise ConvertError(f"{partial}: rank 0 has made it, and it is not here: name storage that all nodes share")
