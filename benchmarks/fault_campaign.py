"""A campaign of random faults: a job restores the right state, or its error names what is missing.

    python benchmarks/fault_campaign.py --trials 40 --seed 7 --json OUT

README.md describes a trial and its expected outcomes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.campaign_damage import Job, damage, survey  # noqa: E402
from benchmarks.campaign_job import HOW, POSITIONS, Ended, Plan, Trouble, train  # noqa: E402
from benchmarks.common import environment, print_table, scratch, write_json  # noqa: E402
from ftckpt.errors import ConfigError, FtckptError  # noqa: E402
from ftckpt.memory.directory import SMP_LOCK_NAME, clean_job  # noqa: E402
from ftckpt.memory.locks import holder_of  # noqa: E402
from ftckpt.parity.modes import Modes, resolve_modes  # noqa: E402
from tests.support.event_logs import read_events  # noqa: E402
from tests.support.mounting import may_mount  # noqa: E402
from tests.support.pool import RankGroup, RankResult, run_ranks, spawn_ranks  # noqa: E402

KINDS = ("resumed", "refused", "wrong", "hung", "leaked")
PROTECT = ["auto", "auto", "node", "peer", "node,peer", "replica,peer", "copy,peer", "node,replica,peer"]
PROTECT += ["replica", "copy"]
"""Drawn from; modes that are impossible on the drawn layout are drawn again."""

# Several processes import torch at once, on few cores.
_START_SECS = 60.0
_RESTART_SECS = 90.0
_GRACE_SECS = 70.0
"""Longer than a collective of the pool waits: a child may keep the connections of a rank that has ended."""

_DEADLINE_SECS = 6.0
"""The deadline of a group, one of whose ranks is stopped for 1.5 times as long."""
_ITERATIONS_AFTER = 60
"""After trouble, until which it must be over."""
_PROOFS = (1, 2, 4, 8)
"""Snapshots before which complete replicas are compared: no snapshot has a drift from before them."""
_LOST = re.compile(r"^(?:ftckpt\.errors\.)?LostError: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Shape:
    """The random choices of one trial."""

    nodes: tuple[str, ...]
    settings: dict[str, Any]
    modes: Modes

    @property
    def folder(self) -> Path:
        """The job's."""
        return Path(self.settings["arena"]) / f"ftckpt-{self.settings['job']}"

    @property
    def env(self) -> dict[str, str]:
        """Variables of all attempts, which belong to one launcher run."""
        return {"FTCKPT_RUN": self.settings["job"], "TMPDIR": str(Path(self.settings["arena"]) / "tmp")}


class TrialError(Exception):
    """A failure of a job that nobody has killed yet."""


@dataclass(frozen=True)
class TrialVerdict:
    """The outcome of a trial, one of ``KINDS``, with its faults."""

    kind: str
    shape: Shape
    faults: tuple[str, ...]
    promise: int | None
    start: int | None
    text: str


