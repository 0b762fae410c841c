"""Events as JSON lines: what ftckpt did, when, and how long training was blocked by it."""

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
    """One row of the table of events: ``fields`` by name, each with its unit or what it holds.

    ``loud`` events are logged as warnings too, with or without a directory for event logs, and with their ``ADVICE``.
    """

    meaning: str
    fields: Mapping[str, str] = field(default_factory=dict)
    loud: bool = False


def _quiet(meaning: str, **fields: str) -> EventKind:
    return EventKind(meaning, fields)


def _loud(meaning: str, **fields: str) -> EventKind:
    return EventKind(meaning, fields, loud=True)


_ITERATION = "of the snapshot"
_COSTS = {
    "moved_bytes": "bytes copied, by the kind of span that they ran beside",
    "window_capacity_bytes": "what the windows were expected to take; null before they were measured",
    "stall_secs": "time the optimizer waited for unfinished copies",
    "fence_secs": "time in the fence",
    "secs": "length of the iteration",
}

EVENTS: dict[str, EventKind] = {
    # A rank's session.
    "joined": _quiet(
        "restore() begins", job="name", node="name",
        launch="name of the launcher run, from the rank that speaks for it on its node",
    ),
    "conditions": _quiet(
        "what a node trains with", node="name", cpu="its name", cores="that this rank may use",
        memory_bytes="of the node", device="its name; cpu", versions="of what this rank has loaded",
    ),
    "environment": _quiet(
        "something about this machine that can cost snapshots", name="of the finding", text="what it means",
        remedy="what to do",
    ),
    "plan": _quiet(
        "what this rank copies", copied_bytes="per snapshot", derived_bytes="left out, made from masters at restore",
        spill_bytes="expected not to fit in windows, with ``equal`` and with ``chosen`` shares; empty until measured",
    ),
    "protection": _quiet(
        "what protects the job's snapshots", modes="in force", failures="kinds of loss: cases, survived, an example",
        memory_per_node="bytes of the fullest node", network_bytes="per protected snapshot: of a node, of the job",
    ),
    "protection_lessened": _loud(
        "a mode protects nothing on the nodes that are left, or --ftckpt-memory-limit leaves it no room", reason="why"
    ),
    "protection_waits": _quiet(
        "no room for parity beside snapshots of an earlier layout; it waits until those have gone",
        need_bytes="of parity, packages and slots beside those snapshots", reason="what was too small",
    ),
    "restored": _quiet(
        "restore() ends", iteration="restored; null: a start from the beginning", lineage="of what follows, hex",
        source="where it came from", blocked_secs="time in restore()",
        ends="what nodes saw of how the attempt before ended, the cause first",
    ),
    "failures": _quiet(
        "what failures the job has had, and is to expect by now; each by kind: process, node, job",
        last="the kind that has ended the attempt before; empty: none is known", attempt="this one, from 1",
        ends="what nodes have seen of how that one ended, the first first",
        nodes="of the job, now", seen="how many", secs="that the job has trained, as if always on these nodes",
        given_secs="between two, as assumed", mtbf_secs="between two, by both",
    ),
    "ranks_ended": _quiet(
        "ranks of the node are gone, had not left, and have not said why",
        text="which, by what signal or with what exit code where that was seen, and where they were",
    ),
    "failures_unknown": _loud("failures that the job has had cannot be read or kept: they do not count", error="why"),
    "closed": _quiet("this rank's session has ended", iteration="of the last boundary; -1: there was none"),
    "close_incomplete": _quiet("other ranks did not come to close(): arenas may stay", error="what was seen"),
    # A snapshot.
    "snapshot": _quiet(
        "a snapshot began", iteration=_ITERATION, slot="index", blocked_secs="time the training thread took for it"
    ),
    "fence": _quiet("training came to the fence", blocked_secs="time it waited there"),
    "copied": _quiet(
        "a snapshot's copies have ended", iteration=_ITERATION,
        share_in_windows="share of the bytes copied inside windows, 0 to 1", **_COSTS,
    ),
    "timeline": _quiet(
        "what one iteration did when", iteration=_ITERATION, coords="the rank's place, by axis",
        schedule="setting", begin="seconds since the epoch", spans="kind, begin and end in seconds since ``begin``",
        copies="begin, end (seconds), bytes", **_COSTS,
    ),
    "skipped": _quiet(
        "a snapshot was not taken, on all ranks", iteration="whose boundary it was", reason="why"
    ),
    "snapshot_error": _loud(
        "a snapshot failed on this rank", error="what was raised", in_a_row="failures without a success between"
    ),
    "ranks_lost": _loud("ranks cannot reach each other: no snapshots until they have connected anew", error="why"),
    "ranks_reunited": _loud(
        "all ranks have connected anew, and snapshots go on", iteration="at whose boundary", secs="after this search"
    ),
    "reunion_failed": _quiet(
        "ranks could not connect anew; they try again", iteration="at whose boundary", error="why"
    ),
    "turned_off": _loud("no more snapshots in this attempt", reason="why"),
    "ages": _quiet(
        "how old the newest snapshots got: after the first minute, and where that has changed", secs="looked at",
        iterations="trained meanwhile", due="snapshots", left_out="of them because every slot was kept",
        whole="how many became", whole_age="most iterations behind the newest whole one",
        protected="how many became; absent where none is to be", protected_age="as whole_age, of the protected one",
    ),
    "interval_changed": _quiet(
        "snapshots become rarer, so that what they cost keeps its budget, or more frequent again",
        interval="iterations between snapshots",
        cost="of a snapshot, over the length of an iteration, on the rank on which it is dearest; in the fence alone "
        "where ``interval`` is a number",
        overhead_budget="setting",
    ),
    "persist_interval_changed": _quiet(
        "snapshots go to storage as often as loses least by what was measured", interval="iterations between two",
        flush_secs="that one takes, as this rank saw it", cost_secs="of training, that one takes, likewise",
        mtbf_secs="between failures that storage alone survives, given or expected",
    ),
    # Windows.
    "planned": _quiet(
        "copies are planned anew", window_capacity_bytes="that windows take", bytes_per_sec="rate of copies",
        moved_share="of an iteration, by which windows had moved", measured="false: from the model of the schedule",
        places="how many", iteration_secs="expected length of an iteration",
    ),
    "replanned": _quiet(
        "the fence cost too much: windows are measured anew", fence_share="of an iteration", overhead_budget="setting"
    ),
    "no_budget": _loud("the node's copy budget cannot be shared: this rank copies without", error="why"),
    # Replicas and what is derived.
    "slow_ranks": _quiet(
        "ranks take longer for their compute steps than the median of their pipeline stage, as far as they wait for "
        "no other in these; looked at once in 100 iterations or more",
        ranks="the slowest: rank, node, compute_secs of an iteration, median_secs of the stage",
        num="how many",
        slow_rank_share="setting",
    ),
    "replicas_differ": _loud(
        "ranks that should hold the same bits do not: each copies its own from now on", fragments="the first of them",
        num="how many", odd_ranks="ranks that hold other bits than most, where there are three replicas or more",
    ),
    "not_derived": _loud(
        "weights are not the cast of their masters: copied as they are", keys="the first of them", num="how many"
    ),
    # Arenas.
    "arena": _quiet(
        "this rank's arena", path="of its directory", reused="whether it was there", slots="how many",
        allocated="how many have memory", slot_bytes="of one",
    ),
    "arena_problem": _quiet(
        "an arena, or a slot of it, cannot be used", path="of the arena, where it is of this rank", shard="it holds",
        problems="in words",
    ),
    "far_slots": _quiet(
        "a slot lies on another NUMA node than the device: its copies are slower", device_node="of the device",
        pages="of a sample, by their NUMA node",
    ),
    "fewer_slots": _quiet(
        "memory has no room for as many slots as protection wants", slots="per arena", wanted="per arena",
        reason="what was too small",
    ),
    "slots_allocated": _quiet("slots got memory while training ran", path="of the arena", slots="which"),
    "spare_given_up": _quiet(
        "a snapshot that no restart can use was given up for room", iteration=_ITERATION, bytes="freed",
        newer="whether snapshots newer than it went, too",
    ),
    # A restart.
    "verified": _quiet(
        "every byte that will be restored is good", iteration=_ITERATION, secs="of verifying",
        states="shards by how far they were checked before", unprotected="shards below protected, and their state",
    ),
    "rebuilt": _quiet(
        "shards were made whole from parity", iteration=_ITERATION, shards="which", bytes="rebuilt", secs="it took",
        sources="where the bytes came from",
    ),
    "passed_over": _quiet("a newer snapshot is not whole", iteration="restored", reasons="why no newer one"),
    "fallback": _loud("a newer snapshot is corrupt", iteration="restored", reasons="what is wrong"),
    "protection_problem": _quiet("a parity file or package is not used", file="its name", problem="why"),
    "lost": _loud(
        "snapshots cannot be made whole; the job goes on from storage, or begins anew", error="what is missing",
        loaded="iteration that was loaded from storage; 0: none",
    ),
    "rolled_back": _loud(
        "the operator went back to a checkpoint on storage; what is in memory is given up", loaded="iteration",
        in_memory="iteration", reason="how that is known",
    ),
    "undone": _loud(
        "a node was away, or a rank died, while the job went back; what it has of that past is given up",
        arenas="names of its arenas", loaded="iteration that counted, of storage",
    ),
    "went_back": _quiet(
        "the job goes back before an iteration that the operator has named, and undoes what is newer",
        iteration="that is restored; 0: the beginning", before="setting", on_storage="iterations undone there",
    ),
    "undone_on_storage": _quiet(
        "the job has gone back, and no start takes what storage has of what it undid", iterations="on storage"
    ),
    "older_than_storage": _loud(
        "what is in memory is older than what was loaded from storage, and given up", in_memory="iteration",
        loaded="iteration",
    ),
    "loaded": _quiet(
        "live tensors are filled", iteration=_ITERATION, read_bytes="from arenas, of any node",
        received_bytes="of these, from other nodes", spread_bytes="from ranks that need the same",
        needed_bytes="in all",
    ),
    "reshaped": _quiet(
        "the restart is in another layout", **{"from": "layout of the snapshot", "to": "layout of the job"},
        iteration=_ITERATION, secs="of loading", read_bytes="from arenas, of any node",
        received_bytes="of these, from other nodes",
    ),
    "padding_changed": _quiet(
        "another number of rows pads the vocabulary", key="tensor", rows="of the snapshot", rows_here="of the job"
    ),
    "loaded_in_training": _quiet("the script loaded a checkpoint while it trained", iteration="the engine stands at"),
    # Protection.
    "protected": _quiet(
        "a snapshot survives what the modes promise", iteration=_ITERATION, secs="since it was chosen",
        again="whether protection had failed before",
    ),
    "network_limit": _quiet(
        "what a node takes of the network for protection", gbps="GB/s each way; 0: no limit",
        source="where that comes from", secs="least time to receive what a snapshot needs",
    ),
    "protection_slow": _loud(
        "the network limit lets no snapshot be protected in time",
        secs="least time to receive what a snapshot needs", timeout_secs="setting", source="of the limit",
    ),
    "not_protected": _loud(
        "a snapshot was given up as the next to protect, or for long none could be chosen", iteration=_ITERATION,
        protected="iteration that still is", error="why, where nothing can be protected",
    ),
    # The SMP of a node.
    "smp_error": _loud("the SMP, or what drives it, met an error; it goes on", error="what", arena="it is about"),
    "smp_restarted": _loud("the node's SMP was gone and was started again", background_secs="it took"),
    "checked": _quiet(
        "the SMP has checksums of a slot", shard="name", iteration=_ITERATION,
        gap_secs="from the seal, in which bad memory goes unnoticed", bytes="hashed",
    ),
    "covered": _quiet(
        "this node's parity and packages of a snapshot are complete", iteration=_ITERATION, secs="it took",
        bytes="of the slots", received_bytes="from other nodes",
    ),
    "not_covered": _loud("this node cannot do its part for a snapshot", iteration=_ITERATION, reason="why"),
    "corrupt": _loud(
        "bytes in memory are not those that were written", arena="name", slot="index", iteration=_ITERATION,
        file="of parity or a package", what="is bad", repairable="which of it parity can rebuild at a restart",
    ),
    "repaired": _quiet("parity or a package was made anew", arena="name", iteration=_ITERATION, what="was bad"),
    "scrubbed": _quiet("all snapshots in memory were checked", secs="it took", bytes="read"),
    "arenas_gone": _quiet("arenas are no longer there", arenas="names"),
    "peer_lost": _loud("another node's SMP does not answer", node="name", reason="why"),
    "peer_back": _quiet("it answers again", node="name"),
    "peer_refused": _loud("somebody did not prove the job's secret", address="of the caller", reason="why"),
    "hang": _loud(
        "no rank of the node has moved for longer than its section may take", hang_secs="setting",
        on_hang="setting", ends="whether the ranks are ended", again="whether the job was ended at this place before",
        secs="since the last sign of life", ranks="where each is, since when, and how long it may be silent there",
    ),
    "stacks": _quiet(
        "ranks that hang have written their stacks to stderr, and the SMP to its log", ranks="which",
        missing="which have not, and why",
    ),
    "hung_again": _loud(
        "the job has hung at the same place as before its restart: it is not started again",
        iteration="of its last boundary", section="it is in", phase="it is in",
    ),
    "hang_aborted": _quiet("the ranks that hung were ended", killed="pids of those that did not end by themselves"),
    # Storage.
    "persisted": _quiet("a snapshot is on storage, all of it", iteration=_ITERATION, secs="since it was chosen"),
    "not_persisted": _loud(
        "a snapshot did not come to storage; a newer one is tried", iteration=_ITERATION,
        secs="since it was chosen, 0 if it was not"
    ),
    "last_not_taken": _loud(
        "the job ends, and of its last iteration there is no snapshot", iteration="the last one", reason="why",
        newest="iteration of the snapshot that goes to storage in its place; null: none is whole",
    ),
    "flushed": _quiet("this node's shards are on storage", iteration=_ITERATION, bytes="written", secs="it took"),
    "not_flushed": _loud("this node cannot bring a snapshot to storage", iteration=_ITERATION, reason="why"),
    "storage_fails": _loud("storage fails; it is tried again", iteration="that goes there", error="what"),
    "committed": _quiet(
        "the shards of all nodes became a checkpoint", iteration=_ITERATION, path="where it is", bytes="of all",
        shards="their number",
    ),
    "exported": _quiet(
        "what others load was made of a snapshot on storage", iteration=_ITERATION,
        format="as ftckpt convert names it", path="where it is", secs="it took",
    ),
    "not_exported": _loud(
        "a snapshot is on storage, and what others load was not made of it", iteration=_ITERATION,
        format="as ftckpt convert names it", reason="why",
    ),
    "not_taken_over": _loud(
        "the framework saves by itself, in the place of which ftckpt was to", iteration="that it saves", reason="why"
    ),
    "prefetched": _quiet(
        "a part of a snapshot on storage was read before the restart asked for it, while ranks still started",
        iteration=_ITERATION, bytes="read", secs="from when this rank knew its settings to the last of them",
    ),
    "fetched": _quiet(
        "shards that memory lacked came from storage", iteration=_ITERATION, shards="their number", bytes="read",
        secs="it took",
    ),
    "storage_damaged": _loud("a snapshot on storage cannot be used", iteration=_ITERATION, error="why"),
    "removed": _quiet("an older checkpoint was removed from storage", iteration=_ITERATION, path="of the storage"),
    "saved": _quiet(
        "a universal checkpoint was written", path="of its directory", iteration=_ITERATION, total_bytes="written",
        blocked_secs="time training waited",
    ),
}  # fmt: skip
"""Every event that ftckpt writes; ``EVENTS.md`` is made of it."""

