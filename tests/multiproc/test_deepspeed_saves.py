"""DeepSpeed's saving taken over: real engines, whose own saves of the same moment have the same in them."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ftckpt.store.directory import clean_job
from tests.support import jobs
from tests.support.constants import configured
from tests.support.ds_jobs import SHAPES, TINY, Run, Shape, outcomes
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiproc

AT, LAST = 2, 4
SECS = 300.0


def build(shape: Shape, settings: Mapping[str, Any] | None) -> Any:
    from ftckpt.standin import deepspeed as standin

    standin.install()
    import train_deepspeed

    config = shape.json()
    if settings is not None:
        import ftckpt.deepspeed  # noqa: F401 - the door

        config["ftckpt"] = {"enabled": True, "node": "node", "protect": "none", **configured(settings)}
    # Without dropout: DeepSpeed's checkpoints hold no generators.
    return train_deepspeed.build(train_deepspeed.parse_args([*TINY, *shape.argv, "--dropout", "0"]), config)


def trained(job: Any, last: int) -> Iterator[tuple[int, float]]:
    import train_deepspeed

    while job.engine.global_steps < last:
        row = train_deepspeed.train_step(job)
        yield row["iteration"], row["loss"]


def saves(rank: int, world_size: int, shape: Shape, settings: dict[str, Any], native: str) -> list[tuple[int, float]]:
    """Train, and save in both ways at one iteration."""
    from ftckpt.job import takeover

    takeover._SMP_SECS = SECS  # beside other jobs an SMP may take long to start
    job, losses = build(shape, settings), []
    for loss in trained(job, LAST):
        losses.append(loss)
        if loss[0] == AT:
            for where in (settings["persist"].partition(":")[2], native):
                state = {"data": job.data.state_dict(), "mine": {"rank": Path("a"), "at": [AT]}}
                assert job.engine.save_checkpoint(where, client_state=state) is True
    job.engine.destroy()
    return losses


def goes_on(rank: int, world_size: int, shape: Shape, where: str) -> tuple[list[tuple[int, float]], Any]:
    """Load with DeepSpeed alone, and train."""
    job = build(shape, None)
    path, state = job.engine.load_checkpoint(where)
    assert path is not None
    job.data.load_state_dict(state["data"])
    return list(trained(job, LAST)), state["mine"]


def differing(mine: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Where two values of ``torch.load`` differ."""
    import torch

    # Of experts DeepSpeed makes its dictionaries anew, so that addresses do not matter: sizes are tuples then.
    if type(mine) is not type(theirs) and not (isinstance(mine, tuple) and isinstance(theirs, tuple)):
        yield f"{where}: {type(mine)} {type(theirs)}"
    elif isinstance(mine, torch.Tensor):
        if mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            yield where
    elif isinstance(mine, Mapping):
        if list(mine) != list(theirs):
            yield f"{where}: {list(mine)} {list(theirs)}"
        for key in mine.keys() & theirs.keys():
            yield from differing(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, (list, tuple)):
        if len(mine) != len(theirs):
            yield f"{where}: {len(mine)} {len(theirs)}"
        for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            yield from differing(one, other, f"{where}[{number}]")
    elif hasattr(mine, "__dict__") and type(mine).__eq__ is object.__eq__:
        yield from differing(vars(mine), vars(theirs), where)
    elif mine != theirs:
        yield f"{where}: {mine} {theirs}"


