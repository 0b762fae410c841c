"""What ftckpt and its peers restore after a kill and a fault, and how fast.

    python benchmarks/peers.py --json FILE

Rows are those of ``benchmarks/cost.py``, which measures what their snapshots cost. Four ranks on one node, of whose
state no rank has another's part, snapshot it in each iteration (ftckpt's default chooses its own interval), until

- *all killed*: all ranks are killed at a random instant of two iterations;
- *one killed*: rank 1 is killed at a random instant after the start of a save, the others fail or are killed;
- *flipped bit*: all are killed between two saves, and a bit flips in the newest snapshot of rank 1;
- *lost shard*: the same, but everything that rank 1 stored is deleted, as with the memory of its node;
- *all processes*: the same, but the processes beside the ranks (agents, SMP, writers) are killed, too.

They start again, restore, and train on. Restored bytes are compared with digests from training. FILE has each trial
when it ends; the same command resumes. The exit code is 1 if ftckpt does not restore exactly.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import random
import re
import signal
import statistics
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
import xxhash

from benchmarks import cost
from benchmarks.common import Blocks, environment, parser_of, print_tables, scratch, turns
from benchmarks.cost import RANKS, ROWS, Sizes, cleaned, missing_package
from benchmarks.cost_jobs import SUBREAPER, SYSTEMS, Block, Ftckpt, Training, descendants, silence
from benchmarks.systems import remove
from tests.support.pool import RankFailure, RankResult, run_ranks

ALL, ONE, FLIPPED, LOST, HELPERS = "all killed", "one killed", "flipped bit", "lost shard", "all processes"
FAULTS = (ALL, ONE, FLIPPED, LOST, HELPERS)
EXACT, WRONG = "exact", "WRONG BYTES"
_TIMEOUT_SECS = 150.0
_PAUSE_SECS = 1.5
"""From the kill to the damage, so that ftckpt has checksums of the newest snapshot."""
_MORE_ITERATIONS = 100
"""In which ranks must die, after the iteration of their end."""
FULL = cost.FULL._replace(device_secs=0.2, warm_up=0, iterations=60)
QUICK = cost.QUICK._replace(device_secs=0.05, warm_up=0, iterations=20)
PEERS = [name for name, row in ROWS.items() if row.group == "memory"]


class FaultTrial(NamedTuple):
    """A job of a row, its end by ``fault``, and the restart."""

    fault: str
    repeat: int
    row: str


def trials_of(repeats: int, faults: Sequence[str], rows: Sequence[str]) -> list[FaultTrial]:
    """All trials, one of each row in turn; each repeat begins with another row."""
    return [FaultTrial(fault, at, row) for at in range(repeats) for fault in faults for row in turns(rows, 5 * at)]


def digest_of(training: Training) -> str:
    digest = xxhash.xxh3_64()
    for tensor in training.job.tensors.values():
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()


def digest_file(block: Block, rank: int, iteration: int | None) -> Path:
    return Path(f"{block.arena}/digest.{rank}.{iteration}")


def die_after(secs: float) -> None:
    """The kernel ends the process at that time, as by SIGKILL."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max(secs, 1e-6))


def train(rank: int, world_size: int, block: Block, fault: str, seed: int) -> None:
    """Trains, notes the digest of each boundary, and dies."""
    silence()
    training, share = Training(block), random.Random(seed).random()
    save, begin, is_random = training.system.save, time.perf_counter(), fault in (ALL, ONE)

    def save_at_boundary(iteration: int) -> bool | None:
        digest_file(block, rank, iteration).write_text(digest_of(training))
        if is_random and iteration == block.iterations and (rank == 1 or fault == ALL):
            die_after(2 * share * (time.perf_counter() - begin) / iteration)
        return save(iteration)

    training.system.save = save_at_boundary  # type: ignore[method-assign]
    for _ in range(block.iterations + _MORE_ITERATIONS):
        training.iterate()
        if not is_random and training.job.iteration == block.iterations:
            training.system.drain()
            time.sleep(0.4)
            dist.barrier()
            die_after(0.0)
            signal.pause()


