"""Releases of Megatron and DeepSpeed that were not tested: examined in the first iterations, or refused by name."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.errors import UnsupportedError
from ftckpt.frameworks import versions
from tests.support import jobs
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc

LATER = "9.9.9"
GONE = {"no method": "allreduce_gradients", "no field": "zenflow_config", "no geometry": "zero_optimization_stage"}
EXAMINED = "was examined: steps are fenced, and snapshots hold what training has"


class Said(logging.Handler):
    """What ftckpt has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ftckpt").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def misfit(what: str, checkpointer: Any) -> None:
    """Let the release be one that does not fit."""
    from ftckpt.capture import copier, examination

    if what in ("no fence", "late fence"):
        checkpointer.fence = lambda: None
    elif what == "off":
        examination._MOST_STEPS = 3
    elif what == "no boundary":
        checkpointer.step = lambda iteration: None
    elif what == "other bytes":
        whole = copier.copy_chunk

        def copy(tensors: Any, copy: Any, slot: Any, *rest: Any, **more: Any) -> None:
            whole(tensors, copy, slot, *rest, **more)
            slot[copy.begin] ^= 1

        copier.copy_chunk = copy


def megatron(rank: int, world_size: int, arena: str, what: str, settings: dict[str, Any]) -> list[str]:
    import megatron.core
    import train_gpt

    import ftckpt.megatron

    said = Said()
    megatron.core.__version__ = LATER
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--pp", "2", "--iterations", "4"]))
    config = Config(enabled=True, job="later", node="node", arena=arena, protect="none", **settings)
    try:
        checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, {}, config)
        assert checkpointer is not None
        checkpointer.restore()
        fence = checkpointer.fence
        misfit(what, checkpointer)
        for iteration in range(1, 5):
            train_gpt.train_step(job)
            if what == "late fence":
                fence()
            if what == "off" and iteration == 1:
                checkpointer._snapshots.execute([checkpointer._state.turn_off("for a test")])
            checkpointer.step(iteration)
        checkpointer.close()
    except UnsupportedError as error:
        said.lines.append(f"refused: {error}")
    return said.lines


def deepspeed(rank: int, world_size: int, arena: str, what: str, settings: dict[str, Any]) -> list[str]:
    import deepspeed as framework

    import ftckpt.deepspeed
    from tests.multiproc import test_deepspeed_doors as doors

    said = Said()
    framework.__version__ = LATER
    config = Config.from_mapping(doors.section(arena, protect="none", **settings))
    try:
        engine = doors.initialize()
        if what in GONE:
            delattr(framework.DeepSpeedEngine, GONE[what])
        misfit(what, ftckpt.deepspeed.attach(engine, config=config))
        for _ in range(1200 if what == "no boundary" else 4):
            doors.train_step(engine)
        ftckpt.deepspeed.close()
    except UnsupportedError as error:
        said.lines.append(f"refused: {error}")
    return said.lines


JOBS = {"megatron": megatron, "deepspeed": deepspeed}
NAMES = {"megatron": "megatron-core", "deepspeed": "DeepSpeed"}


def said_by(framework: str, tmp_path: Path, what: str = "", **settings: Any) -> list[list[str]]:
    pytest.importorskip(framework)
    found = run_ranks(JOBS[framework], 2, str(tmp_path), what, settings, stand_in=framework == "megatron")
    return [result.value for result in found]


@pytest.mark.parametrize("framework", JOBS)
def test_a_later_release_that_fits_trains_and_says_so(framework: str, tmp_path: Path) -> None:
    for rank, lines in enumerate(said_by(framework, tmp_path)):
        text = "\n".join(lines)
        assert "refused: " not in text
        if rank == 0:
            assert (
                f"was not tested with {NAMES[framework]} {LATER}" in text
                and versions.TESTED[NAMES[framework]][0] in text
            )
            assert f"{NAMES[framework]} {LATER} {EXAMINED}" in text


MISFITS = {
    "megatron-no fence": "was changed, and the hook on the optimizer's step was not called",
    "megatron-late fence": "was changed before the hook on the optimizer's step was called",
    "megatron-other bytes": "in the snapshot of iteration 1 is not what training has",
    "deepspeed-no fence": "was changed, and the hook on the optimizer's step was not called",
    "deepspeed-no boundary": "no end of an iteration: no snapshot is taken",
    "deepspeed-no method": "has no allreduce_gradients, from where ftckpt is called",
    "deepspeed-no geometry": "no attribute 'zero_optimization_stage'",
    "deepspeed-no field": "zero_optimization.zenflow",
}


ALIKE = ("megatron-no fence", "deepspeed-no boundary", "deepspeed-no geometry", "deepspeed-no method")
QUICK = [case for case in MISFITS if case not in ALIKE]


@pytest.mark.parametrize("case", by_default(MISFITS, QUICK))
def test_a_later_release_that_does_not_fit_is_refused_by_what(case: str, tmp_path: Path) -> None:
    framework, _, what = case.partition("-")
    for lines in said_by(framework, tmp_path, what):
        assert lines[-1].startswith("refused: ") and MISFITS[case] in lines[-1] and "install a tested" in lines[-1]
        assert not any(EXAMINED in line for line in lines)


def test_a_snapshot_with_other_bytes_is_void_for_the_next_start(tmp_path: Path) -> None:
    said_by("megatron", tmp_path, "other bytes")
    assert any("nothing to restore" in line for line in said_by("megatron", tmp_path)[0])


def test_a_job_that_trains_on_without_snapshots_is_not_examined(tmp_path: Path) -> None:
    for lines in said_by("megatron", tmp_path, "off"):
        assert not any("refused: " in line or EXAMINED in line for line in lines)


@pytest.mark.parametrize("framework", by_default(JOBS, ["megatron"]))
def test_only_tested_releases(framework: str, tmp_path: Path) -> None:
    for lines in said_by(framework, tmp_path, versions="tested"):
        assert f"{NAMES[framework]} {LATER} was not tested with ftckpt" in lines[-1]
        assert all(release in lines[-1] for release in versions.TESTED[NAMES[framework]])


def test_a_build_or_a_commit_in_the_version_is_no_other_release() -> None:
    assert versions.admit("megatron-core", "0.19.1+0a1b2c3", Config()) == ""


def test_a_fork_that_keeps_the_number_of_a_release_is_examined_where_that_is_wanted() -> None:
    assert versions.admit("megatron-core", "0.19.1", Config(versions="always")) == "megatron-core 0.19.1"
