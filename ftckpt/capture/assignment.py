"""The assignment of copies to ranks, and the layout of each rank's arena, decided before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import xxhash

from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.redundancy import NO_REDUNDANCY, Redundancy, SharePlan, SlotParts, burden, lay_out
from ftckpt.errors import CaptureError, ConfigError, UnsupportedError
from ftckpt.group import Group, gather_all, gather_bytes
from ftckpt.model.fragment import Fragment
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
from ftckpt.model.shares import bounded_capacities, choose
from ftckpt.model.topology import Topology
from ftckpt.model.training_state import Description, Piece, cast_master

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """This rank's copies: ``parts[i]`` of ``pieces`` becomes ``manifest.fragments[i]``.

    ``derived`` pieces are not copied. ``differing`` names fragments whose replicas differ, with the ranks in the
    minority; every holder copies its own. ``copied_bytes`` are the optimizer-updated bytes of this rank per snapshot.
    ``spill_bytes``, None without capacities, are the job's bytes predicted not to fit into windows: with equal
    shares, and with the chosen ones. ``belief`` holds the assumptions of the assignment.
    """

    manifest: Manifest
    pieces: tuple[Piece, ...]
    parts: tuple[CopyPart, ...]
    derived: tuple[Piece, ...]
    differing: Mapping[str, tuple[int, ...]]
    copied_bytes: int
    spill_bytes: tuple[int, int] | None
    belief: ReplicaAssumption


def assign(  # noqa: PLR0917 - the last ones are optional
    group: Group,
    topology: Topology,
    described: Description,
    objects_bytes: int,
    chunk_bytes: int,
    capacities: Sequence[int] | None = None,
    redundancy: Redundancy = NO_REDUNDANCY,
    sharing: ReplicaMap | None = None,
    cast: Collection[str] = (),
) -> Assignment:
    """Agrees with all ranks on the copies of each rank. Collective; reads derived pieces and replicated state.

    Each rank sends one message, another if ``sharing`` is None, and more if replicas or derived pieces differ.

    Args:
        capacities: bytes that each rank can copy in its windows; equal on all ranks. None: equal shares.
        redundancy: equal on all ranks; protected runs have equal shares.
        sharing: the result of ``gather_sharing``; on all ranks or on none.
        cast: fragments of this rank that were just cast from their masters and need no check.

    Raises:
        UnsupportedError: a fragment is described twice.
        ConfigError: not one capacity, or not one node, per rank.
        CaptureError: ranks were given different capacities or nodes. All three on all ranks together.
    """
    found = _compare(group, described, capacities, redundancy, sharing, cast)
    sets, weights = found.sets, None if capacities is None else bounded_capacities(capacities)
    # Without capacities shares are equal, regardless of each rank's redundancy.
    shares = choose(*(burden(sets, redundancy) if weights is not None else (sets.runs, sets.private)), weights)
    fragments = [piece.fragment for piece in found.stepped]
    plan = SharePlan(shares.cuts, [member.shard for member in topology.members], chunk_bytes, redundancy)
    slot_parts = lay_out(fragments, sets, group.rank, plan)
    volatile = _volatile_parts(described.volatile, len(fragments), topology.me.shard)
    sizes = objects_bytes, chunk_bytes, int(weights[group.rank]) if weights is not None and shares.weighted else 0
    manifest = _manifest(topology, described, found, slot_parts, volatile, sizes)
    return Assignment(
        manifest, (*found.stepped, *described.volatile), (*slot_parts.parts, *volatile), found.derived,
        _differing(fragments, sets) if found.replicated else {}, _total(manifest.stepped), shares.spill, found.belief,
    )  # fmt: skip


class _Comparison(NamedTuple):
    """This rank's pieces that are copied and derived, and their replica sets."""

    stepped: list[Piece]
    derived: tuple[Piece, ...]
    sets: ReplicaSets
    replicated: bool
    belief: ReplicaAssumption


def _compare(  # noqa: PLR0917 - those of ``assign``
    group: Group,
    described: Description,
    capacities: Sequence[int] | None,
    redundancy: Redundancy,
    sharing: ReplicaMap | None,
    cast: Collection[str],
) -> _Comparison:
    """Compares pieces with their masters and replicas with each other. Collective; see ``assign``."""
    if sharing is None:
        sharing = gather_sharing(group, described)
    stepped, derived = _divided(described, ())
    look = ReplicaView(sharing, stepped)
    view = partial(_View.of, described, look, capacities, redundancy, num_ranks=group.size, cast=cast)
    views = gather_all(group, view, _View)
    broken, summaries = _agreed(views), [view.summary for view in views]
    if broken:  # on any rank: ``sharing`` excludes the pieces that were assumed derived
        stepped, derived = _divided(described, broken)
        look = ReplicaView(gather_sharing(group, described, broken), stepped)
        summaries = gather_bytes(group, look.summary)
    held = look.sharing.sets(partial(gather_bytes, group), look.holdings, summaries)
    replicated = all(view.replicated for view in views)
    sets = without_small(held) if replicated else each_its_own(held)
    compared = [(view.derived_bytes, view.num_pieces) for view in views]
    belief = ReplicaAssumption(held if replicated else None, look.held, derived, compared, broken)
    return _Comparison(stepped, derived, sets, replicated, belief)