def come_back(rank: int, world_size: int, block: Block) -> dict[str, Any]:
    """The iteration that a restart restores, whether it has the bytes of training, and whether training resumes.

    Seconds are those of a peer's load, and of ftckpt's ``attach`` and ``restore``.
    """
    silence()
    training = Training(block)
    dist.barrier()
    begin = time.perf_counter()
    iteration = training.system.restore()
    secs = time.perf_counter() - begin + (training.setup_secs if isinstance(training.system, Ftckpt) else 0.0)
    vars(training.job).pop("tensors", None)  # the optimizer may have others
    digest = digest_file(block, rank, iteration)
    is_exact = digest.exists() and digest.read_text() == digest_of(training)
    found = {"iteration": iteration, "exact": is_exact, "secs": secs, "bytes": training.nbytes, "resumes": True}
    if iteration is not None:
        training.job.load_state_dict({"iteration": iteration})
        try:
            training.iterate()
            training.iterate()
            training.system.drain()
        except Exception as error:  # noqa: BLE001 - the result of a peer
            found["resumes"] = f"{type(error).__name__}: {error}"[:300]
    return found


def flip_bit(paths: Sequence[str]) -> None:
    """Flips a bit in the largest file of the newest snapshot."""
    files = [path for one in paths for path in ([one] if os.path.isfile(one) else glob.glob(f"{one}/slot*"))]
    number = {path: int((re.findall(r"(?:step[-_]?|iter_)(\d+)", path) or ["0"])[0]) for path in files}
    newest = max(files, key=lambda path: (number[path], os.path.getsize(path), os.path.getmtime(path)))
    with open(newest, "rb+") as file:
        file.seek(int(os.path.getsize(newest) * 0.4142))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def kill_helpers(kept: Sequence[int]) -> None:
    """Kills all that descends from this process, which adopts orphans, except the processes of the pool."""
    for _ in range(2):  # the first orphans others
        for pid in {*descendants(os.getpid())} - {*kept}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # its parent waits for it
                os.waitpid(pid, 0)


def run_trial(trial: FaultTrial, sizes: Sizes, arena: Path, kept: Sequence[int]) -> dict[str, Any]:
    """Trains, kills, does the damage and restores, on a clean tmpfs."""
    row, name = ROWS[trial.row], f"bench-{uuid.uuid4().hex[:8]}"
    with scratch(arena) as [tmpfs], cleaned(tmpfs, name):
        agent = SYSTEMS[row.system].start_agent(name)
        options = row.options | ({"has_agent": True} if agent else {})
        counts = 1, 0, sizes.iterations, sizes.mib, sizes.script, sizes.device_secs
        block = Block("plain", row.system, options, *counts, name, str(tmpfs), str(tmpfs / "saved"))
        try:
            return outcome_of(trial, block, agent, kept)
        except RankFailure as error:
            return {"outcome": "error", "why": str(error)[-500:]}
        finally:
            kill_helpers(kept)


def outcome_of(trial: FaultTrial, block: Block, agent: Any, kept: Sequence[int]) -> dict[str, Any]:
    system = SYSTEMS[block.system]
    options: dict[str, Any] = {"timeout_secs": _TIMEOUT_SECS, "expect_failures": True, "grace_secs": 1.0}
    options["stand_in"] = system.on_stand_in
    ended = run_ranks(train, RANKS, block, trial.fault, trial.repeat, **options)
    if ended[1].exitcode != -signal.SIGALRM:
        return {"outcome": "error in training", "why": reason_of(ended)}
    time.sleep(_PAUSE_SECS)
    stored = system.stored(block, 1)
    if trial.fault == FLIPPED and stored:
        flip_bit(stored)
    for path in stored if trial.fault == LOST else ():
        remove(Path(path))
    if trial.fault == HELPERS:
        kill_helpers(kept)
        system.start_agent(block.name)
    elif agent is not None:
        agent.send_signal(signal.SIGUSR1)  # as dlrover-run does when it restarts workers
        time.sleep(0.5)
    back = run_ranks(come_back, RANKS, block, **options)
    if not all(rank.ok for rank in back):
        return {"outcome": "error", "why": reason_of(back)}
    return {"stored": len(stored), **judged([rank.value for rank in back], block)}


def reason_of(ranks: Sequence[RankResult]) -> str:
    """The last line of a rank's error, preferably one that is not about another rank."""
    lines = [rank.error.strip().splitlines()[-1] for rank in ranks if rank.error]
    return min(lines, key=lambda line: "onnection" in line, default="no error was reported")[:300]


