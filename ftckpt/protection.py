"""Protection as a rank drives it: its modes and groups at start, the SMP of its node, what it tells at boundaries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftckpt.arena.checks import CheckState
from ftckpt.arena.pulse import Pulse
from ftckpt.arena.segment import Arena
from ftckpt.capture.capture import Capture
from ftckpt.capture.sections import Redundancy
from ftckpt.capture.targets import SnapshotId, Targets
from ftckpt.comm import Agreement, Group, Told, together
from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.events import Events
from ftckpt.layout.topology import Topology
from ftckpt.node_smp import NodeSmp
from ftckpt.protect.groups import Modes, mirrors, node_groups, peer_groups, slot_groups
from ftckpt.protect.holding import Holding
from ftckpt.protect.modes import possible_modes, resolve_modes
from ftckpt.protect.room import Room, room_for
from ftckpt.protect.table import Report, report
from ftckpt.smp.address import machine

_SMP_SILENT_SECS = 10.0
"""An SMP that gave no sign of life for so long guards nothing."""

_PAUSES = 2
"""After a target that took too long, this many times that wait pass before another is waited for."""

_LEAST_SLOTS = 3

_NONE = (bytes(16), -1)
"""What marks say of no snapshot."""


class Protection:
    """One rank's part. Construction, ``lay_out`` and ``close`` are collective.

    Nothing but ``__init__`` and ``lay_out`` raises: where protection fails, snapshots are not protected, an event
    says so, and training goes on.
    """

    def __init__(self, config: Config, topology: Topology, group: Group, events: Events) -> None:
        self._config = config
        self._topology = topology
        self._group = group
        self._events = events
        told = [json.loads(data) for data in group.gather(json.dumps([config.rack, machine()]).encode())]
        self._racks = [rack for rack, _ in told]
        self.smp = NodeSmp(config, topology, group, events, [where for _, where in told])
        nodes = [member.node for member in topology.members]
        self._left_out: set[str] = set()
        self.modes = together(group, lambda: self._resolve(spans_nodes=len(set(nodes)) > 1))
        together(group, self._check_slots)
        self.redundancy = Redundancy(self.modes.replica, tuple(nodes), tuple(self._racks))
        self.targets = Targets(b"", 0)
        self._arena: Arena | None = None
        self._pulse: Pulse | None = None
        self._digest = 0
        self._since = self._patient_at = 0.0
        self._degraded = False
        self._fresh_at: float | None = None

    @property
    def on(self) -> bool:
        """Whether anything is protected, and each node has an SMP."""
        return bool(self.modes.names)

    @property
    def slots(self) -> int:
        """How many slots an arena has."""
        needed = 2 if not self.on else 3 if self._config.protect_interval == 1 else 4
        return self._config.slots or needed

    @property
    def smp_alive(self) -> bool:
        """Whether this node's SMP gave a sign of life lately."""
        return self._pulse is not None and self._pulse.smp_alive(_SMP_SILENT_SECS)

    def enter(self, node_dir: Path) -> None:
        """The node's directory belongs to this attempt. Collective; raises as ``NodeSmp.enter``."""
        self.smp.enter(node_dir, guarded=self.on)

    def begin(self, lineage: bytes, restored: SnapshotId | None) -> None:
        """Training goes on from ``restored``."""
        self.targets = Targets(lineage, self._config.protect_interval if self.on else 0)
        self.targets.begin(restored)
        self._since = time.monotonic()

    def lay_out(self, capture: Capture | None, node_dir: Path, anew: bool = False) -> None:
        """Know what all ranks hold now: groups, memory, the SMP of this node and those of others.

        ``anew``: the arenas hold other shares than before, so that nothing in them is protected yet, and what goes
        wrong now leaves snapshots unprotected.

        Raises:
            MemoryBudgetError: the node has no room for parity and packages.
            ConfigError: modes, groups, secret or address that cannot work; all on all ranks together.
        """
        self._fresh_at = None
        if capture is None or not self.on:
            return
        self._arena = capture.arena
        if not anew:
            self._look_back(capture.arena)
            self._lay_out(capture.arena, node_dir)
            return
        self.targets.forget()
        try:
            self._lay_out(capture.arena, node_dir)
        except FtckptError as error:
            self._events.emit("not_protected", error=str(error))
            self.targets.stop()
            self._mark()

    def _look_back(self, arena: Arena) -> None:
        """Take over what was protected before this start, if all ranks hold it. Collective.

        What was restored is a target only where it lies in these arenas, not in those of another layout.
        """
        mark = arena.control.protected()
        records = [arena.control.record(slot) for slot in range(arena.control.slots)]
        held = [[record.lineage.hex(), record.iteration] for record in records if record.sealed]
        mine = [[mark[0].hex(), mark[1]] if mark is not None else None, held]
        told = [json.loads(data) for data in self._group.gather(json.dumps(mine).encode())]
        targets, marks = self.targets, {tuple(named) for named, _ in told if named is not None}
        targets.protected = None
        for lineage, iteration in marks if len(marks) == 1 else ():
            if all([lineage, iteration] in theirs for _, theirs in told):
                targets.protected = bytes.fromhex(lineage), iteration
        restored = targets.target
        if restored is not None and not all([restored[0].hex(), restored[1]] in theirs for _, theirs in told):
            targets.target = None

    def supersedes(self, whole: SnapshotId | None) -> bool:
        """Whether older arenas can go; asked at each boundary with the snapshot that became whole there, if any.

        One in the arenas as they are laid out now must be as safe: protected, unless that fails or takes too long.
        """
        now = time.monotonic()
        if whole is not None and self._fresh_at is None:
            self._fresh_at = now
        if self._fresh_at is None:
            return False
        late = now - self._fresh_at > self._config.protect_timeout_secs
        return not self.on or self.targets.protected is not None or self._degraded or late

    def _lay_out(self, arena: Arena, node_dir: Path) -> None:
        me, leads = self._topology.me, self._topology.is_node_leader
        place = self._topology.ranks_on(me.node).index(self._topology.rank)
        if self._pulse is None:
            self._pulse = Pulse.open(node_dir, place, self._topology.rank)
            if leads:
                self._pulse.forget_others(len(self._topology.ranks_on(me.node)))
        mine = Holding.of(arena.image, me.node, self._config.rack, arena.path.name)
        holdings = [Holding.from_json(json.loads(d)) for d in self._group.gather(json.dumps(mine.to_json()).encode())]
        in_slots = slot_groups(holdings)
        self.modes = together(self._group, lambda: self._resolve(spans_nodes=bool(in_slots)))
        groups = node_groups(holdings) if self.modes.node else []
        groups += peer_groups(holdings, self.modes)

        def check() -> None:
            kept = mirrors(holdings, self.modes)
            told = report(holdings, [*groups, *in_slots], kept, self.slots)
            self._tell(told)
            need = told.smp_bytes(me.node)
            found = room_for(node_dir, me.node, need, holdings=holdings, groups=groups, kept=kept, slots=self.slots)
            self._check_memory(node_dir, found)

        together(self._group, check if leads else lambda: None)
        self._digest = self.smp.configure(node_dir, holdings, groups, self._packages(holdings))
        self._mark()

    def _check_slots(self) -> None:
        if self.on and self.slots < _LEAST_SLOTS:
            raise ConfigError(
                f"slots: {self.slots} are too few with protection ({', '.join(self.modes.names)}): one is protected, "
                f"one is being protected, one is written; use {_LEAST_SLOTS} or more, or 0"
            )

    def _resolve(self, spans_nodes: bool) -> Modes:
        """Where layouts are listed the job may have fewer nodes than ``protect`` was written for: it goes on."""
        config, members = self._config, self._topology.members
        places = [(member.shard, member.node, rack) for member, rack in zip(members, self._racks, strict=True)]
        code, losses, group = config.peer_code, config.peer_losses, config.peer_group
        peer: dict[str, Any] = {"peer_code": code, "peer_losses": losses, "peer_group": group}
        if not config.layouts:
            return resolve_modes(config.protect, places, spans_nodes, **peer)
        modes, left_out = possible_modes(config.protect, places, spans_nodes, **peer)
        for reason in left_out:
            if reason not in self._left_out:
                self._left_out.add(reason)
                self._events.emit("protection_lessened", reason=reason)
        return modes

    def _packages(self, holdings: list[Holding]) -> dict[str, list[str]]:
        """Of each other node the shards whose packages this node keeps."""
        wanted: dict[str, list[str]] = {}
        for shard, (home, *others) in mirrors(holdings, self.modes).items():
            if self._topology.me.node in others:
                wanted.setdefault(home, []).append(shard)
        return wanted

    def _tell(self, told: Report) -> None:
        self._events.emit("protection", modes=self.modes.names, **told.to_json())
        self._events.tell(f"protection: {', '.join(self.modes.names)}")
        for line in told.lines():
            self._events.tell(line)

    def _check_memory(self, node_dir: Path, room: Room) -> None:
        waits = room.check(node_dir, self.modes.names)
        if waits:
            self._events.emit("protection_waits", need_bytes=room.now_bytes, reason=waits)
            self._events.tell("no room for parity beside old snapshots: it waits until those have gone")

    def beat(self, iteration: int, phase: str) -> None:
        """Training is in ``phase`` of ``iteration``: who looks for hangs sees it. Takes microseconds."""
        if self._pulse is not None:
            self._pulse.beat(iteration, phase)

    def say(self) -> tuple[int, int]:
        """The target's iteration and whether this node has done its part for it, as ``Agreement.post`` takes them."""
        target = self.targets.target
        if not self.on:
            return -1, Agreement.DONE
        try:
            if target is None:  # none is chosen while a node could not protect it
                return -1, Agreement.DONE if self._ready() else Agreement.CANNOT
            return target[1], self._cover(target)
        except Exception as error:  # noqa: BLE001 - promise 4: training goes on whatever protection does
            self._events.emit("smp_error", error=repr(error))
            return target[1] if target is not None else -1, Agreement.CANNOT

    def _ready(self) -> bool:
        """Whether this node has an SMP that knows what to guard, and was not too slow just now."""
        alive = self._pulse is not None and self.smp_alive and self._pulse.smp_guards(self._digest)
        return alive and time.monotonic() >= self._patient_at

    def _cover(self, target: SnapshotId) -> int:
        pulse, now, state = self._pulse, time.monotonic(), self._state_of(target)
        if pulse is None or state is None or not pulse.smp_guards(self._digest):
            return Agreement.CANNOT
        if state == CheckState.COVERED:
            return Agreement.DONE
        if not self._ready() or pulse.smp_cannot(target[1]):
            return Agreement.CANNOT
        if now - self._since > self._config.protect_timeout_secs:
            self._patient_at = now + _PAUSES * self._config.protect_timeout_secs
            return Agreement.CANNOT
        return Agreement.WORKING

    def _state_of(self, target: SnapshotId) -> CheckState | None:
        """What the SMP did to the target's slot; None where this rank's arena does not hold the target."""
        arena = self._arena
        if arena is None:
            return None
        for slot in range(arena.control.slots):
            record = arena.control.record(slot)
            if record.sealed and (record.lineage, record.iteration) == target:
                check = arena.check(slot)
                return CheckState.NONE if check is None else check.state
        return None

    def hear(self, told: Iterable[Told]) -> None:
        """Take in what all ranks said."""
        before = self.targets.protected
        if not self.targets.hear(told):
            return
        now = time.monotonic()
        if self.targets.protected != before and self.targets.protected is not None:
            iteration = self.targets.protected[1]
            self._events.emit("protected", iteration=iteration, secs=now - self._since, again=self._degraded)
            self._degraded, self._patient_at = False, 0.0
        for _, iteration in self.targets.given_up:
            if not self._degraded:
                kept = self.targets.protected[1] if self.targets.protected is not None else None
                self._events.emit("not_protected", iteration=iteration, protected=kept)
            self._degraded = True
        self.targets.given_up.clear()
        self._since = now
        self._mark()

    def close(self) -> None:
        """This rank trains no more; the SMP stays."""
        self.smp.release()
        if self._pulse is not None:
            self._pulse.leave()

    def _mark(self) -> None:
        """Tell the SMP what to protect, and readers of the arena what is."""
        if self._arena is not None:
            self._arena.control.mark_protected(*(self.targets.protected or _NONE))
            self._arena.control.mark_target(*(self.targets.target or _NONE))
