"""What of the shards of one snapshot is part of the logical model, and under which keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.errors import ConvertError
from ftckpt.layout.replicas import private_key
from ftckpt.state.fragment import Fragment
from ftckpt.state.manifest import Manifest
from ftckpt.universal.catalog import Tensor
from ftckpt.universal.derived import MASTER, WEIGHT, master_of

LOCAL = "local"
"""Role of tensors that belong to one rank and mean nothing in another layout."""
_DUPLICATES = ("copy", "parity")
"""Kinds of sections that hold, or protect, what other shards hold."""


@dataclass(frozen=True)
class Entry:
    """Fragment ``index`` of the manifest of ``shard``; ``fragment`` has its key without the name of the shard."""

    shard: str
    index: int
    fragment: Fragment


def logical_entries(manifests: Iterable[Manifest], roles: Collection[str] | None = None) -> list[Entry]:
    """All of the logical model that shards hold, in the order of shards, replicas' own copies included.

    ``roles``: only keys of these; None: all but ``local``. Copies of other shards' sections and parity are left out.
    """
    found = []
    for manifest in manifests:
        for index, fragment in _own(manifest):
            key = fragment.key.removesuffix(private_key("", manifest.shard))
            role = key.partition("/")[0]
            if role != LOCAL and (roles is None or role in roles):
                found.append(Entry(manifest.shard, index, fragment.with_key(key)))
    return found


def without_doubles(entries: Sequence[Entry], content: Callable[[Entry], int]) -> list[Entry]:
    """One of all entries that hold the same fragment, the first; ``content`` gives a hash of the bytes of one.

    Raises:
        ConvertError: two of them hold different bytes; names the tensor and the shards.
    """
    by_fragment: dict[Fragment, list[Entry]] = {}
    for entry in entries:
        by_fragment.setdefault(entry.fragment, []).append(entry)
    for fragment, same in by_fragment.items():
        hashes = [content(entry) for entry in same] if len(same) > 1 else []
        for entry, value in zip(same, hashes, strict=False):
            if value != hashes[0]:
                raise ConvertError(
                    f"{fragment.key} differs between {same[0].shard} and {entry.shard}: it belongs to ranks, not to "
                    "the model; leave its role out with --roles, or make it the same on all of them"
                )
    return [same[0] for same in by_fragment.values()]


def tensors_of(entries: Iterable[Entry]) -> list[Tensor]:
    """The tensors that entries are parts of.

    Raises:
        ConvertError: two shards do not agree on the type or the shape of one.
    """
    found: dict[str, tuple[Tensor, str]] = {}
    for entry in entries:
        tensor = Tensor(entry.fragment.key, entry.fragment.dtype, entry.fragment.global_shape)
        known, shard = found.setdefault(tensor.key, (tensor, entry.shard))
        if known != tensor:
            one, other = (f"{t.dtype} {list(t.shape)}" for t in (known, tensor))
            raise ConvertError(f"{tensor.key} is {one} in {shard} and {other} in {entry.shard}")
    return [tensor for tensor, _ in found.values()]


def padded_keys(manifests: Iterable[Manifest], keys: Collection[str], derived: Collection[str]) -> frozenset[str]:
    """Those of ``keys``, and of ``derived`` weights, whose first dimension a rule of the layout rounds up."""
    told = {key for manifest in manifests for key in manifest.padded}
    return frozenset(told.intersection(keys)) | {key for key in derived if master_of(key) in told}


def derived_keys(manifests: Iterable[Manifest], keys: Collection[str], precision: str = "") -> dict[str, str]:
    """Weights that are not stored because they are casts of their masters, each with its type.

    ``keys`` are all that are stored. ``precision`` is the type, where the manifests do not say it or say several;
    empty: none is known then, and nothing is derived.
    """
    told = {dtype for manifest in manifests for dtype in manifest.derived}
    dtype = precision or (told.pop() if len(told) == 1 else "")
    weights = (WEIGHT + key.removeprefix(MASTER) for key in sorted(keys) if key.startswith(MASTER))
    return {weight: dtype for weight in weights if dtype and weight not in keys}


def _own(manifest: Manifest) -> Iterator[tuple[int, Fragment]]:
    kinds = [section.kind for section in manifest.sections for _ in range(section.fragments)]
    kinds += ["private"] * (len(manifest.fragments) - len(kinds))
    for index, (kind, fragment) in enumerate(zip(kinds, manifest.fragments, strict=True)):
        if kind not in _DUPLICATES:
            yield index, fragment


def objects_by_shard(shards: Sequence[str], load: Callable[[str], object]) -> Mapping[str, object]:
    """The catalog's objects: what the ranks of ``shards`` saved."""
    return {"shards": {shard: load(shard) for shard in shards}}
