"""Live training state as an integration describes it: fragments with the memory that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftckpt.model.fragment import Fragment

if TYPE_CHECKING:
    import torch


class Piece(NamedTuple):
    """One fragment and the live memory of its elements.

    ``tensor`` is 1-D, contiguous, on any device, and stays at its address for the whole job; it belongs to
    the trainer. ``derived_from``, where given, is a tensor of as many elements from which ``tensor`` is
    believed to be the round-to-nearest cast; it is believed only as long as the bytes agree. ``counted``, where
    given, is the tensor of which ``tensor`` is a view: torch counts the writes to both as one.
    """

    fragment: Fragment
    tensor: torch.Tensor
    derived_from: torch.Tensor | None = None
    counted: torch.Tensor | None = None


def cast_master(master: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Fill ``into`` with the elements of ``master`` in its type, rounded to nearest even as optimizers write weights.

    The one rule by which weights are left out of a snapshot and made again: to be used on both sides.
    """
    return into.copy_(master)


@dataclass(frozen=True)
class Description:
    """All tensors of one rank: ``stepped`` ones change only inside the optimizer step, ``volatile`` ones
    anywhere.

    ``padded`` are keys whose first dimension is rounded up by a rule that depends on the layout: vocabularies.
    ``objects_bytes`` is the room that encoded objects need beside ``objects_size``. ``replicated``: the framework
    keeps the same bytes on all ranks that describe the same fragment; otherwise each rank copies its own.
    """

    stepped: tuple[Piece, ...]
    volatile: tuple[Piece, ...]
    padded: frozenset[str] = frozenset()
    objects_bytes: int = 0
    replicated: bool = True


class TrainingState(Protocol):
    """What a framework integration gives. All calls come from the training thread.

    Order: ``describe`` once and ``save_objects``; after a restart ``load_objects`` or ``load_reshaped``, then, with
    every described tensor in place, ``finish_load``; ``save_objects`` at each boundary. What ``describe`` says of
    one layout fits what it says of another.
    """

    def describe(self) -> Description:
        """Every tensor that must be saved, with optimizer state already allocated.

        Raises UnsupportedError naming what is neither stepped nor volatile.
        """

    def save_objects(self) -> Mapping[str, Any]:
        """RNG, counters, schedulers and users' objects, as ``objects.encode`` takes them."""

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Give training what ``save_objects`` gave on a rank of the same place."""

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """Take what ``save_objects`` gave on ranks of another layout at the boundary of ``iteration``.

        ``objects`` are those of the ranks of the old layout that are the first of each pipeline stage, in the order
        of the stages. RNG, which belongs to ranks that are no more, is derived from the job's own seeds and
        ``iteration``.
        """

    def finish_load(self) -> None:
        """Spread what each rank loaded to where replicas and views expect it, then set RNG."""
