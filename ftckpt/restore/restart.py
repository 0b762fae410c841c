"""A restart from memory, step by step: inventory → decide → verify → repair → void → plan → load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ftckpt.arena.image import SlotImage
from ftckpt.arena.segment import Arena, list_arenas
from ftckpt.comm import Group, together
from ftckpt.errors import ArenaError, LostError, MismatchError
from ftckpt.events import Events
from ftckpt.layout.replicas import private_key
from ftckpt.layout.topology import Topology
from ftckpt.restore.decide import Decision
from ftckpt.restore.load import OpenArenas, Transfer, execute, fetch, transfer
from ftckpt.restore.plan import Have, Read, plan
from ftckpt.restore.protection import remove_newer
from ftckpt.restore.repair import Used
from ftckpt.restore.search import Search, reader_of
from ftckpt.restore.source import Source
from ftckpt.state import objects
from ftckpt.state.fragment import Fragment
from ftckpt.state.manifest import Manifest
from ftckpt.state.piece import Description, Piece, TrainingState


@dataclass(frozen=True)
class Held:
    """A chosen slot: where it lies, the rank that reads it for other nodes, and what is in it."""

    source: Source
    reader: int
    image: SlotImage
    objects_used: int


class Restart:
    """One restart. Every method is collective, called in the order in which they stand."""

    def __init__(self, group: Group, topology: Topology, node_dir: Path, events: Events) -> None:
        self._group = group
        self._topology = topology
        self._node_dir = node_dir
        self._events = events
        self._arenas = OpenArenas(node_dir)
        self._search: Search | None = None

    def choose(self, on_lost: str) -> Decision | None:
        """The newest snapshot that is whole, or was made whole from parity, and whose every byte was verified.

        Raises:
            LostError: snapshots were lost and ``on_lost`` is ``fail``.
            MismatchError: the snapshots belong to another layout or version.
            MemoryBudgetError, ArenaError: lost shards cannot be rebuilt here.
        """
        search = self._search = Search(self._group, self._topology, self._node_dir, self._events, self._arenas)
        try:
            return search.run()
        except LostError as error:
            if on_lost == "fail":
                raise
            self._events.emit("lost", error=str(error))
            return None

    @property
    def sources(self) -> Used:
        """What was rebuilt, of all ranks, by what (``node_parity``, ``replica_parity``, ``peer_parity``, ``copy``):
        chunks and bytes. Empty where all was taken as it lay in memory."""
        return self._search.used if self._search is not None else {}

    @property
    def source(self) -> str:
        """``memory``, or what lost shards were rebuilt from, joined by ``+``."""
        return "+".join(sorted(self.sources)) or "memory"

    def void_newer(self, decision: Decision | None) -> bytes:
        """Make sure that no snapshot but older ones can ever be taken again; returns the new lineage."""
        together(self._group, lambda: self._void(decision))
        return self._group.broadcast(os.urandom(16))

    def load(self, decision: Decision, state: TrainingState, described: Description) -> None:
        """Bring tensors and objects of every rank to what they were at the snapshot's boundary.

        Raises:
            MismatchError: the snapshot is of another model.
        """
        held = self._gather_held(decision)
        pieces = [*described.stepped, *described.volatile]
        wanted = together(self._group, lambda: _needs(pieces, held.values(), self._topology.me.shard))
        transfers = together(self._group, lambda: self._plan(held, wanted))
        encoded, wanted_objects = self._fetch_objects(held[self._topology.me.shard])
        moved = execute(self._group, [*transfers, wanted_objects], self._arenas)
        _derive(pieces, {id(piece) for piece, _ in wanted})
        together(self._group, lambda: state.load_objects(objects.decode(encoded.numpy().tobytes())))
        state.finish_load()
        self._events.emit("loaded", iteration=decision.iteration, **moved._asdict())

    def capacities(self, decision: Decision) -> list[int] | None:
        """What the snapshot's shares were weighted with, in bytes by rank of this job; None where they were equal.

        With it ``assign`` cuts replica sets as the arenas that are there have them.
        """
        mine = together(self._group, lambda: self._own_capacities(decision))
        told: dict[str, int] = {}
        for data in self._group.gather(json.dumps(mine).encode()):
            told.update(json.loads(data))
        found = [told.get(member.shard, 0) for member in self._topology.members]
        return found if all(found) else None

    def close(self) -> None:
        """Unmap the arenas that were read."""
        self._arenas.close()

    def _void(self, decision: Decision | None) -> None:
        if not self._topology.is_node_leader:
            return
        remove_newer(self._node_dir, decision.iteration if decision is not None else -1)
        for path in list_arenas(self._node_dir):
            try:
                arena = Arena.open(path, writable=True)
            except ArenaError:
                continue
            try:
                for index in range(arena.control.slots):
                    record = arena.control.record(index)
                    if decision is None or record.iteration > decision.iteration:
                        arena.control.void(index)
                if decision is None:
                    arena.control.mark_whole(bytes(16), -1)
            finally:
                arena.close()

    def _gather_held(self, decision: Decision) -> dict[str, Held]:
        """What each chosen slot holds, told by the rank that reads it to all."""
        readers = {shard: reader_of(self._topology, shard, source) for shard, source in decision.sources.items()}

        def describe() -> list[list[object]]:
            found: list[list[object]] = []
            for shard, source in decision.sources.items():
                if readers[shard] == self._group.rank:
                    arena = self._arenas.get(source.arena)
                    used = arena.control.record(source.slot).objects_used
                    found.append([shard, arena.manifest.encode().decode(), used])
            return found

        mine = together(self._group, describe)
        held: dict[str, Held] = {}
        for data in self._group.gather(json.dumps(mine).encode()):
            for shard, manifest, used in json.loads(data):
                image = SlotImage.of(Manifest.decode(manifest.encode()))
                held[shard] = Held(decision.sources[shard], readers[shard], image, used)
        return held

    def _own_capacities(self, decision: Decision) -> dict[str, int]:
        return {
            shard: self._arenas.get(source.arena).manifest.capacity
            for shard, source in decision.sources.items()
            if reader_of(self._topology, shard, source) == self._group.rank
        }

    def _plan(self, held: Mapping[str, Held], wanted: Sequence[tuple[Piece, Fragment]]) -> list[Transfer]:
        sources = list(held.values())
        haves = [
            Have(index, fragment, offset)
            for index, source in enumerate(sources)
            for fragment, offset in zip(source.image.manifest.fragments, source.image.offsets, strict=True)
        ]
        here = self._topology.me.node
        reads = plan(haves, [need for _, need in wanted], lambda i: int(sources[i].source.node != here))
        by_source: dict[int, list[Read]] = {}
        for read in reads:
            by_source.setdefault(read.have.source, []).append(read)
        tensors = [piece.tensor for piece, _ in wanted]
        return [
            transfer(sources[index].source, self._reader_for_me(sources[index]), found, tensors)
            for index, found in by_source.items()
        ]

    def _fetch_objects(self, mine: Held) -> tuple[torch.Tensor, Transfer]:
        buffer = torch.empty(mine.objects_used, dtype=torch.uint8)
        return buffer, fetch(mine.source, self._reader_for_me(mine), mine.image.objects.begin, buffer)

    def _reader_for_me(self, held: Held) -> int:
        """A rank reads what lies on its own node by itself."""
        return self._group.rank if held.source.node == self._topology.me.node else held.reader


def _needs(pieces: Sequence[Piece], sources: Iterable[Held], shard: str) -> list[tuple[Piece, Fragment]]:
    """What to read for each piece: its own private copy where replicas differed, otherwise the shared one.

    A derived piece is read only if the snapshot holds it, that is, if the rule did not hold then.
    """
    fragments = {f for held_by in sources for f in held_by.image.manifest.fragments}
    held = {(f.key, f.dtype, f.global_shape) for f in fragments}
    wanted: list[tuple[Piece, Fragment]] = []
    for piece in pieces:
        fragment = piece.fragment
        own = fragment.with_key(private_key(fragment.key, shard))
        if own in fragments:  # private copies are never cut
            wanted.append((piece, own))
        elif (fragment.key, fragment.dtype, fragment.global_shape) in held:
            wanted.append((piece, fragment))
        elif piece.derived_from is None:
            raise MismatchError(
                f"the snapshot is of another model: it has no {fragment.key} of type {fragment.dtype} and shape "
                f"{list(fragment.global_shape)}; start the model it was taken from, or remove it with "
                "'ftckpt clean JOB'"
            )
    return wanted


def _derive(pieces: Sequence[Piece], read: set[int]) -> None:
    for piece in pieces:
        if piece.derived_from is not None and id(piece) not in read:
            piece.tensor.copy_(piece.derived_from)
