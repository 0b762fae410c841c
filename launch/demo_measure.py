"""What the demo concludes from its runs: whether they are equal bit for bit, and what each fault cost."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

Line = Mapping[str, Any]

PARTS = ("detect", "rejoin", "rebuild", "load", "first-step")
"""What the time from a fault to the first boundary after it is made of."""

KINDS = ("weights", "masters", "moments", "steps", "learning rates", "RNG states")


@dataclass(frozen=True)
class Comparison:
    """``differences`` names every loss and tensor that is not equal; ``tensors`` counts those compared."""

    num_losses: int
    tensors: dict[str, int] = field(default_factory=dict)
    differences: tuple[str, ...] = ()

    @property
    def bit_exact(self) -> bool:
        """Whether something was compared, and all of it is equal."""
        return self.num_losses > 0 and bool(self.tensors) and not self.differences


@dataclass(frozen=True)
class Strike:
    """A fault as it happened; ``lost_shards`` had no other place than the memory that is gone."""

    name: str
    point: str
    iteration: int
    ranks: Sequence[int]
    killed_at: float
    lost_shards: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FaultCost:
    """What one fault cost.

    ``iterations_lost``: finished iterations that were trained again (the one under way when it struck always
    is). ``detect_secs``: from the kill until the last process of that attempt was gone. ``rejoin_secs``: from
    then until the last rank had joined: rendezvous, imports, building the model. ``rebuild_secs``: how long
    what was lost was made anew from parity; ``load_secs``: the rest of ftckpt's restore; both on the slowest
    rank. ``first_step_secs``: from the last rank's restore to the first boundary that all ranks have passed.
    ``source``: ``memory``, or what lost shards were rebuilt from, joined by ``+``.
    """

    name: str
    ranks: tuple[int, ...]
    point: str
    iteration: int
    killed_at: float
    restored_iteration: int
    iterations_lost: int
    detect_secs: float
    rejoin_secs: float
    rebuild_secs: float
    load_secs: float
    first_step_secs: float
    source: str = "memory"
    rebuilt_shards: tuple[str, ...] = ()
    rebuilt_bytes: int = 0

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each of ``PARTS``."""
        return {part: getattr(self, f"{part.replace('-', '_')}_secs") for part in PARTS}

    @property
    def total_secs(self) -> float:
        """From the kill to the first boundary after it."""
        return sum(self.parts.values())


def compare(
    reference: Sequence[Line], faulted: Sequence[Line], reference_final: Path, faulted_final: Path
) -> Comparison:
    """Every loss that was logged, those of iterations trained again included, and all final hashes."""
    expected = {line["iteration"]: line["loss_hex"] for line in reference}
    differences = [
        f"loss of iteration {line['iteration']}: {line['loss_hex']} is not {expected.get(line['iteration'])}"
        for line in faulted
        if line["loss_hex"] != expected.get(line["iteration"])
    ]
    missing = sorted(expected.keys() - {line["iteration"] for line in faulted})
    differences += [f"loss of iteration {iteration}: missing" for iteration in missing]
    hashes, others = read_hashes(reference_final), read_hashes(faulted_final)
    differences += [
        f"{name}: {others.get(name, 'missing')[:16]} is not {hashes.get(name, 'missing')[:16]}"
        for name in sorted(hashes.keys() | others.keys())
        if hashes.get(name) != others.get(name)
    ]
    counts = Counter(_kind(name) for name in hashes)
    return Comparison(len(faulted), {kind: counts[kind] for kind in KINDS}, tuple(differences))


def read_hashes(folder: Path) -> dict[str, str]:
    """Every rank's hashes, by ``<coordinates>/<tensor>``."""
    return {
        f"{path.stem}/{name}": value
        for path in sorted(folder.glob("*.json"))
        for name, value in json.loads(path.read_text()).items()
    }


def _kind(name: str) -> str:
    tensor = name.partition("/")[2]
    if tensor.startswith("rng."):
        return "RNG states"
    if not tensor.startswith("optimizer"):
        return "weights"
    names = {"master": "masters", "step": "steps", "lr": "learning rates"}
    return names.get(tensor.rpartition(".")[2], "moments")


