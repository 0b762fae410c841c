"""Executes reads: from this node's arenas straight into live tensors, from other nodes by messages."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ftckpt.arena.package import mirror_dir
from ftckpt.arena.segment import Arena
from ftckpt.comm import Group, together
from ftckpt.errors import ArenaError
from ftckpt.protect.parity_file import ParityFile
from ftckpt.restore.blocks import in_bytes
from ftckpt.restore.plan import Read
from ftckpt.restore.source import BlockAt, ChunkAt, Place, Source, place_of_json

MESSAGE_BYTES = 16 << 20
"""Upper bound of one message and of each side's extra memory."""

Extent = tuple[int, int]
"""Offset and number of bytes inside one slot, chunk, block or package."""


@dataclass(frozen=True)
class Target:
    """Where bytes go: a live 1-D tensor, seen from its byte ``start`` on."""

    tensor: torch.Tensor
    start: int


@dataclass(frozen=True)
class Transfer:
    """Bytes of one place that one rank wants, in order; ``targets[i]`` takes ``extents[i]``."""

    source: Place
    reader: int
    extents: tuple[Extent, ...]
    targets: tuple[Target, ...]


class OpenArenas:
    """Arenas and parity files of this node, opened for reading once each; ``close`` unmaps them."""

    def __init__(self, node_dir: Path) -> None:
        self._node_dir = node_dir
        self._open: dict[str, Arena] = {}
        self._parity: dict[tuple[str, str], ParityFile] = {}

    def get(self, name: str) -> Arena:
        """The arena in directory ``name`` of this node."""
        if name not in self._open:
            self._open[name] = Arena.open(self._node_dir / name)
        return self._open[name]

    def parity(self, arena: str, file: str) -> ParityFile:
        """The parity file ``file`` in directory ``arena`` of this node."""
        if (arena, file) not in self._parity:
            self._parity[arena, file] = ParityFile.open(self._node_dir / arena / file)
        return self._parity[arena, file]

    def view(self, place: Place) -> memoryview:
        """The bytes of a slot, a chunk, a block or a package of this node.

        Raises:
            ArenaError: not there, or damaged so that it cannot be read.
        """
        if isinstance(place, Source):
            return self.get(place.arena).slot(place.slot)
        if isinstance(place, ChunkAt):
            arena = self.get(place.arena)
            span = arena.image.chunks[place.chunk]
            return arena.slot(place.slot)[span.begin : span.end]
        if isinstance(place, BlockAt):
            return self.parity(place.arena, place.file).block(place.block).data
        try:
            return memoryview((mirror_dir(self._node_dir) / place.file).read_bytes())
        except OSError as error:
            raise ArenaError(f"package {place.file}: cannot be read: {error.strerror}") from None

    def close(self) -> None:
        """Unmap all."""
        for arena in self._open.values():
            arena.close()
        for parity in self._parity.values():
            parity.close()
        self._open.clear()
        self._parity.clear()


def transfer(source: Source, reader: int, reads: Sequence[Read], needs: Sequence[torch.Tensor]) -> Transfer:
    """Turn reads of one source into byte extents and the tensors that take them."""
    extents: list[Extent] = []
    targets: list[Target] = []
    for read in reads:
        item = read.have.fragment.item_bytes
        for block in read.blocks:
            row = in_bytes(block, item, read.have.offset)
            for *at, _ in itertools.product(*map(range, row.shape[:-1]), [0]):
                begin = row.source + sum(map(int.__mul__, at, row.source_strides))
                dest = row.dest + sum(map(int.__mul__, at, row.dest_strides))
                extents.append((begin, row.shape[-1]))
                targets.append(Target(needs[read.need], dest))
    return Transfer(source, reader, tuple(extents), tuple(targets))


def execute(group: Group, transfers: Sequence[Transfer], arenas: OpenArenas) -> int:
    """Perform all transfers of all ranks; returns the bytes this rank received from other nodes.

    Collective. Messages are exchanged in one order that all ranks derive from the gathered requests, so
    that each send meets its receive.

    Raises:
        ArenaError: on all ranks together, if one cannot open what it is to read.
    """
    remote = [t for t in transfers if t.reader != group.rank]
    wanted = [{"reader": t.reader, "place": t.source.to_json(), "extents": t.extents} for t in remote]
    requests = [json.loads(data) for data in group.gather(json.dumps(wanted).encode())]
    asked = {
        (asker, index): place_of_json(request["place"])
        for asker, wishes in enumerate(requests)
        for index, request in enumerate(wishes)
        if request["reader"] == group.rank
    }
    views = together(group, lambda: _prepare(group.rank, transfers, asked, arenas))
    received = 0
    for asker, wishes in enumerate(requests):
        for index, request in enumerate(wishes):
            if asker == group.rank:
                received += _receive(group, remote[index])
            elif request["reader"] == group.rank:
                _send(group, asker, views[asker, index], request["extents"])
    return received


Asked = tuple[int, int]
"""The rank that asked, and the place of its request among its own."""


def _prepare(
    rank: int, transfers: Sequence[Transfer], asked: Mapping[Asked, Place], arenas: OpenArenas
) -> dict[Asked, memoryview]:
    """Read what lies on this node, and open what others have asked for: what can fail does so before any message."""
    for local in transfers:
        if local.reader == rank:
            _read_local(local, arenas.view(local.source))
    return {wish: arenas.view(place) for wish, place in asked.items()}


def _read_local(local: Transfer, slot: memoryview) -> None:
    whole = _bytes_of(slot)
    for (offset, nbytes), target in zip(local.extents, local.targets, strict=True):
        _put(target, 0, whole[offset : offset + nbytes])


def _send(group: Group, to: int, slot: memoryview, extents: Sequence[Extent]) -> None:
    whole = _bytes_of(slot)
    for message in messages(extents):
        parts = [whole[extents[i][0] + begin :][:nbytes] for i, begin, nbytes in message]
        group.send(torch.cat(parts), to)


def _receive(group: Group, remote: Transfer) -> int:
    received = 0
    for message in messages(remote.extents):
        buffer = torch.empty(sum(nbytes for _, _, nbytes in message), dtype=torch.uint8)
        group.receive(buffer, remote.reader)
        position = 0
        for index, begin, nbytes in message:
            _put(remote.targets[index], begin, buffer[position : position + nbytes])
            position += nbytes
        received += position
    return received


def _bytes_of(slot: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():  # the mapping is read-only, and so is every use of this tensor
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(slot, dtype=torch.uint8)


def _put(target: Target, begin: int, data: torch.Tensor) -> None:
    """Write bytes into a live tensor; typed views are used, so that copies to a device stay bytes."""
    live = target.tensor.view(torch.uint8)
    live[target.start + begin : target.start + begin + data.numel()].copy_(data)


def messages(extents: Sequence[Extent]) -> Iterator[list[tuple[int, int, int]]]:
    """Pack extents into messages of at most ``MESSAGE_BYTES``: (extent, begin in it, bytes)."""
    message: list[tuple[int, int, int]] = []
    room = MESSAGE_BYTES
    for index, (_, nbytes) in enumerate(extents):
        begin = 0
        while begin < nbytes:
            part = min(room, nbytes - begin)
            message.append((index, begin, part))
            begin += part
            room -= part
            if room == 0:
                yield message
                message, room = [], MESSAGE_BYTES
    if message:
        yield message
