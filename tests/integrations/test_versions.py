"""Releases of Megatron and DeepSpeed that were not tested: they train with a warning, or are refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks import versions
from tests.support import jobs
from tests.support.errors import raises
from tests.support.event_logs import logged
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

LATER = "9.9.9"


def megatron(rank: int, world_size: int, arena: str, what: str, settings: dict[str, Any]) -> list[str]:
    import megatron.core
    import train_gpt
    from megatron.core.pipeline_parallel import schedules

    import ftckpt.megatron

    said = logged(logging.WARNING)
    megatron.core.__version__ = LATER
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--pp", "2", "--iterations", "4"]))
    config = Config(enabled=True, job="later", node="node", arena=arena, protect="none", **settings)
    if what == "no field":
        config_of_model = job.model[0].config
        del config_of_model.timers
        for kind in type(config_of_model).__mro__:
            if "timers" in vars(kind):
                del kind.timers
    elif what == "other arguments":
        schedules.forward_backward_no_pipelining = lambda model, forward_only: None
    try:
        checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, {}, config)
        assert checkpointer is not None
        checkpointer.restore()
        for iteration in range(1, 5):
            train_gpt.train_step(job)
            checkpointer.step(iteration)
        checkpointer.close()
    except UnsupportedError as error:
        said.append(f"refused: {error}")
    return said


def deepspeed(rank: int, world_size: int, arena: str, what: str, settings: dict[str, Any]) -> list[str]:
    import deepspeed as framework

    import ftckpt.deepspeed
    from tests.integrations import test_deepspeed_doors as doors

    said = logged(logging.WARNING)
    framework.__version__ = LATER
    config = Config.from_mapping(doors.section(arena, protect="none", **settings))
    try:
        engine = doors.initialize()
        if what == "no setting":
            del framework.DeepSpeedEngine.zenflow_config
        ftckpt.deepspeed.attach(engine, config=config)
        for _ in range(4):
            doors.train_step(engine)
        ftckpt.deepspeed.close()
    except UnsupportedError as error:
        said.append(f"refused: {error}")
    return said


JOBS = {"megatron": megatron, "deepspeed": deepspeed}
NAMES = {"megatron": "megatron-core", "deepspeed": "DeepSpeed"}


def said_by(framework: str, tmp_path: Path, what: str = "", **settings: Any) -> list[list[str]]:
    pytest.importorskip(framework)
    found = run_ranks(JOBS[framework], 2, str(tmp_path), what, settings, stand_in=framework == "megatron")
    return [result.value for result in found]


@pytest.mark.parametrize("framework", JOBS)
def test_a_later_release_that_fits_trains_with_a_warning(framework: str, tmp_path: Path) -> None:
    for rank, lines in enumerate(said_by(framework, tmp_path)):
        warnings = [line for line in lines if f"{NAMES[framework]} {LATER} was not tested" in line]
        assert not any("refused: " in line for line in lines)
        assert len(warnings) == (rank == 0)
        assert all(release in line for line in warnings for release in versions.TESTED[NAMES[framework]])


MISFITS = {
    "megatron-no field": "has no field timers",
    "megatron-other arguments": "forward_backward_no_pipelining takes no argument num_microbatches",
    "deepspeed-no setting": "zero_optimization.zenflow",
}


@pytest.mark.parametrize("case", by_default(MISFITS, ["megatron-no field", "deepspeed-no setting"]))
def test_a_later_release_that_does_not_fit_is_refused_by_what(case: str, tmp_path: Path) -> None:
    framework, _, what = case.partition("-")
    for lines in said_by(framework, tmp_path, what):
        assert lines[-1].startswith("refused: ") and MISFITS[case] in lines[-1] and LATER in lines[-1]


@pytest.mark.parametrize("framework", by_default(JOBS, ["megatron"]))
def test_only_tested_releases(framework: str, tmp_path: Path) -> None:
    for lines in said_by(framework, tmp_path, versions="tested"):
        assert f"{NAMES[framework]} {LATER} was not tested with ftckpt" in lines[-1]
        assert all(release in lines[-1] for release in versions.TESTED[NAMES[framework]])


def test_a_build_or_a_commit_in_the_version_is_no_other_release() -> None:
    assert versions.admit("megatron-core", "0.19.1+0a1b2c3", Config()) == ""


class Shape:
    """An object of a framework, whose names and signatures are checked."""

    count = 3

    def named(self, model: object, *, forward_only: bool = False) -> None: ...

    def any(self, **kwargs: object) -> None: ...


@pytest.mark.parametrize(
    ("functions", "fields", "problem"),
    [
        ({"named": ("model", "forward_only"), "any": ("whatever",)}, {"count": int}, ""),
        ({"gone": ()}, {}, "Shape has no function gone"),
        ({"count": ()}, {}, "Shape has no function count"),
        ({"named": ("model", "num_microbatches")}, {}, "Shape.named takes no argument num_microbatches"),
        ({}, {"gone": object}, "Shape has no field gone"),
        ({}, {"count": str}, "Shape.count is of type int, not str"),
    ],
)
def test_what_a_release_must_have(
    functions: dict[str, tuple[str, ...]], fields: dict[str, type], problem: str
) -> None:
    if not problem:
        versions.require("framework 1", Shape(), functions, fields)
        return
    with raises(UnsupportedError, "framework 1", problem):
        versions.require("framework 1", Shape(), functions, fields)
