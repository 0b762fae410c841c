"""On a rank: one attempt of a job, with faults in it, and an eye on every snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ftckpt.capture.assignment import as_bytes, rule_holds
from ftckpt.config import Config
from ftckpt.model.fragment import Fragment
from ftckpt.model.training_state import Description, Piece
from ftckpt.session.checkpointer import Checkpointer
from tests.support import faults
from tests.support.conformance.adapter import Adapter, Job

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
        """What a rank has written."""
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
    """What one rank saw: restored iteration, its tensors at the end, and what was watched.

    ``off_their_source`` names derived pieces that are no casts right after the restore, ``sealed`` the iterations
    whose snapshot was in a slot, right, after the fence; ``whole`` those known to be whole on all.
    """

    start: int
    hashes: Mapping[str, str]
    off_their_source: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)


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
    stepped = described(checkpointer).stepped
    wrong = [p.fragment.key for p in stepped if p.derived_from is not None and not rule_holds(p)]
    watcher = Watcher(checkpointer) if attempt.watch else None
    _train(rank, job, attempt)
    hashes = dict(job.hashes())
    checkpointer.close()
    if watcher is None:
        return Outcome(start, hashes, wrong)
    return Outcome(start, hashes, wrong, watcher.problems, watcher.sealed, watcher.whole)


def differing(undisturbed: Mapping[str, str], resumed: Mapping[str, str]) -> list[str]:
    """Tensors that are not as in the undisturbed run, which may lack moments that its optimizer has yet to make."""
    return [name for name in undisturbed if undisturbed[name] != resumed.get(name)]


def described(checkpointer: Checkpointer) -> Description:
    """What the checkpointer copies and restores."""
    assert checkpointer.snapshots is not None, "not restored"
    return checkpointer.snapshots.shard.state


def _train(rank: int, job: Job, attempt: Attempt) -> None:
    while job.iteration < attempt.until:
        losses = [None if loss is None else float(loss).hex() for loss in job.train_iteration()]
        attempt.write(rank, [job.iteration, losses, dict(job.hashes())])


class Watcher:
    """Holds each snapshot against the state at its boundary, when training comes to the fence after it.

    It stands around ``Checkpointer.fence`` and ``step`` for the rest of this process.
    """

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.problems: list[str] = []
        self.sealed: list[int] = []
        self.whole: list[int] = []
        self._checkpointer = checkpointer
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
            whole = self._checkpointer.whole
            self.whole.append(whole.iteration if whole is not None else -1)
            pieces = described(self._checkpointer)
            copies = [(piece, piece.tensor.clone()) for piece in (*pieces.stepped, *pieces.volatile)]
            self._boundary = (iteration, copies)

        Checkpointer.fence = watched_fence  # type: ignore[assignment,method-assign]
        Checkpointer.step = watched_step  # type: ignore[assignment,method-assign]

    def _check_untouched(self, iteration: int, copies: list[tuple[Piece, torch.Tensor]]) -> None:
        stepped = described(self._checkpointer).stepped
        for piece, copy in copies[: len(stepped)]:
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
