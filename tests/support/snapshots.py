"""Snapshots that tests write into arenas as trainers do, and their parity, computed without SMPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt.memory.arena import Arena
from ftckpt.model import objects
from ftckpt.model.snapshot import SnapshotId
from ftckpt.parity.codecs import encode
from ftckpt.parity.groups import ParityGroup, node_groups, peer_groups
from ftckpt.parity.holding import ArenaLayout
from ftckpt.parity.modes import Modes
from ftckpt.parity.stripes import stripes

LINEAGE = b"n" * 16
Bytes = npt.NDArray[np.uint8]


def store(arena: Arena, slot: int, parts: Iterable[bytes], encoded: bytes) -> None:
    """Store the bytes of all fragments and of the objects; the slot stays WRITING until ``seal``."""
    control, image = arena.control, arena.image
    control.begin(slot)
    with arena.slot(slot) as view:
        for part, offset in zip(parts, image.offsets, strict=True):
            view[offset : offset + len(part)] = part
        view[image.objects.begin : image.objects.begin + len(encoded)] = encoded
    control.set_objects(slot, len(encoded), xxhash.xxh3_64_intdigest(encoded))


def write(arena: Arena, slot: int, iteration: int) -> None:
    """Store a snapshot that shard and iteration determine."""
    bits = np.random.default_rng([iteration, xxhash.xxh32_intdigest(arena.manifest.shard.encode())])
    encoded = objects.encode({"bytes": bits.bytes(700 + iteration % 64)})
    store(arena, slot, (bits.bytes(fragment.nbytes) for fragment in arena.manifest.fragments), encoded)


def seal(arena: Arena, slot: int, iteration: int, hashed: bool = False, lineage: bytes = LINEAGE) -> None:
    """Seal a written slot; ``hashed``: with the checksums of its chunks."""
    for chunk in range(len(arena.image.chunks)) if hashed else ():
        arena.control.set_chunk_hash(slot, chunk, arena.hash_chunk(slot, chunk))
    arena.control.seal(slot, SnapshotId(lineage, iteration), hashed)


def fill(arena: Arena, slot: int, iteration: int, hashed: bool = False, lineage: bytes = LINEAGE) -> None:
    """A sealed snapshot of ``iteration``."""
    write(arena, slot, iteration)
    seal(arena, slot, iteration, hashed, lineage)


def slot_of(arena: Arena, iteration: int) -> int:
    """The slot of the snapshot of ``iteration``."""
    slots = [slot for snapshot, slot in arena.snapshots().items() if snapshot.iteration == iteration]
    assert slots, f"{arena.path}: no slot with iteration {iteration}"
    return slots[0]


def chunk_of(arena: Arena, slot: int, chunk: int) -> Bytes:
    """The bytes of a chunk, which can be written."""
    span = arena.image.chunks[chunk]
    return np.frombuffer(arena.slot(slot), np.uint8, span.nbytes, span.begin)


def holding_groups(holdings: Sequence[ArenaLayout], modes: Modes) -> list[ParityGroup]:
    """Parity groups whose blocks are in files."""
    return (node_groups(holdings) if modes.node else []) + peer_groups(holdings, modes)


def parity_blocks(group: ParityGroup, slots: Mapping[str, tuple[Arena, int]]) -> Iterator[tuple[int, int, Any]]:
    """Each block of a group: its holder, its number and its bytes. ``slots``: arena and slot of each shard."""
    for stripe in stripes(group):
        data: list[Bytes | None] = []
        for index, chunk in stripe.data:
            member = group.members[index]
            data.append(None if chunk < 0 else chunk_of(*slots[member.shard], member.first + chunk))
        for row, (holder, block) in enumerate(stripe.blocks):
            yield holder, block, encode(data, stripe.length, row, group.losses)
