"""At start, before training: decide what each rank copies, and the layout of its arena."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import xxhash

from ftckpt.capture.chunks import CopyPart
from ftckpt.capture.redundancy import NO_REDUNDANCY, Redundancy, SharePlan, burden, lay_out
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
    """What this rank copies: ``parts[i]`` of ``pieces`` becomes ``manifest.fragments[i]``.

    ``derived`` pieces are not copied. ``differing`` names fragments whose replicas do not hold the same bits, with
    the ranks that hold others than most; every holder copies its own. ``copied_bytes`` are the stepped bytes of this
    rank per snapshot. ``spill_bytes``, known only where capacities are, is what of the job's stepped bytes is
    predicted not to fit in windows: with equal shares, and with those that were chosen. ``belief`` is what all of it
    rests on.
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
    """Agree with all ranks on who copies what. Collective; reads what follows from others, and what replicas hold.

    One message per rank, where ``sharing`` is what ``gather_sharing`` has given on all ranks, and one more where it
    is None on all. Others follow where state is not what it is believed to be: what is not derived, replicas that
    differ.

    ``capacities[rank]``, the same on all ranks, are the bytes that each rank could copy inside its windows per
    snapshot: replica sets are dealt in proportion, where that makes noticeably less of the state spill. None
    means equal shares. ``redundancy``, too, is the same on all ranks; what it protects is dealt equally. ``cast``
    names fragments of this rank that were made of their masters just now: that they follow needs no look.

    Raises:
        UnsupportedError: a fragment is described twice.
        ConfigError: not one capacity, or not one node, per rank.
        CaptureError: ranks were given different capacities or nodes. All three on all ranks together.
    """
    if sharing is None:
        sharing = gather_sharing(group, described)
    stepped, derived = _divided(described, ())
    look = ReplicaView(sharing, stepped)
    view = partial(_View.of, described, look, capacities, redundancy, num_ranks=group.size, cast=cast)
    views = gather_all(group, view, _View)
    broken, summaries = _agreed(views), [view.summary for view in views]
    if broken:  # on any rank: nothing was told yet of pieces that were taken to follow from others
        stepped, derived = _divided(described, broken)
        look = ReplicaView(gather_sharing(group, described, broken), stepped)
        summaries = gather_bytes(group, look.summary)
    held = look.sharing.sets(partial(gather_bytes, group), look.holdings, summaries)
    replicated = all(view.replicated for view in views)
    sets = without_small(held) if replicated else each_its_own(held)
    weights = None if capacities is None else bounded_capacities(capacities)
    # Without capacities shares are equal, whatever protection costs each rank.
    shares = choose(*(burden(sets, redundancy) if weights is not None else (sets.runs, sets.private)), weights)
    fragments = [piece.fragment for piece in stepped]
    plan = SharePlan(shares.cuts, [member.shard for member in topology.members], chunk_bytes, redundancy)
    slot_parts = lay_out(fragments, sets, group.rank, plan)
    volatile = _volatile_parts(described.volatile, len(stepped), topology.me.shard)
    manifest = Manifest(
        coords=topology.me.coords, layout=topology.layout, objects_bytes=objects_bytes, chunk_bytes=chunk_bytes,
        stepped=_fragments(slot_parts.parts), volatile=_fragments(volatile), sections=slot_parts.sections,
        padded=_padded(described, stepped, slot_parts.parts), derived=_dtypes(derived),
        capacity=int(weights[group.rank]) if weights is not None and shares.weighted else 0,
    )  # fmt: skip
    pieces, parts = (*stepped, *described.volatile), (*slot_parts.parts, *volatile)
    at_odds = (index for index, group in enumerate(sets.group_of.tolist()) if replicated and group == DIFFERING)
    differing = {fragments[index].name: sets.odd.get(index, ()) for index in at_odds}
    compared = [one.to_compare for one in views]
    belief = ReplicaAssumption(held if replicated else None, look.held, derived, compared, broken)
    return Assignment(manifest, pieces, parts, derived, differing, _total(manifest.stepped), shares.spill, belief)


