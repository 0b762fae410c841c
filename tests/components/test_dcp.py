"""Checkpoints of ``torch.distributed.checkpoint`` on ftckpt's storage, saved and loaded by one process."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ftckpt.dcp
from ftckpt.cli.main import main
from ftckpt.dcp import StorageReader, StorageWriter, checkpoints, writer
from ftckpt.errors import DamagedError, StorageError, UnsupportedError
from ftckpt.persist.files import FileStorage
from tests.support.errors import lacks, raises
from tests.support.flips import flip

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(seed: int) -> dict[str, Any]:
    """Tensors of many types and strides, and values."""
    torch.manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(300, 70),
            "half": torch.randn(17, 3, 5).bfloat16(),
            "turned": torch.randn(6, 4).t(),
            "wide": torch.randn(4, 9)[:, ::2],
            "one": torch.randn(5, 4)[:1, 0],
            "nothing": torch.empty(0, 3),
            "mask": torch.randn(9) > 0,
        },
        "optimizer": {
            "state": {"weight": {"step": torch.tensor(float(seed)), "count": torch.tensor(seed)}},
            "param_groups": [{"lr": seed / 7, "betas": (0.9, 0.99), "params": ["weight"]}],
        },
        "array": np.arange(seed + 3),
        "note": f"seed {seed}",
        "none": None,
    }


def leaves(value: Any) -> Any:
    """A nested state with bytes in place of tensors and arrays."""
    if isinstance(value, dict):
        return {key: leaves(item) for key, item in value.items()}
    if isinstance(value, list):
        return [leaves(item) for item in value]
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1).clone(memory_format=torch.contiguous_format)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes()
    return (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else value


def save(where: Path | str, seed: int, **options: Any) -> str:
    """Saves ``state``; the checkpoint's name."""
    chosen = {key: options.pop(key) for key in ("checkpoint_id", "planner") if key in options}
    metadata = dcp.save(state(seed), storage_writer=StorageWriter(where, **options), **chosen)
    return metadata.storage_meta.checkpoint_id


def load(where: Path | str, **options: Any) -> Any:
    found = state(0)
    dcp.load(found, storage_reader=StorageReader(where), **options)
    return leaves(found)


@contextmanager
def fails(kind: type[Exception], *words: str) -> Iterator[None]:
    """A save or load that torch reports with this error of its only rank, which names each of ``words``."""
    with pytest.raises(CheckpointException) as caught:
        yield
    (error, _) = caught.value.failures[0]
    # Torch turns an error in the search of a checkpoint into an AssertionError with its text.
    assert isinstance(error, kind | AssertionError), error
    assert not lacks(str(error), *words), error


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 4096)


def test_a_load_has_the_bits_of_the_save(tmp_path: Path, small_chunks: None) -> None:
    assert checkpoints(tmp_path / "run") == []
    assert [save(tmp_path / "run", seed) for seed in (1, 2)] == ["iter_0000001", "iter_0000002"]
    assert save(tmp_path / "run", 3, checkpoint_id="70") == "iter_0000070"
    assert checkpoints(tmp_path / "run") == ["iter_0000070", "iter_0000002", "iter_0000001"]
    assert load(tmp_path / "run") == leaves(state(3))
    for name, seed in (("iter_0000002", 2), ("1", 1)):
        assert load(tmp_path / "run", checkpoint_id=name) == leaves(state(seed))
    of_one = StorageReader(tmp_path / "run" / "iter_0000001")
    dcp.load(found := state(0), storage_reader=of_one)
    assert leaves(found) == leaves(state(1)) and of_one.checkpoint_id == "iter_0000001"


def test_part_of_a_state_and_other_types(tmp_path: Path, small_chunks: None) -> None:
    save(tmp_path, 1)
    weight, half = torch.zeros(300, 70, dtype=torch.float64), torch.zeros(5, 3, 17).permute(2, 1, 0)
    found = {"model": {"weight": weight, "half": half}}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert torch.equal(found["model"]["weight"], state(1)["model"]["weight"].double())
    assert torch.equal(found["model"]["half"], state(1)["model"]["half"].float())
    with fails(ValueError, "model.weight"):
        dcp.load({"model": {"weight": torch.zeros(70, 300)}}, storage_reader=StorageReader(tmp_path))


def test_the_commands_for_storage_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 1)
    assert main(["pin", str(tmp_path), "1"]) == 0
    for seed in range(2, 6):
        save(tmp_path, seed, keep=2)
    assert checkpoints(tmp_path) == ["iter_0000005", "iter_0000004", "iter_0000001"]
    assert (tmp_path / "latest").read_text() == "iter_0000005\n"
    assert main(["list", str(tmp_path)]) == main(["verify", str(tmp_path)]) == 0
    assert not lacks(capsys.readouterr().out, "iter_0000001", "pinned", "dp1", "torch.distributed.checkpoint")
    assert main(["pin", "--remove", str(tmp_path), "1"]) == 0
    save(tmp_path, 6, keep=2)
    assert checkpoints(tmp_path) == ["iter_0000006", "iter_0000005"]
    assert main(["convert", str(tmp_path), str(tmp_path / "to")]) == 2
    assert not lacks(capsys.readouterr().err, "ftckpt.dcp.StorageReader")


