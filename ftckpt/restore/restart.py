"""A restart from memory, step by step: inventory → decide → verify → repair → void → plan → load."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ftckpt.arena.segment import Arena, list_arenas
from ftckpt.comm import Group, together
from ftckpt.errors import ArenaError, LostError
from ftckpt.events import Events
from ftckpt.layout.names import layout_name
from ftckpt.layout.shards import first_of_each_stage
from ftckpt.layout.topology import Topology
from ftckpt.restore.decide import Decision
from ftckpt.restore.load import Moved, OpenArenas, Transfer, execute, fetch, transfer
from ftckpt.restore.plan import Index, Read, plan
from ftckpt.restore.protection import remove_newer
from ftckpt.restore.repair import Used
from ftckpt.restore.reshape import Hashes, Held, check_copies, hear, index_for, needs_across, needs_of, tell
from ftckpt.restore.search import Search, readers_of, reshaped
from ftckpt.state import objects
from ftckpt.state.fragment import Fragment
from ftckpt.state.piece import Description, Piece, TrainingState


class Restart:
    """One restart. Every method is collective, called in the order in which they stand."""

    def __init__(self, group: Group, topology: Topology, node_dir: Path, events: Events) -> None:
        self._group = group
        self._topology = topology
        self._node_dir = node_dir
        self._events = events
        self._arenas = OpenArenas(node_dir)
        self._search: Search | None = None

    def choose(self, on_lost: str, reshapes: bool = False) -> Decision | None:
        """The newest snapshot that is whole, or was made whole from parity, and whose every byte was verified.

        ``reshapes``: whether one of another layout will do.

        Raises:
            LostError: snapshots were lost and ``on_lost`` is ``fail``.
            MismatchError: the snapshots belong to another version, or to a layout that will not do.
            MemoryBudgetError, ArenaError: lost shards cannot be rebuilt here.
        """
        place = (self._group, self._topology, self._node_dir, self._events, self._arenas)
        search = self._search = Search(*place, reshapes=reshapes)
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

        In another layout tensors are the same, element by element, and ``state`` makes of the objects what it can.

        Raises:
            MismatchError: the snapshot is of another model, or what its ranks hold of one tensor differs.
        """
        begin = time.perf_counter()
        held = self._gather_held(decision)
        pieces = [*described.stepped, *described.volatile]
        across = reshaped(self._topology, decision)
        wanted, transfers = together(self._group, lambda: self._plan(held, pieces, described.padded, across))
        if across:
            self._check_copies(held, [need for _, need in wanted])
            moved = execute(self._group, transfers, self._arenas)
            _derive(pieces, {id(piece) for piece, _ in wanted})
            firsts, at = self._first_objects(held), decision.iteration
            together(self._group, lambda: state.load_reshaped([objects.decode(one) for one in firsts], at))
        else:
            encoded, mine = self._fetch_objects(held[self._topology.me.shard])
            moved = execute(self._group, [*transfers, mine], self._arenas)
            _derive(pieces, {id(piece) for piece, _ in wanted})
            together(self._group, lambda: state.load_objects(objects.decode(encoded.numpy().tobytes())))
        state.finish_load()
        self._events.emit("loaded", iteration=decision.iteration, **moved._asdict())
        if across:
            self._tell_reshaped(decision, moved, time.perf_counter() - begin)

    def capacities(self, decision: Decision) -> list[int] | None:
        """What the snapshot's shares were weighted with, in bytes by rank of this job; None where they were equal.

        With it ``assign`` cuts replica sets as the arenas that are there have them; those of another layout say
        nothing of this one.
        """
        if reshaped(self._topology, decision):
            return None
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
        readers, across = readers_of(self._topology, decision), reshaped(self._topology, decision)

        def describe() -> bytes:
            mine = []
            for shard, source in decision.sources.items():
                if readers[shard] == self._group.rank:
                    arena = self._arenas.get(source.arena)
                    used = arena.control.record(source.slot).objects_used
                    mine.append(Held.of(source, self._group.rank, arena.image, used, reshaped=across))
            return tell(mine)

        told = self._group.gather(together(self._group, describe))
        return {one.shard: one for data in told for one in hear(data, decision.sources, readers)}

    def _own_capacities(self, decision: Decision) -> dict[str, int]:
        readers = readers_of(self._topology, decision)
        return {
            shard: self._arenas.get(source.arena).manifest.capacity
            for shard, source in decision.sources.items()
            if readers[shard] == self._group.rank
        }

    def _plan(
        self, held: Mapping[str, Held], pieces: Sequence[Piece], padded: frozenset[str], across: bool
    ) -> tuple[list[tuple[Piece, Fragment]], list[Transfer]]:
        """What this rank reads for which piece, and from where."""
        sources = list(held.values())
        index = index_for(pieces, sources, self._topology.me.shard)
        if across:
            padded = padded.union(*(source.padded for source in sources))
            wanted = needs_across(pieces, index, padded)
            self._tell_padding(index, [need for _, need in wanted])
        else:
            padded = frozenset()
            wanted = needs_of(pieces, index, held[self._topology.me.shard])
        here, needs = self._topology.me.node, [need for _, need in wanted]
        costs = [int(source.source.node != here) for source in sources]
        by_source: dict[int, list[Read]] = {}
        for read in plan(index, needs, costs.__getitem__, padded, turn=self._group.rank):
            by_source.setdefault(read.have.source, []).append(read)
        tensors = [piece.tensor for piece, _ in wanted]
        return wanted, [
            transfer(sources[index].source, self._reader_for_me(sources[index]), found, tensors)
            for index, found in by_source.items()
        ]

    def _tell_padding(self, index: Index, needs: Sequence[Fragment]) -> None:
        """A vocabulary of another size may be another vocabulary: that is for people to see."""
        told = False
        for need in needs:
            for shape in index.shapes(need.key, need.dtype) - {need.global_shape}:
                here = need.global_shape[0]
                self._events.emit("padding_changed", key=need.key, rows=shape[0], rows_here=here)
                if not told:
                    self._events.tell(f"{need.key}: padded to {here} rows, {shape[0]} in the snapshot")
                told = True

    def _check_copies(self, held: Mapping[str, Held], needs: Sequence[Fragment]) -> None:
        """What several shards hold for themselves must be the same before one of them is read for all."""
        mine = [one for one in held.values() if self._reads(one)]
        hashed = together(self._group, lambda: [one.hashes(self._arenas.view(one.source)) for one in mine])
        told = self._group.gather(b"".join(part.tobytes() for part in hashed))
        hashes: dict[str, Hashes] = {}
        read = [0] * len(told)
        for shard, one in held.items():
            hashes[shard] = np.frombuffer(told[one.reader], np.uint64, len(one.copies), read[one.reader])
            read[one.reader] += hashes[shard].nbytes
        together(self._group, lambda: check_copies(list(held.values()), hashes, needs))

    def _first_objects(self, held: Mapping[str, Held]) -> list[bytes]:
        """Encoded objects of the first rank of each pipeline stage, in the order of the stages."""
        firsts = [held[shard] for shard in first_of_each_stage(list(held))]
        mine = together(self._group, lambda: {one.shard: self._objects(one) for one in firsts if self._reads(one)})
        return [self._group.broadcast(mine.get(one.shard, bytes(one.objects[1])), one.reader) for one in firsts]

    def _reads(self, held: Held) -> bool:
        return held.reader == self._group.rank

    def _objects(self, held: Held) -> bytes:
        begin, used = held.objects
        return bytes(self._arenas.view(held.source)[begin : begin + used])

    def _tell_reshaped(self, decision: Decision, moved: Moved, secs: float) -> None:
        before, now = layout_name(decision.layout), layout_name(self._topology.layout)
        sizes = {"read_bytes": moved.read_bytes, "received_bytes": moved.received_bytes}
        self._events.emit(
            "reshaped", **{"from": before, "to": now}, iteration=decision.iteration, secs=secs, **sizes
        )  # fmt: skip
        self._events.tell(f"iteration {decision.iteration} reshaped from {before} to {now} in {secs:.1f} s")

    def _fetch_objects(self, mine: Held) -> tuple[torch.Tensor, Transfer]:
        begin, used = mine.objects
        buffer = torch.empty(used, dtype=torch.uint8)
        return buffer, fetch(mine.source, self._reader_for_me(mine), begin, buffer)

    def _reader_for_me(self, held: Held) -> int:
        """A rank reads what lies on its own node by itself."""
        return self._group.rank if held.source.node == self._topology.me.node else held.reader


def _derive(pieces: Sequence[Piece], read: set[int]) -> None:
    for piece in pieces:
        if piece.derived_from is not None and id(piece) not in read:
            piece.tensor.copy_(piece.derived_from)
