"""Events as JSON lines: actions of ftckpt, their times, and how long they blocked training."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.errors import written
from ftckpt.event_file import BackgroundEventFile, EventFile

log = logging.getLogger("ftckpt")


@dataclass(frozen=True, slots=True)
class EventKind:
    """One row of the table of events; ``fields`` maps names to a description or unit.

    ``loud`` events are also logged as warnings with their ``ADVICE``, even without a directory for event logs.
    """

    meaning: str
    fields: Mapping[str, str] = field(default_factory=dict)
    loud: bool = False


def _quiet(meaning: str, **fields: str) -> EventKind:
    return EventKind(meaning, fields)


def _loud(meaning: str, **fields: str) -> EventKind:
    return EventKind(meaning, fields, loud=True)


MAX_LOG_BYTES = 128 << 20
"""Maximum size of a process's event log, whose older half is deleted then: one or two weeks of a rank that takes a
snapshot every ten seconds."""

_ITERATION = "of the snapshot"
_COSTS = {
    "moved_bytes": "bytes copied, by kind of the concurrent span",
    "window_capacity_bytes": "expected capacity of the windows; null before they were measured",
    "stall_secs": "time the optimizer waited for unfinished copies",
    "fence_secs": "time in the fence",
    "secs": "length of the iteration",
}

EVENTS: dict[str, EventKind] = {
    # A rank's session.
    "joined": _quiet(
        "restore() started", job="name", node="name",
        launch="name of the launcher run; from one rank per node",
    ),
    "conditions": _quiet(
        "hardware and versions of a node", node="name", cpu="its name", cores="usable by this rank",
        memory_bytes="of the node", device="its name; cpu", versions="of modules that this rank has loaded",
    ),
    "environment": _quiet(
        "a property of this machine that can lose snapshots", name="of the finding", text="what it means",
        remedy="what to do",
    ),
    "plan": _quiet(
        "the copy plan of this rank", copied_bytes="per snapshot",
        derived_bytes="not copied, cast from masters at restore",
    ),
    "protection": _quiet(
        "the protection of the job's snapshots", modes="active",
        failures="kinds of loss: cases, survived, an example",
        memory_per_node="bytes of the fullest node", network_bytes="per protected snapshot: of a node, of the job",
    ),
    "protection_lessened": _loud(
        "a mode protects nothing on the remaining nodes, or exceeds --ftckpt-memory-limit", reason="why"
    ),
    "protection_waits": _loud(
        "the node has no room for parity and packages: protection waits for it",
        need_bytes="of parity, packages and slots", reason="the limit that is too small",
    ),
    "restored": _quiet(
        "restore() finished", iteration="restored; null: a start from scratch",
        lineage="of the following snapshots, hex",
        source="of the state", blocked_secs="time in restore()",
        part_secs="of that, by part; read: with checksums and concurrent copies; copy: the remaining copies",
        ends="how the previous attempt ended, as its nodes recorded it, the cause first",
    ),
    "ranks_ended": _quiet(
        "ranks of the node exited without closing or recording a reason",
        text="which, their signals or exit codes if known, and their phases",
    ),
    "closed": _quiet(
        "this rank's session has ended", iteration="of the last boundary; -1: there was none",
        error="why ranks did not close together, so that arenas may remain; null: they did",
    ),
    # A snapshot.
    "snapshot": _quiet(
        "a snapshot started", iteration=_ITERATION, slot="index", blocked_secs="time the training thread took for it"
    ),
    "fence": _quiet("training passed the fence", blocked_secs="time it waited there"),
    "copied": _quiet(
        "a snapshot's copies are complete", iteration=_ITERATION,
        share_in_windows="share of the bytes copied inside windows, 0 to 1", **_COSTS,
    ),
    "timeline": _quiet(
        "the timeline of one iteration", iteration=_ITERATION, coords="the rank's place, by axis",
        schedule="setting", begin="seconds since the epoch", spans="kind, begin and end in seconds since ``begin``",
        copies="begin, end (seconds), bytes", **_COSTS,
    ),
    "skipped": _quiet(
        "a snapshot was not taken, on all ranks", iteration="of the step boundary", reason="why"
    ),
    "snapshot_error": _loud(
        "a snapshot failed on this rank", error="what was raised", in_a_row="failures without a success between"
    ),
    "turned_off": _loud("no more snapshots in this attempt", reason="why"),
    "interval_changed": _quiet(
        "the interval of snapshots or flushes changes", of="memory or storage",
        interval="iterations between two", overhead_budget="setting",
        cost="of a snapshot, relative to an iteration; in the fence alone if ``interval`` is a number; of the"
        " rank with the highest; null while it is measured",
        flush_secs="of a flush, as measured on this rank", cost_secs="of training lost by one, likewise",
        mtbf_secs="between failures that lose memory",
    ),
    # Windows.
    "planned": _quiet(
        "copies are planned again", window_capacity_bytes="capacity of the windows", bytes_per_sec="rate of copies",
        moved_share="share of an iteration by which windows had moved",
        places="how many", iteration_secs="expected length of an iteration",
    ),
    # Replicas and what is derived.
    "replicas_differ": _loud(
        "replicas differ: from now on each rank copies its own state", fragments="the first of them",
        num="how many", odd_ranks="ranks that differ from the majority, with three replicas or more",
    ),
    "replicas_drift": _loud(
        "a sample of replicas differs: snapshots since the last full comparison may mix states of ranks; "
        "none is taken until the next full comparison",
        after="iteration of the last full comparison, -1: none", until="iteration of the sample",
    ),
    "not_derived": _loud(
        "weights are not the cast of their masters: they are copied", keys="the first of them", num="how many"
    ),
    # Arenas.
    "arena": _quiet(
        "this rank's arena", path="of its directory", reused="whether it existed", slots="how many",
        allocated="slots with memory", slot_bytes="of one",
    ),
    "arena_problem": _quiet(
        "an arena, a slot of it, a parity file or a package cannot be used", path="of this rank's arena, "
        "if it is that", shard="its shard", file="of parity or a package", problems="texts",
    ),
    "spare_given_up": _quiet(
        "a snapshot that no restart can use was evicted", iteration=_ITERATION, bytes="freed",
        newer="whether newer snapshots were evicted, too",
    ),
    # A restart.
    "verified": _quiet(
        "all bytes to be restored match their checksums", iteration=_ITERATION, secs="of verifying",
        states="shards by their earlier state", unprotected="shards that are not protected, and their state",
        gap_secs="longest time from a seal to its checksums, in which corruption goes unnoticed",
    ),
    "rebuilt": _quiet(
        "shards were reconstructed from parity", iteration=_ITERATION, shards="which", bytes="reconstructed",
        secs="duration",
        sources="of the bytes",
    ),
    "passed_over": _quiet("a newer snapshot is incomplete", iteration="restored", reasons="why no newer one"),
    "fallback": _loud("a newer snapshot is corrupt", iteration="restored", reasons="what is wrong"),
    "lost": _loud(
        "snapshots cannot be reconstructed; the job resumes from storage, or starts from scratch",
        error="what is missing",
        loaded="iteration that was loaded from storage; 0: none",
    ),
    "rolled_back": _loud(
        "training resumes from before snapshots that exist: these are abandoned, not deleted",
        iteration="resumed from", newest="iteration of the newest abandoned one", reason="why",
    ),
    "memory_older_than_storage": _loud(
        "snapshots in memory are older than the checkpoint loaded from storage, and dropped", in_memory="iteration",
        loaded="iteration",
    ),
    "loaded": _quiet(
        "live tensors are filled", iteration=_ITERATION, secs="of loading", read_bytes="from arenas, of any node",
        received_bytes="of these, from other nodes", spread_bytes="from ranks with the same needs",
        needed_bytes="in all",
        **{"from": "layout of the snapshot; null: that of the job", "to": "layout of the job, likewise"},
    ),
    # Protection.
    "protected": _quiet(
        "a snapshot is protected", iteration=_ITERATION, secs="since it was chosen",
        again="whether protection had failed before",
    ),
    "protection_slow": _loud(
        "snapshots are protected late; repeated only after one was in time",
        secs="since a newer snapshot could have been protected, or needed by the network for one", reason="why",
    ),
    "not_protected": _loud(
        "protection of a snapshot was given up, or none could be chosen for long", iteration=_ITERATION,
        protected="iteration of the protected snapshot", error="why nothing can be protected",
    ),
    "step_late": _loud(
        "a step takes ten times as long as the one before, and a minute; from the first node, once per step",
        rank="that all others wait for", node="its name", phase="which it is in",
        behind="iterations behind the furthest rank", secs="since its last step boundary",
    ),
    # The SMP of a node.
    "smp_error": _loud("an error in the SMP, which continues", error="text", arena="affected"),
    "smp_restarted": _loud("the node's SMP had exited and was restarted", background_secs="duration"),
    "checked": _quiet(
        "the SMP has computed a slot's checksums", shard="name", iteration=_ITERATION,
        gap_secs="since the seal, in which corruption goes unnoticed", bytes="hashed",
    ),
    "covered": _quiet(
        "this node's parity and packages of a snapshot are complete", iteration=_ITERATION, secs="it took",
        bytes="of the slots", received_bytes="from other nodes",
    ),
    "not_covered": _loud("this node cannot protect its part of a snapshot", iteration=_ITERATION, reason="why"),
    "corrupt": _loud(
        "bytes in memory do not match their checksums", arena="name", slot="index", iteration=_ITERATION,
        file="of parity or a package", what="corrupt parts",
        repairable="those that parity can reconstruct at a restart",
    ),
    "repaired": _quiet("parity or a package was rebuilt", arena="name", iteration=_ITERATION, what="corrupt parts"),
    "scrubbed": _quiet("all snapshots in memory were checked", secs="it took", bytes="read"),
    "peer_lost": _loud("the SMP of another node does not respond", node="name", reason="why"),
    "peer_refused": _loud("a caller did not prove the job's secret", address="of the caller", reason="why"),
    # Storage.
    "persisted": _quiet("a snapshot is persisted by all nodes", iteration=_ITERATION, secs="since it was chosen"),
    "last_not_taken": _loud(
        "the job ends without a snapshot of its last iteration", iteration="the last one", reason="why",
        newest="iteration of the snapshot that is flushed instead; null: none is committed",
    ),
    "flushed": _quiet("this node's shards are persisted", iteration=_ITERATION, bytes="written", secs="it took"),
    "flush_failed": _loud(
        "a flush failed: logged by a node's SMP with the reason, and by ranks with the time",
        iteration=_ITERATION, reason="why", secs="since it was chosen; 0: it was not",
    ),
    "storage_fails": _loud("storage fails; the flush is retried", iteration="of the flush", error="text"),
    "committed": _quiet(
        "the shards of all nodes were committed as a checkpoint", iteration=_ITERATION, path="of it",
        bytes="in total",
        shards="their number",
    ),
    "exported": _quiet(
        "a checkpoint was exported to another format", iteration=_ITERATION,
        format="as ftckpt convert names it", path="where it is", secs="it took",
    ),
    "not_exported": _loud(
        "a snapshot is on storage, and its export failed", iteration=_ITERATION,
        format="as ftckpt convert names it", reason="why",
    ),
    "fetched": _quiet(
        "shards that memory lacked were read from storage", iteration=_ITERATION, shards="their number", bytes="read",
        secs="it took",
    ),
    "storage_damaged": _loud("a snapshot on storage is unusable", iteration=_ITERATION, error="why"),
    "removed": _quiet("an older checkpoint was removed from storage", iteration=_ITERATION, path="of the storage"),
    "saved": _quiet(
        "a universal checkpoint was written", path="of its directory", iteration=_ITERATION, total_bytes="written",
        blocked_secs="time training waited",
    ),
}  # fmt: skip
"""Every event that ftckpt writes; ``EVENTS.md`` is made of it."""

ADVICE = {
    "turned_off": "training continues without snapshots: restart the job once the reason is fixed",
    "replicas_differ": "unless the script lets replicas drift, this is silent corruption: have that hardware tested",
    "replicas_drift": "see the replicas_differ event that follows; a restart takes those snapshots only by name",
    "fallback": "the node's memory fails, or another program has written to the arena: see its log of memory errors",
    "protection_slow": "ftckpt status says which node is behind; raise --ftckpt-smp-cores or --ftckpt-network-rate, "
    "or protect less",
    "not_exported": "ftckpt convert makes it from the snapshot",
    "not_protected": "ftckpt status says which node is behind",
    "step_late": "ftckpt status shows whether it has moved since; py-spy shows where it is",
    "smp_error": "ftckpt status says whether snapshots are still protected",
    "smp_restarted": "smp.log of the node has the cause; if it just stops, the OOM killer",
    "not_covered": "the previous snapshot stays protected; see the reason",
    "corrupt": "parity reconstructs it if possible; have the node's memory tested if it recurs",
    "peer_lost": "no newer snapshot is protected until that node is back or the job restarts without it",
    "peer_refused": "another job, or a stranger: --ftckpt-smp-listen and --ftckpt-secret-file keep jobs apart",
    "flush_failed": "snapshots in memory remain, and a newer one is tried: repair storage, or start with another "
    "--ftckpt-persist; ftckpt status says what is wrong there",
    "storage_fails": "full or unreachable: repair it while the job trains",
    "storage_damaged": "an older one is used; ftckpt verify lists what is corrupt there",
}
"""What to do about loud events, where they do not say so themselves."""


WORDS = {
    "turned_off": ": no more snapshots in this attempt: {reason}",
    "snapshot_error": ": a snapshot failed: {error}",
    "protection_slow": ": protection delayed: {reason}",
    "step_late": ": all ranks wait for rank {rank} on {node}: {behind} iteration(s) behind, no step for "
    "{secs:.0f} s, in {phase}",
    "protection_waits": ": snapshots are taken, and protected as soon as there is room: {reason}",
}
"""Log texts of loud events; events without one are logged with their fields as JSON."""


def _in_words(event: str, fields: Mapping[str, Any]) -> str:
    """The text of an event; empty if it has none, or lacks one of its fields."""
    try:
        return WORDS.get(event, "").format_map(fields)
    except KeyError:
        return ""


_UNKNOWN = EventKind("")

_SESSION = ("joined", "conditions", "restored", "protection", "plan")
"""Events repeated in a rotated log: they identify the process and the attempt."""


class Events:
    """The event stream of a rank, or, with ``name``, of another process. Thread-safe.

    Every line has ``time`` (seconds since the epoch), ``event`` and ``rank`` (or ``process``, the name); durations
    end in ``_secs``, sizes in ``_bytes``. ``blocked_secs`` is time the training thread waited; background time has
    its own name. Lines are appended to ``directory/rank<R>.jsonl`` or ``directory/<name>.jsonl``. At ``limit_bytes``
    (0: no limit) the older half is deleted. Without a directory, only loud events are logged. If the file system
    ``may_hang``, a thread writes the lines. After a write error a warning is logged and no more lines are written.
    """

    def __init__(
        self, directory: Path | None, rank: int, name: str = "", limit_bytes: int = 0, may_hang: bool = False
    ) -> None:
        self._rank = rank
        self._who: dict[str, Any] = {"process": name} if name else {"rank": rank}
        self._name = name or f"rank {rank}"
        self._file: EventFile | BackgroundEventFile | None = None
        self.loud: Counter[str] = Counter()
        """Numbers of loud events, by name."""
        self.parts: list[tuple[str, float]] = []
        """Parts of a restart: names and end times."""
        self._last: dict[str, tuple[float, Mapping[str, Any]]] = {}  # by event
        self.direct(directory, limit_bytes, may_hang)

    def direct(self, directory: Path | None, limit_bytes: int = 0, may_hang: bool = False) -> None:
        """Writes later lines to a file in ``directory``, which is created if missing; None: to no file.

        Raises:
            OSError: it cannot be written.
        """
        fresh: EventFile | BackgroundEventFile | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{self._name.replace(' ', '')}.jsonl"
            fresh = EventFile(path, limit_bytes, _SESSION, self._give_up)
            fresh = BackgroundEventFile(fresh) if may_hang else fresh
        # Replaced before the close, so that concurrent threads write to the new file.
        old, self._file = self._file, fresh
        if old is not None:
            old.close()

    @property
    def kept(self) -> bool:
        """Whether quiet events are written; if not, their fields need not be computed."""
        return self._file is not None

    def emit(self, event: str, **fields: Any) -> None:
        """Records ``event``, a name of ``EVENTS``; fields of its row that are not given are null.

        Unknown events and fields are accepted: an error in the calling thread could cost a snapshot.
        """
        kind = EVENTS.get(event, _UNKNOWN)
        self._last[event] = time.time(), fields
        if kind.loud:
            self.loud[event] += 1
            words = _in_words(event, fields) or f" {json.dumps(fields, default=str)}"
            text = "; ".join([words, *filter(None, [ADVICE.get(event)])])
            log.warning("ftckpt %s: %s%s", self._name, event, written(text))
        file = self._file
        if file is None:
            return
        line = {"time": time.time(), "event": event, **self._who, "pid": os.getpid(), **dict.fromkeys(kind.fields)}
        line |= fields
        file.handle(logging.makeLogRecord({"name": event, "msg": json.dumps(line, default=str)}))

    def end_part(self, name: str) -> None:
        """Records the end of a part of a restart, which started at the end of the previous one."""
        self.parts.append((name, time.perf_counter()))

    def last(self, most: int) -> list[dict[str, Any]]:
        """The newest events as JSON values, oldest first; only the last of each kind, to include rare ones."""
        newest = sorted(self._last.copy().items(), key=lambda one: one[1][0])[-most:]
        told = [{"time": round(at, 3), "event": event, **fields} for event, (at, fields) in newest]
        found: list[dict[str, Any]] = json.loads(json.dumps(told, default=str))
        return found

    def announce(self, text: str) -> None:
        """Logs one line, only on rank 0 and in processes with a name."""
        if self._rank == 0 or "process" in self._who:
            log.info("ftckpt: %s", written(text))

    def warn(self, text: str) -> None:
        """Logs a warning that is not an event."""
        log.warning("ftckpt %s: %s", self._name, written(text))

    def close(self) -> None:
        """Writes the remaining lines and closes the file; later events are only logged."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _give_up(self, error: BaseException | None) -> None:
        log.warning("ftckpt %s: no more events: %s", self._name, error)
        self._file = None


