"""A job whose weights are mostly frozen, as with LoRA: its checkpoints name older chunks, and restarts read them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.memory.directory import clean_job
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.training_state import Description, Piece
from ftckpt.persist.commit import CheckpointName, read_manifest
from ftckpt.persist.files import FileStorage
from tests.support import jobs, plain
from tests.support.errors import lacks
from tests.support.pool import run_ranks
from tests.support.storages import committed

pytestmark = [pytest.mark.multiproc, pytest.mark.faults]

FROZEN = 1 << 17


class FrozenState(plain.PlainState):
    """A rank's own part of a frozen base, beside what trains."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.base = torch.arange(rank, rank + FROZEN, dtype=torch.float32)
        frozen = Fragment.whole("base", "F32", (world_size, FROZEN), Box((rank, 0), (1, FROZEN)))
        self.description = Description((*self.description.stepped, Piece(frozen, self.base)), ())


def train(rank: int, world_size: int, settings: dict[str, Any], times: int) -> None:
    """Train until so many checkpoints are on storage."""
    checkpointer, state = plain.make(rank, world_size, settings, of=FrozenState)
    number, persisted = checkpointer.restore() or 0, set[int]()
    while len(persisted) < times:
        number += 1
        assert number < 5000, "nothing came to storage"
        plain.iterate(checkpointer, state, number)
        if checkpointer.persisted is not None:
            persisted.add(checkpointer.persisted.iteration)
        time.sleep(0.03)
    checkpointer.close(remove=False)


def restored(rank: int, world_size: int, settings: dict[str, Any]) -> Any:
    checkpointer, state = plain.make(rank, world_size, settings, of=FrozenState)
    assert isinstance(state, FrozenState)
    state.base.zero_()
    start = checkpointer.restore()
    checkpointer.close(remove=False)
    return start, state.row.unique().tolist(), state.base.tolist() == list(map(float, range(rank, rank + FROZEN)))


def test_a_restart_reads_chunks_of_older_checkpoints_and_without_them_takes_another(
    settings: dict[str, Any], arena_root: Path, tmp_path: Path
) -> None:
    where = tmp_path / "storage"
    where.mkdir()
    settings |= {
        "protect": "none", "chunk_size": "64KiB", "objects_size": "1MiB",
        "persist": str(where), "persist_interval": 4, "persist_keep": 2,
    }  # fmt: skip
    run_ranks(train, 2, settings, 5)
    clean_job(arena_root, "test")
    storage = FileStorage(str(where))
    newest, before, *_ = committed(storage)
    stored = read_manifest(storage, CheckpointName(newest))
    assert stored.bases and stored.nbytes < 2 * 4 * FROZEN / 2
    assert [one.value for one in run_ranks(restored, 2, settings)] == [(newest, [float(newest)], True)] * 2
    clean_job(arena_root, "test")
    gone = sorted(stored.bases)[0]
    (where / gone).unlink()
    assert [one.value for one in run_ranks(restored, 2, settings)] == [(before, [float(before)], True)] * 2
    told = jobs.events(settings, "storage_damaged")
    assert {one["iteration"] for one in told} == {newest} and not lacks(told[0]["error"], gone.rpartition("/")[2])
