"""Live training state, as described by an integration: fragments and their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ftckpt.model.fragment import Fragment

if TYPE_CHECKING:
    import torch


class Piece(NamedTuple):
    """One fragment and its live memory.

    ``tensor`` is 1-D, contiguous, on any device, owned by the trainer, and stays at its address during the job.
    ``derived_from``: a tensor of equal size of which ``tensor`` is assumed to be the round-to-nearest cast, as long
    as the bytes agree. ``counted``: the tensor of which ``tensor`` is a view; both share torch's version counter.
    """

    fragment: Fragment
    tensor: torch.Tensor
    derived_from: torch.Tensor | None = None
    counted: torch.Tensor | None = None


def cast_master(master: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Fills ``into`` with ``master`` cast to its type, rounded to nearest even, as optimizers write weights.

    Snapshots omit weights that equal this cast, and restarts recompute them with it.
    """
    return into.copy_(master)


@dataclass(frozen=True)
class Description:
    """All tensors of one rank: ``stepped`` ones (optimizer-updated state) change only inside the optimizer step,
    ``volatile`` ones (mutable state) at any time.

    ``padded``: keys whose first dimension is rounded up by a rule that depends on the layout, such as vocabularies.
    ``objects_bytes``: space for encoded objects in addition to ``objects_size``. ``replicated``: the framework
    guarantees equal bytes on all ranks that describe the same fragment; otherwise each rank copies its own.
    """

    stepped: tuple[Piece, ...]
    volatile: tuple[Piece, ...]
    padded: frozenset[str] = frozenset()
    objects_bytes: int = 0
    replicated: bool = True


class TrainingState(Protocol):
    """The interface of a framework integration. All calls come from the training thread.

    Order: ``describe`` once and ``save_objects``; after a restart ``load_objects`` or ``load_reshaped``, then, with
    all described tensors restored, ``finish_load``; ``save_objects`` at each boundary. Fragments that ``describe``
    returns in different layouts refer to the same logical tensors.
    """

    def describe(self) -> Description:
        """Every tensor that must be saved, with optimizer state already allocated.

        Raises UnsupportedError for state that is neither stepped nor volatile.
        """

    def save_objects(self) -> Mapping[str, Any]:
        """RNG, counters, schedulers and users' objects, as ``objects.encode`` takes them."""

    def check_objects(self, objects: Sequence[Mapping[str, Any]], is_reshaped: bool) -> None:
        """Explains why tensors do not fit, from results of ``save_objects`` of some ranks of the snapshot.

        Raises MismatchError if they are of another optimizer, or, if ``is_reshaped``, of one that keeps its layout.
        """

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Restores the result of ``save_objects`` of a rank with the same coordinates."""

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        """Restores results of ``save_objects`` from another layout at the boundary of ``iteration``.

        ``objects``: those of the first rank of each pipeline stage of the old layout, in the order of the stages. RNG
        states belong to ranks of the old layout: new ones are derived from the job's seeds and ``iteration``.
        """

    def finish_load(self) -> None:
        """Propagates loaded state to replicas and views, then sets RNG."""
