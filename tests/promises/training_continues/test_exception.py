"""Errors in a rank, not kills: it ends at once and logs why, and the job resumes from memory.

What users see most: out of memory, an assertion, an error of the data loader, ``sys.exit``, SIGTERM of a scheduler,
Ctrl-C. Each test is one job of torchrun, which restarts it after each failure.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.promises.training_continues.failing import ALL, DIRECTORY_VAR, MESSAGE, Failure, fired, write_plan
from tests.support import constants, jobs
from tests.support.launching import ITERATIONS, Launched, deepspeed_config
from tests.support.pool import run_ranks
from tests.support.processes import command_line, is_running
from tests.support.repository import ROOT

pytestmark = [pytest.mark.multiproc, pytest.mark.faults, pytest.mark.timeout(1200)]

MODEL = ("--pp", "2", "--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--micro-batch", "2")
SETTINGS = ("--ftckpt-chunk-size", "64KiB", "--ftckpt-objects-size", "1MiB")
SCRIPT = str(Path(__file__).with_name("failing.py"))
PROMPT_SECS = 15.0
"""Some seconds, on a busy machine; where a rank waits for others it takes a minute or more."""
START_SECS = 60.0
"""For one start of all processes, and what it trains until its failure."""


@functools.cache
def reference() -> list[str]:
    """Losses of a run without failures, every bit of them."""
    words = [*MODEL, "--iterations", str(ITERATIONS)]
    found = run_ranks(jobs.losses, 2, words, timeout_secs=START_SECS * 2)[-1].value
    return [loss.hex() for loss in found if loss is not None]


class Failing(Launched):
    """A job of one agent with two ranks, that fails as planned; watches how long processes take to end."""

    runner = "ftckpt.megatron"

    def __init__(self, here: Path, arena: Path, training: Sequence[str]) -> None:
        super().__init__(here, arena, training)
        self.job, self.failures = f"test-{uuid.uuid4().hex[:8]}", here / "failures"
        self.env[DIRECTORY_VAR] = str(self.failures)
        self.ended: dict[int, float] = {}
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def launch(self, failures: Sequence[Failure], *options: str) -> subprocess.Popen[bytes]:
        if not self.failures.exists():
            write_plan(self.failures, list(failures))
        words = ["--job", self.job, "--nproc", "2", "--runner", self.runner, "--restarts", str(len(failures))]
        return self.start(["bash", str(ROOT / "launch" / "torchrun.sh"), *words, *options, *self.training])

    def stop(self) -> None:
        self._stopped.set()
        self._watcher.join()
        super().stop()

    def _watch(self) -> None:
        """When each process that had joined was no more, as its launcher sees it."""
        while not self._stopped.wait(0.02):
            for pid in {event["pid"] for rank in range(2) for event in self.events(rank, "joined")} | {
                one["pid"] for one in fired(self.failures)
            }:
                if pid not in self.ended and not is_running(pid):
                    self.ended[pid] = time.time()

    def check_prompt(self, failures: Sequence[Failure]) -> None:
        """All failures fired, and each of them soon ended its process."""
        came = fired(self.failures)
        assert [one["number"] for one in came if failures[one["number"]].rank != ALL or not one["rank"]] == list(
            range(len(failures))
        )
        assert all(self.ended[one["pid"]] - one["time"] < PROMPT_SECS * crowd() for one in came), came

    def check_same_losses(self) -> None:
        rows = [json.loads(line) for line in self.log.read_text().splitlines()]
        assert [row["loss_hex"] for row in rows] == [reference()[row["iteration"] - 1] for row in rows]


def crowd() -> float:
    """How many processes share a core, and so how much longer everything takes than by itself."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@pytest.fixture
def failing(tmp_path: Path, arena_root: Path) -> Iterator[Failing]:
    job = Failing(tmp_path, arena_root, [SCRIPT, *MODEL, *SETTINGS])
    yield job
    job.stop()


def check(failing: Failing, failures: Sequence[Failure], *options: str, restored: int | None = None) -> None:
    """Each failure ends the ranks at once, and the job trains to its end; ``restored``: how often from memory."""
    failing.launch(failures, *options)
    failing.finish(START_SECS * (2 + len(failures)))
    failing.check_prompt(failures)
    failing.check_same_losses()
    failing.check_went_on(restarts=len(failures) if restored is None else restored)


def told(failing: Failing) -> str:
    return failing.output(10**7)


MICRO = 4
"""Micro-batches of an iteration, and so calls of the forward function."""

TRAINING = [
    Failure("masters written", 0),
    Failure("forward", 1, nth=3 * MICRO + 2),
    Failure("after fence", 1),
    Failure("weights written", 0),
    Failure("boundary", 1),
    Failure("in step", 1, "interrupt"),
    Failure("save object", 0, "exit"),
    Failure("data", ALL),
    Failure("forward", 0, nth=3 * MICRO + 2, cleanup="destroy"),
]
RESTARTING = [Failure("after step", 0), Failure("load object", 1, nth=1)]
# Never three in a row without a snapshot: that ends the job.
STARTING = [
    Failure("attach", 0, nth=1),
    Failure("after step", 0),
    Failure("describe", 1, nth=1),
    Failure("choose", 0, nth=1),
    Failure("after step", 1),
    Failure("lay out", 1, nth=1),
    Failure("finish load", 0, nth=1),
    Failure("after step", 0),
    Failure("restored", 1, nth=1),
    Failure("forward", 0, nth=1),
]


