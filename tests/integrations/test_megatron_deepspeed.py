"""A loop that counts as Megatron-DeepSpeed's does trains on to the bit, and knows where it stands."""

from __future__ import annotations

import functools
import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ftckpt.errors import FtckptError
from tests.support.ds_jobs import SMALL
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

LOOP = Path(__file__).parents[1] / "standin" / "megatron_loop"
JSON: dict[str, Any] = {
    **SMALL,
    "gradient_accumulation_steps": 2,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 9}},
}
ARGUMENTS: dict[str, Any] = {
    "deepspeed": True, "train_iters": 8, "eval_interval": 2, "log_interval": 1, "save_interval": 3, "save": None,
    "load": None, "load_tag": None, "exit_interval": None, "inference": False, "skip_train": False,
    "finetune": False,
}  # fmt: skip


class Crash(Exception):
    pass


def attempt(
    rank: int, world_size: int, fault: tuple[str, int] | None, arguments: dict[str, Any], section: dict[str, Any],
    *, loop: Callable[[Any, Namespace], None] | None = None,
) -> tuple[list[Any], int | None, str]:  # fmt: skip
    """The log of one attempt of a job, its state after the set-up, and its end."""
    from tests.standin import deepspeed as standin

    standin.install()
    sys.path.insert(0, str(LOOP))
    import ftckpt.deepspeed

    training: Any = importlib.import_module("megatron.training")  # the one of LOOP
    begun = []

    def meet(place: str, iteration: int) -> None:
        begun.append(iteration)
        if (place, iteration) == fault:
            raise Crash

    lines: list[Any] = []
    config = {**JSON, "ftckpt": section}
    given = Namespace(**{**ARGUMENTS, **arguments}, lines=lines, fault=meet, deepspeed_config=config)
    ended = "end"
    try:
        if loop is not None:
            loop(training, given)
        else:
            training.pretrain(given)
    except (Crash, SystemExit, FtckptError) as error:
        ended = f"{type(error).__name__}: {error}".removesuffix(": ")
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return lines, begun[0] if begun else None, ended


def own_loop(training: Any, arguments: Namespace, *, counts: bool) -> None:
    """A script's own, around ``train_step``; where it ``counts``, the loop's arguments know."""
    training.initialize(arguments)
    model, *_ = training.setup_model_and_optimizer(None, None)
    iteration, data = arguments.iteration, training.batches(arguments.consumed_train_samples)
    while iteration < arguments.train_iters:
        arguments.curr_iteration = iteration
        losses, *_ = training.train_step(data, model)
        iteration += 1
        arguments.lines.append((iteration, losses["lm loss"].item().hex()))
        if counts:
            arguments.iteration = iteration
            arguments.consumed_train_samples += training.MICRO * model[0].gradient_accumulation_steps()
    if arguments.save:
        training.save_checkpoint(iteration, model)


def loops(
    rank: int, world_size: int, fault: tuple[str, int] | None, counts: bool, section: dict[str, Any], **arguments: Any
) -> tuple[list[Any], int | None, str]:
    """A life of a job with a loop of its own."""
    return attempt(rank, world_size, fault, arguments, section, loop=functools.partial(own_loop, counts=counts))


@dataclass(frozen=True)
class Case:
    """``fault`` ends the first life; the second begins at ``iteration``. ``settings`` are ftckpt's."""

    fault: tuple[str, int] | None
    iteration: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    again: Mapping[str, Any] = field(default_factory=dict)


CASES = {
    # Sums of losses that wait for their line, and an evaluation that was counted before.
    "in an iteration": Case(("train", 6), 6, {"log_interval": 3}),
    # The boundary is behind the evaluation, which has not been.
    "in an evaluation": Case(("evaluate", 6), 6),
    "storage is older": Case(("train", 6), 6, {"save": "{}", "load": "{}"}),
    "storage is newer": Case(("train", 8), 7, {"save": "{}", "load": "{}"}, {"interval": 5}),
    "the user goes back": Case(("train", 8), 4, {"save": "{}", "load": "{}"}, {}, {"load_tag": "global_step3"}),
    "the loop exits": Case(None, 6, {"exit_interval": 5}, {}, {"exit_interval": None}),
}


