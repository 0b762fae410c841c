"""The assignment of copies to ranks, and the layout of each rank's arena, decided before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash

from ftckpt.array_types import Array
from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.redundancy import NO_REDUNDANCY, Redundancy, SharePlan, lay_out
from ftckpt.errors import CaptureError, ConfigError, UnsupportedError
from ftckpt.group import Group, gather_all, gather_bytes
from ftckpt.model.manifest import Manifest
from ftckpt.model.replica_groups import DIFFERING
from ftckpt.model.replicas import (
    Holdings,
    ReplicaMap,
    ReplicaSets,
    each_its_own,
    find_sharing,
    private_key,
    without_small,
)
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import Description, Piece, cast_master

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """This rank's copies: ``parts[i]`` of ``pieces`` becomes ``manifest.fragments[i]``.

    ``derived`` pieces are not copied. ``differing`` names fragments whose replicas differ, with the ranks in the
    minority; every holder copies its own.
    """

    manifest: Manifest
    pieces: tuple[Piece, ...]
    parts: tuple[CopyPart, ...]
    derived: tuple[Piece, ...]
    differing: Mapping[str, tuple[int, ...]]
    assumption: ReplicaAssumption


def assign(
    group: Group,
    topology: Topology,
    described: Description,
    objects_bytes: int,
    chunk_bytes: int,
    *,
    redundancy: Redundancy = NO_REDUNDANCY,
    sharing: ReplicaMap | None = None,
    cast: Collection[str] = (),
) -> Assignment:
    """Agrees with all ranks on the copies of each rank. Collective; reads derived pieces and replicated state.

    Each rank sends one message, another if ``sharing`` is None, and more if replicas or derived pieces differ.

    Args:
        redundancy: equal on all ranks.
        sharing: the result of ``gather_sharing``; on all ranks or on none.
        cast: fragments of this rank that were just cast from their masters and need no check.

    Raises:
        UnsupportedError: a fragment is described twice.
        ConfigError: not one node per rank.
        CaptureError: ranks were given different nodes. All three on all ranks together.
    """
    found = _compare(group, described, redundancy, sharing, cast)
    plan = SharePlan([member.shard for member in topology.members], chunk_bytes, redundancy)
    slot_parts = lay_out([piece.fragment for piece in found.stepped], found.sets, group.rank, plan)
    volatile = _volatile_parts(described.volatile, len(found.stepped), topology.me.shard)
    manifest = Manifest(
        topology.me.coords, topology.layout, tuple(part.fragment for part in slot_parts.parts),
        tuple(part.fragment for part in volatile), objects_bytes, chunk_bytes, slot_parts.sections,
        padded=_padded(described, found.stepped, slot_parts.parts),
        derived=tuple(sorted({piece.fragment.dtype for piece in found.derived})),
    )  # fmt: skip
    pieces, parts = (*found.stepped, *described.volatile), (*slot_parts.parts, *volatile)
    return Assignment(manifest, pieces, parts, found.derived, found.differing, found.assumption)


class _Comparison(NamedTuple):
    """This rank's pieces that are copied and derived, their replica sets, and fields as in ``Assignment``."""

    stepped: list[Piece]
    derived: tuple[Piece, ...]
    sets: ReplicaSets
    differing: Mapping[str, tuple[int, ...]]
    assumption: ReplicaAssumption


def _compare(
    group: Group, described: Description, redundancy: Redundancy, sharing: ReplicaMap | None, cast: Collection[str]
) -> _Comparison:
    """Compares pieces with their masters and replicas with each other. Collective; see ``assign``."""
    if sharing is None:
        sharing = gather_sharing(group, described)
    stepped, derived = _divided(described, ())
    look = ReplicaView(sharing, stepped)
    view = partial(_View.of, described, look, redundancy, num_ranks=group.size, cast=cast)
    views = gather_all(group, view, _View)
    broken, summaries = _agreed(views), [view.summary for view in views]
    if broken:  # on any rank: ``sharing`` excludes the pieces that were assumed derived
        stepped, derived = _divided(described, broken)
        look = ReplicaView(gather_sharing(group, described, broken), stepped)
        summaries = gather_bytes(group, look.summary)
    held = look.sharing.sets(partial(gather_bytes, group), look.holdings, summaries)
    replicated = all(view.replicated for view in views)
    sets = without_small(held) if replicated else each_its_own(held)
    largest_bytes, differing = [view.derived_bytes for view in views], {}
    if replicated:
        largest_bytes += [run.nbytes for run in held.runs]
        at_odds = np.flatnonzero(sets.group_of == DIFFERING).tolist()
        differing = {stepped[index].fragment.name: sets.odd.get(index, ()) for index in at_odds}
    assumption = ReplicaAssumption(
        look.sharing.groups.members if replicated else (), look.holdings.of, look.held, max(largest_bytes),
        max(view.num_pieces for view in views),
    )  # fmt: skip
    return _Comparison(stepped, derived, sets, differing, assumption)