def fault_cost(
    strike: Strike, *, events: Iterable[Line], lines: Iterable[Line], gone: Mapping[int, float]
) -> FaultCost:
    """Work out the cost of a fault from the event logs, and from when processes disappeared.

    ``lines`` are the training log's, each with ``seen``: when it was read.

    Raises:
        ValueError: the logs have no attempt before the fault, none after it that passed a boundary, or one
            that did not rebuild a lost shard.
    """
    name, killed_at = strike.name, strike.killed_at
    attempts = _attempts(events)
    before = [attempt for attempt in attempts if attempt.restored_at < killed_at]
    after = [attempt for attempt in attempts if attempt.restored_at >= killed_at and attempt.boundary_at]
    if not before or not after:
        raise ValueError(f"fault {name}: no attempt before it, or none after it that went on")
    old, new = before[-1], after[0]
    if missing := strike.lost_shards - new.rebuilt_shards:
        raise ValueError(f"fault {name}: {', '.join(sorted(missing))} were lost and not rebuilt")
    gone_at = max(gone[pid] for pid in old.pids)
    logged = (line["iteration"] for line in lines if old.restored_at <= line["seen"] < new.joined_at)
    finished = max((old.started_from, old.last_iteration, *logged))
    return FaultCost(
        name=name,
        ranks=tuple(strike.ranks),
        point=strike.point,
        iteration=strike.iteration,
        killed_at=killed_at,
        restored_iteration=new.started_from,
        iterations_lost=max(0, finished - new.started_from),
        detect_secs=gone_at - killed_at,
        rejoin_secs=new.joined_at - gone_at,
        rebuild_secs=new.rebuild_secs,
        load_secs=new.restore_secs - new.rebuild_secs,
        first_step_secs=new.boundary_at - new.joined_at - new.restore_secs,
        source="+".join(sorted(new.sources)) or "memory",
        rebuilt_shards=tuple(sorted(new.rebuilt_shards)),
        rebuilt_bytes=new.rebuilt_bytes,
    )


@dataclass(frozen=True)
class Blocked:
    """Seconds that training stood still in one iteration: the median rank's two parts, the slowest's sum."""

    boundary: float
    fence: float
    slowest: float


def blocked_by_iteration(events: Iterable[Line]) -> dict[int, Blocked]:
    """What snapshots cost, by iteration; of an iteration that was trained again the last attempt counts."""
    fences: dict[int, float] = defaultdict(float)
    boundaries: dict[tuple[int, int], tuple[float, float]] = {}
    for event in sorted(events, key=lambda event: float(event["time"])):
        if event["event"] == "fence":
            fences[event["pid"]] += event["blocked_secs"]
        elif event["event"] == "snapshot":
            key = (event["iteration"], event["rank"])
            boundaries[key] = (event["blocked_secs"], fences.pop(event["pid"], 0.0))
    ranks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (iteration, _), blocked in boundaries.items():
        ranks[iteration].append(blocked)
    return {
        iteration: Blocked(
            median(boundary for boundary, _ in found),
            median(fence for _, fence in found),
            max(map(sum, found)),
        )
        for iteration, found in sorted(ranks.items())
    }


@dataclass
class _Attempt:
    """One start of all ranks; a lineage is its name."""

    started_from: int = 0
    joined_at: float = 0.0
    restored_at: float = 0.0
    restore_secs: float = 0.0
    rebuild_secs: float = 0.0
    boundary_at: float = 0.0
    last_iteration: int = 0
    pids: set[int] = field(default_factory=set)
    sources: set[str] = field(default_factory=set)
    rebuilt_shards: set[str] = field(default_factory=set)
    rebuilt_bytes: int = 0

    def take(self, rebuilt: Line) -> None:
        """What one rank rebuilt."""
        self.rebuild_secs = max(self.rebuild_secs, rebuilt["secs"])
        self.sources |= rebuilt["sources"].keys()
        self.rebuilt_shards |= set(rebuilt["shards"])
        self.rebuilt_bytes += rebuilt["bytes"]


def _attempts(events: Iterable[Line]) -> list[_Attempt]:
    ordered = sorted(events, key=lambda event: float(event["time"]))
    joined = {event["pid"]: float(event["time"]) for event in ordered if event["event"] == "joined"}
    attempts: dict[str, _Attempt] = {}
    attempt_of: dict[int, _Attempt] = {}
    first: dict[int, float] = {}
    rebuilt: dict[int, list[Line]] = defaultdict(list)
    for event in ordered:
        pid, when = event["pid"], float(event["time"])
        if event["event"] == "restored":
            attempt = attempt_of[pid] = attempts.setdefault(event["lineage"], _Attempt())
            attempt.pids.add(pid)
            attempt.started_from = event["iteration"] or 0
            attempt.joined_at = max(attempt.joined_at, joined[pid])
            attempt.restored_at = max(attempt.restored_at, when)
            attempt.restore_secs = max(attempt.restore_secs, event["blocked_secs"])
            for done in rebuilt.pop(pid, ()):
                attempt.take(done)
        elif event["event"] == "rebuilt":
            rebuilt[pid].append(event)
        elif event["event"] == "snapshot" and pid in attempt_of:
            attempt = attempt_of[pid]
            attempt.last_iteration = max(attempt.last_iteration, event["iteration"])
            if first.setdefault(pid, when) == when:
                attempt.boundary_at = max(attempt.boundary_at, when)
    return list(attempts.values())
