"""DeepSpeed jobs killed at any point resume bit-exact, whoever has the data position, with checkpoints or without."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftckpt.memory.arena import Arena
from tests.support import ds_jobs, jobs
from tests.support.arenas import check_all
from tests.support.faults import Fault
from tests.support.tiers import by_default

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

UNTIL, AT = 7, 5
PIPELINE = "pp2-dp2"


@cache
def reference(name: str, *argv: str, until: int = UNTIL) -> list[jobs.Outcome]:
    return ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES[name], until, argv=argv))


def attempt(
    name: str, settings: dict[str, Any], *faults: Fault, argv: tuple[str, ...] = (), until: int = UNTIL
) -> None:
    shape = ds_jobs.SHAPES[name]
    results = ds_jobs.broken(ds_jobs.Run(shape, until, settings, argv, faults))
    for fault in faults:
        ranks = range(shape.ranks) if fault.rank == "all" else [fault.rank]
        assert all(fault.fired(rank) for rank in ranks), [result.error for result in results]
        assert all(jobs.killed(results[rank]) for rank in ranks), [result.error for result in results]


def resume(name: str, settings: dict[str, Any], *argv: str, until: int = UNTIL) -> int:
    resumed = ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES[name], until, settings, argv))
    assert not list(Path(settings["arena"]).iterdir()), "an ended job left something behind"
    return jobs.assert_continues(reference(name, *argv, until=until), resumed)


def test_the_position_of_the_data_comes_back(settings: dict[str, Any], tmp_path: Path) -> None:
    """For an iterator that the script recreates; DeepSpeed's own loader is tested with the entry."""
    argv, until = ("--data", "iterator"), 15
    attempt(PIPELINE, settings, Fault(1, 14, "forward", tmp_path / "fired", "kill"), argv=argv, until=until)
    assert resume(PIPELINE, settings, *argv, until=until) in {12, 13}


@pytest.mark.parametrize("name", by_default(["zero2", PIPELINE], [PIPELINE]))
def test_memory_newer_than_storage_wins(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """The script loads DeepSpeed's checkpoint of iteration 3; the arenas hold a newer one."""
    argv = ("--save", str(tmp_path / "ds"), "--load", str(tmp_path / "ds"), "--save-interval", "3")
    attempt(name, settings, Fault(1, AT, "boundary", tmp_path / "fired", "kill"), argv=argv)
    resumed = ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES[name], UNTIL, settings, argv))
    assert jobs.assert_continues(reference(name), resumed) == AT - 1
    assert any(event["iteration"] == AT - 1 for event in jobs.events(settings, "restored"))


@pytest.mark.parametrize("name", by_default(["zero2", PIPELINE], ["zero2"]))
def test_storage_newer_than_memory_wins(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """A run without ftckpt has meanwhile reached iteration 6: the snapshots in memory are older, and are dropped."""
    storage = str(tmp_path / "ds")
    attempt(name, settings, Fault("all", AT, "boundary", tmp_path / "fired", "kill", secs=20))
    ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES[name], 6, argv=("--save", storage, "--save-interval", "6")))
    loading = ds_jobs.Run(ds_jobs.SHAPES[name], 9, settings, ("--load", storage))
    resumed = ds_jobs.outcomes(loading)
    assert {outcome.start for outcome in resumed} == {6}
    assert resumed == ds_jobs.outcomes(replace(loading, settings=None))
    [older, *_] = jobs.events(settings, "memory_older_than_storage")
    assert (older["in_memory"], older["loaded"]) == (AT - 1, 6)


def test_a_tag_goes_back_once_and_not_at_each_restart(settings: dict[str, Any], tmp_path: Path) -> None:
    argv = ("--save", str(tmp_path / "ds"), "--save-interval", "2")
    attempt("zero1", settings, Fault("all", AT, "boundary", tmp_path / "fired", "kill", secs=20), argv=argv)
    back = (*argv, "--load", str(tmp_path / "ds"), "--load-tag", "global_step2")
    attempt("zero1", settings, Fault("all", AT, "boundary", tmp_path / "again", "kill", secs=20), argv=back)
    told = [(event["iteration"], event["newest"]) for event in jobs.events(settings, "rolled_back")]
    assert told == [(2, AT - 1)] * 2
    resumed = ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES["zero1"], UNTIL, settings, back))
    assert {outcome.start for outcome in resumed} == {AT - 1} and len(jobs.events(settings, "rolled_back")) == 2


def test_lost_snapshots_wait_for_what_the_script_loads(settings: dict[str, Any], tmp_path: Path) -> None:
    """``deepspeed.initialize`` cannot know whether ``load_checkpoint`` will be called: nothing was written yet."""
    argv = ("--save", str(tmp_path / "ds"), "--save-interval", "3")
    attempt("zero1", settings, Fault("all", AT, "boundary", tmp_path / "fired", "kill", secs=20), argv=argv)
    check_all(*Path(settings["arena"]).glob("ftckpt-*/*"))
    for path in Path(settings["arena"]).glob("ftckpt-*/*/*dp1*"):
        with closing(Arena.open(path, writable=True)) as arena:
            for slot in arena.snapshots().values():
                arena.slot(slot)[arena.image.chunks[0].begin] ^= 1
    for result in ds_jobs.broken(ds_jobs.Run(ds_jobs.SHAPES["zero1"], UNTIL, settings, argv)):
        assert result.error is not None and "LostError" in result.error and '"on_lost" fresh' in result.error
        assert "_refuse" in result.error, "not before the script could load"
    loading = ds_jobs.Run(ds_jobs.SHAPES["zero1"], UNTIL, settings, (*argv, "--load", str(tmp_path / "ds")))
    resumed = ds_jobs.outcomes(loading)
    assert {outcome.start for outcome in resumed} == {3}
    assert {event["loaded"] for event in jobs.events(settings, "lost")} == {3}
    without = replace(loading, settings=None, argv=("--load", str(tmp_path / "ds"), "--load-tag", "global_step3"))
    assert resumed == ds_jobs.outcomes(without)


@pytest.mark.slow
def test_a_part_of_storage_is_not_mixed_with_what_memory_had(settings: dict[str, Any], tmp_path: Path) -> None:
    storage = str(tmp_path / "ds")
    attempt("zero1", settings, Fault("all", AT, "boundary", tmp_path / "fired", "kill", secs=20))
    ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES["zero1"], 6, argv=("--save", storage, "--save-interval", "6")))
    mixed = ds_jobs.Run(ds_jobs.SHAPES["zero1"], 9, settings, ("--load", storage, "--load-weights-only"))
    for result in ds_jobs.broken(mixed):
        assert result.error is not None
        assert "iteration 4 was restored from memory" in result.error and "ftckpt clean test" in result.error


@pytest.mark.slow
def test_a_job_that_lost_its_storage_and_nothing_else(settings: dict[str, Any], tmp_path: Path) -> None:
    """load_checkpoint finds nothing, which is no error of DeepSpeed: memory is what there is."""
    storage = tmp_path / "ds"
    argv = ("--save", str(storage), "--load", str(storage), "--save-interval", "3")
    attempt("zero1", settings, Fault(1, AT, "boundary", tmp_path / "fired", "kill"), argv=argv)
    shutil.rmtree(storage)
    resumed = ds_jobs.outcomes(ds_jobs.Run(ds_jobs.SHAPES["zero1"], UNTIL, settings, argv))
    assert jobs.assert_continues(reference("zero1"), resumed) == AT - 1
