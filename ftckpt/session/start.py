"""The start of a session: all ranks meet, then load the training state."""

from __future__ import annotations

from typing import NamedTuple

from ftckpt.capture.affinity import near_cores
from ftckpt.capture.boundary import LastBoundary
from ftckpt.config import Config
from ftckpt.errors import ConfigError, StorageError
from ftckpt.group import gather_each
from ftckpt.memory.directory import list_arenas
from ftckpt.model import objects
from ftckpt.model.lineage import LoadedCheckpoint, Request
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.training_state import Description
from ftckpt.persist.exports import prepare
from ftckpt.persist.paths import Place
from ftckpt.restore.restart import Restart
from ftckpt.restore.staging import pin_ahead
from ftckpt.restore.threads import threads_of
from ftckpt.schedule.clock import make_clock
from ftckpt.schedule.window_scheduler import WindowScheduler
from ftckpt.session.attempt import AttemptReport, NodeReport
from ftckpt.session.rank_context import RankContext
from ftckpt.session.shard import Shard, device_of


class Preparation(NamedTuple):
    """A rank's parts before it loads anything. ``kept``: the state of the last boundary, if the job flushes its final
    snapshot."""

    described: Description
    scheduler: WindowScheduler
    kept: LastBoundary | None


class LoadResult(NamedTuple):
    """The lineage from now on, the restored snapshot, its source as a sentence (``where``) and in short, whether it
    is in memory, ``cast`` as in ``Restart``, and whether parts of it were reconstructed (``rebuilt``)."""

    lineage: bytes
    snapshot: SnapshotId | None
    where: str
    source: str | None = None
    in_memory: bool = False
    cast: frozenset[str] = frozenset()
    rebuilt: bool = False


def meet(rank: RankContext) -> Preparation:
    """Prepare this rank, and check with all others that they can start. Collective; raises as ``restore``."""
    rank.events.emit("joined", job=rank.config.job, node=rank.topology.me.node, launch=rank.attempt.launch)
    # Before anything is read: afterwards no other attempt writes these arenas.
    rank.arenas.entry.enter()
    rank.protection.smp.report_hazards(rank.arenas.path)
    prepared: list[Preparation] = []
    places, attempts, _ = gather_each(
        rank.group, (rank.arenas.entry.look, NodeReport),
        (lambda: rank.attempt.look(rank.arenas.path), AttemptReport),
        (lambda: prepared.append(_prepare(rank)), type(None)),
    )  # fmt: skip
    rank.arenas.entry.require_one_directory(places)
    rank.attempt.begin(attempts)
    if interval := max(place.interval for place in places):  # nodes may lack the last change
        rank.state.interval.resume(interval)
        prepared[0].scheduler.intervals.resume(interval)
    return prepared[0]


def _prepare(rank: RankContext) -> Preparation:
    """The local part of ``meet``: nothing here waits for other ranks."""
    config, training_state = rank.config, rank.training_state
    _prepare_storage(config)
    described, topology = training_state.describe(), rank.topology
    device = device_of(described)
    if list_arenas(rank.arenas.path):  # there may be something to load
        nbytes = sum(piece.tensor.nbytes for piece in (*described.stepped, *described.volatile))
        pin_ahead(nbytes, threads_of(topology))
    kept = LastBoundary(described) if rank.flushes_at_end else None
    # Objects that cannot be saved are an error at start, not at each snapshot.
    needed, room = len(objects.encode(dict(training_state.save_objects()))), config.objects_bytes
    if needed > room:
        raise ConfigError(
            f"objects need {needed} bytes, but only {room} are reserved: raise --ftckpt-objects-size, which is "
            f"{config.objects_size}"
        )
    rank.arenas.cores = near_cores(device)
    scheduler = WindowScheduler(
        config, make_clock(device), rank.events, topology.me.coords, speaks=topology.rank == 0
    )
    return Preparation(described, scheduler, kept)


def _prepare_storage(config: Config) -> None:
    """Prepare the destination of flushes. Raises StorageError if it is permanently unusable; ignores transient
    errors."""
    try:
        prepare(Place.of(config.persist, config.persist_format))
    except StorageError as error:
        if error.lasting:
            raise StorageError(f"--ftckpt-persist: {error}", lasting=True) from None


def load(rank: RankContext, shard: Shard, checkpoint: LoadedCheckpoint) -> LoadResult:
    """Load the newest state that all ranks can restore, ``checkpoint`` included, and invalidate all newer ones.

    Collective; raises as ``restore``.
    """
    config, training_state = rank.config, rank.training_state
    restart = Restart(
        rank.group, rank.topology, rank.arenas.path, rank.events,
        storage=Place.of(config.persist, config.persist_format).snapshots, slots=config.slots, job=config.job,
    )  # fmt: skip
    try:
        request = Request(config.rollback_before, config.restore_from)
        unproven = not checkpoint.may_follow or config.on_lost != "storage"
        decision = restart.choose(config.on_lost, checkpoint, request, unproven)
        # Before any rank trains: a restart after a kill must not find a newer slot to resume from.
        rank.events.end_part("decide")
        lineage = restart.invalidate_newer(decision)
        if decision is not None:
            decision = restart.load(decision, training_state, shard.state)
        restart.record_lineage()
        rank.protection.smp.lineage = restart.resumption.lineage
        # After the load, which may detect corruption.
        rank.state.flushes.begin(restart.resumption.on_storage)
        if decision is None:
            return LoadResult(lineage, None, checkpoint.as_start(restart.why))
        snapshot, source = decision.snapshot, restart.source
        other = writer if (writer := restart.written_by(decision)) not in ("", config.job) else ""
        of_other = f" of job {other}" if other else ""  # a snapshot directory copied from another job
        where = f"iteration {snapshot.iteration} from {source}{of_other}{checkpoint.beside(config.job)}"
        return LoadResult(lineage, snapshot, where, source, restart.in_memory, restart.cast, bool(restart.usage))
    finally:
        restart.close()
