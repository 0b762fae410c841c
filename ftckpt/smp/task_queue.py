"""Scheduler of an SMP's work in small steps: checksums of sealed slots, parity of the target, scrubbing, flushes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ftckpt.errors import FtckptError, SmpError, in_words
from ftckpt.events import Events
from ftckpt.idle_cores import has_idle_core
from ftckpt.memory.arena import Arena
from ftckpt.memory.heartbeat import FlushState, Heartbeat
from ftckpt.model.flush_interval import mtbf_secs
from ftckpt.model.snapshot import SnapshotId
from ftckpt.persist.paths import Place
from ftckpt.smp.arenas import MonitoredArenas, common_mark, least_mark
from ftckpt.smp.channel import Channel, Deadlines, Trust
from ftckpt.smp.checksum import Checker
from ftckpt.smp.chunk_source import Service, Sources
from ftckpt.smp.cpu_throttle import CoreShare, core_secs
from ftckpt.smp.encode import EncodeTask, SnapshotEncoder, claims, uncover
from ftckpt.smp.final_flush import FinalFlush
from ftckpt.smp.flush import Flush, FlushOrders, Joinable
from ftckpt.smp.footprint import allow_packages
from ftckpt.smp.link import NetworkLimit, TransferForecast
from ftckpt.smp.peers import Peers
from ftckpt.smp.requests import PersistRequest
from ftckpt.smp.scrub import SCRUB_SECS, Scrubber
from ftckpt.smp.traffic import TrafficMonitor
from ftckpt.smp.work import Task, Throttle
from ftckpt.units import rate

NETWORK_PHASES = frozenset({"tail", "fence", "optimizer"})
"""Phases of training that need the network, used while ``TrafficMonitor`` has no profile: gradients are reduced from
the last backward on, and parameters are gathered after the optimizer."""
_LOOK_SECS = 0.02
"""Interval between scans for seals and targets, which read the control block of each arena."""
_PAUSE_SECS = 1.0
"""After a failed check or scrub: an immediate failure would repeat at once."""
_CLOSE_SECS = 2.0
"""For a flush to remove its partial files: whoever ends the SMP does not wait for storage."""
_MAX_REPORTED = 200
_THREADS, _THREAD_BYTES = 4, 64 << 20
"""Maximum threads that hash one slot, and the minimum bytes for each: hashing less takes less time than starting a
thread."""
_PATIENCE = 0.5
"""Share of the trainers' protection timeout after which the SMP stops retrying a node that keeps failing."""


class _Orders(NamedTuple):
    """The parsed description of a node's work, which trainers send."""

    node: str
    duty: EncodeTask
    flush: FlushOrders
    arenas: list[str]
    addresses: dict[str, tuple[str, int]]
    trust: Trust
    forecast: TransferForecast
    settings: dict[str, Any]