def _divided(described: Description, broken: Collection[str]) -> tuple[list[Piece], tuple[Piece, ...]]:
    """Optimizer-updated pieces that are copied, and derived ones; keys in ``broken`` count as not derived."""
    # A key that is broken on one rank is broken on all: otherwise ranks disagree on a snapshot's content.
    is_derived = [p.derived_from is not None and p.fragment.key not in broken for p in described.stepped]
    pairs = list(zip(described.stepped, is_derived, strict=True))
    return [piece for piece, derived in pairs if not derived], tuple(piece for piece, derived in pairs if derived)


def _volatile_parts(volatile: Sequence[Piece], first: int, shard: str) -> tuple[CopyPart, ...]:
    """One part per mutable piece; ``first`` is the index of the first one among the rank's pieces."""
    # Ranks have different values under one key: the shard's name makes the key unique.
    private = [piece.fragment.with_key(private_key(piece.fragment.key, shard)) for piece in volatile]
    return tuple(CopyPart(first + offset, 0, fragment) for offset, fragment in enumerate(private))


def _padded(described: Description, stepped: Sequence[Piece], parts: Iterable[CopyPart]) -> tuple[str, ...]:
    """Padded keys of which this rank copies anything; parity (piece -1) has no key."""
    if not described.padded:
        return ()
    copied = {stepped[part.piece].fragment.key for part in parts if part.piece >= 0}
    copied |= {piece.fragment.key for piece in described.volatile}
    return tuple(sorted(described.padded & copied))


class _View(NamedTuple):
    """One rank's message: keys that are not derived as described, and a digest of its redundancy.

    ``derived_bytes``: of pieces described as derived; ``num_pieces``: of all. ``replicated``: whether its framework
    keeps replicas equal. ``summary``: its replicated state; empty if some key is broken.
    """

    broken: tuple[str, ...]
    redundancy: str
    derived_bytes: int
    num_pieces: int
    replicated: bool
    summary: bytes

    @classmethod
    def of(
        cls, described: Description, look: ReplicaView, redundancy: Redundancy, *, num_ranks: int,
        cast: Collection[str],
    ) -> _View:  # fmt: skip
        if redundancy.mode and len(redundancy.nodes) != num_ranks:
            raise ConfigError(
                f"--ftckpt-protect: got {len(redundancy.nodes)} nodes, needs one for each of {num_ranks} ranks"
            )
        derived = sum(piece.fragment.nbytes for piece in described.stepped if piece.derived_from is not None)
        broken = tuple(_broken(described, cast))
        return cls(
            broken, redundancy.digest, derived, len(described.stepped), described.replicated,
            b"" if broken else look.summary(),
        )  # fmt: skip


class ReplicaView:
    """This rank's replicated state, as it is now."""

    def __init__(self, sharing: ReplicaMap, pieces: Sequence[Piece]) -> None:
        self.sharing = sharing
        self._pieces = pieces

    @cached_property
    def held(self) -> dict[int, torch.Tensor]:
        """Replicated pieces as bytes, by index; cached, because a view costs as much as reading a small piece."""
        return {index: as_bytes(self._pieces[index].tensor) for index in self.sharing.order.tolist()}

    @cached_property
    def holdings(self) -> Holdings:
        """Hashes of the replicated fragments, computed once."""
        return self.sharing.look(lambda indices: content_hashes([self.held[index] for index in indices]))

    def summary(self) -> bytes:
        """The encoded holdings for the other ranks."""
        return self.holdings.summary()


def _agreed(views: Collection[_View]) -> set[str]:
    """Keys that are broken on any rank; raises if nodes differ: some bytes would be copied by nobody."""
    if len({view.redundancy for view in views}) > 1:
        raise CaptureError("nodes, racks or protection modes differ between ranks")
    return {key for view in views for key in view.broken}