@pytest.mark.slow
def test_an_error_at_a_restart(failing: Failing) -> None:
    """The one rank's error is that of all where ftckpt called what failed; the next start finds all that it needs."""
    check(failing, RESTARTING, restored=1)
    text = told(failing)
    assert text.count(f"rank 1: OutOfMemoryError: {MESSAGE}") == 1, "one rank speaks for all, and names the one"
    assert text.count(f"torch.OutOfMemoryError: {MESSAGE}\n") == len(RESTARTING)


LEAVING = [
    Failure("after fence", 1, "exit"),
    Failure("data", 0, "SIGTERM"),
    Failure("after fence", 0, "SIGINT"),
    Failure("proof", 1, "exit"),
    Failure("data", ALL, "exit"),
]
AT_THE_END = [Failure("end", 0, nth=1), Failure("close", 1, nth=1), Failure("closed", 0, nth=1)]


@pytest.mark.slow
def test_an_error_at_the_end(failing: Failing) -> None:
    """Until all ranks have closed, snapshots stay; once they have, there is nothing to resume from."""
    failing.common += ["--dump-final", str(failing.here / "final")]
    failing.training += ["--dump-final", str(failing.here / "final")]
    failing.launch(AT_THE_END)
    failing.finish(START_SECS * (2 + len(AT_THE_END)))
    failing.check_prompt(AT_THE_END)
    failing.check_same_losses()
    restored = failing.restored()  # the last snapshot may have been on its way
    assert len(restored) == 2 and min(restored) >= ITERATIONS - 1, restored


CLEANING_UP = [Failure("forward", 1, nth=3 * MICRO + 2, cleanup="close"), Failure("data", ALL, cleanup="close")]
"""``close()`` in a ``finally``: an error is no end of training, and other ranks will not come."""
GOES_ON = {
    "training": (TRAINING, None),
    "at a start": (STARTING, 5),
    "a rank leaves": (LEAVING, None),
    "the script closes": (CLEANING_UP, None),
}
"""Failures, and how often the job resumes from memory if not after each."""


@pytest.mark.slow
@pytest.mark.parametrize("where", GOES_ON)
def test_a_job_goes_on_after_each_failure(where: str, failing: Failing) -> None:
    failures, restored = GOES_ON[where]
    check(failing, failures, restored=restored)
    if "training" in where:
        raised = [one for one in fired(failing.failures) if failures[one["number"]].how == "raise"]
        assert told(failing).count(f"torch.OutOfMemoryError: {MESSAGE}\n") == len(raised)


LONG = ("--torchrun-arg", "--monitor-interval=600")
"""So that the launcher does not end the others: they must by themselves."""

COLLECTIVE = ("choose", "proof", "close")


@pytest.mark.slow
@pytest.mark.parametrize("stage", COLLECTIVE)
def test_others_do_not_wait(stage: str, failing: Failing) -> None:
    """If a rank fails by itself in a collective call, the others end, too, and log why."""
    # At the end broken groups are connected once more: a rank that does not come is waited for so long.
    failing.env[constants.VARIABLE] = '{"vote_secs": 5, "earlier_secs": 30}'
    failing.launch([Failure(stage, 1, "exit", nth=1)], *LONG)
    one = failing.wait_for("failure", lambda: fired(failing.failures))[0]
    failing.wait_for("the end of both", lambda: len(failing.ended) == 2)
    secs = {pid: at - one["time"] for pid, at in failing.ended.items()}
    mine, others = secs.pop(one["pid"]), max(secs.values())
    assert mine < PROMPT_SECS * crowd() and others < 2 * PROMPT_SECS * crowd()
    text = told(failing) + (failing.here / "events" / "rank0.jsonl").read_text()
    assert any(reason in text for reason in ("gave up", "Connection closed by peer", "Connection reset by peer"))


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT], ids=lambda by: by.name)
def test_the_launcher_is_told_to_end(by: signal.Signals, failing: Failing) -> None:
    """SIGTERM as by a scheduler, SIGINT as by Ctrl-C: all processes end, and a later start resumes from memory."""
    failing.training += ["--iterations", "100000"]
    script = failing.launch([])
    failing.wait_for("snapshots", lambda: failing.events(0, "snapshot")[4:])
    os.kill(script.pid, by)
    assert script.wait(60) != 0
    assert not [pid for pid in failing.pids() if "ftckpt.smp" not in command_line(pid)]
    newest = max(event["iteration"] for event in failing.events(0, "snapshot"))
    failing.scripts.clear()
    failing.training += ["--iterations", str(newest + 10)]
    failing.launch([])
    failing.finish(START_SECS * 5)
    (restored,) = failing.restored()
    assert newest - 2 <= restored <= newest
    assert not list(failing.arena.iterdir())


DEEPSPEED = [
    Failure("ds forward", 1, nth=14),
    Failure("ds optimizer", 0),
    Failure("ds stepped", 1),
    Failure("ds data", 0, "exit", nth=8),
    Failure("ds initialize", 1, nth=1),
    Failure("ds iteration", ALL),
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed(tmp_path: Path, arena_root: Path) -> None:
    config = deepspeed_config(tmp_path)
    training = [SCRIPT, "--deepspeed_config", str(config), "--pp", "2", "--layers", "2", "--hidden", "32"]
    job = Failing(tmp_path, arena_root, [*training, "--seq", "32"])
    job.runner = "ftckpt.deepspeed"
    job.env |= {"DS_ACCELERATOR": "cpu"}
    try:
        job.launch(DEEPSPEED)
        job.finish(START_SECS * (2 + len(DEEPSPEED)))
        job.check_prompt(DEEPSPEED)
        job.check_went_on(restarts=len(DEEPSPEED) - 1)  # one comes before anything is restored
    finally:
        job.stop()
