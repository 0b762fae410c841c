"""Megatron's saving taken over: real megatron-core jobs in a train loop that saves where Megatron-LM's does."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.convert.conversion import Options, convert
from ftckpt.convert.snapshots import SnapshotReader
from ftckpt.convert.universal import UniversalWriter
from ftckpt.errors import ConfigError, UnsupportedError
from ftckpt.store.directory import clean_job
from tests.multiproc.test_convert_megatron import assert_equal, consolidated, contents, loaded
from tests.support import jobs
from tests.support.constants import configured
from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

TRACKER = "latest_checkpointed_iteration.txt"
EVERY = 4
SECS = 300.0


class TrainLoop:
    """``megatron.training.training`` as far as it saves, for one rank; ``saved`` are the iterations that it wrote."""

    def __init__(self, rank: int, args: Namespace) -> None:
        self.saved: list[int] = []
        self.passing: list[int] = []
        self.exits_at = self.last = -1
        self.module: Any = types.ModuleType("megatron.training.training")

        def save_checkpoint(iteration: int, model: Any, non_persistent_ckpt: bool = False) -> None:
            (self.passing if non_persistent_ckpt else self.saved).append(iteration)
            if rank == 0 and not non_persistent_ckpt:
                (Path(args.save) / f"iter_{iteration:07d}").mkdir()
                (Path(args.save) / TRACKER).write_text(str(iteration))

        def save_checkpoint_and_time(iteration: int, model: Any, non_persistent_ckpt: bool = False) -> None:
            self.module.save_checkpoint(iteration, model, non_persistent_ckpt=non_persistent_ckpt)

        def checkpoint_and_decide_exit(model: Any, iteration: int) -> bool:
            if iteration % EVERY == 0:
                self.module.save_checkpoint_and_time(iteration, model)
            elif iteration % EVERY == 2:
                self.module.save_checkpoint_and_time(iteration, model, non_persistent_ckpt=True)
            return iteration == self.exits_at

        def train(iterate: Any) -> None:
            iteration = 0
            while iteration != self.last:
                iteration += 1
                iterate(iteration)
                if self.module.checkpoint_and_decide_exit(None, iteration):
                    sys.exit(0)  # as there

        for function in (save_checkpoint, save_checkpoint_and_time, checkpoint_and_decide_exit, train):
            setattr(self.module, function.__name__, function)
        sys.modules[self.module.__name__] = self.module


def trained(
    rank: int, world_size: int, settings: dict[str, Any], directory: str, until: str
) -> tuple[list[int], list[int], int]:
    """Train until something was ``persisted`` or ``saved``, and on to the next save; what was saved, and where it
    ended."""
    import torch
    import train_gpt

    import ftckpt.megatron
    from ftckpt.megatron import saves

    args = Namespace(save=directory, save_interval=EVERY)
    loop = TrainLoop(rank, args)
    config = saves.taken_over(Config(enabled=True, node="node", persist="megatron", **configured(settings)), args)
    job = train_gpt.build(train_gpt.parse_args([*jobs.TINY, "--tp", "2", "--iterations", "5000"]))
    objects = {"data": job.data, "progress": job.progress}
    checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
    assert checkpointer is not None
    checkpointer.restore()
    saves.take_over(checkpointer, args)

    end = -1

    def iterate(iteration: int) -> None:
        nonlocal end
        train_gpt.train_step(job)
        if iteration != EVERY:  # of which there is no snapshot, then
            checkpointer.step(iteration)
        if iteration == 2 * EVERY + 1:
            loop.module.save_checkpoint_and_time(2 * EVERY, None)  # for another reason
        stored = checkpointer.persisted
        own = stored is not None and stored.iteration > 2 * EVERY  # that one Megatron saves, too
        done = own if until == "persisted" else len(loop.saved) > 2 or iteration > 200
        flag = torch.tensor([done], dtype=torch.int)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        if flag.item() and end < 0:
            end = (iteration // EVERY + 1) * EVERY
            if until == "persisted":
                loop.exits_at = end
            else:
                loop.last = end

    with suppress(SystemExit):
        loop.module.train(iterate)
    checkpointer.close()
    return loop.saved, loop.passing, end


@pytest.fixture
def taking_over(settings: dict[str, Any], arena_root: Path) -> Iterator[dict[str, Any]]:
    settings |= {"protect": "none", "objects_size": "1MiB", "on_error": "raise", "slots": 5}
    yield settings
    clean_job(arena_root, "test")


@pytest.mark.slow
def test_what_megatron_would_save_comes_there_and_megatron_loads_it(
    taking_over: dict[str, Any], tmp_path: Path
) -> None:
    where = tmp_path / "save"
    results = run_ranks(trained, 2, taking_over, str(where), "persisted", timeout_secs=SECS)
    (saved, passing, end), other = (result.value for result in results)
    assert (saved, passing, end) == other
    # What ftckpt has no snapshot of, what is for another reason, and where training ends: by Megatron itself.
    assert saved == [EVERY, 2 * EVERY, end] and passing == list(range(2, end, EVERY))
    told = {event["iteration"] for event in jobs.events(taking_over, "not_taken_over")}
    assert EVERY in told and 2 * EVERY not in told, "what is for another reason was never to be taken over"
    assert (where / TRACKER).read_text() == str(end)
    ours = {int(path.parent.name[5:]): path.parent for path in where.glob("iter_*/ftckpt.json")}
    iteration = min(ours)
    assert iteration > EVERY and not ours.keys() & set(saved)
    assert len(ours) > 1, "one was on its way when training ended"
    assert {path.name for path in where.iterdir() if path not in ours.values()} == {
        "ftckpt", TRACKER, *(f"iter_{at:07d}" for at in saved)
    }  # fmt: skip
    convert(SnapshotReader(where / "ftckpt", iteration), UniversalWriter(tmp_path / "universal"), Options())
    again = run_ranks(loaded, 1, ("--tp", "1"), str(ours[iteration]), iteration, timeout_secs=SECS)
    assert_equal(consolidated(again), contents(tmp_path / "universal"))
    assert not list(Path(taking_over["arena"]).iterdir()), "memory is empty"
    there = {**taking_over, "persist": f"megatron:{where}", "persist_interval": 1000}
    run = jobs.Run(("--tp", "2"), max(ours) + 1, there, end="keep")
    assert {outcome.start for outcome in jobs.outcomes(2, run)} == {max(ours)}


@pytest.mark.slow
def test_megatron_saves_by_itself_where_nothing_comes(taking_over: dict[str, Any], tmp_path: Path) -> None:
    where = tmp_path / "save"
    taking_over |= {"flush_secs": 1.0, "on_error": "continue"}
    results = run_ranks(trained, 2, taking_over, str(where), "saved", timeout_secs=SECS)
    saved, _, end = results[0].value
    assert saved[:2] == [EVERY, 2 * EVERY] and saved[-1] == end and len(saved) > 2
    told = jobs.events(taking_over, "not_taken_over")
    assert EVERY in (iterations := {event["iteration"] for event in told}) and iterations <= set(saved)
    reasons = {event["reason"] for event in told}
    assert "another rank objects" in reasons and any("was to be there" in reason for reason in reasons)
    assert (where / TRACKER).read_text() == str(end)


GOOD = {"save": "/a", "save_interval": 10, "ckpt_format": "torch_dist", "save_retain_interval": None}


@pytest.mark.parametrize(
    ("args", "settings", "text"),
    [
        ({"save": None}, {}, "add --save DIR --save-interval K"),
        ({"save_interval": None}, {}, "add --save DIR --save-interval K"),
        ({"save": "msc://a/b"}, {}, "--save msc://a/b is no directory"),
        ({"ckpt_format": "torch"}, {}, "torch_dist is written, and --ckpt-format is torch"),
        ({"save_retain_interval": 20}, {}, "--save-retain-interval is not followed"),
        ({"no_save_optim": True}, {}, "--no-save-optim is not followed"),
        ({"dataloader_save": "/b"}, {}, "--dataloader-save is what Megatron's own saving writes"),
        ({}, {"persist_interval": 10}, "--save-interval says how often"),
        ({}, {"interval": "auto"}, "interval: auto takes snapshots of other iterations"),
        ({}, {"interval": 3}, "interval: 3 does not divide --save-interval 10"),
    ],
)
def test_what_cannot_be_taken_over_is_refused(args: dict[str, Any], settings: dict[str, Any], text: str) -> None:
    from ftckpt.megatron import saves

    with pytest.raises(ConfigError, match=text):
        saves.taken_over(Config(persist="megatron", **settings), Namespace(**{**GOOD, **args}))


def test_another_train_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.megatron import saves

    loop: Any = types.ModuleType("megatron.training.training")
    loop.save_checkpoint = loop.train = print
    monkeypatch.setitem(sys.modules, "megatron.training", types.ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    with pytest.raises(UnsupportedError, match=r"has no megatron\.training\.training\.save_checkpoint_and_time"):
        saves.taken_over(Config(persist="megatron"), Namespace(**GOOD))
