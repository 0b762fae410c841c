"""Real Megatron-core jobs on the ranks of multi-process tests, with ftckpt or without."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ftckpt.config import Config
from tests.support import waiting
from tests.support.constants import configured
from tests.support.event_logs import logged, read_events
from tests.support.faults import Fault
from tests.support.pool import RankResult, run_ranks

TINY = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2"]


@dataclass(frozen=True)
class Run:
    """One attempt of a job.

    ``settings`` are fields of Config, without protection unless they say so, None trains without ftckpt;
    ``nodes[rank]`` names nodes. ``prepare`` and ``restored`` get the built job and the rank, before ftckpt is
    attached and after a restore. ``end`` is the action of ranks after iteration ``until``: ``close``, ``keep``
    (leave the arenas) or ``die``. ``guarded``: it waits for its SMP before it trains.
    """

    argv: Sequence[str]
    until: int
    settings: dict[str, Any] | None = None
    nodes: Sequence[str] | None = None
    faults: Sequence[Fault] = ()
    prepare: Callable[[Any, int], object] | None = None
    restored: Callable[[Any, int], object] | None = None
    end: str = "close"
    guarded: bool = True


@dataclass(frozen=True)
class Outcome:
    """The result of one rank: restored iteration, rows of (iteration, loss, gradient norm), final hashes."""

    start: int | None
    history: list[tuple[int, float | None, float | None]]
    hashes: dict[str, str]


def add_parameter(chunk: Any) -> None:
    """Give a built model one more module, after its optimizer was made."""
    import torch
    from megatron.core.utils import unwrap_model

    unwrap_model(chunk).extra = torch.nn.Linear(2, 2, bias=False)


def built(*argv: str, iterations: int = 9) -> tuple[Any, Any]:
    """The example job, and its state as ftckpt describes it."""
    import train_gpt

    from ftckpt.megatron.state import MegatronState

    job = train_gpt.build(train_gpt.parse_args([*TINY, *argv, "--iterations", str(iterations)]))
    return job, MegatronState(job.model, job.optimizer, job.scheduler, {"data": job.data})


def train(rank: int, world_size: int, run: Run) -> Outcome:
    """Build the example job, restore, train and end as ``run`` requests."""
    import train_gpt

    import ftckpt.megatron
    from tests.support import faults

    args = train_gpt.parse_args([*TINY, *run.argv, "--iterations", str(run.until)])
    job = train_gpt.build(args)
    if run.prepare is not None:
        run.prepare(job, rank)
    start = None
    faults.install(run.faults, rank, world_size)
    if run.settings is not None:
        node = run.nodes[rank] if run.nodes else "node"
        config = Config(enabled=True, node=node, **configured({"protect": "none", "interval": 1, **run.settings}))
        objects = {"data": job.data, "progress": job.progress}
        job.checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
        start = job.checkpointer.restore()
        if run.guarded and (job.checkpointer.rank.protection.protects or config.persist):
            # Its few iterations are to be protected: an SMP starts beside training.
            waiting.until(lambda: job.checkpointer.rank.protection.smp_guards, "the SMP knows what to do", 30.0)
        if run.restored is not None:
            run.restored(job, rank)
    rows = [(m["iteration"], m["loss"], m["grad_norm"]) for m in train_gpt.train(job)]
    if run.end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    hashes = train_gpt.final_hashes(job)
    if job.checkpointer is not None:
        job.checkpointer.close(remove=run.end == "close")
    return Outcome(start, rows, hashes)


def losses(rank: int, world_size: int, words: Sequence[str]) -> list[float | None]:
    """The loss of each iteration of the example job without ftckpt; None but on the last stage."""
    import train_gpt

    args = train_gpt.parse_args([*words, "--log-file", os.devnull])
    return [metrics["loss"] for metrics in train_gpt.train(train_gpt.build(args))]


def train_and_tell(rank: int, world_size: int, run: Run, train_job: Callable[..., Outcome] = train) -> Any:
    """The outcome of ``train_job``, and what ftckpt logged meanwhile."""
    lines = logged()
    return train_job(rank, world_size, run), "\n".join(lines)


def outcomes(world_size: int, run: Run, timeout_secs: float = 120.0) -> list[Outcome]:
    """Run to the end on all ranks."""
    return [result.value for result in run_ranks(train, world_size, run, timeout_secs=timeout_secs)]


def broken(world_size: int, run: Run, timeout_secs: float = 120.0, grace_secs: float = 3.0) -> list[RankResult]:
    """Run an attempt that is meant to fail."""
    return run_ranks(train, world_size, run, timeout_secs=timeout_secs, expect_failures=True, grace_secs=grace_secs)


def assert_continues(reference: Sequence[Outcome], resumed: Sequence[Outcome]) -> int:
    """Every rank resumed from the same iteration, to the same bits; returns that iteration (0: from scratch)."""
    starts = {outcome.start for outcome in resumed}
    assert len(starts) == 1, f"ranks restored different iterations: {starts}"
    start = starts.pop() or 0
    for rank, (whole, rest) in enumerate(zip(reference, resumed, strict=True)):
        assert rest.history == whole.history[start:], f"rank {rank}: losses differ"
        wrong = [name for name in whole.hashes if whole.hashes[name] != rest.hashes[name]]
        assert not wrong, f"rank {rank}: {len(wrong)} tensors differ, such as {wrong[:3]}"
    return start


def goes_on(train: Callable[[Any], list[Outcome]], run: Any, stop: int) -> int:
    """Train ``run`` without ftckpt, with it until iteration ``stop``, and from there to its end, to the same bits.

    Returns the iteration that was restored. No snapshot may fail.
    """
    whole = train(replace(run, settings=None))
    train(replace(run, until=stop, end="keep"))
    start = assert_continues(whole, train(run))
    assert not events(run.settings, "snapshot_error")
    return start


def events(settings: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """All events of one name, of all ranks and attempts, by time."""
    return read_events(Path(settings["events"]), name)


def killed(result: RankResult) -> bool:
    """Whether SIGKILL ended the rank."""
    return result.exitcode == -signal.SIGKILL
