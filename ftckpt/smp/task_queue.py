"""Scheduler of an SMP's work in small steps: checksums of sealed slots, parity of the target, scrubbing, flushes.

The path of a snapshot: ``checksum`` checks its sealed slots, trainers mark it as the target, ``encode`` makes this
node's part of its protection, and once all nodes have done that, trainers mark it as protected.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError, SmpError, in_words
from ftckpt.events import Events
from ftckpt.idle_cores import has_idle_core
from ftckpt.memory.arena import Arena
from ftckpt.memory.control_block import ControlBlock
from ftckpt.memory.heartbeat import FlushState, Heartbeat
from ftckpt.model.flush_interval import mtbf_secs
from ftckpt.model.snapshot import SnapshotId
from ftckpt.smp.arenas import MonitoredArenas
from ftckpt.smp.channel import Channel, Deadlines, Trust
from ftckpt.smp.checksum import Checker
from ftckpt.smp.chunk_source import Service, Sources
from ftckpt.smp.cpu_throttle import CoreShare, core_secs
from ftckpt.smp.encode import Encoder, ProtectionPart
from ftckpt.smp.flush import FlushOrders
from ftckpt.smp.flush_queue import FlushQueue
from ftckpt.smp.footprint import allow_packages
from ftckpt.smp.link import NetworkLimit, TransferForecast
from ftckpt.smp.peers import Peers
from ftckpt.smp.scrub import SCRUB_SECS, Scrubber
from ftckpt.smp.traffic import TrafficMonitor
from ftckpt.smp.work import Task, Tasks, Throttle
from ftckpt.units import rate

NETWORK_PHASES = frozenset({"tail", "fence", "optimizer"})
"""Phases of training that need the network, used while ``TrafficMonitor`` has no profile: gradients are reduced from
the last backward on, and parameters are gathered after the optimizer."""
_SCAN_SECS = 0.02
"""Interval between scans for seals and targets, which read the control block of each arena."""
_PAUSE_SECS = 1.0
"""After a failed check or scrub: an immediate failure would repeat at once."""
_MAX_REPORTED = 200
_THREADS, _THREAD_BYTES = 4, 64 << 20
"""Maximum threads that hash one slot, and the minimum bytes for each: hashing less takes less time than starting a
thread."""
_PATIENCE = 0.5
"""Share of the trainers' protection timeout after which the SMP stops retrying a node that keeps failing."""
_NO_WORK: Mapping[str, Any] = {"node": "", "scrub_secs": 0.0}
"""The description before the first one."""


@dataclass(frozen=True)
class _Workers:
    """The objects that work on one description."""

    pace: Throttle
    share: CoreShare
    checker: Checker
    encoder: Encoder
    scrubber: Scrubber
    forecast: TransferForecast
    traffic: TrafficMonitor

    def refused(self, snapshot: SnapshotId) -> str:
        """An arena whose slot of ``snapshot`` does not match its checksums; "" if none is known."""
        return self.checker.refused(snapshot) or self.scrubber.refused(snapshot)


class Target(NamedTuple):
    """The snapshot that trainers want to be protected next, and why this node cannot, if it cannot."""

    snapshot: SnapshotId | None = None
    problem: str = ""

    @property
    def cannot(self) -> SnapshotId | None:
        """The snapshot, if this node cannot protect it."""
        return self.snapshot if self.problem else None


