"""A copy of the last boundary's objects and mutable state, and detection of writes by torch's version counters."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import torch

from ftckpt.model import objects
from ftckpt.model.training_state import Description, Piece


class LastBoundary:
    """The last step boundary's objects and mutable state, so that a snapshot of it can still be taken at exit.

    Objects are stored encoded; mutable tensors are copied on their own device. Optimizer-updated tensors are not
    copied: the fence and torch's version counters show whether they have changed. For the training thread only.
    """

    def __init__(self, described: Description) -> None:
        self.iteration = -1
        """The boundary's iteration; -1: none yet."""
        # If a derived piece was written and its master was not, the replica check detects it.
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
        """Saves the boundary of ``iteration``. Never raises: ``encoded`` raises an error of the objects."""
        self.iteration, self._encoded, self._error, self._is_behind = iteration, b"", None, False
        try:
            self._encoded = objects.encode(dict(save_objects()))
            if self._volatile:
                with torch.no_grad():
                    # Enqueued on training's stream: the host does not wait.
                    torch._foreach_copy_(self._copies, self._volatile)
        except Exception as error:  # noqa: BLE001 - promise 4: raised where a snapshot is taken
            self._error = error
        self._counts = self._stepped.read()

    def pass_by(self) -> None:
        """Marks the saved boundary as passed: optimizer-updated state may change from here on."""
        self._is_behind = True

    @property
    def encoded(self) -> bytes:
        """The encoded objects. Raises the error that occurred when they were saved."""
        if self._error is not None:
            raise self._error
        return self._encoded

    def in_place_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replaces mutable tensors of ``tensors`` by their saved copies."""
        if self._asked is not tensors:  # a cache: callers pass the same list at each boundary
            self._asked, self._answer = tensors, [self._of.get(id(tensor), tensor) for tensor in tensors]
        return self._answer

    def objection(self, iteration: int) -> str:
        """The reason why this is not the state after ``iteration``; empty if it is."""
        if iteration < 0 or self.iteration != iteration:  # below 0: no boundary yet
            return "its boundary was not saved"
        if self._error is not None:
            return f"its objects could not be saved: {self._error}"
        if self._is_behind:
            return "training has continued past it"
        key = self._stepped.written(self._counts)
        return f"{key} was written after it" if key else ""


Counts: TypeAlias = "array[int]"
"""Version counters of the tensors of a ``WriteCounts``, in their order."""

_count = attrgetter("_version")


class WriteCounts:
    """Version counters of the tensors behind some pieces; pieces that are views may share one."""

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
        """Reads the current counters."""
        # An array: comparing lists of int objects misses the CPU cache. An array from a list is built twice as fast
        # as one from an iterator.
        return array("q", [*map(_count, self._tensors)])

    def written(self, before: Counts) -> str:
        """The key of a piece that was written since ``read`` returned ``before``; empty if none was."""
        now = self.read()
        if now == before:
            return ""
        return next(key for key, was, count in zip(self._keys, before, now, strict=True) if was != count)

    def forget(self) -> None:
        """Releases the tensors."""
        self._keys, self._tensors = [], []
