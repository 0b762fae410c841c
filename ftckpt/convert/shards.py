"""What of the shards of one snapshot is part of the logical model, and under which keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.convert.catalog import Catalog
from ftckpt.convert.consolidation import MASTER, WEIGHT, master_of
from ftckpt.errors import ConvertError
from ftckpt.model.fragment import Fragment
from ftckpt.model.manifest import Manifest
from ftckpt.model.replicas import disagreement, private_key

LOCAL = "local"
"""Role of tensors that belong to one rank and mean nothing in another layout."""
_DUPLICATES = ("copy", "parity")
"""Kinds of sections that hold, or protect, what other shards hold."""


@dataclass(frozen=True)
class ShardFragment:
    """Fragment ``index`` of the manifest of ``shard``; ``fragment`` has its key without the name of the shard."""

    shard: str
    index: int
    fragment: Fragment


def logical_fragments(manifests: Iterable[Manifest], roles: Collection[str] | None = None) -> list[ShardFragment]:
    """All of the logical model that shards hold, in the order of shards, replicas' own copies included.

    ``roles``: only keys of these; None: all but ``local``. Copies of other shards' sections and parity are left out.
    """
    entries = []
    for manifest in manifests:
        for index, fragment in _own(manifest):
            # What replicas hold each for itself has the shard's name behind its key; here it is one tensor again.
            key = fragment.key.removesuffix(private_key("", manifest.shard))
            role = key.partition("/")[0]
            if role != LOCAL and (roles is None or role in roles):
                entries.append(ShardFragment(manifest.shard, index, fragment.with_key(key)))
    return entries


def without_doubles(entries: Sequence[ShardFragment], content: Callable[[ShardFragment], int]) -> list[ShardFragment]:
    """One of all entries that hold the same fragment, the first; ``content`` gives a hash of the bytes of one.

    Raises:
        ConvertError: two of them hold different bytes; names the tensor and the shards.
    """
    by_fragment: dict[Fragment, list[ShardFragment]] = {}
    for entry in entries:
        by_fragment.setdefault(entry.fragment, []).append(entry)
    doubles = (entry for same in by_fragment.values() if len(same) > 1 for entry in same)
    differing = disagreement((entry.fragment, entry.shard, content(entry)) for entry in doubles)
    if differing is not None:
        fragment, one, other = differing
        raise ConvertError(
            f"{fragment.key} differs between {one} and {other}: it belongs to ranks, not to the model; leave its "
            "role out with --roles, or make it the same on all of them"
        )
    return [same[0] for same in by_fragment.values()]


def snapshot_catalog(
    iteration: int,
    manifests: Sequence[Manifest],
    entries: Iterable[ShardFragment],
    objects: Mapping[str, object],
    precision: str = "",
) -> Catalog:
    """The catalog of a snapshot whose shards have these ``manifests``, with ``entries`` of them, each element once.

    Weights that are not stored are casts of their masters, of the type that the manifests say; ``precision`` is the
    type where they do not say it or say several. Where none is known nothing is derived.
    """
    fragments = tuple(entry.fragment for entry in entries)
    keys = {fragment.key for fragment in fragments}
    dtypes = {dtype for manifest in manifests for dtype in manifest.derived}
    dtype = precision or (dtypes.pop() if len(dtypes) == 1 else "")
    weights = (WEIGHT + key.removeprefix(MASTER) for key in sorted(keys) if key.startswith(MASTER))
    derived = {weight: dtype for weight in weights if dtype and weight not in keys}
    rounded_up = {key for manifest in manifests for key in manifest.padded}
    padded = rounded_up.intersection(keys) | {key for key in derived if master_of(key) in rounded_up}
    return Catalog(
        origin="ftckpt",
        iteration=iteration,
        layout=dict(manifests[0].layout),
        fragments=fragments,
        objects=objects,
        padded=frozenset(padded),
        derived=derived,
    )


def objects_by_shard(shards: Iterable[str], load: Callable[[str], object]) -> Mapping[str, object]:
    """The catalog's objects: what the ranks of ``shards`` saved."""
    return {"shards": {shard: load(shard) for shard in shards}}


def _own(manifest: Manifest) -> Iterator[tuple[int, Fragment]]:
    kinds = [section.kind for section in manifest.sections for _ in range(section.fragments)]
    kinds += ["private"] * (len(manifest.fragments) - len(kinds))
    for index, (kind, fragment) in enumerate(zip(kinds, manifest.fragments, strict=True)):
        if kind not in _DUPLICATES:
            yield index, fragment