def _read(given: Mapping[str, Any]) -> _Orders:
    try:
        settings = dict(given.get("settings", {}))
        return _Orders(
            str(given["node"]),
            EncodeTask.from_json(given),
            FlushOrders.from_json(given),
            [str(place["arena"]) for place in given["places"].values()],
            {str(name): (str(at[0]), int(at[1])) for name, at in given.get("peers", {}).items()},
            Trust(bytes.fromhex(given.get("secret") or ""), bool(settings.get("encrypt"))),
            TransferForecast(
                int(given.get("received_bytes", 0)),
                NetworkLimit(**given.get("network", {"bytes_per_sec": 0.0, "source": "none is named"})),
                mtbf_secs(str(settings.get("mtbf", "auto")), max(1, len(given.get("nodes", ())))),
            ),
            settings,
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SmpError(f"configure: the description is unusable: {type(error).__name__}: {error}") from None


class TaskQueue:
    """All work of one node's SMP. ``configure`` it, then call ``step`` repeatedly, then ``close``.

    One thread calls all methods; only ``service`` is for other threads. Flushes run in threads of their own.

    Args:
        node_dir: directory of the node's arenas.
        deadlines: of requests to other nodes.
    """

    def __init__(self, node_dir: Path, events: Events, deadlines: Deadlines | None = None) -> None:
        self._events = events
        self._arenas = MonitoredArenas(node_dir)
        self._peers = Peers(deadlines)
        self._pulse = Heartbeat.open(node_dir, None)
        self._description: dict[str, Any] | None = None
        self._duty = EncodeTask()
        self._target: SnapshotId | None = None
        self._cannot: tuple[SnapshotId, str] | None = None
        self._next_look = 0.0
        self._reported: set[str] = set()
        self._turn = 0
        self._check, self._cover, self._proof, self._scrub = Task(), Task(), Task(), Task()
        # Snapshots that an earlier SMP, or this one for other groups, marked COVERED; the first is being verified.
        self._claims: list[SnapshotId] = []
        self._flush_orders = FlushOrders()
        self._flush: Flush | None = None
        self._final: FinalFlush | None = None
        # The last flush at each place; the next one there waits for its end. Another place may hang forever.
        self._last_at: dict[str, Joinable] = {}
        self._forecast = TransferForecast(0, NetworkLimit(0.0, "not configured"), 0.0)
        self._traffic = TrafficMonitor("", self._pulse.began_secs, int)
        self._pace = self._new_pace({})
        self._share = _new_share({})
        self.service = Service(self._arenas, self._pace)
        self._sources = Sources("", self._arenas, self._peers, self._pace, events=events, patience_secs=30.0)
        self._checker = Checker(self._arenas, self._pace, events, self._num_threads)
        self.trains = True
        """Whether a process trains on this node, as the daemon has seen last."""
        self._scrubber = Scrubber(self._sources, self._duty, events, 0.0)

    @property
    def cannot(self) -> SnapshotId | None:
        """The target that this node cannot protect; None while it can, or without a target."""
        return self._cannot[0] if self._cannot else None

    @property
    def busy(self) -> bool:
        """Whether a task is active, even if it waits."""
        return any(task.active for task in (self._check, self._cover, self._proof, self._scrub))

    @property
    def flushing(self) -> tuple[SnapshotId | None, FlushState]:
        """The snapshot to flush, and this node's progress."""
        flush = self._flush
        return (None, FlushState.NONE) if flush is None or flush.halted else (flush.snapshot, flush.state)

    @property
    def open_arenas(self) -> dict[str, Arena]:
        """The open arenas by the names of their directories."""
        return {arena.name: arena.mapped for arena in self._arenas.all}

    def marks(self) -> tuple[SnapshotId | None, SnapshotId | None]:
        """The newest committed and the newest protected snapshot, as marked in all arenas of this node."""
        controls = [arena.mapped.control for arena in self._arenas.all]
        return least_mark([one.whole() for one in controls]), least_mark([one.protected() for one in controls])

    @property
    def saving(self) -> bool:
        """Whether a final flush runs, which needs no ranks."""
        return self._final is not None and self._final.working

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
        self._checker.forget()
        self._scrubber.forget()
        if self._final is not None:  # the job trains again
            self._final.stop()
            self._final = None
        if given == self._description:
            if self._cannot is not None:  # retry the target
                self._target = self._cannot = None
            return
        node, duty, flush, arenas, addresses, trust, forecast, settings = _read(given)
        addresses.pop(node, None)
        if addresses or trust.secret:
            self._peers.configure(addresses, trust)
        self._abandon()
        if self._flush is not None and flush != self._flush_orders:
            # Restarted if still requested: its state belongs to the orders of an earlier attempt.
            self._flush.stop()
        self._description, self._duty, self._forecast, self._flush_orders = given, duty, forecast, flush
        self._traffic.stop()
        self._traffic = TrafficMonitor(
            str(given.get("address", "")), self._pulse.began_secs, lambda: Channel.moved_bytes
        )
        # One throttle for both: sent data is read from this node's memory and uses the same link.
        self._pace = self.service.pace = self._checker.pace = self._new_pace(settings)
        self._share = _new_share(settings)
        patience = _PATIENCE * float(settings.get("protect_timeout_secs", 60.0))
        self._sources = Sources(
            node, self._arenas, self._peers, self._pace, events=self._events, patience_secs=patience
        )
        self._scrubber = Scrubber(self._sources, duty, self._events, float(given.get("scrub_secs", SCRUB_SECS)))
        self._arenas.want(arenas)
        self._refresh()
        # Packages may have become corrupt since: each is verified before a claim counts again.
        self._claims = list(dict.fromkeys([*self._claims, *claims(self._sources)]))

    def persist(self, request: PersistRequest) -> dict[str, Any]:
        """Start flushing the newest snapshot without ranks, or only report the progress.

        Raises:
            SmpError: no save runs, the node is not configured, no place is named, or a save to another one runs.
        """
        if not request.anew:
            if self._final is None:
                raise SmpError("no save is running: the SMP that was asked for it has ended")
            return self._final.status
        orders = self._flush_orders
        if request.where:
            place = Place.of(request.where, request.form)
            orders = replace(orders, where=place.snapshots, exports=place.exports, keep=0)
        if self._description is None or not orders.where:
            raise SmpError("no storage is named: neither in the request nor by the job's --ftckpt-persist")
        if self._final is not None and self._final.working:
            if (self._final.orders.where, self._final.orders.exports) != (orders.where, orders.exports):
                raise SmpError(f"another save is running, to {self._final.orders.where}: wait for its end")
            return self._final.status  # a second request shares the save
        orders = replace(orders, timeout_secs=request.timeout_secs)
        if self._flush is not None:
            self._flush.stop()
        # Yields to nobody: no rank trains.
        pace = Throttle(bool, bool, orders.bytes_per_sec)
        self._final = self._last_at[orders.where] = FinalFlush(
            orders, self._arenas, pace, self._events, timeout_secs=request.timeout_secs,
            before=self._last_at.get(orders.where),
        )  # fmt: skip
        return self._final.status

    def step(self, deadline: float) -> bool:
        """Work until ``deadline`` (``time.monotonic``) or until idle; returns whether anything was done."""
        worked = False
        while (now := time.monotonic()) < deadline:
            if now >= self._next_look:
                self._next_look = now + _LOOK_SECS
                self._look()
            wait_secs = self._advance()
            if wait_secs is None:
                break
            if wait_secs > 0:
                time.sleep(min(wait_secs, max(0.0, deadline - time.monotonic())))
            else:
                worked = True
        return worked

    def status(self) -> dict[str, Any]:
        """The state of all work, as JSON values."""
        state = "idle" if self._description is None else "cannot" if self._cannot else "working"
        flushed, flush_state = self.flushing
        return {
            "state": state,
            "protects": bool(self._duty.groups or self._duty.mirror_from),
            "target": _named(self._target),
            "cannot": self._cannot and {**(_named(self._cannot[0]) or {}), "reason": self._cannot[1]},
            "covering": self._cover.active,
            "checked": self._checker.checked,
            "repaired": self._scrubber.repaired,
            "flushing": _named(flushed if flush_state is not FlushState.DONE else None),
            "storage": {
                "where": self._flush_orders.where,
                "at_end": self._flush_orders.at_end,
                "problem": self._flush.problem if self._flush is not None else "",
            },
            "network": {**asdict(self._forecast.limit), "wait_secs": round(self._forecast.wait_secs, 3)},
            "idle_cores": round(self._share.idle, 3),
            "rest_secs": round(max(0.0, self._share.due_secs - time.monotonic()), 3),
            "received_bytes": self._sources.received_bytes,
            "sent_bytes": self.service.sent_bytes,
            "failing": dict(self._sources.failing),
            "problems": dict(self._arenas.problems),
        }

    def close(self) -> None:
        """Cancel all work and unmap everything; ``service`` must not be used afterwards."""
        self._abandon()
        self._traffic.stop()
        for begun in (self._flush, self._final):
            if begun is not None:
                begun.stop()
        deadline = time.monotonic() + _CLOSE_SECS
        for last in self._last_at.values():
            last.join(max(0.0, deadline - time.monotonic()))
        self._peers.close()
        self._arenas.close()

    def _new_pace(self, settings: Mapping[str, Any]) -> Throttle:
        return Throttle(
            self._others_need_cores,
            self._network_in_use,
            rate(settings.get("smp_rate", "0")),
            self._forecast.limit.bytes_per_sec,
            has_room=self._has_room,
        )

    def _has_room(self, need_secs: float) -> bool | None:
        # Looks the monitor up at each call: a flush outlives the one that it started with.
        return self._traffic.has_room(need_secs)

    def _others_need_cores(self) -> bool:
        return self._pulse.ranks_copy() or not has_idle_core()

    def _network_in_use(self) -> bool:
        # ``lives`` is None for a rank of another container, which may be training.
        return any(rank.phase in NETWORK_PHASES and rank.lives is not False for rank in self._pulse.ranks())

    def _look(self) -> None:
        """Detect replaced arenas, a new target or flush, and unchecked seals, and start their work."""
        if self._arenas.changed:
            self._abandon()
            self._refresh()
        arenas = self._arenas.all
        target = common_mark([arena.mapped.control.target() for arena in arenas]) if self._arenas.complete else None
        if self._claims and not self._proof.active:
            self._claims.sort(key=lambda claim: claim != target)  # trainers wait for the target's
            self._proof.start(SnapshotEncoder(self._sources, self._duty, self._events, self._claims[0]).prove())
        # A claimed target is not encoded before its claim is verified or rejected.
        if target != self._target and target not in self._claims:
            # Trainers wait for the new target, and may overwrite slots of the old one.
            self._cover.stop()
            self._target, self._cannot = target, None
            if target is not None:
                self._forecast.begin(self._sources.received_bytes)
                self._cover.start(SnapshotEncoder(self._sources, self._duty, self._events, target).run())
        self._look_for_flush(
            common_mark([a.mapped.control.flush() for a in arenas]) if self._arenas.complete else None
        )
        refused = target is not None and (self._checker.refused(target) or self._scrubber.refused(target))
        # At once, not after the timeout for other nodes: trainers can then choose another target.
        if self._cover.active and target is not None and refused:
            self._cover.stop()
            self._give_up(target, f"{refused}: the snapshot does not match its checksums")
        if not self._check.active and (needed := self._needs_checksums()) is not None:
            work = self._checker.next(self._target, needed)
            if work is not None:
                self._check.start(work)
        # Scrubbing is not urgent: it never delays work that trainers wait for.
        if not self.busy and self._scrubber.due:
            self._scrub.start(self._scrubber.run())

    def _num_threads(self, nbytes: int) -> int:
        return self._share.threads(min(_THREADS, nbytes // _THREAD_BYTES))

    def _needs_checksums(self) -> Callable[[SnapshotId], bool] | None:
        """A predicate for the snapshots whose checksums are needed; None: none are. While ranks train, most snapshots
        are overwritten unread."""
        named = (self._target, self.flushing[0])
        if self.trains and self._final is None:
            return named.__contains__ if any(named) else None
        # A restart or a save may choose any snapshot that is not older than the newest committed one: ranks end at
        # different boundaries, and other nodes may lack this one's newest.
        whole, _ = self.marks()
        oldest = -1 if whole is None or self._final is not None else whole.iteration
        return lambda snapshot: snapshot in named or snapshot.iteration >= oldest

    def _look_for_flush(self, wanted: SnapshotId | None) -> None:
        if wanted == self.flushing[0] or self._final is not None:
            return
        if self._flush is not None:
            self._flush.stop()
        orders = self._flush_orders
        if wanted is not None and orders.where:
            pace = Throttle(
                self._pulse.ranks_copy, self._network_in_use, orders.bytes_per_sec, has_room=self._has_room
            )
            before = self._last_at.get(orders.where)
            self._flush = self._last_at[orders.where] = Flush(
                orders, self._arenas, pace, self._events, wanted, before=before
            )

    def _advance(self) -> float | None:
        """Do one piece of work; returns the seconds to wait, None if there is no work."""
        tasks = [self._check, self._cover, self._proof]
        self._turn = (self._turn + 1) % len(tasks)  # round robin: no task starves
        busy = [running for running in tasks[self._turn :] + tasks[: self._turn] if running.active]
        waits = []
        for running in busy or [self._scrub]:
            if not running.active:
                continue
            if running.wait_secs > 0:
                waits.append(running.wait_secs)
                continue
            self._run(running)
            return 0.0
        return min(waits) if waits else None

    def _run(self, running: Task) -> None:
        try:
            try:
                running.go_on()
            finally:
                self._share.note()
            if not running.active:
                self._next_look = 0.0  # there may be more work at once
        except (FtckptError, OSError, ValueError) as error:  # ValueError: a file was closed meanwhile
            self._failed(running, error)
        except Exception as error:  # trainers wait for the target: they must see that it cannot be protected
            if running is not self._cover:
                raise
            self._failed(running, error)
        finally:
            # Only after steps of encoding: checks in between must not delay the next target.
            if running is self._cover:
                self._pulse.tell_rest(self._share.due_secs)
                self._forecast.note(self._sources.received_bytes, time.monotonic())
                self._pulse.tell_wait(self._forecast.wait_secs)
            if running is self._proof and not running.active:
                self._claims.pop(0)
        if running is self._scrub:
            if self._target in self._scrubber.lost:
                self._target = None  # encode it again
            self._scrubber.lost.clear()

    def _failed(self, running: Task, error: Exception) -> None:
        if any(arena.vanished for arena in self._arenas.all):
            return  # the work was in vain; the next refresh reports it
        reason = in_words(error)
        if running is self._cover and self._target is not None:
            self._give_up(self._target, reason)
            return
        self._next_look = time.monotonic() + _PAUSE_SECS
        self._report_once(reason)

    def _give_up(self, target: SnapshotId, reason: str) -> None:
        self._cannot = (target, reason)
        self._events.emit("not_covered", iteration=target.iteration, reason=reason)

    def _report_once(self, problem: str, **fields: Any) -> None:
        """Report each problem once, although every attempt may hit it; the record is cleared when full."""
        if problem not in self._reported:
            if len(self._reported) >= _MAX_REPORTED:
                self._reported.clear()
            self._reported.add(problem)
            self._events.emit("smp_error", error=problem, **fields)

    def _abandon(self) -> None:
        """Cancel all tasks and forget the target, so that it is encoded again."""
        for running in (self._check, self._cover, self._proof, self._scrub):
            running.stop()
        self._target = self._cannot = None

    def _refresh(self) -> None:
        self._arenas.refresh()
        for name, problem in self._arenas.problems.items():
            self._report_once(problem, arena=name)
        images = [arena.mapped.image for arena in self._arenas.all]
        own_bytes = [image.volatile.nbytes + image.objects.nbytes for image in images]
        allow_packages(max([*own_bytes, *(each.most_bytes for each in self._duty.mirror_from)], default=0))
        uncover(self._sources, self._duty)


def _new_share(settings: Mapping[str, Any]) -> CoreShare:
    """The limit on this process's use of its cores; none if ``protect_interval`` is a number."""
    share = float(settings.get("smp_cores", 0.0)) if settings.get("protect_interval") == "auto" else 0.0
    cores = os.sched_getaffinity(0)
    return CoreShare(share * len(cores), lambda: core_secs(cores))


def _named(snapshot: SnapshotId | None) -> dict[str, Any] | None:
    return None if snapshot is None else snapshot.fields
