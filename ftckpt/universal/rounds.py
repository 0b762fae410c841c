"""Files that several ranks write at the same time, a bounded number of bytes at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType

from ftckpt.universal.atomic import explained
from ftckpt.universal.catalog import Bytes, Part, Unit
from ftckpt.universal.writer import TensorFile, UniversalSink, strips


@dataclass(frozen=True)
class Step:
    """Rows that come next in the file of ``unit``; ``part`` is None where there are none, in an empty file."""

    unit: Unit
    part: Part | None

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.part.nbytes if self.part is not None else 0


def deal(units: Sequence[Unit], ranks: int) -> list[list[Unit]]:
    """Who writes which files: the largest first, each to whom has least to write so far. The same on all ranks."""
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for unit in sorted(units, key=lambda unit: (-unit.nbytes, unit.name)):
        rank = load.index(min(load))
        dealt[rank].append(unit)
        load[rank] += unit.nbytes
    return dealt


def rounds(units: Sequence[Unit], nbytes: int) -> Iterator[list[Step]]:
    """What to write one round after the other: at most ``nbytes`` each, or one step that is larger."""
    batch: list[Step] = []
    room = nbytes
    for unit in units:
        for step in _steps(unit, nbytes):
            if batch and step.nbytes > room:
                yield batch
                batch, room = [], nbytes
            batch.append(step)
            room -= step.nbytes
    if batch:
        yield batch


def _steps(unit: Unit, nbytes: int) -> Iterator[Step]:
    if unit.nbytes == 0:
        yield Step(unit, None)
    for part in unit.parts:
        for first, last in strips(part, nbytes):
            yield Step(unit, Part(part.tensor, first, last))


class OpenFiles:
    """The file that is being written; one that is not complete at the end, or on an error, is removed."""

    def __init__(self, sink: UniversalSink) -> None:
        self._sink = sink
        self._stack = ExitStack()
        self._made: TensorFile | None = None

    def __enter__(self) -> OpenFiles:
        return self

    def put(self, step: Step, data: Bytes) -> None:
        """The next bytes of a file; its first ones open it, its last ones complete it.

        Raises:
            ConvertError: no room, no permission, or the disk fails.
        """
        with explained(self._sink.destination.partial / step.unit.name):
            made = self._made
            if made is None:
                file = self._stack.enter_context(self._sink.destination.file(step.unit.name))
                made = self._made = self._sink.begin_file(step.unit, file)
            if len(data):
                made.put(data)
            if made.complete:
                made.end()
                self._made = None
                self._stack.close()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, value, trace)
