"""``ftckpt convert --verify`` compares what is no tensor, too: what was changed, lost or added is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_convert import Memory, array, wholes

from ftckpt.errors import ConvertError
from ftckpt.universal.catalog import Catalog
from ftckpt.universal.conversion import Options, convert, prepare
from ftckpt.universal.formats import ReadOptions, open_reader, open_writer
from ftckpt.universal.universal_format import UniversalWriter
from ftckpt.universal.verification import verify
from tests.support.errors import raises

Change = Callable[[Any], object]
WEIGHTS = {"weight/layers.0.weight": array((8, 5), "BF16")}
STATES = {f"{role}/layers.0.weight": array((8, 5), seed=n) for n, role in enumerate(("master", "exp_avg"))}
RICH = {
    "scheduler": {"last_epoch": 7, "rates": [1e-3, math.nan], "bounds": (0, 1)},
    "counters": {1: "one", "samples": 2**40},
    "generator": torch.arange(5, dtype=torch.uint8),
    "array": np.arange(3, dtype=np.int32),
}
MEGATRON = {
    "megatron": {
        "checkpoint_version": 3.0,
        "args": {"lr": 1e-3, "kind": {"class": "megatron.core.x.enums.Kind", "arguments": [1]}, "betas": (0.9, 0.95)},
        "opt_param_scheduler": {"num_steps": 56, "max_lr": 1e-3},
        "num_floating_point_operations_so_far": 12.5,
        "rng_state": [1, 2],
        "optimizer": {
            "optimizer": {
                "param_groups": [{"wd_mult": 1.0, "lr": 3e-4, "betas": (0.9, 0.95), "step": 7}],
                "state": {},
            },
            "grad_scaler": {"scale": torch.tensor([65536.0]), "growth_tracker": 3},
        },
    },
    "sharded_objects": {"rng_state/shard_0_1": [1]},
}
SCALER = "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"
DEEPSPEED = {
    "deepspeed": {
        "state": {
            "lr_scheduler": {"last_batch_iteration": 6}, "global_steps": 7, "global_samples": 56, "skipped_steps": 1,
            "ds_config": {"bf16": {"enabled": True}}, "client": {"note": ["a", 1]}, "dp_world_size": 2,
            "args": {"lr": 0.1},
        },
        "optimizer": {
            "param_groups": [{"lr": 3e-4, "betas": (0.9, 0.95)}, {"lr": 1e-4, "betas": (0.9, 0.95)}],
            "loss_scaler": {"class": SCALER, "arguments": [], "cur_scale": 4.0, "dtype": "torch.float16"},
            "clip_grad": 1.0,
        },
    },
    "precision": "BF16",
}  # fmt: skip


def source(objects: Mapping[str, Any], origin: str = "universal") -> Memory:
    made = Memory(WEIGHTS | STATES, [*wholes(WEIGHTS, "BF16"), *wholes(STATES)])
    made.described = Catalog(origin, 7, {}, made.catalog.fragments, objects)
    return made


def verified(objects: Mapping[str, Any], path: Path, to: str) -> int:
    conversion = prepare(source(objects), open_writer(path.with_name("never"), to), Options())
    written = open_reader([path], ReadOptions())
    try:
        return verify(conversion, written, 1)
    finally:
        written.close()


def at(value: Any, where: str) -> tuple[Any, Any]:
    *path, last = where.split(".")
    for name in path:
        value = value[int(name) if isinstance(value, list) else name]
    return value, last


def put(where: str, new: Any) -> Change:
    def change(value: Any) -> None:
        holder, key = at(value, where)
        holder[int(key) if isinstance(holder, list) else key] = new

    return change


def drop(where: str) -> Change:
    def change(value: Any) -> None:
        holder, key = at(value, where)
        del holder[key]

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put("scheduler.last_epoch", 8), "objects.scheduler.last_epoch 8 7"),
        (drop("counters.samples"), "objects.counters.samples"),
        (put("more", 1), "objects.more"),
        (put("generator", torch.arange(1, 6, dtype=torch.uint8)), "objects.generator"),
    ],
)
def test_universal_checkpoints_hold_all_objects(tmp_path: Path, change: Change, text: str) -> None:
    other = copy.deepcopy(RICH)
    change(other)
    convert(source(other), UniversalWriter(tmp_path / "out"), Options())
    assert verified(other, tmp_path / "out", "universal") == 3
    with raises(ConvertError, *text.split()):
        verified(RICH, tmp_path / "out", "universal")


def changed_file(file: Path, change: Change) -> None:
    value = torch.load(file, weights_only=False)
    change(value)
    torch.save(value, file)


def argument(name: str, new: Any) -> Change:
    return lambda value: setattr(value["args"], name, new)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (argument("betas", (0.9, 0.96)), "args.betas.1 0.96 0.95"),
        (lambda value: delattr(value["args"], "kind"), "args.kind"),
        (put("optimizer.optimizer.param_groups.0.lr", 3e-5), "3e-05 0.0003"),
        (put("optimizer.grad_scaler.scale", torch.tensor([1.0])), "scaler.scale"),
        (put("iteration", 8), "8 7"),
    ],
)
def test_checkpoints_of_megatron(tmp_path: Path, change: Change, text: str) -> None:
    convert(source(MEGATRON), open_writer(tmp_path / "out", "megatron-dist"), Options())
    assert verified(MEGATRON, tmp_path / "out", "megatron-dist") == 3
    changed_file(tmp_path / "out" / "iter_0000007" / "common.pt", change)
    with raises(ConvertError, *text.split()):
        verified(MEGATRON, tmp_path / "out", "megatron-dist")


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("state", put("lr_scheduler.last_batch_iteration", 5), "scheduler.last_batch_iteration 5 6"),
        ("state", drop("client"), ""),
        ("optimizer", put("param_groups.1.lr", 0.0), "parameters.1.lr 0.0 0.0001"),
        ("optimizer", lambda value: setattr(value["loss_scaler"], "cur_scale", 8.0), "scaler.cur_scale 8"),
    ],
)
def test_universal_checkpoints_of_deepspeed(tmp_path: Path, file: str, change: Change, text: str) -> None:
    pytest.importorskip("deepspeed")
    convert(source(DEEPSPEED), open_writer(tmp_path / "out", "deepspeed-universal"), Options())
    assert verified(DEEPSPEED, tmp_path / "out", "deepspeed-universal") == 2
    folder = tmp_path / "out" / "global_step7"
    if file == "optimizer":
        changed_file(folder / "zero" / "optimizer_state.pt", change)
    else:
        for each in folder.glob("*model_states.pt"):
            changed_file(each, change)
    with raises(ConvertError, *text.split()):
        verified(DEEPSPEED, tmp_path / "out", "deepspeed-universal")
