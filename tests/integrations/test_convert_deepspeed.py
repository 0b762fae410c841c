"""Checkpoints of real DeepSpeed engines, read and written without DeepSpeed: every element, both ways."""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.errors import ConvertError
from ftckpt.model.objects import decode, encode
from ftckpt.universal.catalog import Catalog, Reader
from ftckpt.universal.consolidation import Consolidator
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.deepspeed import files as deepspeed_files
from ftckpt.universal.deepspeed import universal_reader as deepspeed_universal
from ftckpt.universal.deepspeed.reader import DeepSpeedReader
from ftckpt.universal.deepspeed.universal_reader import DeepSpeedUniversalReader
from ftckpt.universal.deepspeed.universal_writer import DeepSpeedUniversalWriter
from ftckpt.universal.language.spec import Spec
from tests.support import elements
from tests.support.ds_jobs import BF16, SHAPES, Shape, build, fp16, zero
from tests.support.elements import Elements, Wholes, differing, read_all, wholes
from tests.support.errors import raises
from tests.support.pool import run_ranks
from tests.support.tiers import by_default

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiproc

TINY = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--iterations", "99"]
STEPS = 3
INFO = {
    "universal_checkpoint_version": 0.2,
    "parameter_with_row_parallelism_patterns": [r".*\.output\.weight", r".*\.down\.weight"],
    "tp_replicated_parameter_patterns": [r".*positions", r".*norm.*", r"tied_modules\..*", r"[0-9]+\.(weight|bias)"],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\..*"],
}
"""The example model's description of itself."""

FP32_ACCUMULATION = {"data_types": {"grad_accum_dtype": "fp32"}}
SAVED = {
    "fp32": SHAPES["fp32"],
    "bf16": SHAPES["bf16"],
    "fp16": SHAPES["fp16"],
    "zero1-fp16": Shape(2, config=fp16(17) | zero(1)),
    "zero1-freeze": Shape(2, ["--freeze"], BF16 | zero(1)),
    "zero1-three": Shape(3, config=BF16 | zero(1)),
    "zero2-tied": SHAPES["zero2"],
    "zero2-round-robin": Shape(2, config=BF16 | zero(2, round_robin_gradients=True)),
    "zero2-aligned": Shape(3, ["--hidden", "18"], BF16 | zero(2, parameter_alignment=True)),
    "zero3-three": Shape(3, config=BF16 | zero(3, sub_group_size=500)),
    "zero3-fp32": SHAPES["zero3-fp32"],
    "bf16-optimizer": SHAPES["bf16-optimizer"],
    "pp2-dp2-tied": Shape(4, ["--pp", "2", "--tie"], BF16 | zero(1) | FP32_ACCUMULATION),
    "pp2-tp2-dp2": SHAPES["pp2-tp2-dp2"],
    "pp2-fp16": Shape(2, ["--pp", "2"], fp16(8)),
    "moe-ep2-zero2": SHAPES["moe-ep2-zero2"],
}

