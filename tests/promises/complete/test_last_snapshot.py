"""The last iteration of a job is flushed, though no snapshot was due or could be taken at its boundary."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import ftckpt.torch
from ftckpt.capture import copier
from ftckpt.config import Config
from ftckpt.memory.directory import clean_job
from ftckpt.memory.heartbeat import FlushState, Heartbeat
from ftckpt.persist.backend import open_storage
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.smp.client import SmpClient
from tests.support import ds_jobs, jobs, plain, waiting
from tests.support.event_logs import read_events
from tests.support.pool import run_ranks
from tests.support.storages import committed

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

LAST = 10


@pytest.fixture
def ending(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A snapshot each seventh iteration, and none on its way to storage before the end."""
    (tmp_path / "storage").mkdir()
    settings |= {
        "interval": 7, "persist": str(tmp_path / "storage"), "persist_interval": 1000, "chunk_size": "64KiB",
        "objects_size": "1MiB", "start_timeout_secs": 20.0,
    }  # fmt: skip
    yield settings
    clean_job(arena_root, "test")


def stored(settings: dict[str, Any]) -> list[int]:
    return committed(open_storage(settings["persist"]))


class Numbers:
    """Batches that are drawn with the job's RNG."""

    def __init__(self) -> None:
        self.drawn = 0

    def draw(self) -> torch.Tensor:
        self.drawn += 1
        return torch.rand(8, 4) + self.drawn

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


def train_a_model(rank: int, world_size: int, settings: dict[str, Any] | None, until: int) -> Any:
    """A batch is drawn, and statistics move, after the last boundary; returns the start and the final bits."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=0.1), Numbers()
    model = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    config = Config(enabled=True, node="n", **settings) if settings else None
    checkpointer = ftckpt.torch.attach(model, optimizer, None, {"data": data}, config)
    start = checkpointer.restore() or 0
    for iteration in range(start + 1, until + 1):
        optimizer.zero_grad()
        model(data.draw()).square().sum().backward()
        optimizer.step()
        checkpointer.step(iteration)
    bits = [[value.tolist() for value in model.state_dict().values()], torch.rand(1).item()]
    model(data.draw())
    checkpointer.close()
    return start, bits


def test_the_last_iteration_is_on_storage_bit_for_bit(ending: dict[str, Any]) -> None:
    reference = [result.value[1] for result in run_ranks(train_a_model, 2, None, LAST + 3)]
    run_ranks(train_a_model, 2, ending, LAST)
    assert stored(ending) == [LAST] and not list(Path(ending["arena"]).iterdir())
    assert [event["iteration"] for event in jobs.events(ending, "snapshot")] == [7, 7, LAST, LAST]
    assert not jobs.events(ending, "last_not_taken")
    results = [result.value for result in run_ranks(train_a_model, 2, ending, LAST + 3)]
    assert results == [(LAST, bits) for bits in reference]


MEGATRON = ["--distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--precision", "bf16"]


def test_the_last_iteration_of_megatron_is_there(ending: dict[str, Any]) -> None:
    reference = jobs.outcomes(2, jobs.Run(MEGATRON, 12))
    jobs.outcomes(2, jobs.Run(MEGATRON, LAST, ending))
    assert stored(ending) == [LAST]
    assert jobs.assert_continues(reference, jobs.outcomes(2, jobs.Run(MEGATRON, 12, ending))) == LAST


@pytest.mark.slow
def test_the_last_iteration_of_deepspeed_is_there(ending: dict[str, Any]) -> None:
    shape = ds_jobs.SHAPES["zero2"]
    reference = ds_jobs.outcomes(ds_jobs.Run(shape, 12))
    ds_jobs.outcomes(ds_jobs.Run(shape, LAST, ending))
    assert stored(ending) == [LAST]
    assert jobs.assert_continues(reference, ds_jobs.outcomes(ds_jobs.Run(shape, 12, ending))) == LAST


def train(rank: int, world_size: int, settings: dict[str, Any], trouble: str, until: int = LAST) -> None:
    checkpointer, state = plain.make(rank, world_size, settings)
    if trouble == "told late":
        tell_late(checkpointer)
    for iteration in range((checkpointer.restore() or 0) + 1, until + 1):
        if trouble == "no objects" and rank == 1:
            state.failing[LAST] = ValueError("no state today")
        plain.iterate(checkpointer, state, iteration)
    if trouble == "goes on":
        checkpointer.fence()
        state.advance(LAST + 1, LAST + 1)
    elif trouble == "copies fail" and rank == 1:
        copier.copy_chunk = fail
    elif trouble == "killed" and rank == 1:
        plain.before_each_copy(plain.die)
    checkpointer.close()


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("a bus that fell asleep")


def tell_late(checkpointer: Checkpointer) -> None:
    """The SMP gets this attempt's description after it has failed with the last snapshot of an earlier one."""
    configure = SmpClient.configure

    def late(self: SmpClient, description: Mapping[str, Any]) -> str:
        pulse = Heartbeat.open(checkpointer.node_dir, None)

        def has_failed() -> bool:
            newest = checkpointer.capture.newest if checkpointer.capture is not None else None
            return newest is not None and pulse.flush_state(newest) == FlushState.CANNOT

        waiting.until(has_failed, "it fails", 30)
        return configure(self, description)

    SmpClient.configure = late  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("goes on", "rank 0: training has continued past it"),
        ("no objects", "rank 1: its objects could not be saved: no state today"),
        (
            "copies fail",
            "rank 1: snapshot of iteration 10 dropped: copy failed: RuntimeError('a bus that fell asleep')",
        ),
    ],
)
def test_where_the_last_cannot_be_taken_the_one_before_is_brought(
    trouble: str, reason: str, ending: dict[str, Any]
) -> None:
    run_ranks(train, 2, ending, trouble)
    assert stored(ending) == [7]
    told = [(event["iteration"], event["newest"], event["reason"]) for event in jobs.events(ending, "last_not_taken")]
    assert told == [(LAST, 7, reason)] * 2
    start, *_ = [result.value for result in run_ranks(plain.restored, 2, ending)]
    assert start[:3] == (7, 7, [7.0])


