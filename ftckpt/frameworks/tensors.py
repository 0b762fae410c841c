"""Fragments of a rank's tensors: their elements as parts of logical tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from ftckpt.errors import UnsupportedError
from ftckpt.model.fragment import TORCH_NAMES, Box, Fragment
from ftckpt.model.training_state import Piece

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Levels that torch.compile and activation checkpointing insert into names."""

_T = TypeVar("_T")

DTYPE_NAMES: dict[torch.dtype, str] = {getattr(torch, torch_name): name for name, torch_name in TORCH_NAMES.items()}


class LogicalBox(NamedTuple):
    """``box`` of the logical tensor ``key``; its first element is element ``start`` of the local parameter.

    The first ``outer`` axes number separate tensors (the experts of a layer); the box contains one of them.
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
    """A view of a complex tensor as pairs of real numbers, with one more dimension; any other tensor unchanged.

    Raises:
        UnsupportedError: it is a lazy conjugate.
    """
    if not tensor.is_complex():
        return tensor
    if tensor.is_conj():
        raise UnsupportedError("a complex tensor is a lazy conjugate: store tensor.resolve_conj()")
    return torch.view_as_real(tensor.detach())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A 1-D view of a contiguous tensor, detached from autograd."""
    return tensor.detach().view(-1)


def fragments(
    boxes: Sequence[LogicalBox], role: str, every: torch.Tensor, first: int
) -> list[tuple[Fragment, torch.Tensor]]:
    """Fragments of ``every``, a 1-D tensor with the elements of a local parameter from ``first``, in role ``role``.

    A parameter with several boxes, or one cut by an optimizer, has several fragments, each with its view.

    Raises:
        UnsupportedError: a dtype that safetensors does not have.
    """
    views: list[tuple[Fragment, torch.Tensor]] = []
    numel = every.numel()
    for key, global_shape, box, box_begin, _ in boxes:
        # Box and tensor are both ranges of the flattened local parameter: the fragment is their intersection.
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
    """Pieces of the parameters that no optimizer steps on any rank.

    Args:
        boxes: boxes of all parameters of this rank.
        stepped: parameters that some rank's optimizer steps.
        owned: returns the part of a parameter that this rank saves, as its first element's index in the local
            parameter and the elements.

    Raises:
        UnsupportedError: such a parameter requires gradients, so an unknown optimizer may step it.
    """
    for parameter, places in boxes.items():
        # Another rank that steps the parameter saves it; this rank gathers it.
        if parameter in stepped or not any(place.box.numel for place in places):
            continue
        if parameter.requires_grad:
            raise UnsupportedError(
                f"parameter {places[0].key} requires gradients and no saved optimizer steps it: add it to the "
                "optimizer that ftckpt saves, as a separate group if another optimizer has it, or freeze it with "
                "requires_grad_(False)"
            )
        first, weight = owned(parameter)
        views = fragments(places, "weight", flat(weight), first)
        yield from (Piece(part, view, counted=weight) for part, view in views)


def number_piece(place: LogicalBox, role: str, tensor: torch.Tensor) -> Piece:
    """A single number for an entire logical tensor; all ranks that hold a part of the tensor have this piece.

    Raises:
        UnsupportedError: a dtype that safetensors does not have.
    """
    # The experts of a layer have one number each, in one logical tensor.
    shape = place.global_shape[: place.outer] or (1,)
    box = Box(place.box.offset[: place.outer] or (0,), (1,) * len(shape))
    fragment = Fragment.whole(f"{role}/{place.key}", dtype_name(tensor, place.key), shape, box)
    return Piece(fragment, flat(tensor), counted=tensor)


def whole_piece(key: str, tensor: torch.Tensor) -> Piece:
    """A tensor that ranks do not divide.

    Raises:
        UnsupportedError: it is not contiguous, or has a dtype that safetensors does not have.
    """
    check_contiguous(key, tensor)
    tensor = as_real(tensor)
    shape = tuple(tensor.shape)
    fragment = Fragment.whole(key, dtype_name(tensor, key), shape, Box((0,) * len(shape), shape))
    return Piece(fragment, flat(tensor))


def check_contiguous(what: str, tensor: torch.Tensor) -> None:
    """Raises UnsupportedError, which names ``what``, if elements are not stored in row-major order."""
    if not tensor.is_contiguous():
        raise UnsupportedError(
            f"{what} is not contiguous (transposed, expanded or channels_last): before attach assign "
            "tensor.data = tensor.data.contiguous()"
        )


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The safetensors name of a tensor's dtype; raises UnsupportedError, which names ``what``, if there is none."""
    name = DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise UnsupportedError(f"{what} has type {tensor.dtype}, which ftckpt cannot save")
    return name
