"""Tensors of a rank as fragments: which elements of which logical tensor they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ftckpt.errors import UnsupportedError
from ftckpt.state.fragment import Box, Fragment
from ftckpt.state.piece import Piece

DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Placed:
    """``box`` of the logical tensor ``key``; its first element is element ``start`` of the local parameter.

    The first ``outer`` axes number whole tensors (the experts of a layer), in each of which the box holds one.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    outer: int = 0


def fragments(
    placed: Sequence[Placed], role: str, tensor: torch.Tensor, first: int
) -> list[tuple[Fragment, torch.Tensor]]:
    """Fragments of ``tensor``: elements ``first`` and on of a flattened local parameter, in role ``role``.

    A parameter of several boxes, or one cut by an optimizer, gives several fragments, each with its view.

    Raises:
        UnsupportedError: a type that safetensors has no name for.
    """
    found: list[tuple[Fragment, torch.Tensor]] = []
    flat = tensor.detach().view(-1)
    for place in placed:
        begin = max(place.start, first)
        end = min(place.start + place.box.numel, first + flat.numel())
        if begin < end:
            start, stop = begin - place.start, end - place.start
            fragment = Fragment(
                f"{role}/{place.key}", dtype_name(tensor, place.key), place.global_shape, place.box, start, stop
            )
            found.append((fragment, flat[begin - first : end - first]))
    return found


def number_piece(placed: Placed, role: str, tensor: torch.Tensor) -> Piece:
    """A single number that belongs to a whole tensor, however ranks divide it: all its holders have this piece.

    Raises:
        UnsupportedError: a type that safetensors has no name for.
    """
    shape = placed.global_shape[: placed.outer] or (1,)
    box = Box(placed.box.offset[: placed.outer] or (0,), (1,) * len(shape))
    fragment = Fragment.whole(f"{role}/{placed.key}", dtype_name(tensor, placed.key), shape, box)
    return Piece(fragment, tensor.detach().view(1))


def whole_piece(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that is not cut over ranks.

    Raises:
        UnsupportedError: it is not contiguous, or has a type that safetensors has no name for.
    """
    if not tensor.is_contiguous():
        raise UnsupportedError(f"{key} is not contiguous in memory")
    shape = tuple(tensor.shape)
    fragment = Fragment.whole(key, dtype_name(tensor, key), shape, Box((0,) * len(shape), shape))
    return Piece(fragment, tensor.detach().view(-1))


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The safetensors name of a tensor's type; raises UnsupportedError naming ``what``."""
    if tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedError(f"{what} has type {tensor.dtype}, which ftckpt cannot save")
    return DTYPE_NAMES[tensor.dtype]
