"""The entry of DeepSpeed's integration: its start, refusals, restored data and RNG, and its end."""

from __future__ import annotations

import functools
import logging
import multiprocessing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ftckpt.config import Config
from ftckpt.errors import ConfigError, FtckptError, MismatchError, UnsupportedError
from tests.support import jobs, plain
from tests.support.ds_jobs import SMALL
from tests.support.errors import message_of
from tests.support.event_logs import logged
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytestmark = pytest.mark.multiproc
pytest.importorskip("deepspeed")

WIDTH, SAMPLES = 4, 20
JSON = {**SMALL, "zero_optimization": {"stage": 1}}


def results(function: Any, ranks: int, *args: Any) -> list[Any]:
    return [result.value for result in run_ranks(function, ranks, *args, stand_in=False)]


def section(arena: str, **settings: Any) -> dict[str, Any]:
    return {"enabled": True, "job": "doors", "node": "node", "arena": arena, **settings}


def initialize(ftckpt_section: Any = None, data: Any = None, scheduler: Any = None, **config: Any) -> Any:
    """A tiny engine with dropout. ``scheduler`` is made from its optimizer."""
    from tests.standin import deepspeed as standin

    standin.install()
    import deepspeed

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.5))
    extra = {} if ftckpt_section is None else {"ftckpt": ftckpt_section}
    engine, *_ = deepspeed.initialize(
        model=model, training_data=data, lr_scheduler=scheduler, config={**JSON, **extra, **config}
    )
    return engine


def train_step(engine: Any, batch: Any = None) -> float:
    loss = engine(torch.ones(2, WIDTH) if batch is None else batch).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


