"""Tensors of a rank as fragments: which elements of which logical tensor they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from ftckpt.errors import UnsupportedError
from ftckpt.model.fragment import TORCH_NAMES, Box, Fragment
from ftckpt.model.training_state import Piece

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Levels that torch.compile and activation checkpointing put into names."""

_T = TypeVar("_T")

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}


class LogicalBox(NamedTuple):
    """``box`` of the logical tensor ``key``; its first element is element ``start`` of the local parameter.

    The first ``outer`` axes number whole tensors (the experts of a layer), in each of which the box holds one.
    """

    key: str
    global_shape: tuple[int, ...]
    box: Box
    start: int
    outer: int = 0


ParameterBoxes = Mapping[torch.nn.Parameter, Sequence[LogicalBox]]
"""Boxes of each parameter of a rank. A parameter of several logical tensors has a box in each."""


def unwrapped(named: Iterable[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Strips the names of wrappers from the results of ``named_parameters`` and similar methods."""
    return ((".".join(part for part in name.split(".") if part not in _WRAPPERS), value) for name, value in named)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a complex tensor as pairs of real numbers, along one more dimension; any other as it is.

    Raises:
        UnsupportedError: it is a conjugate that is not computed yet.
    """
    if not tensor.is_complex():
        return tensor
    if tensor.is_conj():
        raise UnsupportedError("a complex tensor is a lazy conjugate: store tensor.resolve_conj()")
    return torch.view_as_real(tensor.detach())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor in a row, apart from autograd."""
    return tensor.detach().view(-1)


def fragments(
    boxes: Sequence[LogicalBox], role: str, every: torch.Tensor, first: int
) -> list[tuple[Fragment, torch.Tensor]]:
    """Fragments of ``every``, which is ``flat``: elements ``first`` and on of a local parameter, in role ``role``.

    A parameter of several boxes, or one cut by an optimizer, gives several fragments, each with its view.

    Raises:
        UnsupportedError: a type that safetensors has no name for.
    """
    views: list[tuple[Fragment, torch.Tensor]] = []
    numel = every.numel()
    for key, global_shape, box, box_begin, _ in boxes:
        # Box and tensor are both ranges of the flattened local parameter: what they share is this fragment.
        begin, end = max(box_begin, first), min(box_begin + box.numel, first + numel)
        if begin < end:
            dtype = dtype_name(every, key)
            fragment = Fragment(f"{role}/{key}", dtype, global_shape, box, begin - box_begin, end - box_begin)
            views.append((fragment, every if end - begin == numel else every[begin - first : end - first]))
    return views


def frozen_pieces(
    boxes: ParameterBoxes,
    stepped: Collection[torch.nn.Parameter],
    owned: Callable[[torch.nn.Parameter], tuple[int, torch.Tensor]],
) -> Iterator[Piece]:
    """The parameters that no optimizer steps on any rank.

    Args:
        boxes: of all parameters of this rank.
        stepped: those that some rank's optimizer steps.
        owned: of a parameter, the elements that this rank is responsible for, and which of the local parameter's
            elements is the first of these.

    Raises:
        UnsupportedError: one is trained nevertheless, so that what steps it is not known.
    """
    for parameter, places in boxes.items():
        # On some rank: what another rank steps is gathered here, and saved there.
        if parameter in stepped or not any(place.box.numel for place in places):
            continue
        if parameter.requires_grad:
            raise UnsupportedError(
                f"parameter {places[0].key} needs gradients and no optimizer steps it: add it to the one optimizer "
                "that ftckpt saves, as a group of its own where another optimizer has it, or freeze it with "
                "requires_grad_(False)"
            )
        first, weight = owned(parameter)
        views = fragments(places, "weight", flat(weight), first)
        yield from (Piece(part, view, counted=weight) for part, view in views)


def number_piece(place: LogicalBox, role: str, tensor: torch.Tensor) -> Piece:
    """A single number that belongs to a whole tensor, however ranks divide it: all its holders have this piece.

    Raises:
        UnsupportedError: a type that safetensors has no name for.
    """
    # Experts of a layer have a number each, in one logical tensor of numbers.
    shape = place.global_shape[: place.outer] or (1,)
    box = Box(place.box.offset[: place.outer] or (0,), (1,) * len(shape))
    fragment = Fragment.whole(f"{role}/{place.key}", dtype_name(tensor, place.key), shape, box)
    return Piece(fragment, flat(tensor), counted=tensor)


def whole_piece(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that is not cut over ranks.

    Raises:
        UnsupportedError: it is not contiguous, or has a type that safetensors has no name for.
    """
    check_contiguous(key, tensor)
    tensor = as_real(tensor)
    shape = tuple(tensor.shape)
    fragment = Fragment.whole(key, dtype_name(tensor, key), shape, Box((0,) * len(shape), shape))
    return Piece(fragment, flat(tensor))


def check_contiguous(what: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedError, which names ``what``, where elements are not stored in row-major order."""
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{what} is not contiguous (transposed, expanded or channels_last): before attach assign "
            "tensor.data = tensor.data.contiguous()"
        )


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The safetensors name of a tensor's type; raises UnsupportedError naming ``what``."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedError(f"{what} has type {tensor.dtype}, which ftckpt cannot save")
    return name