ADVICE = {
    "ranks_lost": "they search for each other; the network between nodes, or a node, is away",
    "turned_off": "training goes on without snapshots: start the job again when the reason is mended",
    "no_budget": "see whether the arena can be written",
    "replicas_differ": "where the script does not let them drift this is silent corruption: have that hardware "
    "tested",
    "fallback": "memory of that node fails, or something has written into the arena: see its log of memory errors",
    "protection_slow": "raise --ftckpt-network-gbps or --ftckpt-protect-timeout-secs, or protect less",
    "not_exported": "ftckpt convert makes it of the snapshot",
    "not_protected": "ftckpt status says which node is behind",
    "smp_error": "ftckpt status says whether snapshots are still protected",
    "smp_restarted": "smp.log of the node says what ended it; the OOM killer, if it just stops",
    "not_covered": "the snapshot that was protected before stays so; the reason names what to look at",
    "corrupt": "parity rebuilds it where it can; have the node's memory tested if it comes again",
    "peer_lost": "no newer snapshot is protected until that node is back, or the job has started without it",
    "peer_refused": "another job's SMP, or a stranger: --ftckpt-smp-listen and --ftckpt-secret-file keep jobs apart",
    "hang": "stacks go to this log; with --ftckpt-on-hang abort such a job is ended, for its launcher to start again",
    "hung_again": "the stacks say where: mend that, then start the job again",
    "not_persisted": "the nodes' not_flushed and storage_fails say why",
    "not_flushed": "snapshots in memory stay: mend storage, or start with another --ftckpt-persist",
    "storage_fails": "full, away, or without permission: mend it while the job trains",
    "storage_damaged": "an older one is taken; ftckpt verify says what is bad there",
}
"""What to do about loud events, where they do not say so themselves."""


