"""The steps of a restart: inventory → decide → verify → repair → invalidate newer snapshots → plan → load. If nothing
must be repaired, bytes may be verified while they are loaded; newer snapshots are then invalidated last."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ftckpt.errors import ArenaError, ConfigError, LostError, StorageError
from ftckpt.events import Events
from ftckpt.group import Group, gather_all, gather_bytes, together
from ftckpt.memory.lineage_file import read_lineage
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
    is_doubtful,
    lineage_after,
    rollback_reason,
)
from ftckpt.model.snapshot import SnapshotId
from ftckpt.model.text import listed
from ftckpt.model.topology import Topology, layouts_differ
from ftckpt.model.training_state import Description, Piece, TrainingState, cast_master
from ftckpt.persist import commit, retention
from ftckpt.restore.decide import Decision
from ftckpt.restore.direct_read import ReadEstimate, SlotAge, fits
from ftckpt.restore.invalidate import adopt, void
from ftckpt.restore.inventory import Inventory
from ftckpt.restore.load import Traffic, Transfer, execute
from ftckpt.restore.locations import OpenArenas
from ftckpt.restore.repair import Usage
from ftckpt.restore.search import PendingLoad, Search, pass_over, tell_verified
from ftckpt.restore.selected_slots import Needs, SelectedSlots
from ftckpt.restore.storage_catalog import NO_SHELF, CatalogSurvey, StorageCatalog, ask
from ftckpt.restore.survey import SurveyResult, look
from ftckpt.restore.threads import threads_of

_LINEAGE_BYTES = 16
_MOST_NAMED = 8

_Brought = tuple[Needs, Traffic, Callable[[], bytes]]


class _Start(NamedTuple):
    """Inputs of one start, see ``Restart.choose``; the same on all ranks.

    ``new``: the requests to fulfil. ``asked``: all explicit requests of this start. ``selection``: the snapshots that
    may be restored, under its lineage; ``shelf``: those of them on storage. ``reports``: the inventory of all ranks,
    None if arenas were changed since.
    """

    seen: SurveyResult
    new: Request
    asked: tuple[str, ...]
    selection: Selection
    shelf: StorageCatalog
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


class Restart:
    """One restart: ``choose``, ``void_newer``, ``load`` unless ``choose`` gave None, ``record_lineage``, ``close``;
    in this order, and collective but for ``close``."""

    def __init__(
        self, group: Group, topology: Topology, node_dir: Path, events: Events, *, storage: str = "", slots: int = 2,
        job: str = "",
    ) -> None:  # fmt: skip
        self._group = group
        self._topology = topology
        self._node_dir = node_dir
        self._events = events
        self._arenas = OpenArenas(node_dir)
        self._storage, self._slots, self._job = storage, slots, job
        self._shelf = NO_SHELF
        self._start: _Start  # from ``choose`` on
        self._chosen: SelectedSlots | None = None  # the slots of the decision; set by ``void_newer``
        self._coming: PendingLoad | None = None  # the unverified load of the decision
        self.in_memory = True
        """Whether the loaded snapshot is in memory, too; set by ``load``."""
        self._decide: Callable[[], Decision | None] | None = None  # the next decision if the pending load is bad
        self._is_touched = False  # whether the pending load may have written to the live state
        self.on_storage = -1
        """The newest iteration on storage up to the one that training resumes from, -1 for none; set by ``load``, or
        by ``choose`` if it returns None."""
        self._abandons = False  # whether storage has newer snapshots than the one that training resumes from
        self.lineage = UNKNOWN
        """The lineage of the snapshots that will be taken; set as ``on_storage``."""
        self.why = ""
        """The reason why training does not resume from memory; empty if it does, or if memory has no snapshot."""
        self.cast: frozenset[str] = frozenset()
        """Names of this rank's fragments that ``load`` has computed from their masters."""
        self.usage: Usage = {}
        """Chunks and bytes that all ranks reconstructed or fetched, by source (``source`` of ``parity.modes.TRAITS``,
        or ``storage``). Empty if everything was read from slots."""

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
        lineage = partial(read_lineage, self._node_dir)
        shelf_look = CatalogSurvey(self._group, self._storage, self._events, request, lineage=lineage)
        seen = look(self._group, self._topology, self._arenas, shelf_look, loaded)
        self._shelf = seen.shelf
        reports = None if self._adopt_head(seen) else seen.reports
        new = self._requests_since(request, seen)
        selection = self._selected(new, seen)
        start = self._start = _Start(
            seen, new, seen.loaded.requests(request, seen.head), selection, seen.shelf.selected(selection),
            on_lost, unproven, reports,
        )  # fmt: skip
        reason = rollback_reason(seen.loaded, seen.head) if new == NO_REQUEST or seen.loaded.named else ""
        whole, decision = seen.whole(seen.head), None
        # Abandoned snapshots are not searched: they need be neither complete nor in this layout.
        if reason and whole >= 0:
            self.why = f"{reason}; memory ({whole}) is abandoned"
            self._events.emit("rolled_back", iteration=seen.loaded.iteration, newest=whole, reason=reason)
        elif not reason:
            decision = self._newest(start)
        if decision is None and not reason and new.name:
            because = f": {self.why}" if self.why else ", it is incomplete"
            raise LostError(
                f"--ftckpt-restore-from {new.name}: cannot be restored{because}; name another one that 'ftckpt list' "
                "shows, or none, to resume from the newest"
            )
        if decision is None and not reason and start.needs_snapshot:
            _refuse_doubtful(seen)
        if new != NO_REQUEST:
            self._record_request(start, decision)
        if decision is None:
            self.resume(None)
        return decision

    def _adopt_head(self, seen: SurveyResult) -> bool:
        """Invalidate snapshots of abandoned branches, of a node that was away or was killed before it recorded the
        head, before anything is reconstructed; returns whether a node may have some."""
        if all(one.lineage == seen.head for one in seen.memory if one.lineage.branches):
            return False

        def adopt_here() -> None:
            if self._topology.is_node_leader and (arenas := adopt(self._node_dir, seen.head, seen.head)):
                reason = f"this node has snapshots of an abandoned branch, in {listed(arenas)}"
                self._events.emit("rolled_back", iteration=seen.head.branches[-1].iteration, reason=reason)

        together(self._group, adopt_here)
        return True

    def _requests_since(self, request: Request, seen: SurveyResult) -> Request:
        """The requests that this start has to fulfil; a rollback is ignored if there is no snapshot at all."""
        loaded, new = seen.loaded, request.since(seen.head)
        if loaded.in_training:  # the start before training fulfilled them
            return NO_REQUEST
        if new.texts != request.texts:
            done = ", ".join(f"--ftckpt-{text}" for text in request.texts if text not in new.texts)
            self._events.announce(
                f"{done}: an earlier start did that, and this one resumes; to repeat it, start once without it"
            )
        if new.name and _named(new.name, seen) is None:
            raise StorageError(
                f"--ftckpt-restore-from {new.name}: neither {self._storage or 'storage'} nor memory has a checkpoint "
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

    def _selected(self, new: Request, seen: SurveyResult) -> Selection:
        """The snapshots that may be restored, and the lineage that this start branches."""
        if new.name and (named := _named(new.name, seen)) is not None:
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

    def _record_request(self, start: _Start, decision: Decision | None) -> None:
        """Record the branch on storage before anything in memory is invalidated: it must survive loss of memory."""
        seen, asked = start.seen, ", ".join(f"--ftckpt-{text}" for text in start.new.texts)
        if decision is None and start.needs_snapshot:
            raise LostError(_nothing_before(start.new.before, seen))
        if self._storage and self._shelf.storage is None:
            raise StorageError(f"{asked}: storage cannot record the branch: {self._shelf.problem}", lasting=True)
        iteration = decision.snapshot.iteration if decision is not None else max(0, seen.loaded.iteration)
        if start.new.before and decision is not None:
            # At the restored iteration, not at the requested one: iterations in between belong to the new branch.
            branched = replace(start.selection, head=seen.head.branch(iteration))
            start = self._start = start._replace(selection=branched)
        self._claim(replace(start.selection.head, requests=start.asked))
        text = f"{asked}: resumes from iteration {iteration}"
        if seen.newest_there <= iteration:
            self._events.announce(f"{text}; there are no newer snapshots")
            return
        self._events.emit("rolled_back", iteration=iteration, newest=seen.newest_there, reason=asked)
        self._events.announce(f"{text}; newer snapshots are abandoned, not deleted")

    def _claim(self, lineage: Lineage) -> None:
        """Record ``lineage`` as the head on storage. Collective."""

        def claim() -> None:
            storage = self._shelf.storage
            if storage is None or self._group.rank != 0:
                return
            ask(lambda: commit.claim(storage, self._group.name, self._job, time.time(), lineage))
            if self._shelf.reader:  # the claim removes all holds, this one too
                ask(lambda: retention.hold(storage, self._shelf.reader))

        together(self._group, claim)

    def _newest(self, start: _Start) -> Decision | None:
        """The newest snapshot in memory or on storage; None if the loaded checkpoint is newer."""
        in_memory, is_requested = start.seen.newest(start.selection.head), start.new != NO_REQUEST
        if not is_requested and 0 <= max(in_memory, start.shelf.newest) < start.loaded.iteration:
            self._give_up_older(in_memory, start.loaded)
            decision = None
        else:
            decision = self._search(start)
        if decision is None and not is_requested:
            start.shelf.require_seen()
        return decision

    def _search(self, start: _Start) -> Decision | None:
        # A pending load may turn out bad after it has overwritten some of the live state. So there is none if the job
        # could continue with that state.
        overlaps = start.new == NO_REQUEST and start.needs_snapshot
        search = Search(
            self._group, self._topology, self._events, self._arenas, shelf=start.shelf,
            slots=self._slots, selection=start.selection, overlaps=overlaps, unproven=overlaps and start.unproven,
            reports=start.reports,
        )  # fmt: skip
        return self._found(search, search.run, start)

    def _found(self, search: Search, run: Callable[[], Decision | None], start: _Start) -> Decision | None:
        """The decision of a search; sets the alternative for a pending load that turns out bad."""
        on_lost, loaded, shelf = start.on_lost, start.loaded, start.shelf
        try:
            decision = run()
        except LostError as error:
            shelf.require_seen()
            if start.new.name:  # regardless of ``on_lost``: newer snapshots were not lost
                self.why = str(error)
                return None
            if on_lost == "fail" or (on_lost == "storage" and not loaded.is_one):
                raise LostError(f"{error}. {_remedy(loaded)}") from None
            self._events.emit("lost", error=str(error), loaded=max(0, loaded.iteration))
            self.why = f"snapshots were lost: {error}"
            return None
        if decision is not None and decision.snapshot.iteration < loaded.iteration and start.selection.only is None:
            self._give_up_older(decision.snapshot.iteration, loaded)
            return None
        self.usage, self._coming = search.usage, search.coming
        if decision is not None and search.coming is not None:
            if search.coming.slots is None:
                self._decide = lambda: self._found(search, search.settle, start)
            else:
                left = start._replace(shelf=shelf.without(decision.snapshot), reports=None)
                self._decide = lambda: self._search(left)
        return decision

    def _give_up_older(self, in_memory: int, loaded: LoadedCheckpoint) -> None:
        self._events.emit("memory_older_than_storage", in_memory=in_memory, loaded=loaded.iteration)
        self.why = f"memory ({in_memory}) is older and abandoned"

    @property
    def source(self) -> str:
        """``memory``, or the sources that lost shards came from, joined by ``+``."""
        return "+".join(sorted(self.usage)) or "memory"

    def written_by(self, decision: Decision) -> str:
        """The job whose run wrote the shards that came from storage; empty if none did."""
        there = (one.job for one in self._start.shelf.snapshots if one.snapshot == decision.snapshot)
        return next(there, "") if "storage" in self.usage else ""

    def void_newer(self, decision: Decision | None) -> bytes:
        """Invalidate all snapshots newer than ``decision`` (all, if None); returns the id of new snapshots.

        All nodes do so before any rank trains: otherwise new snapshots and rolled-back ones of the same iteration
        could be combined after the next failure. If the load is still pending, ``load`` does it after the last byte:
        should the snapshot turn out bad, a later start may have the nodes that newer ones lack. Afterwards all ranks
        know the contents of the selected slots.
        """
        chosen = self._chosen = SelectedSlots(
            self._group, self._topology, self._events, self._arenas, coming=self._coming, decision=decision
        )

        def answer() -> bytes:
            if self._coming is None:
                self._void_node(decision)
            return os.urandom(_LINEAGE_BYTES) + chosen.describe()

        # All ranks use rank 0's. The gather ends after every node has invalidated.
        answers = gather_bytes(self._group, answer)
        chosen.join([one[_LINEAGE_BYTES:] for one in answers])
        return answers[0][:_LINEAGE_BYTES]

    def _void_node(self, decision: Decision | None) -> None:
        if self._topology.is_node_leader:
            # -1 is below every iteration: a job that starts over invalidates everything.
            void(self._node_dir, decision.snapshot.iteration if decision is not None else -1)

    def load(self, decision: Decision, state: TrainingState, described: Description) -> Decision:
        """Restore tensors and objects of every rank to the snapshot's step boundary; returns the decision loaded.

        That is another one if a pending load turns out bad: an older snapshot, or the same one reconstructed. In
        another layout tensors are equal element by element, and ``state`` converts the objects as far as possible.

        Raises:
            MismatchError: the snapshot is of another model, or replicas of a tensor differ in it.
            LostError, MemoryBudgetError, ArenaError: as ``choose``, for the replacement of a bad snapshot.
        """
        try:
            while True:
                try:
                    loaded = self._load(decision, state, described)
                    self.resume(loaded.snapshot.iteration)
                    return loaded
                except (StorageError, ArenaError) as error:
                    if self._decide is None:
                        raise
                    if isinstance(error, StorageError):
                        pass_over(self._events, decision.snapshot, error)
                finally:
                    self._end_coming()
                decision = self._decided_anew()
        except LostError as error:
            error.touched = self._is_touched
            raise

    def resume(self, iteration: int | None) -> None:
        """Set the lineage of new snapshots, for training that resumes from ``iteration`` (None: from no snapshot)."""
        start = self._start
        there = [one.snapshot.iteration for one in start.shelf.snapshots]
        self.on_storage = max((one for one in there if iteration is None or one <= iteration), default=-1)
        self._abandons = any(iteration is None or one > iteration for one in there)
        self.lineage = lineage_after(
            start.selection.head, start.loaded, iteration, max(there, default=-1), start.asked
        )

    def record_lineage(self) -> None:
        """Record the lineage of new snapshots on all nodes, and on storage if that has abandoned ones.

        Called before any rank trains, after ``load`` or a ``choose`` that returned None.

        Raises:
            ArenaError: a node cannot write it.
            StorageError: storage cannot.
        """
        seen, lineage, leads = self._start.seen, self.lineage, self._topology.is_node_leader
        head, nodes = seen.head, {member.node for member in self._topology.members}
        is_same = (lineage.branches, lineage.requests, lineage.found) == (head.branches, head.requests, head.found)
        if is_same and seen.nodes_know(len(nodes)):
            return
        if lineage != self._start.selection.head and self._abandons:
            # Storage first: nodes killed before they record the lineage adopt it from there. If nothing on storage is
            # abandoned, the claim during training is early enough.
            self._claim(lineage)
        together(self._group, lambda: adopt(self._node_dir, lineage, head) if leads else None)

    def _decided_anew(self) -> Decision:
        """The decision that replaces the pending load."""
        decide, self._decide = self._decide, None
        assert decide is not None, "set with a pending load"
        decision = decide()
        assert decision is not None, "this search returns a decision, or raises"
        self.void_newer(decision)
        return decision

    def _load(self, decision: Decision, state: TrainingState, described: Description) -> Decision:
        begin, coming, chosen = time.perf_counter(), self._coming, self._chosen
        assert chosen is not None, "set by void_newer"
        pieces = [*described.stepped, *described.volatile]
        brought = None
        if not decision.ranks:
            chosen.require_all_taken(pieces)
        if coming is not None:
            brought = self._bring_straight(coming, chosen, decision, pieces, described.padded)
        if coming is not None and brought is None:
            # A new ``load``: the replacement may be pending as well, and turn out bad in its turn.
            return self.load(self._without_straight(coming, decision), state, described)
        self.in_memory = coming is None or coming.slots is None
        needs, traffic, encoded = brought or self._bring(chosen, pieces, described.padded)
        # Only now: a derived weight is the cast of a master that the transfers have just filled.
        self.cast = _derive(pieces, {id(piece) for piece, _ in needs})
        if not decision.ranks:
            chosen.check_copies([need for _, need in needs])
        # In another layout no rank has this rank's objects: the first rank of each stage represents its stage.
        firsts = [] if decision.ranks else chosen.first_objects()

        def finish() -> None:
            if decision.ranks:
                state.load_objects(objects.decode(encoded()))
            else:
                state.load_reshaped([objects.decode(one) for one in firsts], decision.snapshot.iteration)
            if self._coming is not None:  # see ``void_newer``
                self._void_node(decision)

        together(self._group, finish)
        # Last: it sets RNG, and the steps before may draw random numbers.
        state.finish_load()
        self._events.end_part("objects")
        self._report(decision, traffic, time.perf_counter() - begin)
        return decision

    def _bring_straight(
        self,
        coming: PendingLoad,
        chosen: SelectedSlots,
        decision: Decision,
        pieces: Sequence[Piece],
        padded: frozenset[str],
    ) -> _Brought | None:
        """Read as ``_bring``, but verify each chunk while it is read; None if ranks would read too much more than
        once, or shards on other nodes."""
        straight, shard, begin = coming.straight, self._topology.me.shard, time.perf_counter()
        needs: Needs = []
        states: dict[str, SlotAge] = {}

        def plan() -> ReadEstimate:
            own = chosen.own
            needs[:], planned = chosen.plan(pieces, padded)
            states.update(coming.states())
            reading = straight.plan(planned)._replace(states=tuple(states.values()))
            # A rank may read no tensor from its own shard, but reads its objects from it.
            far = coming.slots is None and own is not None and own.at.node != self._topology.me.node
            return reading._replace(near=reading.near and not far)

        readings = gather_all(self._group, plan, ReadEstimate)
        if not fits(readings):
            return None
        self._is_touched = True
        self._events.end_part("plan")
        traffic, iteration = straight.bring(self._events.end_part), decision.snapshot.iteration
        if coming.slots is not None:
            straight.reader.tell(self._events, iteration, len(straight.places))
        else:
            every, secs = chain.from_iterable(one.states for one in readings), time.perf_counter() - begin
            tell_verified(self._events, iteration, secs, every, states)
        return needs, traffic, lambda: straight.objects(shard)

    def _without_straight(self, coming: PendingLoad, decision: Decision) -> Decision:
        """The decision if a direct read does not fit: shards are fetched to slots, or verified in their slots."""
        self._end_coming()
        if coming.slots is None:
            return self._decided_anew()
        decision = replace(decision, sources=coming.slots.run())
        self.usage = {"storage": coming.slots.usage}
        self.void_newer(decision)
        return decision

    def _bring(self, chosen: SelectedSlots, pieces: Sequence[Piece], padded: frozenset[str]) -> _Brought:
        """Read all pieces; returns the needs, the traffic, and the encoded objects of the shard that this rank
        continues."""
        needs: Needs = []
        encoded, transfers = chosen.own_objects()

        def plan() -> list[Transfer]:
            # Each rank plans only its own reads, from contents that all have gathered.
            needs[:], planned = chosen.plan(pieces, padded)
            return [*planned, *transfers]

        traffic = execute(self._group, plan, self._arenas, threads_of(self._topology))
        self._events.end_part("read")
        return needs, traffic, lambda: encoded.numpy().tobytes()

    def _end_coming(self) -> None:
        if self._coming is not None:
            self._coming.straight.close()
        self._coming = None

    def capacities(self) -> list[int] | None:
        """The weights of the ranks' shares in bytes, by rank of this job; None if shares are equal.

        They are the snapshot's weights, so that ``assign`` cuts replica sets as in the existing arenas, or measured
        ones if its shares were equal. None in another layout, where no rank continues a shard.
        """
        rooms = self._chosen.capacities if self._chosen is not None else []
        known = [room for room in rooms if room is not None]
        return known if len(known) == len(self._topology.members) and any(known) else None

    def close(self) -> None:
        """Unmap the arenas and release the hold on storage."""
        self._end_coming()
        self._arenas.close()
        self._shelf.close()

    def _report(self, decision: Decision, traffic: Traffic, secs: float) -> None:
        iteration, layouts = decision.snapshot.iteration, dict[str, str]()
        if not decision.ranks:
            before, now = layout_name(decision.layout), layout_name(self._topology.layout)
            if before == now:  # they differ in something that the name does not show
                now = f"another ({', '.join(layouts_differ(self._topology.layout, decision.layout))})"
            layouts = {"from": before, "to": now}
            self._events.announce(f"iteration {iteration} reshaped from {before} to {now} in {secs:.1f} s")
        self._events.emit("loaded", iteration=iteration, secs=secs, **asdict(traffic), **layouts)


def _named(name: str, seen: SurveyResult) -> tuple[SnapshotId, Lineage] | None:
    """The snapshot of that name and its lineage, on storage or else in memory; None if neither has it."""
    if (stored := seen.shelf.named) is not None:
        return stored.snapshot, stored.lineage
    there = {snapshot: lineage for snapshot, lineage in seen.in_memory.items() if _name(snapshot) == name}
    newest = max(there, default=None)
    return (newest, there[newest]) if newest is not None else None


def _refuse_doubtful(seen: SurveyResult) -> None:
    """Raises LostError if only doubtful snapshots exist."""
    doubtful = {_name(one) for one, of in seen.in_memory.items() if is_doubtful(of, one.iteration, seen.head)}
    doubtful |= {
        one.name for one in seen.shelf.snapshots if is_doubtful(one.lineage, one.snapshot.iteration, seen.head)
    }
    if doubtful:
        raise LostError(
            f"only doubtful snapshots exist ({listed(sorted(doubtful), _MOST_NAMED)}), which may mix states of "
            "replicas that differed: restore one with --ftckpt-restore-from NAME, or start from the beginning with "
            "--ftckpt-on-lost fresh"
        )


def _nothing_before(limit: int, seen: SurveyResult) -> str:
    """The error text for a rollback to before iteration ``limit`` if no snapshot is older."""
    iterations = {one.iteration for one in [*seen.in_memory, *(one.snapshot for one in seen.shelf.snapshots)]}
    names = listed([str(one) for one in sorted(iterations)], _MOST_NAMED)
    have = f", which have iterations {names}" if names else ""
    return (
        f"--ftckpt-rollback-before: no snapshot before iteration {limit} is complete in memory or on storage{have}; "
        "name a later iteration, or start from the beginning with --ftckpt-on-lost fresh"
    )


def _name(snapshot: SnapshotId) -> str:
    return str(commit.CheckpointName(snapshot.iteration))


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
