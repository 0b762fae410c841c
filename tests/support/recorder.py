"""Stands where a checkpointer does, and writes down what the hooks of a framework call."""

from __future__ import annotations

from collections.abc import Sequence


class Recorder:
    """``log`` has a word for each call, in order; a place of the schedule by its kind."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.expected: tuple[tuple[str, ...], tuple[float, ...]] | None = None

    def fence(self) -> None:
        self.log.append("fence")

    def phase(self, kind: str) -> None:
        self.log.append(kind)

    def pause(self) -> None:
        self.log.append("pause")

    def step(self, iteration: int) -> None:
        self.log.append(f"step {iteration}")

    def expect(self, kinds: Sequence[str], lengths: Sequence[float]) -> None:
        self.expected = (tuple(kinds), tuple(lengths))

    def close(self) -> None:
        self.log.append("close")


def merged(log: Sequence[str]) -> list[str]:
    """A place that is told twice in a row is one place."""
    return [word for index, word in enumerate(log) if index == 0 or word != log[index - 1]]