def judged(ranks: Sequence[Mapping[str, Any]], block: Block) -> dict[str, Any]:
    """The outcome of a restart."""
    iterations = [rank["iteration"] for rank in ranks]
    if len({*iterations}) > 1:
        return {"outcome": "ranks differ", "why": f"iterations {iterations}"}
    if iterations[0] is None:
        return {"outcome": "nothing"}
    done = min(
        max(int(path.suffix[1:]) for path in Path(block.arena).glob(f"digest.{rank}.*")) for rank in range(RANKS)
    )
    return {
        "outcome": EXACT if all(rank["exact"] for rank in ranks) else WRONG,
        "lost": done - iterations[0],
        "load_secs": max(rank["secs"] for rank in ranks),
        "bytes": sum(rank["bytes"] for rank in ranks),
        "resumes": next((rank["resumes"] for rank in ranks if rank["resumes"] is not True), True),
    }


def figures_of(blocks: Sequence[Mapping[str, Any]], row: str) -> dict[str, Any]:
    """The outcomes of a row by fault, and medians of its exact restarts after ``ALL``."""
    mine = [block for block in blocks if block["row"] == row]
    if not mine:
        return {}
    good = [block for block in mine if (block["fault"], block["outcome"]) == (ALL, EXACT)]
    found: dict[str, Any] = {fault: text_of([one for one in mine if one["fault"] == fault]) for fault in FAULTS}
    if good:
        secs = statistics.median(block["load_secs"] for block in good)
        found |= {"load_secs": secs, "gb_per_sec": good[0]["bytes"] / secs / 1e9}
        found["lost"] = statistics.median(block["lost"] for block in good)
    return found


def text_of(trials: Sequence[Mapping[str, Any]]) -> str:
    """The outcomes of a fault, the most frequent first."""
    outcomes = Counter(
        one["outcome"] + (", then fails" if one.get("resumes", True) is not True else "") for one in trials
    )
    return ", ".join(f"{num} {outcome}" if len(outcomes) > 1 else outcome for outcome, num in outcomes.most_common())


HEADS = [*FAULTS, "load s", "GB/s", "lost"]


def cells(found: Mapping[str, Any], _: Any) -> list[str]:
    """A line of the table."""
    figures = {"load_secs": ".2f", "gb_per_sec": ".2f", "lost": "g"}
    texts = [format(found[name], spec) if name in found else "" for name, spec in figures.items()]
    return [*(found[fault] for fault in FAULTS), *texts]


def main(argv: Sequence[str]) -> int:
    """Tries every fault on every row, prints the table and writes the file; returns the exit code."""
    parser = parser_of(__doc__, arena=True)
    parser.add_argument("--repeats", type=int, help="default: 3, 1 with --quick")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="default: all")
    parser.add_argument("--rows", nargs="+", choices=PEERS, default=PEERS, help="default: all")
    args = parser.parse_args(argv)
    sizes, repeats = (QUICK, 1) if args.quick else (FULL, 3)
    reasons = {row: f"{package} is not installed" for row in args.rows if (package := missing_package(row))}
    about = environment(argv, "benchmarks/peers.py", {one.package for one in SYSTEMS.values() if one.package})
    run = Blocks(
        args.json,
        {
            "benchmark": "peers",
            "environment": about,
            "sizes": {**sizes._asdict(), "script": [*sizes.script]},
            "ranks": RANKS,
        },
    )
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    run_ranks(_nothing, 1)  # starts the pool
    kept = descendants(os.getpid())
    run.measure(
        trials_of(args.repeats or repeats, args.faults, [row for row in args.rows if row not in reasons]),
        lambda trial: run_trial(trial, sizes, args.arena.absolute(), kept),
        lambda block: f"{block['outcome']} {block.get('why', '')}",
    )
    table = {row: figures_of(run.content["blocks"], row) for row in args.rows}
    print_tables({"restores": table}, HEADS, cells, reasons)
    ours = [block for block in run.content["blocks"] if ROWS[block["row"]].system == "ftckpt"]
    missed = [f"{block['row']}, {block['fault']}: {text_of([block])}" for block in ours if text_of([block]) != EXACT]
    return run.conclude({"restores": table}, reasons, missed, args.quick)


def _nothing(rank: int, world_size: int) -> None: ...


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
