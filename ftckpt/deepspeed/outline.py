"""DeepSpeed's own saving, let to write files whose elements a snapshot has: see ``ftckpt.persist.outlines``.

It writes through an engine for checkpoints, for which ours stands in. What each file says is then DeepSpeed's own, of
whatever layout, ZeRO stage and version; of tensors those are left out that are described, byte for byte by their
addresses. All others, padding and numbers too, are written as they are at this moment, as DeepSpeed would.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ftckpt.deepspeed import optimizers
from ftckpt.deepspeed.geometry import place_parameters
from ftckpt.frameworks.tensors import flat, fragments, frozen_pieces
from ftckpt.model.fragment import Fragment
from ftckpt.persist.outlines import Hole

_NUMBER_BYTES = 16
"""What is no longer than this is written at once: a count of steps, say."""

_watch = threading.local()
"""``seen``: storages in the order in which ``torch.save`` comes to them, while it is watched on this thread."""


class _Part(NamedTuple):
    """Where the elements of a fragment lie in a storage: from byte ``begin`` on."""

    begin: int
    fragment: Fragment

    @property
    def end(self) -> int:
        return self.begin + self.fragment.nbytes


Parts = Mapping[int, Sequence[_Part]]
"""By the address of a storage: ascending, and none over another."""


def parts_of(engine: Any) -> Parts:
    """Where in this rank's memory lies what the job's snapshots hold, of whatever rank."""
    boxes, optimizer = place_parameters(engine), engine.optimizer
    found: dict[int, list[_Part]] = defaultdict(list)

    def add(fragment: Fragment, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if fragment.nbytes > _NUMBER_BYTES:
            begin = tensor.data_ptr() - storage.data_ptr()
            found[storage.data_ptr()].append(_Part(begin, fragment))

    # Whole weights, of which this rank's snapshot has its own part only. Under ZeRO 3 they come and go.
    for parameter, places in boxes.items():
        if not hasattr(parameter, "ds_tensor") and parameter.is_contiguous():
            for fragment, view in fragments(places, "weight", flat(parameter), 0):
                add(fragment, view)
    trained = optimizers.stepped_parameters(optimizer)
    for piece in itertools.chain(
        optimizers.pieces(optimizer, boxes), frozen_pieces(boxes, trained, optimizers.owned)
    ):
        add(piece.fragment, piece.tensor)
    return {address: _apart(parts) for address, parts in found.items()}


def _apart(parts: Sequence[_Part]) -> list[_Part]:
    """Without those that lie inside others."""
    kept: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.begin, -part.end)):
        if not kept or part.begin >= kept[-1].end:
            kept.append(part)
    return kept


class OutlineEngine:
    """Stands in for ``engine.checkpoint_engine`` while DeepSpeed saves below ``root``.

    ``problem`` is what went wrong; it is not raised inside of DeepSpeed, where other ranks wait for this one.
    """

    def __init__(self, wrapped: Any, root: Path, parts: Parts) -> None:
        self.wrapped = wrapped
        self._root = root
        self._parts = parts
        self.table: dict[str, list[Hole]] = {}
        self.problem = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    def preserves_storage_sharing(self) -> bool:
        """No: what would be copied for that has another address, and nothing of it is written twice."""
        return False

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self.problem = self.problem or str(error)

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self.table[str(Path(path).relative_to(self._root))] = self._save(state_dict, path)
        except Exception as error:  # noqa: BLE001 - DeepSpeed saves by itself then, and meets it, too
            self.problem = self.problem or f"{path}: {error}"

    def _save(self, value: Any, path: str) -> list[Hole]:
        """Write ``value`` without what is described; returns where that belongs."""
        with _watched() as storages, torch.serialization.skip_data():
            self.wrapped.save(value, path)
        reader: Any = torch._C.PyTorchFileReader(path)
        sizes = [reader.get_record_size(f"data/{number}") for number in range(len(storages))]
        if sizes != [storage.nbytes() for storage in storages.values()]:
            raise RuntimeError("torch.save has written other storages than it came to")
        holes: list[Hole] = []
        with open(path, "r+b") as file:
            for number, storage in enumerate(storages.values()):
                begin = reader.get_record_offset(f"data/{number}")
                covered = self._parts.get(storage.data_ptr(), ()) if storage.nbytes() else ()
                holes += [Hole(begin + part.begin, part.fragment) for part in covered]
                for low, high in _between(covered, storage.nbytes()):
                    _write(file.fileno(), begin, storage, low, high)
            file.flush()
            os.fsync(file.fileno())
        return sorted(holes, key=lambda hole: hole.begin)


@contextmanager
def _watched() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that ``torch.save`` comes to inside: it numbers them in this order, each once."""
    _register()
    _watch.seen = storages = dict[int, torch.UntypedStorage]()
    try:
        yield storages
    finally:
        del _watch.seen


def _note(storage: Any) -> str | None:
    """Called by torch to say where a storage lies; None lets it ask others."""
    if hasattr(_watch, "seen"):
        _watch.seen.setdefault(storage._cdata, storage)
    return None


@functools.cache
def _register() -> None:
    torch.serialization.register_package(0, _note, lambda storage, location: None)


def _between(parts: Sequence[_Part], nbytes: int) -> Iterator[tuple[int, int]]:
    """The bytes that none of ``parts`` has."""
    at = 0
    for part in parts:
        if at < part.begin:
            yield at, part.begin
        at = part.end
    if at < nbytes:
        yield at, nbytes


def _write(descriptor: int, begin: int, storage: torch.UntypedStorage, low: int, high: int) -> None:
    everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    view = everything[low:high].cpu().numpy().data
    while view:
        written = os.pwrite(descriptor, view, begin + low)
        low, view = low + written, view[written:]