def _broken(described: Description, cast: Collection[str]) -> list[str]:
    """Keys of pieces that do not equal the cast of their masters; those in ``cast`` need no check."""
    derived = [p for p in described.stepped if p.derived_from is not None and p.fragment.name not in cast]
    # One by one only to find the broken ones: each piece has a fixed cost.
    if all(map(_follow, _rules(derived))):
        return []
    return [piece.fragment.key for piece in derived if not rule_holds(piece)]


def rule_holds(piece: Piece) -> bool:
    """Whether the piece is bit-equal to the round-to-nearest cast of its master."""
    return piece.derived_from is not None and _follow(([piece.derived_from], [piece.tensor]))


def gather_sharing(group: Group, described: Description, broken: Collection[str] = ()) -> ReplicaMap:
    """Finds the ranks that share each copied fragment, including ``broken`` keys. Collective.

    The result depends on the description only, not on tensor values, so state need not be loaded yet.

    Raises:
        UnsupportedError: a fragment is described twice; on all ranks together.
    """
    fragments = [piece.fragment for piece in _divided(described, broken)[0]]

    def gather(codes: Callable[[], bytes]) -> list[bytes]:
        def checked() -> bytes:
            _require_once(described)
            return codes()

        return gather_bytes(group, checked)

    return find_sharing(gather, group.rank, group.size, fragments)


def _require_once(described: Description) -> None:
    names = [piece.fragment.name for piece in described.stepped]
    if len(set(names)) < len(names):
        raise UnsupportedError(f"the state describes {Counter(names).most_common(1)[0][0]} more than once")


Rule: TypeAlias = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Masters, and the weights derived from them."""

_BATCH_BYTES = 1 << 20
"""Small tensors are compared in batches of at most this size, because each tensor has a fixed cost."""


@dataclass(frozen=True, eq=False)
class ReplicaAssumption:
    """The assumptions that samples check: replicas are bit-equal, and derived pieces follow their masters.

    ``members``: the ranks of each replica set; none if each rank copies its own. ``of`` gives this rank's pieces of a
    set, by its number, in an order that is equal on all members; ``held``: the bytes of each, by index.
    ``largest_bytes``: of the largest replica set, or of some rank's derived pieces if larger. ``num_pieces``: maximum
    of a rank. Equal on all ranks except ``of`` and ``held``.
    """

    members: Sequence[Array]
    of: Callable[[int], Array]
    held: Mapping[int, torch.Tensor]
    largest_bytes: int
    num_pieces: int

    @property
    def needed(self) -> bool:
        """Whether there is anything to check; equal on all ranks."""
        return self.largest_bytes > 0 or bool(self.members)


def _nbytes(piece: Piece) -> int:
    return piece.fragment.nbytes


def _batches(items: Sequence[T], kind: Callable[[T], object], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups consecutive items of one kind into batches of at most ``_BATCH_BYTES``, or of one item."""
    batch: list[T] = []
    size = 0
    for item in items:
        more = nbytes(item)
        if batch and (size + more > _BATCH_BYTES or kind(item) != kind(batch[0])):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += more
    if batch:
        yield batch


def _rules(derived: Sequence[Piece]) -> list[Rule]:
    """The rules for derived pieces, small pieces batched."""
    sides = (
        zip(*((piece.derived_from, piece.tensor) for piece in batch), strict=True)
        for batch in _batches(derived, lambda piece: (piece.tensor.dtype, piece.tensor.device), _nbytes)
    )
    return [(list(masters), list(weights)) for masters, weights in sides]


def _follow(rule: Rule) -> bool:
    """Whether the weights are bit-equal to the casts of their masters."""
    masters, weights = (side[0] if len(side) == 1 else torch.cat(side) for side in rule)
    cast = cast_master(masters, torch.empty_like(weights))
    return torch.equal(as_bytes(cast), as_bytes(weights))


def content_hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The xxh3-64 hash of each tensor, 1-D and uint8."""
    hashes: list[int] = []
    for batch, joined in _read(tensors):
        begin = 0
        for tensor in batch:
            hashes.append(xxhash.xxh3_64_intdigest(joined[begin : begin + tensor.numel()]))
            begin += tensor.numel()
    return hashes


def _read(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], memoryview]]:
    """Yields batches of small tensors with their concatenated bytes in host memory."""
    for batch in _batches(tensors, lambda one: one.device, torch.Tensor.numel):
        joined = batch[0] if len(batch) == 1 else torch.cat(batch)
        yield batch, joined.cpu().numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D contiguous tensor as uint8: compared by value, NaN differs from itself and 0.0 equals -0.0."""
    return tensor.detach().view(torch.uint8)
