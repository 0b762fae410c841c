"""What of the last boundary may be gone when the job ends: its objects, and state that changes elsewhere.
And which tensors were written, as torch counts it for autograd."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from ftckpt.model import objects
from ftckpt.model.training_state import Description, Piece


class LastBoundary:
    """Kept at each boundary, so that a snapshot of it can still be taken later, by the training thread.

    Objects are kept encoded and volatile tensors copied where they lie, in memory that is allocated here. Of stepped
    tensors nothing is kept: that they have not changed is known from the fence, and where torch counts writes, from
    these.
    """

    def __init__(self, described: Description) -> None:
        self.iteration = -1
        """The boundary's iteration; -1: none yet."""
        # Where a derived one was written, and its master was not, a proof shows it.
        self._stepped = WriteCounts(piece for piece in described.stepped if piece.derived_from is None)
        self._volatile = [piece.tensor for piece in described.volatile]
        self._copies = [torch.empty_like(tensor) for tensor in self._volatile]
        self._of = {id(tensor): copy for tensor, copy in zip(self._volatile, self._copies, strict=True)}
        self._asked: Sequence[torch.Tensor] = ()
        self._answer: list[torch.Tensor] = []
        self._encoded = b""
        self._error: Exception | None = None
        self._counts: Counts = array("q")
        self._is_behind = False

    def keep(self, iteration: int, save_objects: Callable[[], Mapping[str, Any]]) -> None:
        """Training is at the boundary of ``iteration``. Never raises: an error of the objects is ``encoded``'s."""
        self.iteration, self._encoded, self._error, self._is_behind = iteration, b"", None, False
        try:
            self._encoded = objects.encode(dict(save_objects()))
            if self._volatile:
                with torch.no_grad():
                    # Enqueued where training computes: the host waits for nothing.
                    torch._foreach_copy_(self._copies, self._volatile)
        except Exception as error:  # noqa: BLE001 - promise 4: raised where a snapshot is taken
            self._error = error
        self._counts = self._stepped.read()

    def pass_by(self) -> None:
        """Stepped state may change from here on."""
        self._is_behind = True

    @property
    def encoded(self) -> bytes:
        """The objects. Raises what kept them from being saved."""
        if self._error is not None:
            raise self._error
        return self._encoded

    def in_place_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """``tensors``, with what was kept in the place of volatile ones."""
        if self._asked is not tensors:  # the same ones at each boundary
            self._asked, self._answer = tensors, [self._of.get(id(tensor), tensor) for tensor in tensors]
        return self._answer

    def objection(self, iteration: int) -> str:
        """Why this is not the state behind ``iteration`` any more; empty where it is."""
        if iteration < 0 or self.iteration != iteration:  # below 0: training has come to none
            return "of its boundary nothing is known"
        if self._error is not None:
            return f"its objects could not be saved: {self._error}"
        if self._is_behind:
            return "training has gone on behind it"
        key = self._stepped.written(self._counts)
        return f"{key} was written behind it" if key else ""


Counts: TypeAlias = "array[int]"
"""Of the tensors of a ``WriteCounts``, in their order."""

_count = attrgetter("_version")


class WriteCounts:
    """The tensors that have the counts of some pieces: one of them may count for many."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._keys: list[str] = []
        self._tensors: list[torch.Tensor] = []
        seen: set[int] = set()
        for piece in pieces:
            tensor = piece.tensor if piece.counted is None else piece.counted
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self._keys.append(piece.fragment.key)
                self._tensors.append(tensor)

    def read(self) -> Counts:
        """As they stand now."""
        # No list is kept: of as many numbers each would be an object somewhere in memory, which no cache has. Made of
        # one: from an iterator an array takes numbers twice as long.
        return array("q", [*map(_count, self._tensors)])

    def written(self, before: Counts) -> str:
        """The key of a piece that was written since ``read`` gave ``before``; empty where none was."""
        now = self.read()
        if now == before:
            return ""
        return next(key for key, was, count in zip(self._keys, before, now, strict=True) if was != count)

    def forget(self) -> None:
        """Let go of the tensors."""
        self._keys, self._tensors = [], []
