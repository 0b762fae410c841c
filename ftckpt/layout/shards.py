"""The shards of a layout by name, without any rank that holds one: what a snapshot of another layout consists of."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ftckpt.errors import MismatchError
from ftckpt.state.manifest import shard_name

MAX_SHARDS = 1 << 20
"""More than any job has: sizes that ask for more are damage."""

_PLACE = re.compile(r"(.+?)([0-9]+)")


def axes_of(shard: str) -> tuple[str, ...]:
    """The axes in the name of a shard, in its order: ``tp0-pp1-dp0`` gives tp, pp, dp.

    Raises:
        MismatchError: not the name of a shard.
    """
    return tuple(axis for axis, _ in _places(shard))


def shard_names(layout: Mapping[str, Any], axes: Sequence[str]) -> tuple[str, ...]:
    """All shards of a layout; the last of ``axes`` runs fastest. ``layout`` gives the size of each axis.

    Raises:
        MismatchError: an axis that has no size there; more shards than any job has.
    """
    sizes = tuple((axis, layout.get(axis)) for axis in axes)
    for axis, size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MismatchError(f"layout {dict(layout)}: {axis} has no size, so the shards of it cannot be known")
    if math.prod(size for _, size in sizes if size) > MAX_SHARDS:
        raise MismatchError(f"layout {dict(layout)}: more than {MAX_SHARDS} shards")
    return _names(sizes)


def first_of_each_stage(shards: Sequence[str]) -> tuple[str, ...]:
    """Those of ``shards`` that are first along every axis but ``pp``, in the order of the pipeline's stages.

    Raises:
        MismatchError: not the name of a shard.
    """
    firsts = []
    for shard in shards:
        places = dict(_places(shard))
        if not any(index for axis, index in places.items() if axis != "pp"):
            firsts.append((places.get("pp", 0), shard))
    return tuple(shard for _, shard in sorted(firsts))


@lru_cache(maxsize=8)
def _names(sizes: tuple[tuple[str, Any], ...]) -> tuple[str, ...]:
    axes = [axis for axis, _ in sizes]
    places = itertools.product(*(range(size) for _, size in sizes))
    return tuple(shard_name(dict(zip(axes, place, strict=True))) for place in places)


def _places(shard: str) -> list[tuple[str, int]]:
    found = [_PLACE.fullmatch(part) for part in shard.split("-")]
    if not all(found):
        raise MismatchError(f"{shard!r} is no name of a shard; they are such as tp0-pp1-dp0")
    return [(match[1], int(match[2])) for match in found if match]
