"""The checks, each of one framework in one configuration.

Jobs are run as seldom as possible. One chain of attempts serves five checks: the first is killed on one rank in the
middle of a batch, the second while a rank copies, the third on all ranks at once; the fourth runs to its end. Every
attempt writes what it computes, iteration by iteration, and every line is held against an undisturbed run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.support.conformance.adapter import Adapter
from tests.support.conformance.attempt import Attempt, Outcome, differing, run
from tests.support.conformance.hooks import follow, problems_of
from tests.support.conformance.inspect import Inspection, inspect
from tests.support.elements import put_together
from tests.support.faults import Fault
from tests.support.pool import RankResult, run_ranks

T = TypeVar("T")

UNTIL = 9
_BATCH, _COPY, _ALL = 3, 5, 7
"""Iterations in which the three faults strike."""
_TIMEOUT_SECS = 120.0


class Suite:
    """Runs a check by its name; ``folder`` is an empty one on a tmpfs, for arenas, logs and markers."""

    def __init__(self, adapter: Adapter, folder: Path) -> None:
        self._adapter = adapter
        self._folder = folder
        self._done: dict[str, Any] = {}

    def check(self, name: str) -> None:
        """Raises AssertionError where the integration does not conform."""
        CHECKS[name](self)

    def describe(self) -> None:
        """Fragments of all ranks make up every tensor, at addresses that stay."""
        inspections = self._inspections()
        for rank, inspection in enumerate(inspections):
            assert not inspection.problems, f"rank {rank}: {inspection.problems[:3]}"
            assert not inspection.moved, f"rank {rank}: training moved {inspection.moved[:3]}"
        for when in ("untrained", "trained"):
            wrong = put_together([getattr(inspection, when) for inspection in inspections])
            assert not wrong, f"{when}: {wrong[:3]}"
        changed = [a != b for i in inspections for (_, a), (_, b) in zip(i.untrained, i.trained, strict=True)]
        assert any(changed), "training changed nothing"

    def derived(self) -> None:
        """What is derived is a cast of its source, and only then not captured."""
        inspections = self._inspections()
        for inspection in inspections:
            assert bool(inspection.derived) <= self._adapter.masters, f"{inspection.derived[:3]} without masters"
            assert not inspection.off_their_source, inspection.off_their_source[:3]
            assert not set(inspection.derived) & set(inspection.captured), "derived and captured"
        first = inspections[0]
        assert bool(first.spoiled) == self._adapter.masters, f"rank 0 has derived {first.derived[:3]}"
        if first.spoiled:
            assert first.spoiled in first.captured_if_spoiled, f"{first.spoiled} is no cast, and not captured"
        for rank, outcome in enumerate(self._last()):
            assert not outcome.off_their_source, f"rank {rank} restored {outcome.off_their_source[:3]} off its source"

    def unknown(self) -> None:
        """State that cannot be mapped is refused, by name."""
        refusals = [inspection.refusals for inspection in self._inspections()]
        assert any("mystery" in refusal["state"] for refusal in refusals), refusals[0]
        assert all("extra.weight" in refusal["parameter"] for refusal in refusals), refusals[0]

    def hooks(self) -> None:
        """Hooks tell where training is, fence each write, each of two fences alone, and are silent in children."""
        results = run_ranks(follow, self._adapter.ranks, self._adapter, **self._adapter.pool)
        for rank, result in enumerate(results):
            assert not (problems := problems_of(result.value)), f"rank {rank}: {problems[:3]}"

    def snapshot(self) -> None:
        """Each iteration is sealed after its fence, whole at the next boundary, and as it was at its own."""
        for rank, outcome in enumerate(self._last()):
            assert not outcome.problems, f"rank {rank}: {outcome.problems[:3]}"
            assert outcome.sealed == list(range(outcome.start + 1, UNTIL)), f"rank {rank} sealed {outcome.sealed}"
            assert outcome.whole == list(range(outcome.start, UNTIL)), f"rank {rank}: whole were {outcome.whole}"

    def kill_one(self) -> None:
        """A rank that dies in the middle of a batch costs at most the snapshot whose copies ran."""
        self._expect_death("first", [self._victim], {_BATCH - 2, _BATCH - 1}, "second")

    def kill_copy(self) -> None:
        """A rank that dies while it copies costs the snapshot that it wrote."""
        self._expect_death("second", [self._victim], {_COPY - 1}, "third")

    def kill_all(self) -> None:
        """All ranks die at once."""
        self._expect_death("third", range(self._adapter.ranks), {_ALL - 2, _ALL - 1}, "fourth")

    def restore(self) -> None:
        """The job goes on to the same bits, and leaves nothing behind."""
        reference, last = self._reference(), self._last()
        for rank, (whole, rest) in enumerate(zip(reference, last, strict=True)):
            assert rest.start > 0, f"rank {rank} began anew"
            wrong = differing(whole.hashes, rest.hashes)
            assert not wrong, f"rank {rank}: {len(wrong)} of {len(whole.hashes)} tensors differ, such as {wrong[:3]}"
        self._expect_rows("fourth", {outcome.start for outcome in last}, UNTIL)
        assert not list((self._folder / "arena").iterdir()), "an ended job left something behind"

    @property
    def _victim(self) -> int:
        return self._adapter.ranks - 1

    def _expect_death(self, attempt: str, victims: Sequence[int], restored: set[int], following: str) -> None:
        results: list[RankResult] = self._chain()[attempt]
        for rank in victims:
            assert results[rank].exitcode == -signal.SIGKILL, f"rank {rank}: {results[rank].error}"
        self._expect_rows(following, restored, UNTIL if following == "fourth" else None)

    def _expect_rows(self, name: str, starts: set[int], end: int | None) -> None:
        """All ranks of an attempt went on after one of ``starts``, to the bits of the undisturbed run."""
        self._chain()
        begun = set()
        for rank in range(self._adapter.ranks):
            rows, whole = self._attempt(name).rows_of(rank), self._attempt("reference").rows_of(rank)
            assert rows, f"rank {rank}: attempt {name} did not come to the end of an iteration"
            start = rows[0][0] - 1
            begun.add(start)
            assert start in starts, f"rank {rank}: attempt {name} restored {start}, not one of {sorted(starts)}"
            for row, expected in zip(rows, whole[start:], strict=False):
                assert row[:2] == expected[:2], (
                    f"rank {rank}: losses of attempt {name}: {row[:2]}, not {expected[:2]}"
                )
                wrong = differing(expected[2], row[2])
                assert not wrong, f"rank {rank}: {wrong[:3]} of attempt {name} differ after iteration {row[0]}"
            assert end is None or rows[-1][0] == end
        assert len(begun) == 1, f"ranks restored different iterations: {begun}"

    def _reference(self) -> list[Outcome]:
        return self._once("reference", lambda: self._outcomes(self._attempt("reference")))

    def _inspections(self) -> list[Inspection]:
        def all_ranks() -> list[Inspection]:
            results = run_ranks(
                inspect, self._adapter.ranks, self._adapter, timeout_secs=_TIMEOUT_SECS, **self._adapter.pool
            )
            return [result.value for result in results]

        return self._once("inspections", all_ranks)

    def _last(self) -> list[Outcome]:
        return [result.value for result in self._chain()["fourth"]]

    def _chain(self) -> dict[str, list[RankResult]]:
        def attempts() -> dict[str, list[RankResult]]:
            (self._folder / "arena").mkdir()
            self._reference()
            done = {name: self._run(self._attempt(name), True) for name in ("first", "second", "third")}
            return {**done, "fourth": self._run(self._attempt("fourth"))}

        return self._once("chain", attempts)

    def _attempt(self, name: str) -> Attempt:
        log = self._folder / name
        if name == "reference":
            return Attempt(UNTIL, log)
        settings = {
            "job": "conformance", "arena": str(self._folder / "arena"), "chunk_size": "64KiB",
            "start_timeout_secs": 60.0,
        }  # fmt: skip
        marker = self._folder / f"{name}.fired"
        planned = {
            "first": [Fault(self._victim, _BATCH, "phase", marker, "kill", ordinal=1)],
            "second": [Fault(self._victim, _COPY, "copy", marker, "kill", ordinal=1)],
            "third": [Fault("all", _ALL, "fence", marker, "kill", secs=20.0)],
        }
        return Attempt(UNTIL, log, settings, planned.get(name, ()), watch=name == "fourth")

    def _outcomes(self, attempt: Attempt) -> list[Outcome]:
        return [result.value for result in self._run(attempt)]

    def _run(self, attempt: Attempt, dies: bool = False) -> list[RankResult]:
        return run_ranks(
            run, self._adapter.ranks, self._adapter, attempt,
            timeout_secs=_TIMEOUT_SECS, expect_failures=dies, grace_secs=3.0, **self._adapter.pool,
        )  # fmt: skip

    def _once(self, name: str, action: Callable[[], T]) -> T:
        """What ``action`` returns or raises, the first time it is asked for."""
        if name not in self._done:
            try:
                self._done[name] = action()
            except Exception as error:  # noqa: BLE001 - each check that needs it fails with it
                self._done[name] = error
        found = self._done[name]
        if isinstance(found, Exception):
            raise found
        return cast(T, found)


CHECKS: dict[str, Callable[[Suite], None]] = {
    "describe": Suite.describe,
    "hooks": Suite.hooks,
    "snapshot": Suite.snapshot,
    "kill_one": Suite.kill_one,
    "kill_copy": Suite.kill_copy,
    "kill_all": Suite.kill_all,
    "restore": Suite.restore,
    "derived": Suite.derived,
    "unknown": Suite.unknown,
}
