"""Names of parallel layouts, such as ``tp2pp2dp2``: what the log says and what ``--ftckpt-layouts`` takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ftckpt.errors import LayoutError

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
"""Tensor, pipeline, virtual pipeline (model chunks per stage), context, expert, expert tensor, data parallel."""

_ALWAYS = ("tp", "pp", "dp")
_PART = re.compile(r"([a-z]+)([1-9][0-9]{0,8})")


def parse_layout(name: str) -> dict[str, int]:
    """The sizes that a name gives. Axes stand in any order, each at most once.

    An axis that is not named is 1, except ``etp``, which is then as ``tp`` (Megatron's default), and ``dp``,
    which is then not among the sizes: as many replicas as there are ranks for.

    Raises:
        LayoutError: not a name of a layout; the text says what one is.
    """
    parts = _PART.findall(name)
    axes = [axis for axis, _ in parts]
    unknown = sorted(set(axes) - set(AXES))
    twice = sorted({axis for axis in axes if axes.count(axis) > 1})
    if not parts or "".join(axis + size for axis, size in parts) != name:
        raise LayoutError(f"{name!r} is no layout: {_accepted()}")
    if unknown:
        raise LayoutError(f"layout {name!r} has an unknown axis {unknown[0]!r}: {_accepted()}")
    if twice:
        raise LayoutError(f"layout {name!r} gives {twice[0]!r} twice: {_accepted()}")
    given = {axis: int(size) for axis, size in parts}
    sizes = {axis: given.get(axis, 1) for axis in AXES if axis != "dp" or "dp" in given}
    sizes["etp"] = given.get("etp", sizes["tp"])
    return sizes


def layout_name(layout: Mapping[str, Any]) -> str:
    """The name of a layout: tp, pp and dp (where known) always, other sizes where they are not the usual.

    ``parse_layout`` of it gives the sizes of Megatron's axes back. Axes of other frameworks follow under their
    own names; what is true or false is no axis.
    """
    parts = []
    for axis in (*AXES, *(axis for axis in layout if axis not in AXES)):
        size = layout.get(axis)
        usual = layout.get("tp", 1) if axis == "etp" else 1
        if size is None or isinstance(size, bool):
            continue
        if axis in _ALWAYS or str(size) != str(usual):
            parts.append(f"{axis}{size}")
    return "".join(parts)


def _accepted() -> str:
    return f"write axes ({', '.join(AXES)}) and sizes, such as tp2pp2 or tp2pp1ep2dp4"
