"""A running job saves its newest snapshot for any layout: every element, by all ranks, completely or not at all."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ftckpt.config import Config
from ftckpt.errors import ConvertError
from ftckpt.group import Group
from ftckpt.memory.arena import Arena
from ftckpt.model.fragment import Box, Fragment
from ftckpt.model.topology import RankPlace, Topology
from ftckpt.model.training_state import Description, Piece
from ftckpt.session import save
from ftckpt.session.checkpointer import Checkpointer
from ftckpt.universal import safetensors, storage
from ftckpt.universal.arenas import ArenaReader
from ftckpt.universal.universal_format import UniversalReader
from tests.support.arenas import check_all
from tests.support.errors import message_of
from tests.support.pool import run_ranks, spawn_ranks

pytestmark = pytest.mark.multiproc

LAYOUT = {"tp": 2, "dp": 2}
NODES = ["node0", "node0", "node1", "node1"]
WIDE = (64, 96)
SHAPES: dict[str, tuple[int, ...]] = {
    "master/wide": WIDE, "exp_avg/wide": WIDE, "weight/plain": (10, 7), "step/wide": (1,), "buffer/bias": (5,),
}  # fmt: skip


def value(key: str, iteration: int) -> torch.Tensor:
    """The tensor after ``iteration`` steps."""
    size = int(np.prod(SHAPES[key]))
    return ((torch.arange(size, dtype=torch.float32) * 0.37 + len(key)).sin() * iteration).view(SHAPES[key])


class State:
    """Rank tp·2+dp holds columns of ``wide``, cut by a distributed optimizer, and rows of ``plain``."""

    def __init__(self, rank: int) -> None:
        tp, dp = divmod(rank, 2)
        self.iteration, self.shift = 0, 0.0
        self._live: list[tuple[Fragment, torch.Tensor]] = []
        columns, rows = Box((0, 48 * tp), (64, 48)), Box((5 * tp, 0), (5, 7))
        cut = 64 * 48 // 2 + 5
        own = (0, cut) if dp == 0 else (cut, 64 * 48)
        master = self._add(Fragment("master/wide", "F32", WIDE, columns, *own))
        self._add(Fragment("exp_avg/wide", "F32", WIDE, columns, *own))
        self._add(Fragment.whole("weight/plain", "F32", (10, 7), rows))
        self._add(Fragment.whole("step/wide", "F32", (1,), Box((0,), (1,))))
        weight = Fragment("weight/wide", "BF16", WIDE, columns, *own)
        stepped = [Piece(fragment, tensor) for fragment, tensor in self._live]
        self.weight, self.master = torch.zeros(weight.numel, dtype=torch.bfloat16), master
        stepped.append(Piece(weight, self.weight, self.master))
        self.bias = self._add(Fragment.whole("buffer/bias", "F32", (5,), Box((0,), (5,))))
        scratch = torch.full((3,), float(rank))
        local = Fragment.whole("local/0.scratch", "F32", (3,), Box((0,), (3,)))
        volatile = (Piece(*self._live[-1]), Piece(local, scratch))
        padded = frozenset({"master/wide", "weight/wide"})
        self.description = Description(tuple(stepped), volatile, padded)

    def _add(self, fragment: Fragment) -> torch.Tensor:
        tensor = torch.zeros(fragment.numel)
        self._live.append((fragment, tensor))
        return tensor

    def describe(self) -> Description:
        return self.description

    def save_objects(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "generator": torch.get_rng_state()}

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        self.iteration = objects["iteration"]

    def check_objects(self, objects: Any, is_reshaped: bool) -> None:
        pass

    def load_reshaped(self, objects: Sequence[Mapping[str, Any]], iteration: int) -> None:
        raise NotImplementedError

    def finish_load(self) -> None:
        pass

    def advance(self, iteration: int) -> None:
        self.iteration = iteration
        for fragment, tensor in self._live:
            box = tuple(slice(o, o + n) for o, n in zip(fragment.box.offset, fragment.box.shape, strict=True))
            tensor.copy_(value(fragment.key, iteration)[box].reshape(-1)[fragment.start : fragment.stop])
        self.bias.add_(self.shift)
        self.weight.copy_(self.master)


def start(rank: int, arena: str) -> tuple[Checkpointer, State]:
    members = tuple(RankPlace({"tp": r // 2, "dp": r % 2}, NODES[r]) for r in range(4))
    config = Config(
        enabled=True, job="save", node=NODES[rank], arena=arena, protect="none", chunk_size="1MiB", schedule="sync"
    )
    group = Group(60.0)
    state = State(rank)
    return Checkpointer(config, state, Topology(rank, members, LAYOUT), group=group), state


def train(checkpointer: Checkpointer, state: State, iterations: Sequence[int]) -> None:
    for iteration in iterations:
        checkpointer.fence()
        state.advance(iteration)
        checkpointer.step(iteration)


def small() -> None:
    """Many files, many batches."""
    save.BATCH_BYTES, safetensors.STRIP_BYTES = 4000, 4000


def flip(arena: Arena, damages: bool) -> None:
    """A bit in each slot; a second time, back again."""
    for slot in range(arena.control.slots) if damages else ():
        with arena.slot(slot) as view:
            view[arena.image.offsets[0]] ^= 1


def saved(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Everything that one job can show."""
    small()
    told: dict[str, Any] = {}
    checkpointer, state = start(rank, f"{root}/arena")
    checkpointer.restore()
    told["early"] = message_of(lambda: checkpointer.save_universal(Path(root, "early")))
    train(checkpointer, state, [1, 2, 3])
    path, told["lines"] = Path(root, "out"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointer.events, "announce", told["lines"].append)
        time.sleep(0.2)
        assert checkpointer.save_universal(path, 9000) == path
    told["again"] = message_of(lambda: checkpointer.save_universal(path))
    if rank == 2:  # one rank alone finds no room
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    told["full"] = message_of(lambda: checkpointer.save_universal(Path(root, "full"), 9000))
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    told["left"] = sorted(os.listdir(root)) if rank == 0 else []
    train(checkpointer, state, [4])  # training goes on
    checkpointer.save_universal(Path(root, "later"), 1 << 30)
    state.shift = float(rank)
    train(checkpointer, state, [5])
    told["differ"] = message_of(lambda: checkpointer.save_universal(Path(root, "differ")))
    checkpointer.group.barrier()
    capture = checkpointer.capture
    assert capture is not None
    if rank == 3:
        check_all(checkpointer.node_dir)
    flip(capture.arena, rank == 3)
    told["damaged"] = message_of(lambda: checkpointer.save_universal(Path(root, "damaged")))
    flip(capture.arena, rank == 3)
    checkpointer.close(remove=False)
    return told