class Job:
    """Attempts of one job, and of others next to it; ``{}`` in arguments is a folder."""

    def __init__(self, arena: Path, folder: Path, case: Case) -> None:
        arena.mkdir()
        self._folder, self._arguments = folder, case.arguments
        self._section = {"job": "job", "node": "node", "arena": str(arena), "protect": "none", **case.settings}

    def live(self, name: str, fault: tuple[str, int] | None, more: Mapping[str, Any]) -> Any:
        """Runs ``attempt``, under ftckpt where ``name`` is ``disturbed``."""
        arguments = {
            key: value.format(self._folder / name) if isinstance(value, str) else value
            for key, value in {**self._arguments, **more}.items()
        }
        section = {"enabled": name == "disturbed", **self._section}
        (result,) = run_ranks(attempt, 1, fault, arguments, section, stand_in=False)
        return result.value


@pytest.mark.parametrize("name", by_default(CASES, ["in an iteration"]))
def test_a_loop_that_counts_for_itself_trains_on_where_it_was(name: str, arena_root: Path, tmp_path: Path) -> None:
    case = CASES[name]
    job = Job(arena_root / "a", tmp_path, case)
    expected, _, _ = job.live("undisturbed", None, {"exit_interval": None})
    before, begun, ended = job.live("disturbed", case.fault, {})
    assert begun == 1 and ended == ("Crash" if case.fault else "SystemExit")
    after, begun, ended = job.live("disturbed", None, case.again)
    assert (begun, ended) == (case.iteration, "end")
    assert set(before + after) == set(expected) and before == expected[: len(before)]
    assert after == expected[-len(after) :]


@pytest.mark.slow
def test_a_loop_of_the_scripts_own_goes_on_where_it_counts_and_is_refused_where_not(arena_root: Path) -> None:
    (arena_root / "a").mkdir()
    section = {"enabled": True, "node": "node", "arena": str(arena_root / "a"), "protect": "none"}

    def live(fault: tuple[str, int] | None, counts: bool, **more: Any) -> Any:
        job = {"job": f"counts-{counts}".lower(), **section, **more}
        return run_ranks(loops, 1, fault, counts, job, stand_in=False)[0].value

    for _ in range(2):  # no snapshot of the first counts in the second
        lines, begun, ended = live(None, counts=False)
        assert begun == 1 and len(lines) == 1
        assert ended.startswith(
            "ConfigError: args.iteration is 0 and engine.global_steps 1: the loop counts elsewhere"
        )
    expected, _, _ = live(None, counts=True, enabled=False)
    before, _, _ = live(("train", 6), counts=True)
    after, begun, ended = live(None, counts=True)
    assert (begun, ended) == (6, "end") and before + after == expected


@pytest.mark.slow
def test_a_loop_that_begins_with_weights_of_another_job_goes_on(arena_root: Path, tmp_path: Path) -> None:
    job = Job(arena_root / "a", tmp_path, Case(None, 0, {"load": str(tmp_path / "base"), "finetune": True}))
    job.live("base", None, {"save": str(tmp_path / "base"), "load": None, "finetune": False})
    expected, begun, _ = job.live("undisturbed", None, {})
    assert begun == 1
    before, begun, _ = job.live("disturbed", ("train", 6), {})
    after, again, _ = job.live("disturbed", None, {})
    assert (begun, again) == (1, 6) and before + after == expected


@pytest.mark.slow
def test_a_save_behind_training_is_of_the_last_boundary_and_loads_without_ftckpt(
    arena_root: Path, tmp_path: Path
) -> None:
    (arena_root / "a").mkdir()
    section = {"job": "saves", "enabled": True, "node": "node", "arena": str(arena_root / "a"), "protect": "none"}
    folder = str(tmp_path / "saved")

    def live(section: dict[str, Any], **arguments: Any) -> Any:
        loop = functools.partial(loops, **arguments)
        return run_ranks(loop, 1, None, True, section, stand_in=False)[0].value

    live(section, save=folder, train_iters=4)
    from_memory = live(section, train_iters=6)
    from_storage = live({**section, "enabled": False}, load=folder, train_iters=6)
    assert from_memory == from_storage and from_memory[1:] == (5, "end")