class TaskQueue:
    """All work of one node's SMP. ``configure`` it, then call ``step`` repeatedly, then ``close``.

    One thread calls all methods; only ``service`` is for other threads. Flushes run in threads of their own.

    Args:
        node_dir: directory of the node's arenas.
        deadlines: of requests to other nodes.
    """

    def __init__(self, node_dir: Path, events: Events, deadlines: Deadlines | None = None) -> None:
        self.trains = True
        """Whether a process trains on this node, as the daemon has seen last."""
        self.arenas = MonitoredArenas(node_dir)
        self.flushes = FlushQueue(self.arenas, events, self._new_flush_pace)
        self._events = events
        self._peers = Peers(deadlines)
        self._pulse = Heartbeat.open(node_dir, None)
        self._description: dict[str, Any] | None = None
        self._target = Target()
        self._tasks = Tasks()
        self._next_scan = 0.0
        self._reported: set[str] = set()
        self._workers = self._new_workers(_NO_WORK)
        self.service = Service(self.arenas, self._workers.pace)

    @property
    def cannot(self) -> SnapshotId | None:
        """The target that this node cannot protect; None while it can, or without a target."""
        return self._target.cannot

    @property
    def busy(self) -> bool:
        """Whether a task is active, even if it waits."""
        return self._tasks.active

    @property
    def open_arenas(self) -> dict[str, Arena]:
        """The open arenas by the names of their directories."""
        return {arena.name: arena.mapped for arena in self.arenas.all}

    @property
    def traffic(self) -> TrafficMonitor:
        """The monitor of the node's network."""
        return self._workers.traffic

    @property
    def trust(self) -> Trust:
        """The credentials of this SMP towards those of other nodes."""
        return self._peers.trust

    def configure(self, description: Mapping[str, Any]) -> None:
        """Apply a description; work for another one is cancelled. Must be fast: a trainer waits for the answer.

        Raises:
            SmpError: the description lacks something or contradicts itself.
            ConfigError: the secret is too short.
        """
        given = dict(description)
        # A restart may have repaired corrupt slots.
        self._workers.checker.forget()
        self._workers.scrubber.forget()
        self.flushes.resume()
        if given == self._description:
            if self.cannot is not None:  # retry
                self._target = Target()
            return
        try:
            arenas = [str(place["arena"]) for place in given["places"].values()]
            (addresses, trust), orders = _peers_of(given), FlushOrders.from_json(given)
            workers = self._new_workers(given)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            text = f"configure: the description is unusable: {type(error).__name__}: {error}"
            raise SmpError(text) from None
        if addresses or trust.secret:
            self._peers.configure(addresses, trust)
        self._cancel()
        self._description = given
        self.flushes.configure(orders)
        self._workers.traffic.stop()
        self._workers, self.service.pace = workers, workers.pace
        self.arenas.want(arenas)
        self._refresh()
        # An earlier SMP, or this one for other groups, marked them: the target's parts are verified and used again.
        self._workers.encoder.revoke_all()

    def step(self, deadline: float) -> bool:
        """Work until ``deadline`` (``time.monotonic``) or until idle; returns whether anything was done."""
        worked = False
        while (now := time.monotonic()) < deadline:
            if now >= self._next_scan:
                self._next_scan = now + _SCAN_SECS
                self.scan()
            if (task := self._tasks.next()) is None:
                break
            if (wait_secs := task.wait_secs) > 0:
                time.sleep(min(wait_secs, max(0.0, deadline - time.monotonic())))
            else:
                self._run(task)
                worked = True
        return worked

    def status(self) -> dict[str, Any]:
        """The state of all work, as JSON values."""
        workers, (snapshot, problem) = self._workers, self._target
        state = "idle" if self._description is None else "cannot" if problem else "working"
        flushed, flush_state = self.flushes.current
        part, sources = workers.encoder.part, workers.encoder.sources
        return {
            "state": state,
            "protects": bool(part.groups or part.mirror_from),
            "target": _named(snapshot),
            "cannot": {**(_named(snapshot) or {}), "reason": problem} if problem else None,
            "encoding": self._tasks.encode.active,
            "checked": workers.checker.checked,
            "flushing": _named(flushed if flush_state is not FlushState.DONE else None),
            "storage": self.flushes.status,
            "network": {**asdict(workers.forecast.limit), "wait_secs": round(workers.forecast.wait_secs, 3)},
            "idle_cores": round(workers.share.idle, 3),
            "rest_secs": round(max(0.0, workers.share.due_secs - time.monotonic()), 3),
            "received_bytes": sources.received_bytes,
            "sent_bytes": self.service.sent_bytes,
            "failing": dict(sources.failing),
            "problems": dict(self.arenas.problems),
        }

    def close(self) -> None:
        """Cancel all work and unmap everything; ``service`` must not be used afterwards."""
        self._cancel()
        self._workers.traffic.stop()
        self.flushes.close()
        self._peers.close()
        self.arenas.close()

    def scan(self) -> None:
        """Detect replaced arenas, a new target or flush, and unchecked seals, and start their tasks."""
        if self.arenas.changed:
            self._cancel()
            self._refresh()
        target = self.arenas.common_mark(ControlBlock.target)
        if target != self._target.snapshot:
            self._start_encoding(target)
        self.flushes.want(self.arenas.common_mark(ControlBlock.flush))
        # In this order: the checker forgets a corrupt slot whose file was replaced.
        self._start_check(self._target.snapshot)
        self._drop_refused(self._target.snapshot)
        # Scrubbing is not urgent: it never delays work that trainers wait for.
        if not self.busy and self._workers.scrubber.due:
            self._tasks.scrub.start(self._workers.scrubber.run())

    def _start_encoding(self, target: SnapshotId | None) -> None:
        # Trainers wait for the new target, and may overwrite slots of the old one.
        self._tasks.encode.stop()
        self._target = Target(target)
        if target is not None:
            self._workers.forecast.begin(self._workers.encoder.sources.received_bytes)
            self._tasks.encode.start(self._workers.encoder.encode(target))

    def _drop_refused(self, target: SnapshotId | None) -> None:
        """Give up a target with a corrupt slot at once, not after the timeout for other nodes: trainers can then
        choose another one."""
        if target is not None and self._tasks.encode.active and (refused := self._workers.refused(target)):
            self._tasks.encode.stop()
            self._give_up(target, f"{refused}: the snapshot does not match its checksums")

    def _start_check(self, target: SnapshotId | None) -> None:
        if not self._tasks.check.active and (needed := self._needs_checksums(target)) is not None:
            work = self._workers.checker.next(target, needed)
            if work is not None:
                self._tasks.check.start(work)

    def _needs_checksums(self, target: SnapshotId | None) -> Callable[[SnapshotId], bool] | None:
        """A predicate for the snapshots whose checksums are needed; None: none are. While ranks train, most snapshots
        are overwritten unread."""
        named = (target, self.flushes.current[0])
        is_final = self.flushes.is_final
        if self.trains and not is_final:
            return named.__contains__ if any(named) else None
        # A restart or a save may choose any snapshot that is not older than the newest committed one: ranks end at
        # different boundaries, and other nodes may lack this one's newest.
        committed = self.arenas.oldest_mark(ControlBlock.whole)
        oldest = -1 if committed is None or is_final else committed.iteration
        return lambda snapshot: snapshot in named or snapshot.iteration >= oldest

    def _run(self, task: Task) -> None:
        tasks, workers = self._tasks, self._workers
        try:
            try:
                task.run_step()
            finally:
                workers.share.note()
            if not task.active:
                self._next_scan = 0.0  # there may be more work at once
        except (FtckptError, OSError, ValueError) as error:  # ValueError: a file was closed meanwhile
            self._failed(task, error)
        except Exception as error:  # trainers wait for the target: they must see that it cannot be protected
            if task is not tasks.encode:
                raise
            self._failed(task, error)
        finally:
            # Only after steps of encoding: checks in between must not delay the next target.
            if task is tasks.encode:
                self._pulse.tell_rest(workers.share.due_secs)
                workers.forecast.note(workers.encoder.sources.received_bytes, time.monotonic())
                self._pulse.tell_wait(workers.forecast.wait_secs)
        if task is tasks.scrub:
            if self._target.snapshot in workers.scrubber.lost:
                self._target = Target()  # encode it again
            workers.scrubber.lost.clear()

    def _failed(self, task: Task, error: Exception) -> None:
        if any(arena.vanished for arena in self.arenas.all):
            return  # the work was in vain; the next refresh reports it
        reason, target = in_words(error), self._target.snapshot
        if task is self._tasks.encode and target is not None:
            self._give_up(target, reason)
            return
        self._next_scan = time.monotonic() + _PAUSE_SECS
        self._report_once(reason)

    def _give_up(self, target: SnapshotId, reason: str) -> None:
        self._target = Target(target, reason)
        self._events.emit("not_covered", iteration=target.iteration, reason=reason)

    def _report_once(self, problem: str, **fields: Any) -> None:
        """Report each problem once, although every attempt may hit it; the record is cleared when full."""
        if problem not in self._reported:
            if len(self._reported) >= _MAX_REPORTED:
                self._reported.clear()
            self._reported.add(problem)
            self._events.emit("smp_error", error=problem, **fields)

    def _cancel(self) -> None:
        """Cancel all tasks and forget the target, so that it is encoded again."""
        self._tasks.stop()
        self._target = Target()

    def _refresh(self) -> None:
        self.arenas.refresh()
        for name, problem in self.arenas.problems.items():
            self._report_once(problem, arena=name)
        images = [arena.mapped.image for arena in self.arenas.all]
        own_bytes = [image.volatile.nbytes + image.objects.nbytes for image in images]
        encoder = self._workers.encoder
        allow_packages(max([*own_bytes, *(each.most_bytes for each in encoder.part.mirror_from)], default=0))
        encoder.revoke_incomplete()

    def _new_workers(self, given: Mapping[str, Any]) -> _Workers:
        settings, events = dict(given.get("settings", {})), self._events
        limit = NetworkLimit(**given.get("network", {"bytes_per_sec": 0.0, "source": "none is named"}))
        mtbf = mtbf_secs(str(settings.get("mtbf", "auto")), max(1, len(given.get("nodes", ()))))
        forecast = TransferForecast(int(given.get("received_bytes", 0)), limit, mtbf)
        share = _new_share(settings)
        # One throttle for both directions: sent data is read from this node's memory and uses the same link.
        pace = Throttle(
            lambda: self._pulse.ranks_copy() or not has_idle_core(),
            self._network_in_use,
            rate(settings.get("smp_rate", "0")),
            limit.bytes_per_sec,
            has_room=self._has_room,
        )
        patience_secs = _PATIENCE * float(settings.get("protect_timeout_secs", 60.0))
        node = str(given["node"])
        sources = Sources(node, self.arenas, self._peers, pace, events=events, patience_secs=patience_secs)
        encoder = Encoder(sources, ProtectionPart.from_json(given), events)
        scrubber = Scrubber(encoder, events, float(given.get("scrub_secs", SCRUB_SECS)))

        def threads(nbytes: int) -> int:
            return share.threads(min(_THREADS, nbytes // _THREAD_BYTES))

        checker = Checker(self.arenas, pace, events, threads)
        # Last: it starts a thread.
        monitor = TrafficMonitor(str(given.get("address", "")), self._pulse.began_secs, lambda: Channel.moved_bytes)
        return _Workers(pace, share, checker, encoder, scrubber, forecast, monitor)

    def _new_flush_pace(self, bytes_per_sec: float) -> Throttle:
        return Throttle(self._pulse.ranks_copy, self._network_in_use, bytes_per_sec, has_room=self._has_room)

    def _has_room(self, need_secs: float) -> bool | None:
        # Looks the monitor up at each call: a flush outlives the one that it started with.
        return self._workers.traffic.has_room(need_secs)

    def _network_in_use(self) -> bool:
        # ``lives`` is None for a rank of another container, which may be training.
        return any(rank.phase in NETWORK_PHASES and rank.lives is not False for rank in self._pulse.ranks())


def _peers_of(given: Mapping[str, Any]) -> tuple[dict[str, tuple[str, int]], Trust]:
    """The addresses of other nodes, and the credentials towards them. Raises ConfigError if the secret is short."""
    addresses = {str(name): (str(at[0]), int(at[1])) for name, at in given.get("peers", {}).items()}
    addresses.pop(given["node"], None)
    trust = Trust(bytes.fromhex(given.get("secret") or ""), bool(given.get("settings", {}).get("encrypt")))
    return addresses, trust.checked() if addresses or trust.secret else trust


def _new_share(settings: Mapping[str, Any]) -> CoreShare:
    """The limit on this process's use of its cores; none if ``protect_interval`` is a number."""
    share = float(settings.get("smp_cores", 0.0)) if settings.get("protect_interval") == "auto" else 0.0
    cores = os.sched_getaffinity(0)
    return CoreShare(share * len(cores), lambda: core_secs(cores))


def _named(snapshot: SnapshotId | None) -> dict[str, Any] | None:
    return None if snapshot is None else snapshot.fields