class Samples:
    """Each sample shows its index; where ``noisy``, with noise from the generator of the process that loads it."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        sample = torch.full((WIDTH,), float(index))
        sample[1:] += torch.rand(WIDTH - 1) if self.noisy else 0
        return sample


def drawn(rank: int, world_size: int, arena: str, until: int, how: str) -> list[Any]:
    """Trains on the engine's own loader with a sampler that draws from torch's generator; leaves the arenas."""
    import ftckpt.deepspeed

    multiprocessing.set_start_method("fork", force=True)
    samples: Any = Samples(how == "workers")
    engine = initialize(section(arena, interval=1) if arena else None, samples)
    loader = engine.training_dataloader
    loader.data_sampler, loader.num_local_io_workers = torch.utils.data.RandomSampler(samples), int(samples.noisy)
    if how == "peek":
        next(iter(loader))
    rows = []
    while engine.global_steps < until:
        batches = iter(loader)
        if how == "pause":
            torch.rand(7)
            batches = iter(functools.partial(next, batches, None), None)  # not begun a second time
        for batch in batches:
            noise = torch.rand(1).item()
            rows.append((engine.global_steps, batch[:, 0].tolist(), noise, train_step(engine, batch)))
            if engine.global_steps == until:
                break
    loader.data = None  # ends its workers
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return rows


@pytest.mark.parametrize(
    ("how", "stop"),
    by_default(
        [("", 3), ("", 10), ("", 13), ("peek", 10), ("pause", 13), ("workers", 13)],
        [("", 13), ("peek", 10), ("workers", 13)],
    ),
)
def test_epochs_go_on_at_their_batch_whatever_the_sampler_draws_from(how: str, stop: int, arena_root: Path) -> None:
    unbroken = results(drawn, 2, "", 24, how)
    first = results(drawn, 2, str(arena_root), stop, how)
    second = results(drawn, 2, str(arena_root), 24, how)
    assert [a + b for a, b in zip(first, second, strict=True)] == unbroken
    epochs = [sorted(index for _, ids, _, _ in unbroken[0][at : at + 10] for index in ids) for at in (0, 10)]
    assert epochs == [[float(i) for i in range(SAMPLES)]] * 2


def positions(rank: int, world_size: int, arena: str, items: int, begin: int = 0) -> str:
    """A pipeline of one stage, over an iterator of so many items, without those before ``begin``."""
    from tests.standin import deepspeed as standin

    standin.install()
    import deepspeed
    from deepspeed.pipe import PipelineModule

    import ftckpt.deepspeed

    torch.distributed.barrier()
    deepspeed.init_distributed()
    torch.manual_seed(5)
    net = PipelineModule([torch.nn.Linear(WIDTH, WIDTH)], num_stages=1, loss_fn=torch.nn.MSELoss())
    engine, *_ = deepspeed.initialize(model=net, config={**JSON, "ftckpt": section(arena)})
    given = iter([(torch.full((2, WIDTH), float(i)), torch.zeros(2, WIDTH)) for i in range(begin, items)])
    assert engine.global_steps % 3 == 0
    try:
        for _ in range(3):
            engine.train_batch(given)
    except ConfigError as error:
        return str(error)
    left = next(given, None)
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return "none" if left is None else str(left[0][0, 0].item())


def test_items_that_were_drawn_from_a_scripts_iterator_are_skipped(arena_root: Path) -> None:
    assert results(positions, 1, str(arena_root), 4) == ["3.0"]
    text = results(positions, 1, str(arena_root), 9, 3)[0]
    assert "does not start with the first item of the job" in text and "named data" in text
    assert results(positions, 1, str(arena_root), 7) == ["6.0"]
    text = results(positions, 1, str(arena_root), 5)[0]
    assert "ends after 5 of the 6 items" in text and "ftckpt.deepspeed.register" in text


def ended(rank: int, world_size: int, arena: str, how: str) -> None:
    import ftckpt.deepspeed

    engine = initialize(section(arena, start_timeout_secs=20.0))
    for _ in range(3):
        train_step(engine)
    if how == "destroy":
        engine.destroy()
        engine.destroy()
    elif how == "close":
        ftckpt.deepspeed.close()
        train_step(engine)
    elif how == "error":
        try:
            try:
                raise ValueError("training failed")
            finally:
                engine.destroy()
        except ValueError:
            pass
    elif how == "collected":
        with patch("sys.is_finalizing", return_value=True):
            type(engine).__del__(engine)


@pytest.mark.parametrize("how", ["destroy", "close"])
def test_a_good_end_leaves_nothing(how: str, arena_root: Path) -> None:
    results(ended, 2, str(arena_root), how)
    assert list(arena_root.iterdir()) == []


@pytest.mark.parametrize("how", by_default(["error", "collected", "nothing"], ["collected"]))
def test_without_a_good_end_snapshots_stay(how: str, arena_root: Path) -> None:
    results(ended, 2, str(arena_root), how)
    assert len(list(arena_root.rglob("tp0-pp0-dp*"))) == 2
    assert results(started_again, 2, str(arena_root)) in ([2, 2], [3, 3])


def refused(rank: int, world_size: int, arena: str) -> list[str]:
    """The errors of wrong starts, with right ones before, between and after them."""
    import deepspeed

    import ftckpt.deepspeed

    def message(ftckpt_section: Any = None) -> str:
        return message_of(lambda: initialize(ftckpt_section), FtckptError)

    wrong = (["enabled"], section(arena, intervall=2), section(arena, interval=0))
    found = [message(given) for given in (*wrong, {"enabled": False})]
    version, deepspeed.__version__ = deepspeed.__version__, "9.9.9"
    found += [message(section(arena, versions="tested")), message()]
    deepspeed.__version__ = version
    ftckpt.deepspeed.configure({"interval": 3})
    found.append(message(section(arena, interval=2)))
    ftckpt.deepspeed.configure({})
    found += [message(section(arena)), message(section(arena))]
    ftckpt.deepspeed.close()
    return [*found, message(section(arena))]


def test_wrong_starts_are_refused_on_all_ranks_in_one_line(arena_root: Path) -> None:
    for found in results(refused, 2, str(arena_root)):
        kind, unknown, small, off, version, plain, differ, right, second, again = found
        assert "got list" in kind and "'intervall'" in unknown and '"interval": 0' in small
        assert "DeepSpeed 9.9.9 was not tested" in version and "0.19.8" in version
        assert '"interval": 3' in differ and "2 in the DeepSpeed configuration" in differ
        assert "saves one engine" in second and (off, plain, right, again) == ("",) * 4
        assert not [text for text in found if "\n" in text]


def draws_first(rank: int, world_size: int, arena: str, until: int, begins: bool) -> dict[str, Any]:
    """Draws noise before ``engine(batch)`` and counts after ``engine.step``; the iteration it resumes from, its rows,
    and what was reported. Leaves the arenas."""
    import ftckpt.deepspeed

    reported = logged(logging.WARNING)
    counter = Counter()
    ftckpt.deepspeed.register("counter", counter)
    engine = initialize(section(arena) if arena else None)
    start, rows = engine.global_steps, []
    torch.manual_seed(7)
    while engine.global_steps < until:
        if begins:
            ftckpt.deepspeed.begin_iteration()
        noise = torch.rand(2, WIDTH)
        rows.append((noise.sum().item(), counter.count, train_step(engine, noise)))
        counter.count += 1
    if begins:
        ftckpt.deepspeed.begin_iteration()
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return {"start": start, "rows": rows, "reported": [text for text in reported if "step boundary" in text]}


def test_what_a_script_changes_after_the_boundary_is_reported_and_the_remedy_is_one(arena_root: Path) -> None:
    for name in "ab":
        (arena_root / name).mkdir(parents=True)
    (unbroken,) = results(draws_first, 1, "", 6, False)
    (seen,) = results(draws_first, 1, str(arena_root / "a"), 4, False)
    assert len(seen["reported"]) == 1 and "counter, random numbers" in seen["reported"][0]
    assert seen["rows"] == unbroken["rows"][:4]
    (first,) = results(draws_first, 1, str(arena_root / "b"), 3, True)
    (second,) = results(draws_first, 1, str(arena_root / "b"), 6, True)
    assert second["start"] == 3 and first["rows"] + second["rows"] == unbroken["rows"]
    assert first["reported"] == second["reported"] == []


def frozen_later(rank: int, world_size: int, arena: str, kind: str) -> Any:
    """Two iterations; the first freezes the bias. Returns its flag at the start, or the error that stops it."""
    import ftckpt.deepspeed

    settings = {"type": kind, "params": {"lr": 1e-2, "torch_adam": True, "adam_w_mode": kind == "AdamW"}}
    try:
        engine = initialize(section(arena), optimizer=settings)
    except MismatchError as error:
        return str(error)
    bias = engine.module[0].bias
    found, until = bias.requires_grad, engine.global_steps + 2
    while engine.global_steps < until:
        train_step(engine)
        engine.module[0].bias.requires_grad_(False)
    ftckpt.deepspeed.remove()
    return found


def test_flags_of_an_engine_come_back_and_another_optimizer_is_refused(arena_root: Path) -> None:
    assert results(frozen_later, 1, str(arena_root), "AdamW") == [True]
    assert results(frozen_later, 1, str(arena_root), "AdamW") == [False]
    (refused_by_name,) = results(frozen_later, 1, str(arena_root), "Adam")
    assert "optimizer AdamW" in refused_by_name and "Adam:" in refused_by_name


class Counter:
    """An object of a script."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def by_hand(rank: int, world_size: int, arena: str) -> list[Any]:
    """Attaches twice, as two starts of a job would; registers what cannot be registered."""
    import ftckpt.deepspeed
    from ftckpt.deepspeed import active_engine as integration

    found: list[Any] = []
    for name, value in (("a", object()), ("", Counter()), ("ftckpt.data", Counter())):
        with pytest.raises(ConfigError, match=r"^register: "):
            ftckpt.deepspeed.register(name, value)  # type: ignore[arg-type]
    registered = Counter()
    ftckpt.deepspeed.register("registered", registered)
    config = Config(**section(arena))
    for _ in range(2):
        engine, counter = initialize(), Counter()
        registered.count = 0
        assert ftckpt.deepspeed.attach(engine) is None, "the JSON has no section"
        checkpointer = ftckpt.deepspeed.attach(engine, {"counter": counter}, config)
        assert checkpointer is ftckpt.deepspeed.active()
        found.append((engine.global_steps, counter.count, registered.count))
        with pytest.raises(ConfigError, match="saves one engine"):
            ftckpt.deepspeed.attach(engine, {}, config)
        with pytest.raises(ConfigError, match="too late"):
            ftckpt.deepspeed.register("late", Counter())
        with pytest.raises(UnsupportedError, match="compile"):
            engine.compile()
        for _ in range(2):
            counter.count, registered.count = counter.count + 1, registered.count + 10
            train_step(engine)
        integration.leave()
    return found