def test_going_back_abandons_what_is_newer(tmp_path: Path) -> None:
    for seed in range(1, 5):
        save(tmp_path, seed)
    assert save(tmp_path, 12, checkpoint_id="2", keep=2) == "iter_0000002"
    assert checkpoints(tmp_path) == ["iter_0000002", "iter_0000001"]
    assert load(tmp_path) == leaves(state(12))
    assert load(tmp_path, checkpoint_id="4") == leaves(state(4))
    assert load(tmp_path, checkpoint_id="iter_0000002-g1") == leaves(state(2))
    save(tmp_path, 13, checkpoint_id="3", keep=2)
    assert [path.name for path in sorted(tmp_path.glob("iter_*"))] == ["iter_0000002", "iter_0000003"]
    assert load(tmp_path) == leaves(state(13))


def test_a_flipped_bit_is_found_and_named(tmp_path: Path, small_chunks: None) -> None:
    save(tmp_path, 1)
    (file,) = tmp_path.glob("iter_*/*.safetensors")
    chosen = random.Random(5).sample(range(file.stat().st_size), 60)
    right, bad = leaves(state(1)), 0
    for at in (0, 5000, *chosen):
        flip(file, at)
        try:
            assert load(tmp_path) == right  # a gap
        except CheckpointException as caught:
            (error, _) = caught.failures[0]
            assert isinstance(error, DamagedError | AssertionError) and file.name in str(error), error
            bad += 1
        assert main(["verify", str(tmp_path)]) == 1
        flip(file, at)
    assert load(tmp_path) == right and bad > 20


class Losing(StorageWriter):
    """Loses a part of a file that a rank has reported as written."""

    def finish(self, metadata: Any, results: Any) -> None:
        (file,) = Path(self._where).glob("iter_0000002/*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        super().finish(metadata, results)


def test_what_is_not_there_is_not_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with fails(StorageError, "iter_0000002"):
        dcp.save(state(2), storage_writer=Losing(tmp_path))
    assert checkpoints(tmp_path) == ["iter_0000001"] and load(tmp_path) == leaves(state(1))


def test_a_save_that_begins_leaves_what_another_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, unfinished = StorageWriter.finish, FileStorage.unfinished

    def finish_during_a_sweep(self: StorageWriter, metadata: Any, results: Any) -> None:
        def finish_first(storage: FileStorage, *args: Any) -> Any:  # the sweep has listed files and manifests
            monkeypatch.undo()
            finish(self, metadata, results)
            return unfinished(storage, *args)

        monkeypatch.setattr(StorageWriter, "finish", finish)
        monkeypatch.setattr(FileStorage, "unfinished", finish_first)
        save(tmp_path, 2, checkpoint_id="2")

    monkeypatch.setattr(StorageWriter, "finish", finish_during_a_sweep)
    save(tmp_path, 1, checkpoint_id="1")
    for seed in (1, 2):
        assert load(tmp_path, checkpoint_id=str(seed)) == leaves(state(seed))


def test_a_damaged_manifest_brings_no_abandoned_checkpoint_back(tmp_path: Path) -> None:
    for seed in (10, 20, 30, 15):
        save(tmp_path, seed, checkpoint_id=str(seed))
    assert checkpoints(tmp_path) == ["iter_0000015", "iter_0000010"]
    manifest = tmp_path / "iter_0000015" / "manifest.json"
    flip(manifest, manifest.stat().st_size // 2)
    with raises(StorageError, "iter_0000015/manifest.json"):
        checkpoints(tmp_path)
    with fails(StorageError, "iter_0000015/manifest.json"):
        load(tmp_path)
    assert load(tmp_path, checkpoint_id="20") == leaves(state(20))
    save(tmp_path, 16, checkpoint_id="15")  # replaces it
    assert load(tmp_path) == leaves(state(16))
    save(tmp_path, 17, checkpoint_id="10")
    (aside,) = (tmp_path / "iter_0000010").glob("manifest-g*.json")
    flip(aside, aside.stat().st_size // 2)  # certainly abandoned
    assert checkpoints(tmp_path) == ["iter_0000010"] and load(tmp_path) == leaves(state(17))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
def test_tensors_with_gaps_are_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.arange(12).view(4, 3).to(dtype)
    with_gaps = {
        "column": whole[:, 1],
        "rows": whole[::2],
        "steps": whole.view(-1)[::2],
        "one": whole[0, :1].expand(5),
    }
    dcp.save(with_gaps, storage_writer=StorageWriter(tmp_path))
    found = {name: torch.zeros(value.shape, dtype=dtype) for name, value in with_gaps.items()}
    dcp.load(found, storage_reader=StorageReader(tmp_path))
    assert all(torch.equal(found[name], value) for name, value in with_gaps.items())


class Casting(DefaultSavePlanner):
    """Does not plan what it resolves."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        return found.half() if isinstance(found, torch.Tensor) else found


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    def refused(tensors: dict[str, Any], *words: str, **options: Any) -> None:
        with fails(UnsupportedError, *words):
            dcp.save(tensors, storage_writer=StorageWriter(tmp_path), **options)

    refused({"arguments": argparse.Namespace()}, "arguments", "argparse.Namespace")
    refused({"spectrum": torch.zeros(3, dtype=torch.complex64)}, "spectrum", "torch.complex64")
    refused({"weight": torch.zeros(3)}, "weight", "torch.float16", "torch.float32", planner=Casting())
    # Torch itself calls these so, where its release has the option.
    with raises(UnsupportedError, "enable_plan_caching"):
        StorageWriter(tmp_path).prepare_global_plan([SimpleNamespace(usable=False)])  # type: ignore[list-item]
    with raises(UnsupportedError, "use_collectives"):
        StorageWriter(tmp_path).set_up_storage_writer(True, rank=0, use_collectives=False)
    assert checkpoints(tmp_path) == []


def test_no_name_but_those_of_the_page() -> None:
    assert sorted(ftckpt.dcp.__all__) == ["StorageReader", "StorageWriter", "checkpoints"]