WORDS = {
    "turned_off": ": no more snapshots in this attempt: {reason}",
    "snapshot_error": ": a snapshot failed: {error}",
}
"""How loud events read that end training's snapshots; others show their fields as JSON."""


def _in_words(event: str, fields: Mapping[str, Any]) -> str:
    """ "" where it has no words, or lacks a field of theirs."""
    try:
        return WORDS.get(event, "").format_map(fields)
    except KeyError:
        return ""


_UNKNOWN = EventKind("")

_SESSION = ("joined", "conditions", "restored", "protection", "plan")
"""Events that a rotated log repeats: whose its lines are, and which attempt's."""


class Progress:
    """Logs how far a long piece of work is, every ``every_secs``; silent where it takes less."""

    def __init__(self, what: str, every_secs: float = 3.0) -> None:
        self._what = what
        self._every_secs = every_secs
        self._begun = self._logged = time.monotonic()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called as often as one likes."""
        now = time.monotonic()
        if now - self._logged >= self._every_secs:
            self._logged = now
            rate = done_bytes / (now - self._begun) / 1e9
            log.info("ftckpt: %s: %.1f of %.1f GB, %.1f GB/s", self._what, done_bytes / 1e9, total_bytes / 1e9, rate)


class Events:
    """One rank's event stream, or, with ``name``, that of a process beside the ranks.

    Every line has ``time`` (seconds since the epoch), ``event`` and ``rank`` (or ``process``, the name); durations
    end in ``_secs``, sizes in ``_bytes``. ``blocked_secs`` is time the training thread waited; background time has
    its own name. Lines go to ``directory/rank<R>.jsonl`` or ``directory/<name>.jsonl`` (appended, so that attempts
    follow each other) until they take ``limit_bytes`` (0: there is no limit), of which the older half goes then;
    without a directory there are only loud events, as log messages. Safe to call from several threads. Where the
    file system ``may_hang`` nobody waits for it, and lines come to it a moment later. A file that cannot be written
    any more is given up with a warning.
    """

    def __init__(
        self, directory: Path | None, rank: int, name: str = "", limit_bytes: int = 0, may_hang: bool = False
    ) -> None:
        self._rank = rank
        self._who: dict[str, Any] = {"process": name} if name else {"rank": rank}
        self._name = name or f"rank {rank}"
        self._file: EventFile | BackgroundEventFile | None = None
        self.loud: Counter[str] = Counter()
        """How many loud events there were, by name."""
        self._last: dict[str, tuple[float, Mapping[str, Any]]] = {}  # of each kind
        self.direct(directory, limit_bytes, may_hang)

    def direct(self, directory: Path | None, limit_bytes: int = 0, may_hang: bool = False) -> None:
        """Let lines go to a file in ``directory`` from now on; it is made. None: to no file.

        Raises:
            OSError: it cannot be written.
        """
        fresh: EventFile | BackgroundEventFile | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"{self._name.replace(' ', '')}.jsonl"
            fresh = EventFile(path, limit_bytes, _SESSION, self._give_up)
            fresh = BackgroundEventFile(fresh) if may_hang else fresh
        # Swapped first: another thread that comes now writes to the new file.
        old, self._file = self._file, fresh
        if old is not None:
            old.close()

    @property
    def kept(self) -> bool:
        """Whether quiet events go anywhere; where not, what they say need not be found out."""
        return self._file is not None

    def emit(self, event: str, **fields: Any) -> None:
        """Record ``event``, a name of ``EVENTS``; fields of its row that are not given are null.

        Nothing is refused here: an event may come from a thread whose failure would cost a snapshot.
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

    def last(self, most: int) -> list[dict[str, Any]]:
        """The newest ones, oldest first, as JSON values; of each kind the last, or the frequent would be all."""
        newest = sorted(self._last.copy().items(), key=lambda one: one[1][0])[-most:]
        told = [{"time": round(at, 3), "event": event, **fields} for event, (at, fields) in newest]
        found: list[dict[str, Any]] = json.loads(json.dumps(told, default=str))
        return found

    def announce(self, text: str) -> None:
        """One line for people, from rank 0 and from processes with a name alone."""
        if self._rank == 0 or "process" in self._who:
            log.info("ftckpt: %s", written(text))

    def close(self) -> None:
        """Write what is left and close the file; events after this are only logged."""
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
    yield "that reaches half of `--ftckpt-events-mib` is renamed to end in `.1`, and the new one repeats the last"
    yield f"{', '.join(f'`{name}`' for name in _SESSION)} with a field `repeated`. A rank writes 1"
    yield "to 3 KB per snapshot (`benchmarks/events.py`), so 10 to 30 MB a day where one takes ten seconds."
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