QUICK = ("fp32", "zero1-freeze", "zero2-round-robin", "zero3-three", "pp2-tp2-dp2", "moe-ep2-zero2")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk and the state of the ranks when it was written."""

    path: Path
    live: list[list[Elements]]
    objects: bytes


def held(job: Any) -> list[Elements]:
    """The state of this rank, as ftckpt describes it, with bytes."""
    from ftckpt.deepspeed.state import DeepSpeedState

    described = DeepSpeedState(job.engine, {}).describe()
    return elements.held((*described.stepped, *described.volatile))


def save(rank: int, world_size: int, shape: Shape, folder: str) -> tuple[list[Elements], bytes]:
    """Train some steps and save; what ftckpt would have saved."""
    import train_deepspeed

    from ftckpt.deepspeed.state import DeepSpeedState

    job = build(shape, TINY)
    for _ in range(STEPS):
        train_deepspeed.train_step(job)
    job.engine.module.universal_checkpoint_info = INFO
    job.engine.save_checkpoint(folder)
    of_rank = held(job)
    state = DeepSpeedState(job.engine, {})
    state.describe()
    return of_rank, encode(state.save_objects())


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="ftckpt-ds-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def saved(name: str) -> Checkpoint:
    path, shape = _root() / name, SAVED[name]
    results = run_ranks(save, shape.ranks, shape, str(path), stand_in=False)
    return Checkpoint(path, [result.value[0] for result in results], results[0].value[1])


@pytest.mark.parametrize("name", by_default(SAVED, QUICK))
def test_a_checkpoint_holds_what_the_ranks_held(name: str) -> None:
    checkpoint = saved(name)
    assert deepspeed_files.recognises(checkpoint.path)
    source = DeepSpeedReader(checkpoint.path)
    live = wholes([pair for rank in checkpoint.live for pair in rank])
    found = read_all(source)
    assert not differing(found, live)
    derived = source.catalog.derived
    assert set(found) | set(derived) == set(live)
    assert all(live[key][0] == dtype for key, dtype in derived.items())
    assert source.catalog.iteration == STEPS
    source.close()
    with pytest.raises(ConvertError, match="closed"):
        source.read(0)


def convert_to_deepspeed(source: Any, destination: Path) -> None:
    convert(source, DeepSpeedUniversalWriter(destination), Options(workers=2))


def load(rank: int, world_size: int, shape: Shape, folder: str) -> tuple[list[Elements], list[Any]]:
    """Load a universal checkpoint with DeepSpeed's own code; returns this rank's tensors and other state."""
    job = build(shape, TINY, checkpoint={"load_universal": True})
    engine = job.engine
    engine.load_checkpoint(folder)
    rest = [engine.global_steps, engine.skipped_steps, engine.global_samples, engine.get_lr()[0]]
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    kind = type(scaler).__module__.partition(".")[0]
    return held(job), [*rest, kind, scaler.cur_scale if scaler is not None else None]


LOADS = {
    "zero1-three": Shape(2, config=BF16 | zero(2)),
    "zero2-aligned": Shape(2, ["--hidden", "18"], BF16 | zero(3)),
    "zero2-round-robin": Shape(3, config=BF16 | zero(1)),
    "zero3-three": Shape(2, config=BF16 | zero(1)),
    "pp2-tp2-dp2": Shape(2, ["--pp", "2", "--tp", "1", "--tie"], BF16 | zero(1)),
    "pp2-dp2-tied": Shape(4, ["--pp", "2", "--tp", "2", "--tie"], BF16 | zero(1)),
    "zero1-fp16": Shape(3, config=fp16(19) | zero(2)),
    "live": Shape(0),
}
"""The checkpoints and the other layouts that load them."""


class Live(Reader):
    """The state of a job's ranks, as a source."""

    def __init__(self, name: str) -> None:
        self._pairs = [pair for rank in saved(name).live for pair in rank]
        objects = {"shards": {"tp0_pp0_dp0": decode(saved(name).objects)}}
        self.catalog = Catalog("ftckpt", STEPS, {}, tuple(fragment for fragment, _ in self._pairs), objects)

    def read(self, index: int) -> Any:
        return np.frombuffer(self._pairs[index][1], np.uint8)

    def confirm(self) -> None:
        pass

    def fingerprint(self) -> str:
        return ""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("name", by_default(LOADS, ["zero2-round-robin", "zero3-three", "pp2-tp2-dp2", "live"]))