def reference() -> Iterator[str]:
    yield "# Events"
    yield ""
    yield "With `--ftckpt-events DIR` each rank writes `DIR/rank<R>.jsonl`, and each SMP a file of its own: one JSON"
    yield "object a line. Every line has `time` (seconds since the epoch), `event`, `rank` (or `process`) and `pid`,"
    yield "and the fields of its row, null where they do not apply. Loud events are logged as warnings too. A file"
    yield "that reaches 64 MiB is renamed to end in `.1`, and the new one repeats the last"
    yield f"{', '.join(f'`{name}`' for name in _SESSION)} with a field `repeated`. A rank writes a"
    yield "few lines per snapshot."
    yield "On a network file system, which may hang, a thread of its own writes lines: nobody waits for it, and those"
    yield "that a process wrote right before it was killed may be missing. The field `dropped_lines` counts lines"
    yield "before it that are missing because the file system did not answer."
    yield "Made of the table in `events.py`: `python -m ftckpt.events > ftckpt/EVENTS.md`."
    yield ""
    yield "| event | loud | meaning | fields |"
    yield "|---|---|---|---|"
    for name, kind in sorted(EVENTS.items()):
        described = "; ".join(f"`{key}` {text}" for key, text in kind.fields.items())
        meaning = "; ".join([kind.meaning, *filter(None, [ADVICE.get(name)])])
        yield f"| `{name}` | {'yes' if kind.loud else ''} | {meaning} | {described} |"


if __name__ == "__main__":
    print("\n".join(reference()))
