"""Stands where a checkpointer does, and writes down what the hooks of a framework call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Recorder:
    """``log`` has a word for each call, in order; a place of the schedule by its kind."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.expected: tuple[tuple[str, ...], tuple[float, ...]] | None = None

    def fence(self) -> None:
        self.log.append("fence")

    def phase(self, kind: str) -> None:
        self.log.append(kind)

    def beat(self, evaluates: bool = False) -> None:
        self.log.append("evaluates" if evaluates else "beat")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.log.append(f"{name} begins")
        yield
        self.log.append(f"{name} ends")

    def step(self, iteration: int) -> None:
        self.log.append(f"step {iteration}")

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        self.expected = (tuple(kinds), tuple(lengths))

    def close(self) -> None:
        self.log.append("close")