def test_deepspeed_loads_what_was_converted_into_another_layout(name: str, tmp_path: Path) -> None:
    """For checkpoints of ftckpt (``live``) boxes alone describe how parameters are divided."""
    name, is_live = ("pp2-tp2-dp2", True) if name == "live" else (name, False)
    source = Live(name) if is_live else DeepSpeedReader(saved(name).path)
    convert_to_deepspeed(source, tmp_path / "made")
    shape = LOADS[name]
    results = run_ranks(load, shape.ranks, shape, str(tmp_path / "made"), stand_in=False)
    live = wholes([pair for rank in saved(name).live for pair in rank])
    loaded = wholes([pair for result in results for pair in result.value[0]])
    assert set(loaded) == set(live)
    assert not differing(loaded, live)
    said = DeepSpeedReader(saved(name).path).catalog.objects["deepspeed"]
    state, optimizer = said["state"], said["optimizer"]
    steps, skipped, samples, rate, kind, loss_scale = results[0].value[1]
    assert [steps, skipped, samples] == [STEPS, state["skipped_steps"], state["global_samples"]]
    assert rate == optimizer["param_groups"][0]["lr"]
    if name == "zero1-fp16":  # overflows brought it down from where it begins
        assert kind == "deepspeed"
        assert loss_scale == optimizer["loss_scaler"]["cur_scale"] != 2.0**19


PARTS = {
    **INFO,
    "universal_checkpoint_version": 0.3,
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.up\.weight"],
    "parameter_with_sub_params": [
        {"patterns": [r".*\.query\.weight"], "shape": ((6, 8, 2), 16), "partition_dim": 0},
        {"patterns": [r".*\.down\.weight"], "shape": (16, (24, 40)), "partition_dim": 1},
    ],
    "parameter_with_row_parallelism_patterns": [r".*\.output\.weight"],
    "vocabulary_parameter_patterns": [r"tied_modules\..*"],
    "original_vocab_size": 250,
    "parameter_to_average_patterns": [r".*\.norm2\.bias"],
    "tp_replicated_parameter_patterns": [
        r".*positions", r".*norm1.*", r".*norm2\.weight", r"tied_modules\..*", r"[0-9]+\.(weight|bias)",
    ],
}  # fmt: skip
"""All descriptions of divided parameters that a checkpoint can have; the model has none."""


def to_universal(rank: int, world_size: int, source: str, destination: str) -> None:
    """DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    arguments = argparse.Namespace(
        input_folder=source, output_folder=destination, num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=False, inject_missing_state=False,
    )  # fmt: skip
    ds_to_universal.main(arguments)


def said_otherwise(name: str, info: Mapping[str, Any], label: str = "other") -> Path:
    """The same checkpoint with another description of its parameters."""
    path = _root() / f"{name}-{label}"
    if not path.exists():
        shutil.copytree(saved(name).path, path)
        for file in (path / f"global_step{STEPS}").glob("mp_rank_*"):
            state = torch.load(file, weights_only=False)
            torch.save({**state, "universal_checkpoint_info": dict(info)}, file)
    return path


@functools.cache
def by_deepspeed(name: str) -> tuple[Path, Path]:
    """A checkpoint, and what DeepSpeed's converter makes of it."""
    path = said_otherwise(name, PARTS) if name == "pp2-tp2-dp2" else saved(name).path
    made = _root() / f"{name}-by-deepspeed" / f"global_step{STEPS}"
    run_ranks(to_universal, 1, str(path / f"global_step{STEPS}"), str(made), stand_in=False)
    return path, made