def _divided(described: Description, broken: Collection[str]) -> tuple[list[Piece], tuple[Piece, ...]]:
    """Stepped pieces that are copied, and those that follow from others, unless their key is ``broken``."""
    # Broken on one rank is broken on all: else ranks would disagree on what a snapshot holds.
    is_derived = [p.derived_from is not None and p.fragment.key not in broken for p in described.stepped]
    pairs = list(zip(described.stepped, is_derived, strict=True))
    return [piece for piece, derived in pairs if not derived], tuple(piece for piece, derived in pairs if derived)


def _volatile_parts(volatile: Sequence[Piece], first: int, shard: str) -> tuple[CopyPart, ...]:
    """All of each piece; they are ``first`` and the following ones of the rank's pieces."""
    # Each rank has its own under one key: the shard's name makes the key its own.
    private = [piece.fragment.with_key(private_key(piece.fragment.key, shard)) for piece in volatile]
    return tuple(CopyPart(first + offset, 0, fragment) for offset, fragment in enumerate(private))


def _fragments(parts: Iterable[CopyPart]) -> tuple[Fragment, ...]:
    return tuple(part.fragment for part in parts)


def _total(fragments: Iterable[Fragment]) -> int:
    return sum(fragment.nbytes for fragment in fragments)


def _padded(described: Description, stepped: Sequence[Piece], parts: Iterable[CopyPart]) -> tuple[str, ...]:
    """Padded keys of which this rank copies anything; parity (piece -1) is of no key."""
    if not described.padded:
        return ()
    copied = {stepped[part.piece].fragment.key for part in parts if part.piece >= 0}
    copied |= {piece.fragment.key for piece in described.volatile}
    return tuple(sorted(described.padded & copied))


def _dtypes(pieces: Iterable[Piece]) -> tuple[str, ...]:
    return tuple(sorted({piece.fragment.dtype for piece in pieces}))


def _check_numbers(capacities: Sequence[int] | None, redundancy: Redundancy, num_ranks: int) -> None:
    if capacities is not None and len(capacities) != num_ranks:
        raise ConfigError(f"capacities: {len(capacities)} given, one for each of {num_ranks} ranks is needed")
    if redundancy.mode and len(redundancy.nodes) != num_ranks:
        raise ConfigError(
            f"--ftckpt-protect: {len(redundancy.nodes)} nodes given, one for each of {num_ranks} ranks is needed"
        )


class _View(NamedTuple):
    """What one rank sees: keys that do not follow from others, and digests of the weights and of the redundancy that
    it was given. ``derived_bytes``: of pieces that may follow from others; ``num_pieces``: of all. ``replicated``:
    whether its framework keeps replicas the same. ``summary``: what it holds with others; nothing where some key does
    not follow.
    """

    broken: tuple[str, ...]
    weights: str
    redundancy: str
    derived_bytes: int
    num_pieces: int
    replicated: bool
    summary: bytes

    @property
    def to_compare(self) -> tuple[int, int]:
        return self.derived_bytes, self.num_pieces

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
    """What this rank holds of what several ranks hold, as it is now."""

    def __init__(self, sharing: ReplicaMap, pieces: Sequence[Piece]) -> None:
        self.sharing = sharing
        self._pieces = pieces

    @cached_property
    def held(self) -> dict[int, torch.Tensor]:
        """By index, the bytes of the pieces that others hold, too: to see a small one so is as much work as to read
        it."""
        return {index: as_bytes(self._pieces[index].tensor) for index in self.sharing.order.tolist()}

    @cached_property
    def holdings(self) -> Holdings:
        """Read once: only fragments that several ranks hold are hashed."""
        return self.sharing.look(lambda indices: content_hashes([self.held[index] for index in indices]))

    def summary(self) -> bytes:
        """For the other ranks."""
        return self.holdings.summary()


def _agreed(views: Collection[_View]) -> set[str]:
    """Keys that are broken on any rank; different weights or nodes would leave bytes that nobody copies."""
    if len({view.weights for view in views}) > 1:
        raise CaptureError("the ranks were given different capacities of their windows")
    if len({view.redundancy for view in views}) > 1:
        raise CaptureError("the ranks were given different nodes, racks or ways to protect replicas")
    return {key for view in views for key in view.broken}