def read(path: Path) -> tuple[dict[str, torch.Tensor], UniversalReader]:
    source = UniversalReader(path)
    loaded: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        loaded.update(load_file(file))
    return loaded, source


def check(path: Path, iteration: int) -> UniversalReader:
    loaded, source = read(path)
    assert source.catalog.iteration == iteration and source.catalog.layout == LAYOUT
    expected = {key: value(key, iteration) for key in SHAPES}
    expected["weight/wide"] = value("master/wide", iteration).to(torch.bfloat16)
    assert loaded.keys() == expected.keys()
    for key, tensor in expected.items():
        assert loaded[key].dtype == tensor.dtype and torch.equal(loaded[key], tensor), key
    shards = source.catalog.objects["shards"]
    assert list(shards) == ["tp0-dp0"] and shards["tp0-dp0"]["iteration"] == iteration
    return source


def test_a_running_job_saves_what_any_layout_can_load(tmp_path: Path) -> None:
    (tmp_path / "arena").mkdir()
    told = [result.value for result in run_ranks(saved, 4, str(tmp_path), timeout_secs=120)]
    source = check(tmp_path / "out", 3)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 4
    check(tmp_path / "later", 4)
    assert source.catalog.derived == {} and source.catalog.padded == {"master/wide", "weight/wide"}
    for one in told:
        # Nothing is protected here: nobody has taken checksums.
        gap = re.search(r"iteration 3 saved at .* without checksums for (\S+) s", *one["lines"])
        assert gap is not None and float(gap[1]) >= 0.2
        assert "no snapshot is committed" in one["early"]
        assert "out: exists" in one["again"]
        assert one["full"].startswith("rank 2:") and "no room" in one["full"]
        assert "buffer/bias differs between tp0-dp0 and" in one["differ"]
        assert one["damaged"].startswith("rank 3:") and "chunk 0" in one["damaged"]
    assert told[0]["left"] == ["arena", "out"]
    assert sorted(os.listdir(tmp_path)) == ["arena", "later", "out"]
    with pytest.raises(ConvertError, match="differs between"):
        ArenaReader([tmp_path / "arena" / "ftckpt-save"])
    arenas = ArenaReader([tmp_path / "arena" / "ftckpt-save"], iteration=4)
    assert arenas.catalog.derived == {"weight/wide": "BF16"}
    assert {f.key for f in arenas.catalog.fragments} == set(SHAPES)


def killed(rank: int, world_size: int, root: str, point: tuple[int, str, int]) -> None:
    """One rank is killed at a call of ``os``; the others must end by themselves."""
    small()
    victim, name, calls = point
    checkpointer, state = start(rank, f"{root}/arena")
    checkpointer.restore()
    train(checkpointer, state, [1, 2])
    left = [calls]
    original = getattr(storage.os, name)

    def die_later(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] < 0 and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(storage.os, name, die_later)
    checkpointer.save_universal(Path(root, "out"), 9000)


def saved_after(rank: int, world_size: int, root: str) -> int | None:
    small()
    checkpointer, _ = start(rank, f"{root}/arena")
    iteration = checkpointer.restore()
    checkpointer.save_universal(Path(root, "out"), 9000)
    checkpointer.close()
    return iteration


@pytest.mark.parametrize(
    "point", [(3, "fsync", 1), (0, "rename", 0), pytest.param((0, "fsync", 3), marks=pytest.mark.slow)], ids=str
)
def test_killed_in_the_middle_nothing_has_the_name(tmp_path: Path, point: tuple[int, str, int]) -> None:
    (tmp_path / "arena").mkdir()
    root = str(tmp_path)
    with spawn_ranks(killed, 4, root, point) as group:
        assert group.wait_first_failure(60)
        group.wait(60)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out.partial").mkdir(exist_ok=True)  # rank 0, where it lives on, has removed it
    (tmp_path / "out.partial" / "tensors-00009-of-00009.safetensors").write_bytes(b"of another attempt")
    assert {result.value for result in run_ranks(saved_after, 4, root, timeout_secs=120)} == {2}
    source = check(tmp_path / "out", 2)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"manifest.json", *source.manifest.files}
    assert sorted(os.listdir(tmp_path)) == ["arena", "out"]