@pytest.mark.parametrize("name", ["zero1-freeze", "zero3-three", "pp2-tp2-dp2"])
def test_what_we_write_and_read_is_what_deepspeeds_converter_writes(name: str) -> None:
    """Element by element, with the numbers by which a loader divides a parameter; from ours nothing gets lost."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # some files hold objects of DeepSpeed's, which import it
    path, theirs = by_deepspeed(name)
    ours = _root() / f"{name}-compared"
    source = DeepSpeedReader(path)
    convert_to_deepspeed(source, ours)
    folder, compared = ours / f"global_step{STEPS}" / "zero", 0
    for file in sorted(folder.glob("*/*.pt")):
        other = theirs / "zero" / file.parent.name / file.name
        if file.name == "step.pt" and not other.exists():
            continue  # ZeRO 3: their loader takes the one in optimizer_state.pt
        mine, his = torch.load(file, weights_only=False), torch.load(other, weights_only=False)
        if not isinstance(his, dict):
            mine = mine["param"] if isinstance(mine, dict) else mine
            assert torch.equal(mine.reshape(-1), his.reshape(-1)), file
        else:
            assert mine.keys() - his.keys() <= {"cat_dim", "weight_dtype"} and his.keys() <= mine.keys(), file
            assert torch.equal(mine["param"], his["param"]) and mine["param"].dtype == his["param"].dtype, file
            assert all(mine[key] == value for key, value in his.items() if key != "param"), file
        compared += 1
    of_theirs = {entry.name for entry in (theirs / "zero").iterdir() if entry.is_dir()}
    of_ours = {entry.name for entry in folder.iterdir() if entry.is_dir()}
    assert compared > 60 and of_ours <= of_theirs and all(name.endswith("mask") for name in of_theirs - of_ours)
    found = consolidated(source)
    for made in (theirs, theirs.parent, ours):
        assert deepspeed_universal.recognises(made) and not deepspeed_files.recognises(made)
        back = DeepSpeedUniversalReader(made)
        again = consolidated(back)
        assert again.keys() <= found.keys() and not differing(again, found)
        absent = found.keys() - again.keys() - back.catalog.derived.keys()
        assert not {key for key in absent if made == ours or not key.startswith("buffer/")}
        assert back.catalog.iteration == STEPS and back.catalog.objects["precision"] == "BF16"
        assert back.catalog.padded == source.catalog.padded & again.keys()


def consolidated(source: Any) -> Wholes:
    """All that a conversion would write."""
    filler = Consolidator(source)
    found = {}
    for tensor in filler.tensors:
        data = np.array(filler.get(tensor, 0, tensor.rows))
        found[tensor.key] = (
            tensor.dtype,
            tensor.shape,
            data.reshape(-1, max(1, len(data) // max(1, int(np.prod(tensor.shape))))),
        )
    return found


SPEC = {
    "rules": [
        {"match": ["{layer}.attention.query.weight", "{layer}.attention.key.weight"], "fragment": {"dim": 0}},
        {"match": ["{layer}.attention.value.weight", "{layer}.feed.up.weight"], "fragment": {"dim": 0}},
        {"match": ["{layer}.attention.output.weight", "{layer}.feed.down.weight"], "fragment": {"dim": 1}},
        {"match": ["{layer}.norm*.*", "4.*", "1.positions", "tied_modules.**"], "replicated": True},
    ]
}


def test_a_specification_says_where_parts_lie_if_the_checkpoint_does_not() -> None:
    path = said_otherwise("pp2-tp2-dp2", {}, "silent")
    with raises(ConvertError, "2 tensor-parallel ranks", "universal_checkpoint_info", "--spec"):
        DeepSpeedReader(path)
    found = read_all(DeepSpeedReader(path, Spec.parse(SPEC, "example")))
    live = wholes([pair for rank in saved("pp2-tp2-dp2").live for pair in rank])
    assert set(found) == set(live) and not differing(found, live)
    narrow = {"rules": SPEC["rules"][1:]}
    with raises(ConvertError, "rule", "attention.key.weight"):
        DeepSpeedReader(path, Spec.parse(narrow, "example"))


def changed(name: str, file: str, change: Any, label: str) -> Path:
    """A copy of a checkpoint with one file changed."""
    path = _root() / f"{name}-{label}"
    if not path.exists():
        shutil.copytree(saved(name).path, path)
        target = path / f"global_step{STEPS}" / file
        torch.save(change(torch.load(target, weights_only=False, map_location="cpu")), target)
    return path


OPTIMIZER_1 = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
OPTIMIZER_3 = OPTIMIZER_1.replace("rank_1_", "rank_3_")
WITHOUT = {
    OPTIMIZER_1: ("zero1-three", ("missing", OPTIMIZER_1)),
    "mp_rank_01_model_states.pt": ("pp2-dp2-tied", ("missing", "mp_rank_01_model_states.pt")),
    "layer_03-model_00-model_states.pt": ("pp2-dp2-tied", ("layer_…", "tp 0", "3.attention")),
}
"""File: its checkpoint, and the error where it is missing."""


def test_files_that_are_missing_or_damaged_are_named(tmp_path: Path) -> None:
    for file, (name, words) in WITHOUT.items():
        shutil.copytree(saved(name).path, tmp_path / file)
        (tmp_path / file / f"global_step{STEPS}" / file).unlink()
        with raises(ConvertError, *words):
            DeepSpeedReader(tmp_path / file)
    shutil.copytree(saved("zero1-three").path, tmp_path / "more")
    folder = tmp_path / "more" / f"global_step{STEPS}"
    shutil.copy(folder / OPTIMIZER_1, folder / OPTIMIZER_3)
    with raises(ConvertError, OPTIMIZER_3, "pp 1, tp 1, dp 3"):
        DeepSpeedReader(tmp_path / "more")
    (folder / OPTIMIZER_3).unlink()
    (folder / OPTIMIZER_1).write_bytes((folder / OPTIMIZER_1).read_bytes()[:-1000])
    with pytest.raises(ConvertError, match=rf"{OPTIMIZER_1} (is truncated|cannot be read)"):
        DeepSpeedReader(tmp_path / "more")
    (tmp_path / "more" / "latest").write_text("global_step9")
    with pytest.raises(ConvertError, match="latest names 'global_step9'"):
        DeepSpeedReader(tmp_path / "more")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConvertError, match="no checkpoint of DeepSpeed"):
        DeepSpeedReader(tmp_path / "empty")


def test_ranks_that_disagree_are_named() -> None:
    def other_norm(state: dict[str, Any]) -> dict[str, Any]:
        state["bias"][3] += 1
        return state

    path = changed("pp2-tp2-dp2", "layer_04-model_01-model_states.pt", other_norm, "other-norm")
    filler = Consolidator(DeepSpeedReader(path))
    (bias,) = [tensor for tensor in filler.tensors if tensor.key == "weight/4.bias"]
    with pytest.raises(ConvertError, match=r"weight/4\.bias: .*differ.*layer_04-model_0[01]"):
        filler.get(bias, 0, bias.rows)

    def other_slices(state: dict[str, Any]) -> dict[str, Any]:
        next(iter(state["optimizer_state_dict"]["param_slice_mappings"][0].values())).start += 1
        return state

    with raises(ConvertError, OPTIMIZER_1, "param_slice_mappings"):
        DeepSpeedReader(changed("zero1-three", OPTIMIZER_1, other_slices, "slices"))

    def fewer(state: dict[str, Any]) -> dict[str, Any]:
        inner = state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        inner["exp_avg"] = inner["exp_avg"][:-5]
        return state

    with raises(ConvertError, OPTIMIZER_1, "exp_avg", "group 0"):
        DeepSpeedReader(changed("zero1-three", OPTIMIZER_1, fewer, "fewer"))


def test_parameters_that_a_fused_optimizer_laid_end_to_end_are_found() -> None:
    def fused(state: dict[str, Any]) -> dict[str, Any]:
        optimizer = state["optimizer"]
        (masters,), inner = optimizer.pop("fp32_groups"), optimizer["optimizer_state_dict"]
        states = list(inner["state"].values())
        flat = {role: torch.cat([s[role].reshape(-1) for s in states]) for role in ("exp_avg", "exp_avg_sq")}
        inner["state"] = {0: {"step": states[0]["step"], **flat}}
        return {
            **state,
            "optimizer": {**optimizer, "fp32_groups_flat": [torch.cat([m.reshape(-1) for m in masters])]},
        }

    path = changed("fp16", "mp_rank_00_model_states.pt", fused, "fused")
    found, right = read_all(DeepSpeedReader(path)), read_all(DeepSpeedReader(saved("fp16").path))
    assert set(found) == set(right) and not differing(found, right)
