"""Megatron's ``torch`` checkpoints made by hand: layouts and damages that a real job is not needed for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ftckpt.errors import ConvertError
from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.megatron.legacy_reader import MegatronLegacyReader
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from tests.support.errors import raises

EXPERT = "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
RULES = [
    {"match": EXPERT, "fragment": {"dim": 0}, "rename": "experts.{layer}", "expert": "expert", "stack": "expert"},
    {"match": "norm.*", "replicated": True, "optional": True},
    {"match": "proj.weight", "fragment": {"dim": 1}, "optional": True},
]
SPEC = Spec.parse({"rules": RULES}, "example")
EXPERTS = torch.arange(4 * 6 * 3, dtype=torch.float32).view(4, 6, 3)
PROJ = torch.arange(24.0).view(3, 8)


def write(path: Path, name: str, model: dict[str, torch.Tensor], args: dict[str, int], **more: Any) -> None:
    directory = path / "iter_0000003" / name
    directory.mkdir(parents=True)
    whole = {"model": model, "args": argparse.Namespace(**args), "iteration": 3, "checkpoint_version": 3.0, **more}
    torch.save(whole, directory / "model_optim_rng.pt")
    (path / "latest_checkpointed_iteration.txt").write_text("3")


def sizes(tp: int, ep: int = 1, etp: int | None = None) -> dict[str, int]:
    named = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": ep}
    return named if etp is None else {**named, "expert_tensor_parallel_size": etp}


def experts(numbers: range) -> dict[str, torch.Tensor]:
    name = "decoder.layers.0.mlp.experts.local_experts.{}.linear_fc1.weight"
    return {name.format(index): EXPERTS[number].clone() for index, number in enumerate(numbers)}


def read(path: Path, to: Path) -> dict[str, bytes]:
    convert(MegatronLegacyReader(path, SPEC), UniversalWriter(to), Options())
    source = UniversalReader(to)
    return {f.key: source.read(i).tobytes() for i, f in enumerate(source.catalog.fragments)}


def test_experts_that_are_not_cut_while_all_else_is(tmp_path: Path) -> None:
    """Expert tensor parallelism of 1: both ranks hold the full experts, which must not be concatenated."""
    for tp in range(2):
        model = {**experts(range(4)), "proj.weight": PROJ[:, 4 * tp : 4 * tp + 4].clone()}
        write(tmp_path, f"mp_rank_{tp:02d}", model, sizes(2, etp=1))
    found = read(tmp_path, tmp_path / "out")
    assert found["weight/experts.0"] == EXPERTS.numpy().tobytes()
    assert found["weight/proj.weight"] == PROJ.numpy().tobytes()


def test_experts_that_tensor_parallel_ranks_are_dealt(tmp_path: Path) -> None:
    """Two tensor-parallel ranks are two expert ranks: there are no files of the other pairs."""
    for rank in range(2):
        model = {**experts(range(2 * rank, 2 * rank + 2)), "proj.weight": PROJ[:, 4 * rank : 4 * rank + 4].clone()}
        write(tmp_path, f"mp_rank_{rank:02d}_{rank:03d}", model, sizes(2, 2, 1))
    found = read(tmp_path, tmp_path / "out")
    assert found["weight/experts.0"] == EXPERTS.numpy().tobytes()
    assert found["weight/proj.weight"] == PROJ.numpy().tobytes()
    (tmp_path / "iter_0000003" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with raises(ConvertError, "1", "0"):
        MegatronLegacyReader(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"iteration": 4}, "mp_rank_01 4 mp_rank_00 3"),
        ({"optimizer": None}, "mp_rank_01"),
        (
            {"optimizer": {"optimizer": {"param_groups": [{"wd_mult": 1.0}]}}},
            "distrib_optim.pt",
        ),
        ({"optimizer": [{}, {}, {}]}, "mp_rank_01 3"),
        ({"optimizer": [7]}, "distrib_optim.pt"),
    ],
)
def test_ranks_whose_files_do_not_fit_together_are_named(tmp_path: Path, more: dict[str, Any], text: str) -> None:
    optimizer = {"optimizer": {"state": {0: {"exp_avg": torch.zeros(4)}}, "param_groups": [{"params": [0]}]}}
    model = {"norm.weight": torch.ones(4)}
    spec = Spec.parse({"rules": RULES[1:]}, "example")
    for tp, changed in enumerate(({}, more)):
        write(tmp_path, f"mp_rank_{tp:02d}", model, sizes(2), **{"optimizer": optimizer, **changed})
    with raises(ConvertError, *text.split()):
        MegatronLegacyReader(tmp_path, spec)
    if "iteration" not in more:
        weights = MegatronLegacyReader(tmp_path, spec, roles={"weight"})
        assert weights.read(0).tobytes() == np.ones(4, np.float32).tobytes()