@pytest.fixture
def taking_over(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield settings | {"objects_size": "1MiB", "on_error": "raise", "persist": f"deepspeed:{tmp_path / 'save'}"}
    clean_job(arena_root, "test")


def files_of(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


QUICK = ("zero3",)


@pytest.mark.parametrize("name", by_default(SHAPES, QUICK))
def test_what_comes_is_what_deepspeed_saves_and_it_goes_on_from_there(
    name: str, taking_over: dict[str, Any], tmp_path: Path
) -> None:
    import torch

    shape, where, native = SHAPES[name], tmp_path / "save", tmp_path / "native"
    results = run_ranks(saves, shape.ranks, shape, taking_over, str(native), stand_in=False, timeout_secs=SECS)
    assert {event["reason"] for event in jobs.events(taking_over, "not_taken_over")} == {
        f"save_checkpoint({str(native)!r}) is not the directory of persist, {where}"
    }
    assert not list(Path(taking_over["arena"]).iterdir()), "memory is empty"
    ours = {file for file in files_of(where) if not file.startswith("ftckpt/")}
    assert ours == files_of(native) | {f"global_step{AT}/ftckpt.json"}
    assert not (where / "ftckpt" / "outlines").exists()
    for file in sorted(file for file in ours if file.endswith(".pt")):
        mine, theirs = (torch.load(at / file, weights_only=False) for at in (where, native))
        assert not list(differing(mine, theirs)), file
        listed = subprocess.run(
            [sys.executable, "-m", "zipfile", "-t", str(where / file)], check=True, capture_output=True, text=True
        )
        assert listed.stdout.strip() == "Done testing", listed.stdout  # it has checksums
    again = run_ranks(goes_on, shape.ranks, shape, str(where), stand_in=False, timeout_secs=SECS)
    right = [(result.value[AT:], {"rank": Path("a"), "at": [AT]}) for result in results]
    if shape.argv[:1] == ["--num-experts"]:  # of which DeepSpeed itself does not bring back all
        others = run_ranks(goes_on, shape.ranks, shape, str(native), stand_in=False, timeout_secs=SECS)
        right = [result.value for result in others]
    assert [result.value for result in again] == right


def saves_what_cannot_be_left(rank: int, world_size: int, shape: Shape, settings: dict[str, Any]) -> int:
    """A call at each of four iterations, and one, which it returns, left to an SMP that has no place for it."""
    from ftckpt.deepspeed.initialize import door

    where = Path(settings["persist"].partition(":")[2])
    job, blocked = build(shape, settings), where / "ftckpt" / "outlines"
    last = 0
    for iteration, _ in trained(job, 500):
        if iteration == 1 and rank == 0:
            blocked.write_text("")
        if iteration > 4 and door.checkpointer.persisting is not None:  # type: ignore[union-attr]
            continue  # what was left at the third
        job.engine.save_checkpoint(where, tag="a/b" if iteration == 2 else None, client_state={"at": iteration})
        if iteration == 1 and rank == 0:
            blocked.unlink()
        if (last := iteration) > 4:
            break
    if rank == 0:
        (where / "ftckpt").rename(where / "away")
        (where / "ftckpt").touch()
    job.engine.destroy()
    return last


def test_deepspeed_saves_by_itself_what_cannot_be_left(taking_over: dict[str, Any], tmp_path: Path) -> None:
    import torch

    shape, where = SHAPES["zero1"], tmp_path / "save"
    taking_over |= {"flush_secs": 1.0, "on_error": "continue"}
    results = run_ranks(saves_what_cannot_be_left, 2, shape, taking_over, stand_in=False, timeout_secs=SECS)
    last = results[0].value
    assert not list(Path(taking_over["arena"]).iterdir()), "what it saves need not stay in memory"
    told = [event for event in jobs.events(taking_over, "not_taken_over") if event["rank"] == 0]
    assert [event["iteration"] for event in told] == [1, 2, 4]
    reasons = [event["reason"] for event in told]
    assert str(where / "ftckpt" / "outlines") in reasons[0]
    assert reasons[1:] == [
        "the tag 'a/b' is not the name of a directory there",
        "what was to be there of iteration 3 is not",
    ]
    assert (where / "latest").read_text() == f"global_step{last}"
    for iteration in (1, 4, last):
        state = torch.load(where / f"global_step{iteration}" / "mp_rank_00_model_states.pt", weights_only=False)
        assert (state["global_steps"], state["at"]) == (iteration, iteration)
        assert not (where / f"global_step{iteration}" / "ftckpt.json").exists()


@pytest.mark.slow
def test_a_job_goes_on_under_ftckpt_from_what_is_newest(taking_over: dict[str, Any], tmp_path: Path) -> None:
    """Its memory is gone; its script loads what was saved, of an earlier iteration than the last snapshot."""
    where = str(tmp_path / "save")
    save, load = ("--save", where, "--save-interval", "2"), ("--load", where)
    right = outcomes(Run(SHAPES["zero1"], 5))
    outcomes(Run(SHAPES["zero1"], 3, taking_over, save))
    assert (tmp_path / "save" / "latest").read_text() == "global_step2"
    found = outcomes(Run(SHAPES["zero1"], 5, taking_over, (*load, *save)))
    assert [outcome.start for outcome in found] == [3, 3]
    assert [(outcome.history, outcome.hashes) for outcome in found] == [
        (one.history[3:], one.hashes) for one in right
    ]
    assert (tmp_path / "save" / "latest").read_text() == "global_step4"


def never_saves(rank: int, world_size: int, shape: Shape, settings: dict[str, Any]) -> list[str]:
    """What the log says of a job that ends."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ftckpt").addHandler(handler)
    job = build(shape, settings)
    list(trained(job, 1))
    job.engine.destroy()
    return lines


def test_a_job_that_never_saves_is_told(taking_over: dict[str, Any]) -> None:
    results = run_ranks(never_saves, 2, SHAPES["zero1"], taking_over, stand_in=False, timeout_secs=SECS)
    assert any("save_checkpoint was never called: no checkpoint" in line for line in results[0].value)
