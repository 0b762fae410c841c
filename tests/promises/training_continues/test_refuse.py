"""Impossible configurations are refused at start, on all ranks, by name and with a remedy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.events import Events
from ftckpt.memory.directory import PULSE_NAME
from tests.support import jobs, plain
from tests.support.errors import a_rank_raises
from tests.support.pool import RankFailure, run_ranks, spawn_ranks
from tests.support.waiting import until

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]


def refused(settings: dict[str, Any], argv: list[str], text: str, ranks: int = 2) -> None:
    with pytest.raises(RankFailure, match=f"(?s){text}") as caught:
        jobs.outcomes(ranks, jobs.Run(argv, 5, settings))
    assert all(result.error and text.split(".*", maxsplit=1)[0] in result.error for result in caught.value.results)


def test_another_model(settings: dict[str, Any]) -> None:
    jobs.broken(2, jobs.Run([], 3, settings, end="die"))
    refused(settings, ["--hidden", "64"], "MismatchError.*another model.*clean JOB")
    assert jobs.outcomes(2, jobs.Run([], 5, settings))[0].start is not None, "a refusal lost the snapshots"


def test_a_second_live_job_of_the_same_name(settings: dict[str, Any]) -> None:
    settings = {**settings, "lock_secs": 0.5}
    with spawn_ranks(jobs.train, 2, jobs.Run([], 2000, settings)) as first:
        until(lambda: Path(settings["events"]).exists() and jobs.events(settings, "snapshot"), "a snapshot", 120)
        refused(settings, [], "ArenaError.*live job named 'test'.*--ftckpt-job")
        assert first.alive() == [0, 1]


def announced(rank: int, world_size: int, settings: dict[str, Any], steps: int) -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Events, "announce", lambda _events, text: told.append(text))
        checkpointer, state = plain.restarted(rank, world_size, settings)
        plain.train(checkpointer, state, range(1, steps + 1))
        checkpointer.close()
    return told


def test_the_end_of_a_job_is_told_and_that_step_was_never_called(settings: dict[str, Any]) -> None:
    for steps, says in ((0, True), (1, False)):
        told = run_ranks(announced, 2, settings, steps)[0].value
        assert any("step() was never called: no snapshot was taken" in text for text in told) is says
    assert told[-1] == (
        "the job has ended after iteration 1, and its memory is freed; without --ftckpt-persist nothing is flushed "
        "to storage"
    )


def closed_first(rank: int, world_size: int, settings: dict[str, Any]) -> list[str]:
    told: list[str] = []
    checkpointer, state = plain.restarted(rank, world_size, settings)
    plain.train(checkpointer, state, range(1, 4))
    checkpointer.close(remove=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Events, "announce", lambda _events, text: told.append(text))
        checkpointer, _ = plain.make(rank, world_size, settings)
        checkpointer.close()
        with pytest.raises(ConfigError, match=r"restore\(\).*close\(\)"):
            checkpointer.restore()
    return told


def test_a_close_before_restore_is_told_and_removes_nothing(settings: dict[str, Any]) -> None:
    (text,) = run_ranks(closed_first, 2, settings)[0].value
    assert "close() before restore()" in text and "'ftckpt clean test'" in text
    assert list(Path(settings["arena"]).rglob("slot*.safetensors")), "a restart goes on from there"


def test_too_little_memory(settings: dict[str, Any], arena_root: Path) -> None:
    """Memory for one rank's arena and not for two: the sum of the node's ranks is refused."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(arena_root)], check=True)
    try:
        refused(settings, [], "MemoryBudgetError.*need 1[67].*all limits:.*")
        assert not any(arena_root.iterdir()), "something was left"
    finally:
        subprocess.run(["umount", str(arena_root)], check=True)


def test_a_refusal_after_the_arenas_were_made_leaves_nothing(settings: dict[str, Any], arena_root: Path) -> None:
    """Neither arenas nor locks, pages or an SMP; but what an earlier start left."""
    bad = {**settings, "protect": "node", "secret_file": "/nowhere"}
    refused(bad, [], "ConfigError.*secret-file: /nowhere.*umask")
    until(lambda: not any(arena_root.iterdir()), "the last rank's removal, and the end of the SMP", 30)
    jobs.broken(2, jobs.Run([], 3, settings, end="die"))
    refused(bad, [], "ConfigError.*secret-file: /nowhere.*umask")
    assert jobs.outcomes(2, jobs.Run([], 5, settings))[0].start is not None, "a refusal lost the snapshots"


@pytest.mark.slow
def test_a_page_that_cannot_be_shared_is_said_and_training_goes_on(
    settings: dict[str, Any], arena_root: Path
) -> None:
    node = arena_root / "ftckpt-test" / "node"
    (node / PULSE_NAME).mkdir(parents=True)
    jobs.outcomes(2, jobs.Run([], 4, {**settings, "protect": "node"}, guarded=False))
    errors = {event["rank"]: event["error"] for event in jobs.events(settings, "smp_error")}
    assert sorted(errors) == [0, 1], "a rank is silent"
    assert all(str(node / PULSE_NAME) in error and "not shared" in error for error in errors.values())
    assert {event["iteration"] for event in jobs.events(settings, "snapshot")} == {1, 2, 3, 4}


def test_an_unwritable_arena_directory(settings: dict[str, Any]) -> None:
    refused({**settings, "arena": "/proc/nowhere"}, [], "ArenaError.*/proc")


def test_a_node_that_was_renamed(settings: dict[str, Any]) -> None:
    jobs.broken(2, jobs.Run([], 3, settings, nodes=["old", "old"], end="die"))
    refused(settings, [], "ArenaError.*node name 'old'.*--ftckpt-node old")


def with_objects(rank: int, world_size: int, settings: dict[str, Any], objects: dict[str, Any]) -> None:
    """Start a job in which rank 1 saves ``objects``."""
    checkpointer, state = plain.make(rank, world_size, settings)
    if rank == 1:
        state.save_objects = lambda: objects  # type: ignore[method-assign]
    checkpointer.restore()


def test_an_object_that_cannot_be_saved(settings: dict[str, Any], arena_root: Path) -> None:
    """On all ranks, before training: not ftckpt turned off after some failed snapshots."""
    with a_rank_raises(UnsupportedError, "rank 1", "objects.loader.seen[1] is a builtins.set"):
        run_ranks(with_objects, 2, settings, {"loader": {"seen": [1, {2}]}})
    assert not any(arena_root.iterdir())


def test_objects_that_do_not_fit(settings: dict[str, Any]) -> None:
    with a_rank_raises(ConfigError, "are reserved: raise", "which is 1MiB"):
        run_ranks(with_objects, 2, {**settings, "objects_size": "1MiB"}, {"bytes": bytes(2 << 20)})


def add_parameter(job: Any, rank: int) -> None:
    jobs.add_parameter(job.model[0])


def test_a_parameter_that_nothing_steps(settings: dict[str, Any], arena_root: Path) -> None:
    with a_rank_raises(UnsupportedError, "extra.weight", "optimizer"):
        jobs.outcomes(2, jobs.Run([], 3, settings, prepare=add_parameter))
    until(lambda: not any(arena_root.iterdir()), "the last rank's removal of the job's lock")
