"""``torch.distributed.checkpoint`` on ftckpt's storage, with ranks: FSDP2, DDP, another number of ranks, kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ftckpt.torch
from ftckpt.cli.main import main
from ftckpt.config import Config
from ftckpt.dcp import StorageReader, StorageWriter, checkpoints
from ftckpt.memory.directory import clean_job
from ftckpt.memory.image import parse_image
from ftckpt.persist.files import BehindWriter
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

Job = tuple[nn.Module, torch.optim.Optimizer]


def build(kind: str, seed: int) -> Job:
    torch.manual_seed(seed)
    # 7 rows: FSDP2 cuts them unevenly, and of the last layer's single row most ranks have nothing.
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 90), nn.Linear(90, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1 + seed)


def train(job: Job, iterations: int) -> None:
    model, optimizer = job
    for iteration in range(iterations):
        optimizer.zero_grad()
        torch.manual_seed(iteration)
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()


def state_of(job: Job) -> dict[str, Any]:
    model, optimizer = torch_state.get_state_dict(*job)
    return {"model": model, "optimizer": optimizer}


def whole(value: Any) -> Any:
    """A state with bytes of complete tensors; collective."""
    if isinstance(value, dict):
        return {str(key): whole(item) for key, item in sorted(value.items())}
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, torch.Tensor):
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        return tuple(tensor.shape), tensor.detach().reshape(-1).clone().view(torch.uint8).numpy().tobytes()
    return value


def saved(rank: int, world_size: int, where: str, kind: str, is_async: bool = False) -> Any:
    """A state after training, which is saved twice: before, and after."""
    job = build(kind, 1)
    state, writer = state_of(job), StorageWriter(where, keep=1)
    dcp.save({**state, "iteration": 1}, checkpoint_id="1", storage_writer=writer)
    train(job, 3)
    state = {**state_of(job), "iteration": 4}
    was = whole(state)
    if is_async:
        # Of its own: ranks do not order the collectives of two threads.
        group = dist.new_group(backend="gloo")
        future: Any = dcp.async_save(state, checkpoint_id="4", storage_writer=writer, process_group=group)
        train(job, 1)  # overwrites what is being saved
        future.result()
    else:
        dcp.save(state, checkpoint_id="4", storage_writer=writer)
    return was


def loaded(rank: int, world_size: int, where: str, kind: str) -> Any:
    """The state of another job after the load, as the job has it."""
    job = build(kind, 2)
    state = {**state_of(job), "iteration": 0}
    dcp.load(state, storage_reader=StorageReader(where))
    torch_state.set_state_dict(*job, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole({**state_of(job), "iteration": state["iteration"]})


@pytest.mark.parametrize("is_async", [False, True], ids=["save", "async_save"])
@pytest.mark.parametrize(("kind", "ranks", "then"), [("fsdp2", 4, 2), ("ddp", 2, 2)])
def test_a_load_has_the_bits_of_the_save(kind: str, ranks: int, then: int, is_async: bool, tmp_path: Path) -> None:
    was = [result.value for result in run_ranks(saved, ranks, str(tmp_path), kind, is_async, stand_in=False)]
    assert checkpoints(tmp_path) == ["iter_0000004"] and main(["verify", str(tmp_path)]) == 0
    assert [result.value for result in run_ranks(loaded, then, str(tmp_path), kind, stand_in=False)] == was[:then]


def saved_twice(rank: int, world_size: int, where: str, after: int) -> None:
    """Rank 1 is killed in the second save, when it has written so many pieces."""
    job = build("fsdp2", 1)
    dcp.save(state_of(job), storage_writer=StorageWriter(where))
    train(job, 1)
    if rank == 1:
        write, left = BehindWriter.write, iter(range(after))

        def killing(self: BehindWriter, data: Any) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            write(self, data)

        BehindWriter.write = killing  # type: ignore[method-assign]
    dcp.save(state_of(job), storage_writer=StorageWriter(where))


@pytest.mark.parametrize("after", [0, 4])
def test_a_killed_rank_leaves_the_one_before(after: int, tmp_path: Path) -> None:
    results = run_ranks(saved_twice, 2, str(tmp_path), after, expect_failures=True, stand_in=False)
    assert results[1].exitcode == -signal.SIGKILL and not results[0].ok
    torn = set(tmp_path.rglob("iter_0000002/*"))
    assert torn and checkpoints(tmp_path) == ["iter_0000001"]
    run_ranks(loaded_only, 2, str(tmp_path), stand_in=False)
    run_ranks(saved, 2, str(tmp_path), "fsdp2", stand_in=False)
    assert not torn & set(tmp_path.rglob("*"))


def loaded_only(rank: int, world_size: int, where: str) -> None:
    untrained, other = build("fsdp2", 1), build("fsdp2", 2)
    state = state_of(other)
    dcp.load(state, storage_reader=StorageReader(where))
    assert whole(state) == whole(state_of(untrained))


def refused(rank: int, world_size: int, where: str, name: str) -> None:
    with pytest.raises(dcp.api.CheckpointException) as caught:
        loaded(rank, world_size, where, "fsdp2")
    errors = [f"{type(error).__name__}: {error}" for error, _ in caught.value.failures.values()]
    assert any("DamagedError" in error and name in error for error in errors), errors


def persisted(rank: int, world_size: int, settings: dict[str, Any], kind: str) -> Any:
    """The state of a job of ftckpt whose last snapshot is on storage."""
    job = build(kind, 1)
    checkpointer = ftckpt.torch.attach(*job, None, {}, Config(enabled=True, **settings))
    assert checkpointer is not None
    checkpointer.restore()
    for iteration in range(1, 5):
        train(job, 1)
        checkpointer.step(iteration)
    checkpointer.close()
    return whole({**state_of(job), "iteration": 0})


@pytest.fixture
def persisting(settings: dict[str, Any], arena_root: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    more = {"protect": "none", "objects_size": "1MiB", "persist": str(tmp_path / "storage")}
    yield {**settings, **more, "node": "n0"}
    clean_job(arena_root, "test")


def loaded_from_job(rank: int, world_size: int, where: str, kind: str) -> Any:
    """As ``loaded``, without the iteration, which such a checkpoint does not have."""
    job = build(kind, 2)
    state = state_of(job)
    dcp.load(state, storage_reader=StorageReader(where))
    torch_state.set_state_dict(*job, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return whole({**state_of(job), "iteration": 0})


@pytest.mark.parametrize(("kind", "ranks", "then"), [("fsdp2", 4, 2), ("ddp", 2, 2)])
def test_what_a_job_has_persisted_is_loaded(
    kind: str, ranks: int, then: int, persisting: dict[str, Any], tmp_path: Path
) -> None:
    was = [result.value for result in run_ranks(persisted, ranks, persisting, kind, stand_in=False)]
    where = persisting["persist"]
    images = [parse_image(path.read_bytes()) for path in Path(where).glob("iter_*/*.safetensors")]
    cut = [one for image in images for one in image.manifest.fragments if one.numel < one.box.numel]
    assert bool(cut) == (kind == "ddp")  # replicas copy a share each, which may end anywhere
    found = [result.value for result in run_ranks(loaded_from_job, then, where, kind, stand_in=False)]
    assert found == was[:1] * then