def test_an_engine_is_attached_by_hand_with_objects(arena_root: Path) -> None:
    assert results(by_hand, 2, str(arena_root)) == [[(0, 0, 0), (2, 2, 20)]] * 2


def loaded_in_training(rank: int, world_size: int, arena: str, folder: str) -> None:
    """A script rolls back to its own checkpoint, trains, and dies before it has reached the same iteration."""

    engine = initialize(section(arena, events=f"{folder}/events", schedule="sync"))
    for _ in range(2):
        train_step(engine)
    engine.save_checkpoint(f"{folder}/saved")
    for _ in range(3):
        train_step(engine)
    engine.load_checkpoint(f"{folder}/saved")
    assert engine.global_steps == 2
    for _ in range(2):
        train_step(engine)
    assert engine.global_steps == 4
    plain.die()


def started_again(rank: int, world_size: int, arena: str, storage: str = "") -> int:
    import ftckpt.deepspeed  # noqa: F401 - the integration

    engine = initialize(section(arena, persist=storage))
    return int(engine.global_steps)


def test_what_was_taken_back_does_not_come_back(arena_root: Path, tmp_path: Path) -> None:
    """Iteration 5 was committed in memory, and rolled back by the load: the restart resumes from 4."""
    args = (loaded_in_training, 2, str(arena_root), str(tmp_path))
    assert [r.exitcode for r in run_ranks(*args, stand_in=False, expect_failures=True)] == [-9, -9]
    told = {"events": tmp_path / "events"}
    assert not jobs.events(told, "turned_off") and not jobs.events(told, "snapshot_error")
    assert results(started_again, 2, str(arena_root)) == [4, 4]


