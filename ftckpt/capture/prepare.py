"""At start, before training: decide what each rank copies, and lay out the arena that will hold it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import xxhash

from ftckpt.capture.plan import Part
from ftckpt.comm import Group, together
from ftckpt.errors import UnsupportedError
from ftckpt.layout.replicas import Holding, ReplicaSets, identity, private_key, replica_sets, share
from ftckpt.layout.topology import Topology
from ftckpt.state.manifest import Manifest
from ftckpt.state.piece import Description, Piece


@dataclass(frozen=True)
class Assignment:
    """What this rank copies: ``parts[i]`` of ``pieces`` becomes ``manifest.fragments[i]``.

    ``derived`` pieces are not copied. ``differing`` names fragments whose replicas do not hold the same
    bits; every holder copies its own.
    """

    manifest: Manifest
    pieces: tuple[Piece, ...]
    parts: tuple[Part, ...]
    derived: tuple[Piece, ...]
    differing: tuple[str, ...]


def assign(
    group: Group, topology: Topology, described: Description, objects_bytes: int, chunk_bytes: int
) -> Assignment:
    """Agree with all ranks on who copies what. Collective; reads every stepped tensor once."""
    broken = together(group, lambda: _broken(described))
    # Broken on one rank is broken on all: else ranks would disagree on what a snapshot holds.
    anywhere = {key for data in group.gather(json.dumps(broken).encode()) for key in json.loads(data)}
    derived = tuple(p for p in described.stepped if p.derived_from is not None and p.fragment.key not in anywhere)
    dropped = {id(piece) for piece in derived}
    stepped = [p for p in described.stepped if id(p) not in dropped]
    sets = gather_replica_sets(group, stepped)
    shard = topology.me.shard
    fragments = [piece.fragment for piece in stepped]
    parts = [
        Part(index, part.start - fragments[index].start, part)
        for index, part in share(fragments, sets, group.rank, shard)
    ]
    num_stepped = len(parts)
    for offset, piece in enumerate(described.volatile):
        private = piece.fragment.with_key(private_key(piece.fragment.key, shard))
        parts.append(Part(len(stepped) + offset, 0, private))
    manifest = Manifest(
        coords=topology.me.coords,
        layout=topology.layout,
        stepped=tuple(part.fragment for part in parts[:num_stepped]),
        volatile=tuple(part.fragment for part in parts[num_stepped:]),
        objects_bytes=objects_bytes,
        chunk_bytes=chunk_bytes,
    )
    differing = tuple(f.name for f in fragments if identity(f) in sets.differing)
    return Assignment(manifest, (*stepped, *described.volatile), tuple(parts), derived, differing)


def _broken(described: Description) -> list[str]:
    """Keys of pieces that are not what they are believed to be derived from."""
    names = Counter(piece.fragment.name for piece in described.stepped)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise UnsupportedError(f"the state describes {twice[0]} more than once")
    return [p.fragment.key for p in described.stepped if p.derived_from is not None and not rule_holds(p)]


def rule_holds(piece: Piece) -> bool:
    """Whether the piece is, bit for bit, the round-to-nearest cast of what it is derived from."""
    if piece.derived_from is None:
        return False
    cast = piece.derived_from.to(piece.tensor.dtype)
    return torch.equal(as_bytes(cast), as_bytes(piece.tensor))


def gather_replica_sets(group: Group, pieces: Sequence[Piece]) -> ReplicaSets:
    """Which ranks hold the same bits of the same fragments. Collective.

    Only fragments that several ranks hold are hashed.
    """
    mine = [identity(piece.fragment) for piece in pieces]
    gathered = [_split(data, 16) for data in group.gather(b"".join(mine))]
    count: dict[bytes, int] = {}
    for key in (key for keys in gathered for key in keys):
        count[key] = count.get(key, 0) + 1
    shared = [count[key] > 1 for key in mine]
    hashes = together(
        group, lambda: [content_hash(p.tensor) if known else 0 for known, p in zip(shared, pieces, strict=True)]
    )
    answers = [json.loads(data) for data in group.gather(json.dumps(hashes).encode())]
    return replica_sets([list(map(Holding, keys, values)) for keys, values in zip(gathered, answers, strict=True)])


def content_hash(tensor: torch.Tensor) -> int:
    """xxh3-64 of a 1-D tensor's bytes."""
    return xxhash.xxh3_64_intdigest(as_bytes(tensor).cpu().numpy().data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D contiguous tensor seen as uint8: comparing bytes tells NaN from NaN and 0.0 from -0.0."""
    return tensor.detach().view(torch.uint8)


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]