def test_an_smp_that_an_earlier_attempt_has_told_does_not_say_what_becomes_of_the_last(
    ending: dict[str, Any],
) -> None:
    """Storage belongs to this attempt by then: a flush of the other one is refused."""
    run_ranks(train, 2, ending, "killed", expect_failures=True)
    run_ranks(train, 2, ending, "told late")
    assert stored(ending) == [LAST]
    assert read_events(Path(ending["events"]), "flush_failed", of="smp-node")


def test_a_rank_that_is_killed_in_the_last_snapshot_leaves_the_one_before(ending: dict[str, Any]) -> None:
    run_ranks(train, 2, ending, "killed", expect_failures=True)
    assert not stored(ending)
    start, *_ = [result.value for result in run_ranks(plain.restored, 2, ending)]
    assert start[:3] == (7, 7, [7.0])
    shutil.rmtree(ending["events"])
    run_ranks(train, 2, ending, "")
    assert stored(ending) == [LAST]


def train_while_copies_fail(rank: int, world_size: int, settings: dict[str, Any]) -> None:
    checkpointer, state = plain.restarted(rank, world_size, settings)
    copy_chunk = copier.copy_chunk
    for iteration in range(1, LAST + 1):
        if iteration == LAST and rank == 1:
            checkpointer.capture.settle(20.0)  # type: ignore[union-attr]  # the copies of the one before
            copier.copy_chunk = fail
        plain.iterate(checkpointer, state, iteration)
    checkpointer.fence()  # the copies of the other rank arrive
    checkpointer.snapshots.kept.keep(LAST, state.save_objects)  # type: ignore[union-attr]
    copier.copy_chunk = copy_chunk
    checkpointer.close()


def test_what_has_failed_on_one_rank_that_one_takes_once_more(ending: dict[str, Any]) -> None:
    ending |= {"interval": 1}
    run_ranks(train_while_copies_fail, 2, ending)
    taken = [(event["rank"], event["iteration"]) for event in jobs.events(ending, "snapshot")]
    assert taken.count((1, LAST)) == 2 and taken.count((0, LAST)) == 1
    assert stored(ending) == [LAST]
    results = [result.value for result in run_ranks(plain.restored, 2, ending)]
    assert [result[:3] for result in results] == [(LAST, LAST, [float(LAST)])] * 2
