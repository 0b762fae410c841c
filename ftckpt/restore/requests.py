"""Explicit requests of a start: a checkpoint named by ``--ftckpt-restore-from``, or a rollback before an iteration.

A start fulfils a request once: those that the job's lineage has recorded are done.
"""

from __future__ import annotations

from dataclasses import replace

from ftckpt.errors import ConfigError, LostError, StorageError
from ftckpt.events import Events
from ftckpt.model.lineage import NO_REQUEST, Lineage, Request, Selection, is_doubtful
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.persist import commit
from ftckpt.restore.survey import SurveyResult

_MAX_NAMED = 8


def requests_since(request: Request, seen: SurveyResult, events: Events, storage: str) -> Request:
    """The requests that this start has to fulfil; a rollback is ignored if there is no snapshot at all."""
    loaded, new = seen.loaded, request.since(seen.head)
    if loaded.in_training:  # the start before training fulfilled them
        return NO_REQUEST
    if new.texts != request.texts:
        done = ", ".join(f"--ftckpt-{text}" for text in request.texts if text not in new.texts)
        events.announce(
            f"{done}: an earlier start did that, and this one resumes; to repeat it, start once without it"
        )
    if new.name and named_by(new.name, seen) is None:
        raise StorageError(
            f"--ftckpt-restore-from {new.name}: neither {storage or 'storage'} nor memory has a checkpoint "
            "of that name; 'ftckpt list' shows the names",
            lasting=True,
        )
    if new.before and max(seen.newest_there, loaded.iteration) < 0:
        return NO_REQUEST
    if new.before and loaded.iteration >= new.before:
        raise ConfigError(
            f"--ftckpt-rollback-before: {new.before}, but the script has loaded iteration {loaded.iteration}: "
            "let it load an older one, or none"
        )
    return new


def selection_of(new: Request, seen: SurveyResult) -> Selection:
    """The snapshots that may be restored, and the lineage that this start branches."""
    if new.name and (named := named_by(new.name, seen)) is not None:
        snapshot, lineage = named
        generation = lineage.generation_at(snapshot.iteration)
        # The named snapshot is no longer doubtful; older ones of the same range still are.
        doubtful = tuple(
            replace(one, until=snapshot.iteration - 1)
            if one.generation == generation and one.after < snapshot.iteration <= one.until
            else one
            for one in seen.head.doubtful
        )
        head = lineage.branch(snapshot.iteration, after=seen.head.generation)
        return Selection(replace(head, doubtful=doubtful), snapshot, seen.head)
    head = seen.head.branch(new.before - 1) if new.before else seen.head
    return Selection(head, assumed=seen.head)


def named_by(name: str, seen: SurveyResult) -> tuple[SnapshotId, Lineage] | None:
    """The snapshot of that name and its lineage, on storage or else in memory; None if neither has it."""
    if (stored := seen.catalog.named) is not None:
        return stored.snapshot, stored.lineage
    there = {snapshot: lineage for snapshot, lineage in seen.in_memory.items() if name_of(snapshot) == name}
    newest = max(there, default=None)
    return (newest, there[newest]) if newest is not None else None


def refuse_doubtful(seen: SurveyResult) -> None:
    """Raises LostError if only doubtful snapshots exist."""
    doubtful = {name_of(one) for one, of in seen.in_memory.items() if is_doubtful(of, one.iteration, seen.head)}
    doubtful |= {
        one.name for one in seen.catalog.snapshots if is_doubtful(one.lineage, one.snapshot.iteration, seen.head)
    }
    if doubtful:
        raise LostError(
            f"only doubtful snapshots exist ({listed(sorted(doubtful), _MAX_NAMED)}), which may mix states of "
            "replicas that differed: restore one with --ftckpt-restore-from NAME, or start from the beginning with "
            "--ftckpt-on-lost fresh"
        )


def nothing_before(limit: int, seen: SurveyResult) -> str:
    """The error text for a rollback to before iteration ``limit`` if no snapshot is older."""
    iterations = {one.iteration for one in [*seen.in_memory, *(one.snapshot for one in seen.catalog.snapshots)]}
    names = listed([str(one) for one in sorted(iterations)], _MAX_NAMED)
    have = f", which have iterations {names}" if names else ""
    return (
        f"--ftckpt-rollback-before: no snapshot before iteration {limit} is complete in memory or on storage{have}; "
        "name a later iteration, or start from the beginning with --ftckpt-on-lost fresh"
    )


def name_of(snapshot: SnapshotId) -> str:
    return str(commit.CheckpointName(snapshot.iteration))