def draw_shape(dice: random.Random, arena: Path, job: str) -> Shape:
    """A layout with protection modes that are possible there."""
    while True:
        num_nodes = dice.randint(1, 4)
        per_node = dice.randint(1, max(1, 6 // num_nodes))
        nodes = tuple(f"node{index}" for index in range(num_nodes) for _ in range(per_node))
        losses, group = dice.choice([(1, 0), (1, 0), (1, 2), (2, 0)])
        settings: dict[str, Any] = {"job": job, "interval": 1, "arena": str(arena), "events": str(arena / "events")}
        settings |= {"protect": dice.choice(PROTECT), "peer_losses": losses, "peer_group": group}
        settings |= {"protect_interval": dice.choice([1, 1, 3]), "schedule": "thread"}
        settings |= {"start_timeout_secs": 30.0, "protect_timeout_secs": 10.0}
        settings |= {"chunk_size": "64KiB", "objects_size": "1MiB"}
        with contextlib.suppress(ConfigError):
            modes = resolve_modes(settings["protect"], nodes, num_nodes > 1, peer_losses=losses, peer_group=group)
            if modes.names:
                return Shape(nodes, settings, modes)


def run_trial(seed: int) -> TrialVerdict:
    """One trial; its outcome follows from ``seed`` up to the instants at which things happen."""
    dice = random.Random(seed)
    job = f"campaign-{os.getpid()}-{seed}"
    promise, injected = None, list[str]()
    with scratch(Path("/dev/shm")) as [arena]:
        (arena / "tmp").mkdir()
        shape = draw_shape(dice, arena, job)
        try:
            trouble = draw_trouble(dice, shape)
            memory = _train_and_kill(dice, shape, trouble, arena / "progress", injected)
            for _ in range(dice.choice([0, 1, 1, 2, 2])):
                _damage(memory, dice)
            memory.look()
            injected += memory.faults
            promise = memory.promise
            nodes = _replace_lost(dice, shape, memory)
            _start_with_a_stray(dice, shape, nodes, arena / "stray", injected)
            # A drift that was not noticed yet may mix what ranks held.
            mixes = trouble.kind == "drift" and not memory.head.doubtful
            plan = Plan(shape.settings, nodes, dice.randint(1, 8), arena / "again", trouble=trouble, mixes=mixes)
            kind, start, text = judge(_restart(dice, shape, plan, injected), memory)
        except TrialError as error:
            kind, start, text = "wrong", None, str(error)
        finally:
            left = _clean(arena, job)
        if left and kind in ("resumed", "refused"):
            kind, text = "leaked", left
    return TrialVerdict(kind, shape, tuple(injected), promise, start, text)


def judge(results: Sequence[RankResult], memory: Job) -> tuple[str, int | None, str]:
    """Kind, restored iteration and text of a restart that ended with ``results``."""
    promise = memory.promise
    if all(result.ok for result in results):
        starts = {result.value.start for result in results}
        wrong = {name for result in results for name in result.value.wrong}
        start = next(iter(starts))
        if len(starts) > 1 or wrong:
            return "wrong", start, f"started from {sorted(starts, key=str)}, wrong: {sorted(wrong)}"
        # Where all of every node is gone nothing can know of a snapshot: a fresh start is right.
        if start is None and memory.whole >= 0 and not memory.all_lost:
            return "wrong", start, f"started from scratch although iteration {memory.whole} was committed"
        if start is not None and memory.doubts(start):
            return "wrong", start, f"iteration {start} is doubtful"
        if promise is not None and promise >= 0 and (start is None or start < promise):
            return "wrong", start, f"iteration {start}, promised was {promise}"
        return "resumed", start, ""
    texts = [result.error or f"exit code {result.exitcode}" for result in results if not result.ok]
    if any(result.exitcode == -signal.SIGKILL and result.error is None for result in results):
        return "hung", None, texts[0]
    lost = [message for text in texts for message in _LOST.findall(text)]
    if not lost:
        return "wrong", None, texts[0][-600:]
    if promise is not None:
        return "wrong", None, f"refused although iteration {promise} was promised: {lost[0]}"
    return "refused", None, lost[0]


def draw_trouble(dice: random.Random, shape: Shape) -> Trouble:
    """The trouble of training before any kill; of kind "": none."""
    kinds, world_size = ["", "", "stall", "back", "fork"], len(shape.nodes)
    # These modes alone refuse to start where no rank holds what another does any more.
    may_drift = world_size > 1 and shape.settings["protect"] not in ("replica", "copy")
    kind = dice.choice([*kinds, "drift"] if may_drift else kinds)
    least = 3 if kind == "back" else 1
    return Trouble(kind, dice.randint(least, 20), dice.randrange(world_size), dice.choice(HOW.get(kind, [""])))


def _train_and_kill(dice: random.Random, shape: Shape, trouble: Trouble, progress: Path, faults: list[str]) -> Job:
    """Train for a while, then kill some ranks, and maybe SMPs or arenas before; the launcher ends the others."""
    progress.mkdir()
    world_size = len(shape.nodes)
    if trouble.kind == "stall":
        shape.settings.update(start_timeout_secs=_DEADLINE_SECS)
    plan, memory = Plan(shape.settings, shape.nodes, 100_000, progress, trouble=trouble), None
    with spawn_ranks(train, world_size, plan, env=shape.env) as ranks:
        _wait_for(ranks, progress, trouble.iteration + 1)
        if trouble.kind:
            faults.append(str(trouble))
            _outlast(dice, ranks, progress, shape, trouble)
        time.sleep(dice.random() * 0.2)
        if dice.random() < 0.3:
            node = dice.choice(shape.nodes)
            if _kill(holder_of(shape.folder / node / SMP_LOCK_NAME)):
                faults.append(f"kill of the SMP of {node}")
            time.sleep(dice.random())
        if dice.random() < 0.3 and trouble.kind != "drift":  # which moves arenas meanwhile
            memory = survey(shape.folder, shape.modes)
            damage(memory, dice, live=True)
            time.sleep(dice.random() * 0.5)
        victims = range(world_size) if dice.random() < 0.3 else dice.sample(range(world_size), 1)
        for rank in victims:
            ranks.kill(rank)
        faults.append(f"kill of {'all ranks' if len(victims) == world_size else f'rank {victims[0]}'}")
        ranks.wait(dice.random() * 0.5)
    # After the kill, unless damage came first: trainers that live would go on past what is counted here.
    return memory or survey(shape.folder, shape.modes)


def _outlast(dice: random.Random, ranks: RankGroup, progress: Path, shape: Shape, trouble: Trouble) -> None:
    """Have a rank stopped for longer than all deadlines, if that is the trouble; what comes of it must come soon."""
    if trouble.kind == "stall":
        ranks.kill(trouble.rank, signal.SIGSTOP)
        time.sleep(1.5 * _DEADLINE_SECS)
    elif dice.random() < 0.4:
        return
    reached, before = int((progress / f"rank{trouble.rank}").read_text()), survey(shape.folder, shape.modes)
    ranks.kill(trouble.rank, signal.SIGCONT)
    _wait_for(ranks, progress, reached + _ITERATIONS_AFTER)
    events, after = read_events(Path(shape.settings["events"])), survey(shape.folder, shape.modes)
    if problem := unmet(trouble, reached, before, after, events):
        raise TrialError(f"{trouble}: {problem}")


def unmet(trouble: Trouble, reached: int, before: Job, after: Job, events: Sequence[dict[str, Any]]) -> str:
    """The broken promise about ``trouble``, or ""; it came at ``reached``, when memory was as in ``before``."""
    world_size, drift = len(after.sealed), trouble.iteration
    if trouble.kind == "back":
        off = sum(event["event"] == "turned_off" for event in events)
        same = (before.whole, before.protected, before.sealed) == (after.whole, after.protected, after.sealed)
        return "" if same and off == world_size else f"{off} ranks are off, and memory changed: {not same}"
    if after.whole <= reached + 1 or after.doubts(after.whole):
        return f"no snapshot since iteration {reached}: the newest is {after.whole}"
    if trouble.kind != "drift" or drift in _PROOFS:
        return ""
    alarms = {(event["after"], event["until"]) for event in events if event["event"] == "replicas_drift"}
    # The alarm must come with the first row of samples after the drift that is not interrupted.
    taken = Counter(event["iteration"] for event in events if event["event"] == "snapshot")
    row = range(POSITIONS + 1)
    ends = range(drift + POSITIONS, max(taken))
    last = next((end for end in ends if all(taken[end - at] == world_size for at in row)), max(taken))
    is_right = bool(alarms) and all(after < drift <= until <= last for after, until in alarms)
    return "" if is_right else f"a drift at {drift} must be noticed by {last}, and the alarms are {sorted(alarms)}"


def _wait_for(ranks: RankGroup, progress: Path, iteration: int) -> None:
    """Until every rank has trained ``iteration``."""
    deadline = time.monotonic() + _START_SECS
    while time.monotonic() < deadline:
        files = [progress / f"rank{rank}" for rank in range(len(ranks.pids))]
        if all(file.exists() and int(file.read_text() or 0) >= iteration for file in files):
            return
        if ranks.wait_first_failure(0.0):
            break
        time.sleep(0.01)
    texts = [result.error for result in ranks.results() if result.error]
    raise TrialError(f"iteration {iteration} was not reached: {(texts or ['no error'])[0]}")


def _kill(pid: int | None) -> bool:
    """Kill a process, if it is one; whether it was."""
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)
    return bool(pid)


def _damage(memory: Job, dice: random.Random) -> None:
    """A fault; the SMP of a node that is lost dies with it, even one that is starting and has no lock yet."""
    before = set(memory.lost_nodes)
    damage(memory, dice)
    for node in memory.lost_nodes - before:
        for pid in _processes_of(memory.folder.name.removeprefix("ftckpt-"), node):
            _kill(pid)


def _replace_lost(dice: random.Random, shape: Shape, memory: Job) -> list[str]:
    """The nodes of all ranks: lost ones are replaced by others, with the same names or new ones."""
    renamed = {node: f"{node}-new" if dice.random() < 0.5 else node for node in sorted(memory.lost_nodes)}
    return [renamed.get(node, node) for node in shape.nodes]


def _start_with_a_stray(
    dice: random.Random, shape: Shape, nodes: Sequence[str], progress: Path, faults: list[str]
) -> None:
    """A start that must be refused, and harm nothing: one rank is on another machine that has its node's name."""
    candidates = [rank for rank, node in enumerate(nodes) if node in nodes[:rank]]
    if not candidates or dice.random() >= 0.25 or not may_mount():
        return
    faults.append(f"two machines are called {nodes[candidates[0]]}")
    progress.mkdir()
    results = _attempt(shape, Plan(shape.settings, nodes, 1, progress, stray=dice.choice(candidates)))
    strange = [result for result in results if "two machines" not in (result.error or "")]
    if strange:
        raise TrialError(f"a name that two machines have was not refused: {strange[0].error or strange[0].exitcode}")


def _restart(dice: random.Random, shape: Shape, plan: Plan, faults: list[str]) -> list[RankResult]:
    """Start again, where a rank may fork, and once more where a rank crashes after the end."""
    plan.progress.mkdir()
    ranks = range(len(plan.nodes))
    crashing = dice.choice(ranks) if dice.random() < 0.3 else None
    plan = replace(plan, crashing=crashing)
    if plan.trouble.kind != "drift":  # which stays
        fork = dice.random() < 0.4
        plan = replace(plan, trouble=Trouble("fork" if fork else "", 1, dice.choice(ranks), dice.choice(HOW["fork"])))
        faults += [f"{plan.trouble} in the restart"] if fork else []
    results = _attempt(shape, plan)
    ended = plan.progress / f"ended{crashing}"
    if crashing is not None and ended.exists():
        faults.append(f"crash of rank {crashing} after the end")
        start, wrong = json.loads(ended.read_text())
        results[crashing] = RankResult(crashing, 0, Ended(start, tuple(wrong)))
        again = _attempt(shape, replace(plan, crashing=None))
        if not all(result.ok and result.value.finished for result in again):
            raise TrialError(f"a job that was done began again: {[result.error or result.value for result in again]}")
    return results


def _attempt(shape: Shape, plan: Plan) -> list[RankResult]:
    limits = {"timeout_secs": _RESTART_SECS, "grace_secs": _GRACE_SECS}
    return run_ranks(train, len(plan.nodes), plan, expect_failures=True, env=shape.env, **limits)


def _clean(arena: Path, job: str) -> str:
    """End what is left; returns what was there that a job that ended well, or was cleaned, must not leave."""
    folder = arena / f"ftckpt-{job}"
    # A job that ended well has removed its directory; one that refused to start leaves what there is to look at.
    refused = folder.exists()
    if refused:
        clean_job(arena, job)
    left = [str(path.relative_to(arena)) for path in folder.rglob("*")] if folder.exists() else []
    deadline = time.monotonic() + 10.0
    while (alive := _processes_of(job)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in alive:
        _kill(pid)
    return "; ".join([*left[:5], *(f"process {pid}" for pid in alive)])


def _processes_of(job: str, node: str = "ftckpt.smp") -> list[int]:
    """SMPs of the job, on one node if that is given."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if {b"ftckpt.smp", job.encode(), node.encode()} <= set(words):
                pids.append(int(entry.name))
    return pids


def campaign(trials: int, seed: int) -> list[TrialVerdict]:
    """All trials, a line each."""
    verdicts = []
    for number in range(trials):
        try:
            # A seed for each trial: a bad one is run again alone.
            verdict = run_trial(seed * 100_000 + number)
        except FtckptError as error:
            raise RuntimeError(f"trial {number} of seed {seed}: {error}") from error
        verdicts.append(verdict)
        shape = verdict.shape
        where = f"{len(set(shape.nodes))}x{len(shape.nodes) // len(set(shape.nodes))} {'+'.join(shape.modes.names)}"
        outcome = f"promised {verdict.promise}, started from {verdict.start}"
        print(
            f"{number:4d}  {verdict.kind:8s} {where:24s} {'; '.join(verdict.faults)}: {outcome} {verdict.text}",
            flush=True,
        )
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the campaign; the exit status is 0 if nothing was wrong, hung or leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    begin = time.monotonic()
    verdicts = campaign(args.trials, args.seed)
    counts = Counter(verdict.kind for verdict in verdicts)
    as_table = sum(1 for v in verdicts if v.kind == "resumed" and v.promise is not None)
    print_table(("outcome", "trials"), [(kind, str(counts[kind])) for kind in KINDS])
    result = {
        **{kind: counts[kind] for kind in KINDS},
        "trials": args.trials,
        "seed": args.seed,
        "resumed_as_promised": as_table,
        "resumed_beyond_promise": counts["resumed"] - as_table,
        "faults": Counter(fault.split(" of ")[0] for v in verdicts for fault in v.faults),
        "secs": round(time.monotonic() - begin, 1),
        "bad": [
            {"seed": args.seed * 100_000 + number, "kind": v.kind, "faults": v.faults, "text": v.text}
            for number, v in enumerate(verdicts)
            if v.kind in ("wrong", "hung", "leaked")
        ],
        **environment(sys.argv[1:] if argv is None else argv, "benchmarks/fault_campaign.py"),
    }
    print(f"wrong: {counts['wrong']}, hung: {counts['hung']}, leaked: {counts['leaked']}; ", end="")
    print(f"{counts['resumed']} resumed ({as_table} as promised), {counts['refused']} refused as the table says")
    if args.json is not None:
        write_json(args.json, result)
    return 1 if counts["wrong"] + counts["hung"] + counts["leaked"] else 0


if __name__ == "__main__":
    sys.exit(main())