def annealed(rank: int, world_size: int, arena: str, folder: str, ends: tuple[int, int]) -> list[Any]:
    """Under Megatron's scheduler: loads what is in storage, trains until ``ends[0]`` and saves at ``ends[1]``."""
    import ftckpt.deepspeed

    def scheduler(optimizer: Any) -> Any:
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        return OptimizerParamScheduler(optimizer, 0.0, 1e-3, 1e-5, 4, 40, "cosine", 0.0, 0.1, 40, "linear")

    engine = initialize(section(arena) if arena else None, scheduler=scheduler)
    rows: list[Any] = [engine.global_steps, engine.lr_scheduler.num_steps]
    engine.load_checkpoint(folder)
    rows += [engine.global_steps, engine.lr_scheduler.num_steps]
    while engine.global_steps < ends[0]:
        group = engine.basic_optimizer.param_groups[0]
        rows.append((engine.global_steps, group["lr"], group["weight_decay"], train_step(engine)))
        if engine.global_steps == ends[1]:
            engine.save_checkpoint(folder)
    ftckpt.deepspeed.remove()  # the last snapshot is finished
    return rows


@pytest.mark.parametrize("newer", ["memory", "storage", "nothing"])
def test_a_scheduler_that_adds_what_it_loads_stands_where_the_newer_one_stood(
    newer: str, arena_root: Path, tmp_path: Path
) -> None:
    """Both are loaded, one after the other, into one scheduler. ``nothing``: storage is empty."""
    folder, start = str(tmp_path / "saved"), 5
    (unbroken,) = results(annealed, 1, "", str(tmp_path / "empty"), (9, 0))
    results(annealed, 1, str(arena_root), folder, (start, 0 if newer == "nothing" else 3))
    if newer == "storage":
        start = 7
        results(annealed, 1, "", folder, (start, start))
        (unbroken,) = results(annealed, 1, "", folder, (9, 0))
    (resumed,) = results(annealed, 1, str(arena_root), folder, (9, 0))
    assert resumed[:4] == [5, 10, start, 2 * start]  # a batch of two samples is two steps
    assert resumed[4:] == unbroken[start - 9 :]
