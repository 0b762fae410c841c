"""The suite that every integration of a framework must pass, run through an adapter.

Jobs are run as seldom as possible. One chain of attempts serves five checks: the first is killed on one rank in the
middle of a batch, the second while a rank copies, the third on all ranks at once; the fourth runs to its end. Every
attempt writes what it computes, iteration by iteration, and every line is compared with an undisturbed run.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from ftckpt.capture.assignment import as_bytes, assign, rule_holds
from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.group import Group
from ftckpt.model.fragment import Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.checkpointer import Checkpointer
from tests.integrations.adapters import Adapter, Job
from tests.integrations.conformance_hooks import follow, problems_of
from tests.support import faults
from tests.support.elements import Elements, held, put_together
from tests.support.faults import Fault
from tests.support.pool import RankResult, run_ranks

_SEAL_SECS = 20.0

Row = list[Any]
"""Iteration, losses as hexadecimal texts, hashes of all tensors this rank holds after it, by name."""


@dataclass(frozen=True)
class Attempt:
    """Train until iteration ``until``. ``settings`` are fields of Config, None trains without ftckpt.

    Rows go to ``log``, one file per rank, as they come: a killed rank's are there too.
    """

    until: int
    log: Path
    settings: Mapping[str, Any] | None = None
    faults: Sequence[faults.Fault] = ()
    watch: bool = False

    def rows_of(self, rank: int) -> list[Row]:
        """The rows that a rank has written."""
        path = self._path(rank)
        # Behind the last end of a line lies nothing, or what a rank had written of a row when it was killed.
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def write(self, rank: int, row: Row) -> None:
        """One iteration is done."""
        with self._path(rank).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _path(self, rank: int) -> Path:
        return self.log.with_name(f"{self.log.name}.rank{rank}.jsonl")


@dataclass(frozen=True)
class Outcome:
    """The outcome on one rank: restored iteration, its tensors at the end, and the watched snapshots.

    ``off_their_source`` names derived pieces that are no casts right after the restore, ``sealed`` the iterations
    whose snapshot was in a slot, right, after the fence; ``committed`` those known to be committed.
    """

    start: int
    hashes: Mapping[str, str]
    off_their_source: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)


def run(rank: int, world_size: int, adapter: Adapter, attempt: Attempt) -> Outcome:
    """Build, restore, train; close where there is ftckpt."""
    job = adapter.build()
    faults.install(attempt.faults, rank, world_size)
    if attempt.settings is None:
        _train(rank, job, attempt)
        return Outcome(0, dict(job.hashes()))
    checkpointer = job.attach(
        Config(enabled=True, node="node", **{"protect": "none", "interval": 1, **attempt.settings})
    )
    start = job.iteration
    described = job.state().describe()
    wrong = _off_their_source(described)
    watcher = Watcher(checkpointer, described) if attempt.watch else None
    _train(rank, job, attempt)
    hashes = dict(job.hashes())
    checkpointer.close()
    if watcher is None:
        return Outcome(start, hashes, wrong)
    return Outcome(start, hashes, wrong, watcher.problems, watcher.sealed, watcher.committed)


def differing(undisturbed: Mapping[str, str], resumed: Mapping[str, str]) -> list[str]:
    """Tensors that are not as in the undisturbed run, which may lack moments that its optimizer has yet to make."""
    return [name for name in undisturbed if undisturbed[name] != resumed.get(name)]


def _train(rank: int, job: Job, attempt: Attempt) -> None:
    while job.iteration < attempt.until:
        losses = [None if loss is None else float(loss).hex() for loss in job.train_iteration()]
        attempt.write(rank, [job.iteration, losses, dict(job.hashes())])


class Watcher:
    """Compares each snapshot with the state at its boundary, when training reaches the fence after it.

    It stands around ``Checkpointer.fence`` and ``step`` for the rest of this process.
    """

    def __init__(self, checkpointer: Checkpointer, described: Description) -> None:
        self.problems: list[str] = []
        self.sealed: list[int] = []
        self.committed: list[int] = []
        self._checkpointer, self._described = checkpointer, described
        self._boundary: tuple[int, list[tuple[Piece, torch.Tensor]]] | None = None
        step, fence = Checkpointer.step, Checkpointer.fence

        def watched_fence(target: Checkpointer) -> None:
            at, self._boundary = self._boundary, None
            if at is not None:
                self._check_untouched(*at)
            fence(target)
            if at is not None:
                self._check_slot(*at)

        def watched_step(target: Checkpointer, iteration: int) -> None:
            at, self._boundary = self._boundary, None
            if at is not None:  # no fence came: a skipped step, which has written nothing
                self._check_untouched(*at)
            step(target, iteration)
            if at is not None:
                self._check_slot(*at)
            newest = self._checkpointer.committed
            self.committed.append(newest.iteration if newest is not None else -1)
            copies = [(piece, piece.tensor.clone()) for piece in (*described.stepped, *described.volatile)]
            self._boundary = (iteration, copies)

        Checkpointer.fence = watched_fence  # type: ignore[assignment,method-assign]
        Checkpointer.step = watched_step  # type: ignore[assignment,method-assign]

    def _check_untouched(self, iteration: int, copies: list[tuple[Piece, torch.Tensor]]) -> None:
        for piece, copy in copies[: len(self._described.stepped)]:
            if not torch.equal(as_bytes(copy), as_bytes(piece.tensor)):
                self.problems.append(f"{piece.fragment.key} was written before the fence of iteration {iteration}")

    def _check_slot(self, iteration: int, copies: list[tuple[Piece, torch.Tensor]]) -> None:
        capture = self._checkpointer.capture
        assert capture is not None
        if capture.flight is not None:
            capture.flight.wait(_SEAL_SECS)  # the fence waits for copies, not for the checksums and the seal
        arena = capture.arena
        slots = [slot for snapshot, slot in arena.snapshots().items() if snapshot.iteration == iteration]
        if len(slots) != 1:
            records = [arena.control.record(slot) for slot in range(arena.control.slots)]
            found = [(record.state.name, str(record.snapshot)) for record in records]
            self.problems.append(f"{len(slots)} slots hold iteration {iteration} at its fence: {found}")
            return
        self.sealed.append(iteration)
        view = arena.slot(slots[0])
        for fragment, offset in zip(arena.manifest.fragments, arena.image.offsets, strict=True):
            expected = _part_of(copies, fragment)
            if expected is None or bytes(view[offset : offset + fragment.nbytes]) != expected:
                self.problems.append(f"{fragment.name} of iteration {iteration} is not what it was at the boundary")


def _part_of(copies: list[tuple[Piece, torch.Tensor]], part: Fragment) -> bytes | None:
    """The bytes of a fragment, cut from the piece that holds it."""
    key = part.key.partition("@")[0]
    for piece, copy in copies:
        held = piece.fragment
        if held.key == key and held.box == part.box and held.start <= part.start and part.stop <= held.stop:
            return as_bytes(copy[part.start - held.start : part.stop - held.start]).cpu().numpy().tobytes()
    return None


_ROOM = 1 << 20
_TRAINED = 4
"""Iterations; a loss scale that begins too high skips the first ones."""


@dataclass(frozen=True)
class Inspection:
    """The state of one rank. ``untrained`` and ``trained`` are its stepped elements before and after some iterations.

    ``moved`` names pieces that training gave another address, ``off_their_source`` derived ones that are no casts;
    ``captured`` are the keys that would be copied, ``captured_if_spoiled`` the same with one element of ``spoiled``
    changed on rank 0. ``refusals`` has the errors of ``describe``, by the addition to the state.
    """

    problems: list[str]
    untrained: list[Elements]
    trained: list[Elements]
    moved: list[str]
    derived: list[str]
    off_their_source: list[str]
    captured: list[str]
    spoiled: str
    captured_if_spoiled: list[str]
    refusals: dict[str, str]


def inspect(rank: int, world_size: int, adapter: Adapter) -> Inspection:
    """Build the job, describe it, train, describe it again, spoil it. Collective."""
    job = adapter.build()
    state = job.state()
    described = state.describe()
    group = Group(60.0)
    topology = Topology(rank, tuple(RankPlace({"r": r}, "node") for r in range(world_size)), {"r": world_size})

    def captured() -> list[str]:
        manifest = assign(group, topology, described, _ROOM, _ROOM).manifest
        return [fragment.key.partition("@")[0] for fragment in manifest.fragments]

    problems, untrained = _problems(described), held(described.stepped)
    derived = [piece for piece in described.stepped if piece.derived_from is not None]
    wrong = _off_their_source(described)
    untouched = captured()
    spoiled = group.gather((derived[0].fragment.key if derived else "").encode())[0].decode()
    afterwards: list[str] = []
    if spoiled:
        changed = derived[0].tensor[:1] if rank == 0 else torch.empty(0)
        was = changed.clone()
        changed += 1
        afterwards = captured()
        changed.copy_(was)
    for _ in range(_TRAINED):
        job.train_iteration()
    again = state.describe()
    return Inspection(
        problems=problems + _problems(again),
        untrained=untrained,
        trained=held(again.stepped),
        moved=_moved(described, again),
        derived=[piece.fragment.key for piece in derived],
        off_their_source=wrong + _off_their_source(again),
        captured=untouched,
        spoiled=spoiled,
        captured_if_spoiled=afterwards,
        refusals={"state": _refusal_of_state(job), "parameter": _refusal_of_parameter(job)},
    )


def _off_their_source(described: Description) -> list[str]:
    return [p.fragment.key for p in described.stepped if p.derived_from is not None and not rule_holds(p)]


def _problems(described: Description) -> list[str]:
    problems, seen = [], set()
    for piece in (*described.stepped, *described.volatile):
        fragment, tensor = piece.fragment, piece.tensor
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != fragment.numel:
            problems.append(f"{fragment.name} is given {tuple(tensor.shape)}, strides {tensor.stride()}")
        if tensor.requires_grad:
            problems.append(f"{fragment.name} is given with its gradients")
        if fragment.name in seen:
            problems.append(f"{fragment.name} is described twice")
        seen.add(fragment.name)
    return problems


def _moved(before: Description, after: Description) -> list[str]:
    def places(described: Description) -> dict[str, Any]:
        return {p.fragment.name: p.tensor.data_ptr() for p in (*described.stepped, *described.volatile)}

    first, then = places(before), places(after)
    return sorted(name for name in first | then if first.get(name) != then.get(name))


def _refusal_of_state(job: Job) -> str:
    """The refusal of optimizer state ``mystery``, an object that is no tensor and no number."""
    for optimizer in job.optimizers():
        for state in optimizer.state.values():
            state["mystery"] = object()
            try:
                return _refusal(job)
            finally:
                del state["mystery"]
    return "no optimizer of this rank keeps any state"


def _refusal_of_parameter(job: Job) -> str:
    job.add_parameter()
    return _refusal(job)


def _refusal(job: Job) -> str:
    try:
        job.state().describe()
    except UnsupportedError as error:
        return str(error)
    return "it was accepted"


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
        """A derived piece is a cast of its source, and only then not captured."""
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
        """Hooks report where training is, each of two fences alone precedes each write, and children are silent."""
        results = run_ranks(follow, self._adapter.ranks, self._adapter, **self._adapter.pool)
        for rank, result in enumerate(results):
            assert not (problems := problems_of(result.value)), f"rank {rank}: {problems[:3]}"

    def snapshot(self) -> None:
        """Each iteration is sealed after its fence, committed at the next boundary, and as it was at its own."""
        for rank, outcome in enumerate(self._last()):
            assert not outcome.problems, f"rank {rank}: {outcome.problems[:3]}"
            assert outcome.sealed == list(range(outcome.start + 1, UNTIL)), f"rank {rank} sealed {outcome.sealed}"
            expected = list(range(outcome.start, UNTIL))
            assert outcome.committed == expected, f"rank {rank} committed {outcome.committed}"

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
        """The job resumes to the same bits, and leaves nothing."""
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
        """All ranks of an attempt resumed after one of ``starts``, to the bits of the undisturbed run."""
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
        return self._once("reference", lambda: [one.value for one in self._run(self._attempt("reference"))])

    def _inspections(self) -> list[Inspection]:
        def all_ranks() -> list[Inspection]:
            adapter = self._adapter
            results = run_ranks(inspect, adapter.ranks, adapter, timeout_secs=_TIMEOUT_SECS, **adapter.pool)
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

    def _run(self, attempt: Attempt, dies: bool = False) -> list[RankResult]:
        return run_ranks(
            run, self._adapter.ranks, self._adapter, attempt,
            timeout_secs=_TIMEOUT_SECS, expect_failures=dies, grace_secs=3.0, **self._adapter.pool,
        )  # fmt: skip

    def _once(self, name: str, action: Callable[[], T]) -> T:
        """The result or error of ``action``, which runs once."""
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
