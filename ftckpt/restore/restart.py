"""The steps of a restart: inventory → decide → verify → repair → invalidate newer snapshots → plan → load. If nothing
must be repaired, bytes may be verified while they are loaded; newer snapshots are then invalidated last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import ArenaError, LostError, MismatchError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, gather_bytes, together
from ftckpt.memory.inventory import Inventory
from ftckpt.memory.lineage_file import read_lineage
from ftckpt.memory.locations import OpenArenas
from ftckpt.model import objects
from ftckpt.model.layouts import layout_name
from ftckpt.model.lineage import (
    NO_CHECKPOINT,
    NO_REQUEST,
    UNKNOWN,
    Lineage,
    LoadedCheckpoint,
    Request,
    Selection,
    lineage_after,
    rollback_reason,
)
from ftckpt.model.snapshot import LINEAGE_BYTES
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.model.training_state import Description, Piece, TrainingState, cast_master
from ftckpt.persist import commit, retention
from ftckpt.restore.context import RestoreContext, Usage, total_of
from ftckpt.restore.decide import Decision
from ftckpt.restore.invalidate import adopt, invalidate
from ftckpt.restore.load import Traffic, execute
from ftckpt.restore.requests import nothing_before, refuse_doubtful, requests_since, selection_of
from ftckpt.restore.search import Search, SearchResult, pass_over
from ftckpt.restore.selected_shards import LoadPlan, ReadEstimate, SelectedShards, fits
from ftckpt.restore.storage_catalog import EMPTY_CATALOG, CatalogSurvey, StorageCatalog, ask
from ftckpt.restore.storage_source import READERS, reads, report_fetched
from ftckpt.restore.survey import SurveyResult, take_survey
from ftckpt.restore.threads import threads_of
from ftckpt.restore.verify import report_verified


@dataclass(frozen=True)
class _Start:
    """Inputs of one start, see ``Restart.choose``; the same on all ranks.

    ``new``: the requests to fulfil. ``asked``: all explicit requests of this start. ``selection``: the snapshots that
    may be restored, under its lineage; ``catalog``: those of them on storage. ``reports``: the inventory of all
    ranks, None if arenas were changed since.
    """

    seen: SurveyResult
    new: Request
    asked: tuple[str, ...]
    selection: Selection
    catalog: StorageCatalog
    on_lost: str
    unproven: bool
    reports: Sequence[Inventory] | None

    @property
    def loaded(self) -> LoadedCheckpoint:
        """The checkpoint that the script has loaded."""
        return self.seen.loaded

    @property
    def needs_snapshot(self) -> bool:
        """Whether training can continue only from a snapshot."""
        return not self.loaded.is_one and self.on_lost != "fresh"


class Resumption(NamedTuple):
    """The lineage of the snapshots that will be taken, the newest iteration on storage up to the one that training
    resumes from (-1: none), and whether storage has newer snapshots, which are abandoned."""

    lineage: Lineage = UNKNOWN
    on_storage: int = -1
    abandons: bool = False


class Restart:
    """One restart: ``choose``, ``invalidate_newer``, ``load`` unless ``choose`` gave None, ``record_lineage``,
    ``close``; in this order, and collective but for ``close``."""

    def __init__(
        self, group: Group, topology: Topology, node_dir: Path, events: Events, *, storage: str = "", slots: int = 2,
        job: str = "",
    ) -> None:  # fmt: skip
        self._context = RestoreContext(group, topology, events, OpenArenas(node_dir))
        self._storage, self._slots, self._job = storage, slots, job
        self._catalog = EMPTY_CATALOG
        self._start: _Start  # from ``choose`` on
        self._search: Search | None = None
        self._found: SearchResult | None = None  # the result of the search
        self._chosen = SelectedShards(self._context, None)  # its shards; set by ``invalidate_newer``
        self._is_touched = False  # whether an unverified load may have written to the live state
        self.resumption = Resumption()
        """Set by ``load``, or by ``choose`` if it returns None."""
        self.why = ""
        """The reason why training does not resume from memory; empty if it does, or if memory has no snapshot."""
        self.cast: frozenset[str] = frozenset()
        """Names of this rank's fragments that ``load`` has computed from their masters."""
        self.usage: Usage = {}
        """Chunks and bytes that all ranks reconstructed or fetched. Empty if everything was read from slots."""

    def choose(
        self, on_lost: str, loaded: LoadedCheckpoint = NO_CHECKPOINT, request: Request = NO_REQUEST,
        unproven: bool = False,
    ) -> Decision | None:  # fmt: skip
        """The newest snapshot that is complete or was reconstructed, verified in every byte. None if there is none,
        or if training resumes from the ``loaded`` checkpoint: it is newer, or the user rolls back to it.

        ``request``: explicit requests of this start; those that the lineage has recorded are done. ``unproven``: let
        ``load`` verify a snapshot that needs no repair, if the job cannot continue without a snapshot anyway.

        Raises:
            LostError: snapshots were lost and ``on_lost`` is ``fail``, or ``storage`` and nothing was loaded; or the
                requested snapshot does not exist.
            ConfigError: ranks have loaded different iterations, or one that is not before the requested one.
            StorageError: storage cannot record the requested branch, or has no checkpoint of that name.
            MismatchError: the snapshots belong to another version.
            MemoryBudgetError, ArenaError: lost shards cannot be reconstructed on this node.
        """
        start = self._start = self._survey(on_lost, loaded, request, unproven)
        seen, new, decision = start.seen, start.new, None
        reason = rollback_reason(seen.loaded, seen.head) if new == NO_REQUEST or seen.loaded.named else ""
        # Abandoned snapshots are not searched: they need be neither complete nor in this layout.
        if reason and (whole := seen.whole(seen.head)) >= 0:
            self.why = f"{reason}; memory ({whole}) is abandoned"
            self._context.events.emit("rolled_back", iteration=seen.loaded.iteration, newest=whole, reason=reason)
        elif not reason:
            decision = self._newest(start)
        if decision is None and not reason and new.name:
            because = f": {self.why}" if self.why else ", it is incomplete"
            raise LostError(
                f"--ftckpt-restore-from {new.name}: cannot be restored{because}; name another one that 'ftckpt list' "
                "shows, or none, to resume from the newest"
            )
        if decision is None and not reason and start.needs_snapshot:
            refuse_doubtful(seen)
        if new != NO_REQUEST:
            self._record_request(start, decision)
        if decision is None:
            self.resume(None)
        return decision

    def _survey(self, on_lost: str, loaded: LoadedCheckpoint, request: Request, unproven: bool) -> _Start:
        """Survey memory and storage of all ranks."""
        group, topology, events, arenas = self._context
        lineage = partial(read_lineage, arenas.node_dir)
        survey = CatalogSurvey(group, self._storage, events, request, lineage=lineage)
        seen = take_survey(group, topology, arenas, survey, loaded)
        self._catalog = seen.catalog
        reports = None if self._adopt_head(seen) else seen.reports
        new = requests_since(request, seen, events, self._storage)
        selection = selection_of(new, seen)
        asked, catalog = seen.loaded.requests(request, seen.head), seen.catalog.selected(selection)
        return _Start(seen, new, asked, selection, catalog, on_lost, unproven, reports)

    def _adopt_head(self, seen: SurveyResult) -> bool:
        """Invalidate snapshots of abandoned branches, of a node that was away or was killed before it recorded the
        head, before anything is reconstructed; returns whether a node may have some."""
        if all(one.lineage == seen.head for one in seen.memory if one.lineage.branches):
            return False
        group, topology, events, node_arenas = self._context

        def adopt_here() -> None:
            if topology.is_node_leader and (arenas := adopt(node_arenas.node_dir, seen.head, seen.head)):
                reason = f"this node has snapshots of an abandoned branch, in {listed(arenas)}"
                events.emit("rolled_back", iteration=seen.head.branches[-1].iteration, reason=reason)

        together(group, adopt_here)
        return True

    def _record_request(self, start: _Start, decision: Decision | None) -> None:
        """Record the branch on storage before anything in memory is invalidated: it must survive loss of memory."""
        seen, asked = start.seen, ", ".join(f"--ftckpt-{text}" for text in start.new.texts)
        if decision is None and start.needs_snapshot:
            raise LostError(nothing_before(start.new.before, seen))
        if self._storage and self._catalog.storage is None:
            raise StorageError(f"{asked}: storage cannot record the branch: {self._catalog.problem}", lasting=True)
        iteration = decision.snapshot.iteration if decision is not None else max(0, seen.loaded.iteration)
        if start.new.before and decision is not None:
            # At the restored iteration, not at the requested one: iterations in between belong to the new branch.
            branched = replace(start.selection, head=seen.head.branch(iteration))
            start = self._start = replace(start, selection=branched)
        self._claim(replace(start.selection.head, requests=start.asked))
        text = f"{asked}: resumes from iteration {iteration}"
        if seen.newest_there <= iteration:
            self._context.events.announce(f"{text}; there are no newer snapshots")
            return
        self._context.events.emit("rolled_back", iteration=iteration, newest=seen.newest_there, reason=asked)
        self._context.events.announce(f"{text}; newer snapshots are abandoned, not deleted")

    def _claim(self, lineage: Lineage) -> None:
        """Record ``lineage`` as the head on storage. Collective."""
        group = self._context.group

        def claim() -> None:
            storage = self._catalog.storage
            if storage is None or group.rank != 0:
                return
            ask(lambda: commit.claim(storage, group.name, self._job, time.time(), lineage))
            if self._catalog.reader:  # the claim removes all holds, this one too
                ask(lambda: retention.hold(storage, self._catalog.reader))

        together(group, claim)

    def _newest(self, start: _Start) -> Decision | None:
        """The newest snapshot in memory or on storage; None if the loaded checkpoint is newer."""
        in_memory, is_requested = start.seen.newest(start.selection.head), start.new != NO_REQUEST
        if not is_requested and 0 <= max(in_memory, start.catalog.newest) < start.loaded.iteration:
            self._give_up_older(in_memory, start.loaded)
            found = None
        else:
            # An unverified load may turn out bad after it has overwritten some of the live state. So there is none if
            # the job could continue with that state.
            overlaps = start.new == NO_REQUEST and start.needs_snapshot
            search = self._search = Search(
                self._context, start.catalog, slots=self._slots, selection=start.selection, overlaps=overlaps,
                unproven=overlaps and start.unproven, reports=start.reports,
            )  # fmt: skip
            found = self._accepted(search.run)
        if found is None and not is_requested:
            start.catalog.require_seen()
        return found.decision if found is not None else None

    def _accepted(self, search: Callable[[], SearchResult | None]) -> SearchResult | None:
        """The result of a search; None if it is lost, or older than the loaded checkpoint."""
        start, loaded = self._start, self._start.loaded
        try:
            found = search()
        except LostError as error:
            start.catalog.require_seen()
            if start.new.name:  # regardless of ``on_lost``: newer snapshots were not lost
                self.why = str(error)
                return None
            if start.on_lost == "fail" or (start.on_lost == "storage" and not loaded.is_one):
                raise LostError(f"{error}. {_remedy(loaded)}") from None
            self._context.events.emit("lost", error=str(error), loaded=max(0, loaded.iteration))
            self.why = f"snapshots were lost: {error}"
            return None
        if found is not None:
            iteration = found.decision.snapshot.iteration
            if iteration < loaded.iteration and start.selection.only is None:
                self._give_up_older(iteration, loaded)
                return None
            self.usage = found.usage
        self._found = found
        return found

    def _give_up_older(self, in_memory: int, loaded: LoadedCheckpoint) -> None:
        self._context.events.emit("memory_older_than_storage", in_memory=in_memory, loaded=loaded.iteration)
        self.why = f"memory ({in_memory}) is older and abandoned"

    @property
    def source(self) -> str:
        """``memory``, or the sources that lost shards came from, joined by ``+``."""
        return "+".join(sorted(self.usage)) or "memory"

    @property
    def in_memory(self) -> bool:
        """Whether the loaded snapshot is in memory, too."""
        return self._found is None or self._found.fetch is None

    def written_by(self, decision: Decision) -> str:
        """The job whose run wrote the shards that came from storage; empty if none did."""
        there = (one.job for one in self._start.catalog.snapshots if one.snapshot == decision.snapshot)
        return next(there, "") if "storage" in self.usage else ""

    def invalidate_newer(self, decision: Decision | None) -> bytes:
        """Invalidate all snapshots newer than ``decision`` (all, if None); returns the id of new snapshots.

        All nodes do so before any rank trains: otherwise new snapshots and rolled-back ones of the same iteration
        could be combined after the next failure. If the snapshot is not verified yet, ``load`` does it after the last
        byte: should it turn out bad, a later start may have the nodes that newer ones lack. Afterwards all ranks know
        the contents of the selected shards.
        """
        found = self._found if decision is not None else None
        chosen = self._chosen = SelectedShards(self._context, found)

        def answer() -> bytes:
            if found is None or found.is_verified:
                self._invalidate_node(decision)
            return os.urandom(LINEAGE_BYTES) + chosen.describe()

        # All ranks use rank 0's. The gather ends after every node has invalidated.
        answers = gather_bytes(self._context.group, answer)
        chosen.join([one[LINEAGE_BYTES:] for one in answers])
        return answers[0][:LINEAGE_BYTES]

    def _invalidate_node(self, decision: Decision | None) -> None:
        if self._context.topology.is_node_leader:
            # -1 is below every iteration: a job that starts over invalidates everything.
            invalidate(self._context.arenas.node_dir, decision.snapshot.iteration if decision is not None else -1)

    def load(self, decision: Decision, state: TrainingState, described: Description) -> Decision:
        """Restore tensors and objects of every rank to the snapshot's step boundary; returns the decision loaded.

        That is another one if an unverified snapshot turns out bad: an older snapshot, or the same one reconstructed.
        In another layout tensors are equal element by element, and ``state`` converts the objects as far as possible.

        Raises:
            MismatchError: the snapshot is of another model, or replicas of a tensor differ in it.
            LostError, MemoryBudgetError, ArenaError: as ``choose``, for the replacement of a bad snapshot.
        """
        try:
            while not self._loaded(decision, state, described):
                assert self._found is not None and self._search is not None, "set by ``choose``"
                self._accepted(partial(self._search.again, self._found))
                decision = self._replaced()
        except LostError as error:
            error.touched = self._is_touched
            raise
        decision = self._chosen.found.decision
        self.resume(decision.snapshot.iteration)
        return decision

    def _loaded(self, decision: Decision, state: TrainingState, described: Description) -> bool:
        """Load the selected shards; False if they must be searched again: they are bad, or do not fit."""
        found = self._chosen.found
        try:
            if self._load(state, described):
                return True
            if found.fetch is None:
                return False
            self._found = found.fetched(self._context.arenas)
            self.usage = self._found.usage
            decision = self._replaced()
        except (StorageError, ArenaError) as error:
            # What memory lacks for a snapshot on storage it lacks for an older one, too.
            if found.is_verified or (found.fetch is not None and isinstance(error, ArenaError)):
                raise
            if isinstance(error, StorageError):
                pass_over(self._context.events, decision.snapshot, error)
            return False
        return self._loaded(decision, state, described)

    def _replaced(self) -> Decision:
        """The decision that replaces the selected shards, which it selects."""
        assert self._found is not None, "this search finds a snapshot, or raises"
        self.invalidate_newer(self._found.decision)
        return self._found.decision

    def resume(self, iteration: int | None) -> None:
        """Set the lineage of new snapshots, for training that resumes from ``iteration`` (None: from no snapshot)."""
        start = self._start
        there = [one.snapshot.iteration for one in start.catalog.snapshots]
        self.resumption = Resumption(
            lineage_after(start.selection.head, start.loaded, iteration, max(there, default=-1), start.asked),
            max((one for one in there if iteration is None or one <= iteration), default=-1),
            any(iteration is None or one > iteration for one in there),
        )

    def record_lineage(self) -> None:
        """Record the lineage of new snapshots on all nodes, and on storage if that has abandoned ones.

        Called before any rank trains, after ``load`` or a ``choose`` that returned None.

        Raises:
            ArenaError: a node cannot write it.
            StorageError: storage cannot.
        """
        group, topology, _, arenas = self._context
        seen, (lineage, _, abandons) = self._start.seen, self.resumption
        head, nodes = seen.head, {member.node for member in topology.members}
        is_same = (lineage.branches, lineage.requests, lineage.found) == (head.branches, head.requests, head.found)
        if is_same and seen.nodes_know(len(nodes)):
            return
        if lineage != self._start.selection.head and abandons:
            # Storage first: nodes killed before they record the lineage adopt it from there. If nothing on storage is
            # abandoned, the claim during training is early enough.
            self._claim(lineage)
        together(group, lambda: adopt(arenas.node_dir, lineage, head) if topology.is_node_leader else None)

    def _load(self, state: TrainingState, described: Description) -> bool:
        """Load the selected shards; False if they cannot be verified on the way."""
        begin, chosen, events = time.perf_counter(), self._chosen, self._context.events
        decision, pieces = chosen.found.decision, [*described.stepped, *described.volatile]
        try:
            if not decision.ranks:
                chosen.require_all_taken(pieces)
            brought = self._read(pieces, described.padded)
        except MismatchError:  # the name of another optimizer says more than its tensors
            saved = [objects.decode(one) for one in chosen.first_objects()]
            together(self._context.group, lambda: state.check_objects(saved, not decision.ranks))
            raise
        if brought is None:
            return False
        (needs, _, _, encoded, _), traffic = brought
        # Only now: a derived weight is the cast of a master that the reads have just filled.
        self.cast = _derive(pieces, {id(piece) for piece, _ in needs})
        if not decision.ranks:
            chosen.check_copies([need for _, need in needs])
        # In another layout no rank has this rank's objects: the first rank of each stage represents its stage.
        firsts = [] if decision.ranks else chosen.first_objects()

        def finish() -> None:
            if decision.ranks:
                state.load_objects(objects.decode(bytes(encoded())))
            else:
                state.load_reshaped([objects.decode(one) for one in firsts], decision.snapshot.iteration)
            if not chosen.found.is_verified:  # see ``invalidate_newer``
                self._invalidate_node(decision)

        together(self._context.group, finish)
        # Last: it sets RNG, and the steps before may draw random numbers.
        state.finish_load()
        events.end_part("objects")
        self._report(decision, traffic, time.perf_counter() - begin)
        return True

    def _read(self, pieces: Sequence[Piece], padded: frozenset[str]) -> tuple[LoadPlan, Traffic] | None:
        """Read all pieces; None if bytes are not verified yet, and ranks would read too much of them more than once,
        or shards on other nodes."""
        (group, topology, events, arenas), chosen = self._context, self._chosen
        found, begin, plans = chosen.found, time.perf_counter(), list[LoadPlan]()

        def estimate() -> ReadEstimate:
            # Each rank plans only its own reads, from contents that all have gathered.
            plans.append(chosen.plan(pieces, padded))
            return plans[0].estimate

        estimates = gather_all(group, estimate, ReadEstimate)
        if not found.is_verified and not fits(estimates):
            return None
        self._is_touched = self._is_touched or not found.is_verified
        events.end_part("plan")
        snapshot, threads = found.decision.snapshot, threads_of(topology)
        what = f"loads iteration {snapshot.iteration}"
        if found.fetch is not None:
            what, threads = reads(snapshot), READERS
        traffic = execute(group, lambda: plans[0].reads, arenas, threads, what=what, end_part=events.end_part)
        secs = time.perf_counter() - begin
        if found.fetch is not None:
            self.usage = {"storage": total_of(one.counts for one in estimates)}
            report_fetched(events, snapshot, len(found.decision.sources), self.usage["storage"], secs)
        elif not found.is_verified:
            ages = chain.from_iterable(one.ages for one in estimates)
            report_verified(events, snapshot.iteration, secs, ages, plans[0].ages)
        return plans[0], traffic

    def close(self) -> None:
        """Unmap the arenas and release the hold on storage."""
        self._context.arenas.close()
        self._catalog.close()

    def _report(self, decision: Decision, traffic: Traffic, secs: float) -> None:
        iteration, layouts = decision.snapshot.iteration, dict[str, str]()
        topology, events = self._context.topology, self._context.events
        if not decision.ranks:
            before, now = layout_name(decision.layout), layout_name(topology.layout)
            if before == now:  # they differ in something that the name does not show
                now = f"another ({', '.join(layouts_differ(topology.layout, decision.layout))})"
            layouts = {"from": before, "to": now}
            events.announce(f"iteration {iteration} reshaped from {before} to {now} in {secs:.1f} s")
        events.emit("loaded", iteration=iteration, secs=secs, **asdict(traffic), **layouts)


def _remedy(loaded: LoadedCheckpoint) -> str:
    if loaded.is_one:
        return f"Resume from iteration {loaded.iteration}, as loaded from storage, with --ftckpt-on-lost storage"
    return (
        "Nothing was loaded from storage to resume from: let the script load a checkpoint, or start from the "
        "beginning with --ftckpt-on-lost fresh"
    )


def _derive(pieces: Sequence[Piece], read: set[int]) -> frozenset[str]:
    """Compute the derived pieces that were not ``read`` from their masters; returns their names."""
    derived = [piece for piece in pieces if piece.derived_from is not None and id(piece) not in read]
    for piece in derived:
        assert piece.derived_from is not None
        cast_master(piece.derived_from, piece.tensor)
    return frozenset(piece.fragment.name for piece in derived)