def _manifest(  # noqa: PLR0917 - the parts of a manifest
    topology: Topology,
    described: Description,
    found: _Comparison,
    slot_parts: SlotParts,
    volatile: Sequence[CopyPart],
    sizes: tuple[int, int, int],
) -> Manifest:
    objects_bytes, chunk_bytes, capacity = sizes
    return Manifest(
        coords=topology.me.coords,
        layout=topology.layout,
        stepped=_fragments(slot_parts.parts),
        volatile=_fragments(volatile),
        sections=slot_parts.sections,
        padded=_padded(described, found.stepped, slot_parts.parts),
        derived=tuple(sorted({piece.fragment.dtype for piece in found.derived})),
        objects_bytes=objects_bytes,
        chunk_bytes=chunk_bytes,
        capacity=capacity,
    )


def _differing(fragments: Sequence[Fragment], sets: ReplicaSets) -> dict[str, tuple[int, ...]]:
    """Fragments whose replicas differ, with the ranks in the minority."""
    at_odds = (index for index, group in enumerate(sets.group_of.tolist()) if group == DIFFERING)
    return {fragments[index].name: sets.odd.get(index, ()) for index in at_odds}


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


def _total(fragments: Iterable[Fragment]) -> int:
    return sum(fragment.nbytes for fragment in fragments)


def _fragments(parts: Iterable[CopyPart]) -> tuple[Fragment, ...]:
    return tuple(part.fragment for part in parts)


def _padded(described: Description, stepped: Sequence[Piece], parts: Iterable[CopyPart]) -> tuple[str, ...]:
    """Padded keys of which this rank copies anything; parity (piece -1) has no key."""
    if not described.padded:
        return ()
    copied = {stepped[part.piece].fragment.key for part in parts if part.piece >= 0}
    copied |= {piece.fragment.key for piece in described.volatile}
    return tuple(sorted(described.padded & copied))


def _check_numbers(capacities: Sequence[int] | None, redundancy: Redundancy, num_ranks: int) -> None:
    if capacities is not None and len(capacities) != num_ranks:
        raise ConfigError(f"capacities: got {len(capacities)}, needs one for each of {num_ranks} ranks")
    if redundancy.mode and len(redundancy.nodes) != num_ranks:
        raise ConfigError(
            f"--ftckpt-protect: got {len(redundancy.nodes)} nodes, needs one for each of {num_ranks} ranks"
        )


class _View(NamedTuple):
    """One rank's message: keys that are not derived as described, and digests of its weights and redundancy.

    ``derived_bytes``: of pieces described as derived; ``num_pieces``: of all. ``replicated``: whether its framework
    keeps replicas equal. ``summary``: its replicated state; empty if some key is broken.
    """

    broken: tuple[str, ...]
    weights: str
    redundancy: str
    derived_bytes: int
    num_pieces: int
    replicated: bool
    summary: bytes

    @classmethod
    def of(
        cls, described: Description, look: ReplicaView, capacities: Sequence[int] | None, redundancy: Redundancy, *,
        num_ranks: int, cast: Collection[str],
    ) -> _View:  # fmt: skip
        _check_numbers(capacities, redundancy, num_ranks)
        seen = "" if capacities is None else xxhash.xxh3_64_hexdigest(bounded_capacities(capacities).tobytes())
        derived = sum(piece.fragment.nbytes for piece in described.stepped if piece.derived_from is not None)
        broken = tuple(_broken(described, cast))
        return cls(
            broken, seen, redundancy.digest, derived, len(described.stepped), described.replicated,
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
    """Keys that are broken on any rank; raises if weights or nodes differ: some bytes would be copied by nobody."""
    if len({view.weights for view in views}) > 1:
        raise CaptureError("window capacities differ between ranks")
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


class ReplicaAssumption:
    """The assumptions between two replica checks: replicas are bit-equal, and derived pieces follow their masters.

    Args:
        sets: the replicated fragments of this rank; None if each rank copies its own.
        held: the bytes of those fragments, by index.
        derived: derived pieces of this rank.
        to_compare: for each rank, the bytes of its derived pieces and the number of all its pieces.
        broken: keys of pieces found not to be derived.
    """

    def __init__(
        self, sets: ReplicaSets | None, held: Mapping[int, torch.Tensor], derived: Sequence[Piece],
        to_compare: Sequence[tuple[int, int]], broken: Collection[str],
    ) -> None:  # fmt: skip
        derived_bytes, num_pieces = zip(*to_compare, strict=True)
        self.replicas = replicas = sets.again if sets is not None else None
        self.held = held
        runs = sets.runs if sets is not None else ()
        self.largest_bytes = max([*derived_bytes, *(run.nbytes for run in runs)])
        """Bytes of the largest replica set, or of some rank's derived pieces if larger; equal on all ranks."""
        self.num_pieces = max(num_pieces)
        """Maximum number of pieces of a rank; equal on all ranks."""
        self._rules = _rules(derived)
        self._is_broken = bool(broken)
        self.needed = any(derived_bytes) or (replicas is not None and replicas.needed)
        """Whether there is anything to check; equal on all ranks."""

    def look(self) -> tuple[bool, bytes]:
        """Checks this rank's derived pieces; returns whether they follow, and the digests of its replicas."""
        digests = self.replicas.digests(self._digest) if self.replicas is not None else b""
        return not self._is_broken and all(map(_follow, self._rules)), digests

    def agree(self, digests: list[bytes]) -> bool:
        """Whether replicas agree, given the digests of all ranks."""
        return self.replicas is None or self.replicas.agree(digests)

    def _digest(self, indices: Sequence[int]) -> int:
        hasher = xxhash.xxh3_64()
        for _, joined in _read([self.held[index] for index in indices]):
            hasher.update(joined)
        return hasher.intdigest()


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