def _broken(described: Description, cast: Collection[str]) -> list[str]:
    """Keys of pieces that are not what they are believed to be derived from; those in ``cast`` are."""
    derived = [p for p in described.stepped if p.derived_from is not None and p.fragment.name not in cast]
    # Piece by piece only where it must be known which: each takes longer than its bytes do.
    if all(map(_follow, _rules(derived))):
        return []
    return [piece.fragment.key for piece in derived if not rule_holds(piece)]


def rule_holds(piece: Piece) -> bool:
    """Whether the piece is, bit for bit, the round-to-nearest cast of what it is derived from."""
    return piece.derived_from is not None and _follow(([piece.derived_from], [piece.tensor]))


def gather_sharing(group: Group, described: Description, broken: Collection[str] = ()) -> ReplicaMap:
    """Which ranks hold the same of what is copied, ``broken`` keys among it. Collective.

    It follows from the description alone, whatever the tensors hold: it may be asked before state is loaded.

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
"""Masters, and weights that follow from them."""

_BATCH_BYTES = 1 << 20
"""Small tensors are looked at so many bytes at a time: each alone would take longer than its bytes do."""


class ReplicaAssumption:
    """What is taken for granted between two proofs: replicas hold the same bits, derived pieces follow from others.

    Args:
        sets: which fragments of this rank others hold, too; None where each rank copies its own.
        held: by their index, the bytes of those fragments.
        derived: pieces of this rank that follow from others.
        to_compare: the bytes of such pieces and the number of all pieces, of each rank.
        broken: keys of those that do not, as it was found.
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
        """Of the largest replica set, or of what some rank derives; the same on all ranks."""
        self.num_pieces = max(num_pieces)
        """Of the rank that has most; the same on all ranks."""
        self._rules = _rules(derived)
        self._is_broken = bool(broken)
        self.needed = any(derived_bytes) or (replicas is not None and replicas.needed)
        """Whether there is anything to prove; the same on all ranks."""

    def look(self) -> tuple[bool, bytes]:
        """Whether what this rank derives still follows, and what it has to say of its replicas."""
        digests = self.replicas.digests(self._digest) if self.replicas is not None else b""
        return not self._is_broken and all(map(_follow, self._rules)), digests

    def agree(self, digests: list[bytes]) -> bool:
        """Whether replicas agree, by what ``look`` has given on all ranks."""
        return self.replicas is None or self.replicas.agree(digests)

    def _digest(self, indices: Sequence[int]) -> int:
        hasher = xxhash.xxh3_64()
        for _, joined in _read([self.held[index] for index in indices]):
            hasher.update(joined)
        return hasher.intdigest()


def _nbytes(piece: Piece) -> int:
    return piece.fragment.nbytes


def _batches(items: Sequence[T], kind: Callable[[T], object], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Neighbours of one kind together, as long as they are small."""
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
    """What must follow from what, small pieces together."""
    sides = (
        zip(*((piece.derived_from, piece.tensor) for piece in batch), strict=True)
        for batch in _batches(derived, lambda piece: (piece.tensor.dtype, piece.tensor.device), _nbytes)
    )
    return [(list(masters), list(weights)) for masters, weights in sides]


def _follow(rule: Rule) -> bool:
    """Whether weights are, bit for bit, the casts of their masters."""
    masters, weights = (side[0] if len(side) == 1 else torch.cat(side) for side in rule)
    cast = cast_master(masters, torch.empty_like(weights))
    return torch.equal(as_bytes(cast), as_bytes(weights))


def content_hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """xxh3-64 of each of ``tensors``, 1-D and uint8."""
    hashes: list[int] = []
    for batch, joined in _read(tensors):
        begin = 0
        for tensor in batch:
            hashes.append(xxhash.xxh3_64_intdigest(joined[begin : begin + tensor.numel()]))
            begin += tensor.numel()
    return hashes


def _read(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], memoryview]]:
    """Small ones together, with their bytes end to end in host memory."""
    for batch in _batches(tensors, lambda one: one.device, torch.Tensor.numel):
        joined = batch[0] if len(batch) == 1 else torch.cat(batch)
        yield batch, joined.cpu().numpy().data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D contiguous tensor seen as uint8: by value NaN differs from itself, and 0.0 not from -0.0."""
    return tensor.detach().view(torch.uint8)
