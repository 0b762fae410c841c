"""Executes one rank's snapshots at fences and boundaries, as ``ftckpt.session.session`` decides."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ftckpt.capture.boundary import LastBoundary
from ftckpt.capture.capture import Capture
from ftckpt.errors import CaptureError, FtckptError, SilentCorruptionError, StorageError
from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import HeartbeatGauge
from ftckpt.memory.lineage_file import mark_doubtful
from ftckpt.model.snapshot import SnapshotId
from ftckpt.notice import Notice
from ftckpt.schedule.window_scheduler import WindowScheduler
from ftckpt.session import deadlines
from ftckpt.session.actions import (
    Action,
    Announcement,
    CommitMark,
    Disable,
    Divergence,
    IntervalConclusion,
    OldArenaRemoval,
    SkipSnapshot,
    TakeSnapshot,
    UpdateTargets,
)
from ftckpt.session.rank_context import RankContext
from ftckpt.session.shard import Shard, corruption_text
from ftckpt.session.vote import Readiness, TaskState, Vote

_LOOK_SECS = 0.01
"""Pause between the first two polls of the SMP's state, doubled by each: a long pipeline has hundreds of phases."""

NO_REASON = "timed out, and no SMP reported a reason"


class SnapshotDriver:
    """One rank's snapshots, once its state is loaded. Only the training thread calls its methods.

    Args:
        shard: must be laid out.
        kept: keeps the state of each boundary, if the job flushes its final snapshot.
    """

    def __init__(
        self, rank: RankContext, shard: Shard, scheduler: WindowScheduler, kept: LastBoundary | None
    ) -> None:
        self._rank, self._state = rank, rank.state
        self.shard, self.scheduler, self.kept = shard, scheduler, kept
        self._last_fenced = 0  # the number of the last snapshot whose copies were awaited
        self._flush_error: StorageError | None = None  # all ranks raise it at the next boundary with a snapshot
        self._flush_posted = -1  # the last iteration for which this rank has posted why its flush failed
        self._look_again_secs, self._pause_secs = 0.0, _LOOK_SECS
        self.begun = -1
        """The iteration of the last snapshot that this rank started; -1: none."""
        self._num_begun = 0

    @property
    def capture(self) -> Capture | None:
        """The copier of this rank's shard into its arena; None if no arena could be allocated."""
        return self.shard.capture

    @property
    def arena(self) -> Arena | None:
        """The arena of this rank's snapshots; None as ``capture``."""
        return self.capture.arena if self.capture is not None else None

    def begin(self, lineage: bytes, restored: SnapshotId | None, in_memory: bool, rebuilt: bool = False) -> None:
        """Start: snapshots have ``lineage``, training resumes from ``restored``, parts of which may have been
        reconstructed (``rebuilt``)."""
        self._state.begin(lineage, restored, time.monotonic(), in_memory)
        self._state.replicas.lay_out(self.shard.positions, restored.iteration if restored is not None else -1)
        self._state.adopt(*self._rank.protection.survey(restored, rebuilt))
        self._mark_arrangement()

    def require_calls(self) -> None:
        """Stop snapshots if the optimizer step is captured into a graph: its replays write without a fence."""
        if self.capture is not None and self.capture.in_graph:
            self.execute(self._state.give_up("the optimizer step is captured into a graph; step outside of it"))

    def fence(self) -> None:
        """Wait for the copies of the last snapshot, once, and post this rank's vote if it is known by then."""
        begin, waits = time.perf_counter(), self._last_fenced != self._state.interval.number
        # The vote even if the copies failed: the other ranks must learn of it.
        for action in (self._wait_for_copies, self._vote) if waits else (self._vote,):
            try:
                action()
            except Exception as error:  # noqa: BLE001 - promise 4: training continues whatever a snapshot does
                self.fail(error)
        if waits:
            self._rank.numbers.fenced(secs := time.perf_counter() - begin)
            self._rank.events.emit("fence", blocked_secs=secs)

    def post_if_known(self) -> None:
        """Post this rank's vote before the fence, if the fence could not add to it. Polls with growing pauses."""
        state = self._state
        if not (state.owes_vote or state.waits) or self.capture is None or not self.capture.sealed:
            return
        if (now_secs := time.monotonic()) < self._look_again_secs:
            return
        self._look_again_secs, self._pause_secs = now_secs + self._pause_secs, 2 * self._pause_secs
        try:
            if state.waits:
                self._read()
            if not state.owes_vote:
                return
            vote = self._current_vote()
            # WORKING may become DONE by the fence: posted now, all ranks would learn that a step later.
            if vote.cover != TaskState.WORKING:
                self._send(vote)
        except Exception as error:  # noqa: BLE001 - promise 4: training continues whatever a snapshot does
            self.fail(error)

    def boundary(self, iteration: int, begin: float, has_stepped: bool) -> None:
        """Take the snapshot of ``iteration`` if one is due and all ranks take it. ``begin``: when this boundary
        started, by ``time.perf_counter``. ``has_stepped``: optimizer-updated state of this rank may have changed
        since the start.

        Raises:
            SilentCorruptionError: on all ranks, under ``on_corruption: abort``.
            Exception: this rank's error; pass it to ``fail``.
        """
        if self.capture is not None:
            self.capture.at_boundary()
        if self._state.off:  # since the fence of this step
            return
        self._look_again_secs, self._pause_secs = 0.0, _LOOK_SECS
        if self._state.boundary(iteration):
            self._snapshot(iteration, begin, has_stepped)
        else:
            if self._state.unread:
                self._read()
            self._vote()
            self.scheduler.learn()

    def settle(self, wait_secs: float) -> None:
        """Wait at most ``wait_secs`` for the copies of the last fenced snapshot."""
        try:
            if self.capture is not None:
                self.capture.poll(deadlines.FENCE_SECS, wait_secs)
        except Exception as error:  # noqa: BLE001 - the votes of the other ranks must still be read
            self.fail(error)

    def release(self) -> None:
        """Release references to training state, once ftckpt is off and no proof follows."""
        if self.shard.release():
            self.kept = None
            self.scheduler.close()

    def close(self) -> None:
        """Stop copies; call it before their arena is closed."""
        self.kept = None
        if self.capture is not None:
            self.capture.close()
        self.scheduler.close()

    def take(self, decision: TakeSnapshot, room: Sequence[int] | None = None) -> int:
        """Start the snapshot; returns the slot. ``room``: the prepared slots of this boundary."""
        capture = self.capture
        assert capture is not None
        base = self.scheduler.begin(capture.stepped_bytes, capture.unit_bytes)
        objects = self._rank.training_state.save_objects() if self.kept is None else {}
        slot = capture.begin(decision.snapshot, decision.keep, objects, base, kept=self.kept, slots=room)
        self.scheduler.follow(capture.flight, decision.snapshot.iteration)
        if self._rank.config.schedule == "sync":
            # Sealed when ``step`` returns: a job that ends right after it has this snapshot.
            capture.settle(deadlines.FENCE_SECS)
        return slot

    def execute(self, actions: Iterable[Action]) -> None:
        """Execute all actions, then raise the first error: none is repeated, and a later one may turn ftckpt off."""
        failure: Exception | None = None
        for action in actions:
            try:
                self._perform(action)
            except Exception as error:  # noqa: BLE001 - raised below
                failure = failure or error
        if failure is not None:
            raise failure

    def fail(self, error: Exception) -> None:
        """Count a failed snapshot; past a limit in a row ftckpt turns off. Raises under ``on_error: raise``."""
        self._rank.numbers.failed(self._state.interval.number)
        if self._rank.links.broken:
            self._disconnect(error)
        else:
            self.execute(self._state.fail(repr(error)))
        if self._rank.config.on_error == "raise":
            raise error

    def _snapshot(self, iteration: int, begin: float, has_stepped: bool) -> None:
        """Take the snapshot of ``iteration`` if all ranks do."""
        problem: Exception | None = None
        try:
            self._agree()
        except Exception as error:  # noqa: BLE001 - raised below
            problem = error
        # Collective: every rank must enter a proof that is due, whatever it has read and whatever failed here.
        if self._state.proof_due and not self._rank.links.agreement.broken:
            self._prove(iteration, has_stepped)
        self.scheduler.learn()
        if problem is not None:
            raise problem
        capture = self.capture
        room = capture.writable(self._state.keep) if capture is not None else []
        prepared = capture.prepared(room) if capture is not None else []
        obstacle = ""
        if capture is not None and not prepared and (room or capture.lacks_slots):
            obstacle = "slots are still being pinned" if room else "slots are still being allocated"
        decision = self._state.take(iteration, has_room=bool(room), obstacle=obstacle)
        if isinstance(decision, SkipSnapshot):
            self._rank.numbers.counts[HeartbeatGauge.SKIPPED] += 1
            self._rank.events.emit("skipped", iteration=iteration, reason=decision.reason)
        elif decision is not None and capture is not None:
            slot = self.take(decision, prepared)
            self.begun, self._num_begun = iteration, self._num_begun + 1
            self._rank.numbers.took(capture.stepped_bytes)
            self._rank.events.emit(
                "snapshot", iteration=iteration, slot=slot, blocked_secs=time.perf_counter() - begin
            )
        # For a skipped snapshot, too, but not once replicas are known to differ.
        if decision is not None and not self._state.objection:
            self.shard.sample(self._state.interval.number)

    def _agree(self) -> None:
        """Read all vote results. Only here does a rank wait for the others: it needs a slot.

        Raises:
            AgreementError, CaptureError: the other ranks are unreachable, or did not answer in time.
        """
        self.settle(deadlines.EARLIER_SECS)
        self._post(now=True)
        deadline = time.monotonic() + deadlines.VOTE_SECS
        while True:
            results = self._rank.links.agreement.read(deadline - time.monotonic())
            if results is None:
                self._state.miss()
                raise CaptureError(f"other ranks did not answer within {deadlines.VOTE_SECS:g} s")
            self.execute(self._state.learn(results, time.monotonic()))
            if not self._state.owes_vote:  # a result may call for another vote
                break
            self._post(now=True)
        self.execute(self._state.agree())
        self.shard.complete(self._state.keep)
        failure, self._flush_error = self._flush_error, None
        if failure is not None:
            raise failure

    def _vote(self) -> None:
        """Post the votes that this rank owes, as far as they are known; never waits."""
        if self._state.waits:
            self._read()
        self._post()

    def _read(self) -> None:
        """Apply the vote results that have arrived."""
        if results := self._rank.links.agreement.read_complete():
            self.execute(self._state.learn(results, time.monotonic()))

    def _post(self, now: bool = False) -> None:
        """Post every vote that this rank owes: once its copies are sealed, or ``now`` if the others wait.

        Unfinished copies change no count of votes: this vote names the snapshot sealed before them and skips the next
        one, a later vote names theirs.
        """
        while self._state.owes_vote:
            if not now and self.capture is not None and self.capture.flying:
                return
            problem: Exception | None = None
            try:
                vote = self._current_vote()
            except Exception as error:  # noqa: BLE001 - reported below; first the vote that the others need
                vote, problem = self._state.empty_vote(), error
            self._send(vote)
            if problem is not None:
                self.fail(problem)

    def _send(self, vote: Vote) -> None:
        sample = self.shard.sampled(vote.number) if vote.due else ()
        self._rank.links.agreement.post(vote, *sample)  # if it raises, the vote is still owed
        self._state.posted(vote)

    def _current_vote(self) -> Vote:
        capture, state, protection = self.capture, self._state, self._rank.protection
        newest, will = None, Readiness.OFF
        if capture is not None:
            newest, will = capture.newest, Readiness.GO if capture.is_ready(state.keep) else Readiness.SKIP
        vote = state.vote_to_post(
            newest, will, self.scheduler.intervals.request, protection.observe(state.targets.target),
            time.monotonic(), flush=protection.observe_flush(state.flushes.current),
        )  # fmt: skip
        if vote.flush >= 0 and vote.flushed == TaskState.CANNOT:
            self._post_flush_problem(vote.flush)
        return vote

    def _post_flush_problem(self, iteration: int) -> None:
        """Post why this node cannot flush ``iteration``, for the error that all ranks raise: before the vote that
        says so, as ranks read its result at different times and wait for nobody."""
        if self._rank.config.on_error == "raise" and self._flush_posted != iteration:
            self._flush_posted = iteration
            if cause := self._rank.protection.smp.flush_problem():
                self._flush_notice(iteration).post(cause)

    def _flush_notice(self, iteration: int) -> Notice:
        return Notice(f"{self._rank.group.name}/not-persisted/{iteration}")

    def _prove(self, iteration: int, has_stepped: bool) -> None:
        """Check that replicas and derived state are still as assumed; if not, all ranks rebuild their arenas."""
        state, shard = self._state, self.shard
        late = state.late or (shard.capture is not None and shard.capture.busy)
        try:
            proof = shard.prove(late, has_stepped, state.committed)
        except FtckptError as error:
            self.execute([*state.replicas.mistrust(), state.turn_off(f"no new arena: {error}")])
            return
        trusted, doubts = state.replicas.trusted, state.replicas.mistrust() if proof.parted else []
        state.proved(proof.stepped, proof.changed, proof.new_arenas)
        try:
            self.execute(doubts)
        except Exception as error:  # noqa: BLE001 - the other ranks continue with the proof
            self.fail(error)
        if proof.ends:
            raise SilentCorruptionError(corruption_text(self._rank.topology, proof, iteration, trusted))
        if proof.new_arenas:
            state.replicas.lay_out(shard.positions, iteration)
            self.protect_new_arena()
            shard.supply()
            shard.complete(state.keep)  # until a slot exists, only the old arena has the committed snapshot

    def protect_new_arena(self) -> None:
        """Set up protection for rebuilt arenas; if that fails, training continues without protection. Collective."""
        if self.arena is not None:
            arenas = self._rank.arenas
            try:
                self._rank.protection.arrange(self.arena, arenas.coming_bytes, arenas.slots)
            except FtckptError as error:
                self._rank.events.emit("not_protected", error=str(error))
                self.execute(self._state.not_protected())
            else:
                self._mark_arrangement()

    def _mark_arrangement(self) -> None:
        """Mark the targets in the current arena. If no mode remains (no replica set spans nodes), protection stops: a
        snapshot without parity must never be called protected."""
        if self._rank.protection.protects:
            self._rank.protection.mark(self._state.marks)
        else:
            self.execute(self._state.not_protected())

    def _wait_for_copies(self) -> None:
        if self.capture is not None:
            self.capture.fence(deadlines.FENCE_SECS)
        self._last_fenced = self._state.interval.number  # after success: a failed wait is repeated

    def _disconnect(self, error: Exception) -> None:
        """Turn off after the connections to other ranks broke: no vote, and so no commit, is possible."""
        self._rank.links.give_up(str(error))
        if not self._state.off:
            self.execute([self._state.turn_off(f"the connections to other ranks broke: {error}")])

    def _perform(self, action: Action) -> None:
        rank = self._rank
        match action:
            case CommitMark(snapshot):
                if self.arena is not None:
                    self.arena.control.mark_whole(snapshot)
                rank.attempt.progress()
            case UpdateTargets():
                rank.protection.mark(action)
            case OldArenaRemoval():
                rank.arenas.remove_old()
            case Divergence(after, until):
                rank.events.emit("replicas_drift", after=after, until=until)
                if rank.topology.is_node_leader:
                    rank.protection.smp.claim_storage(mark_doubtful(rank.arenas.path, after, until))
            case IntervalConclusion(interval):
                rank.arenas.entry.keep_interval(interval)
            case Announcement(event, fields, text):
                rank.events.emit(event, **fields)
                if text:
                    rank.events.announce(text)
                if action.error and rank.config.on_error == "raise":
                    problem = self._flush_notice(fields["iteration"]).read() or NO_REASON
                    self._flush_error = StorageError(f"{action.error}: {problem}", lasting=True)
            case Disable(reason):
                rank.events.emit("turned_off", reason=reason)
                if self.capture is not None:
                    self.capture.stop()
