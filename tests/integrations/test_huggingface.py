"""Exports that the real ``from_pretrained`` of transformers loads: the same logits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_transformers import RELEASES, SCRIPT, train_gpt2

from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.huggingface.writer import HuggingFaceWriter
from tests.integrations.megatron_models import Model, build, known, parallel, stand_in_for_grouped_gemm
from tests.support import elements, hf_names
from tests.support.elements import Elements
from tests.support.pool import run_ranks
from tests.support.repository import ROOT
from tests.support.trainers import environment, install

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

GATED = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2,
    "activation_func": torch.nn.functional.silu, "layernorm_epsilon": 1e-4,
}  # fmt: skip
EXPERTS = {**GATED, "num_moe_experts": 4, "moe_router_topk": 2}
MODELS: dict[str, tuple[Model, int]] = {
    "gpt2": (Model(), 2),
    "gpt2-untied": (Model({"bias_activation_fusion": True}, untied=True), 1),
    "llama": (Model(GATED, untied=True, rope=True), 2),
    "qwen2": (Model({**GATED, "add_qkv_bias": True}, rope=True), 2),
    "qwen3": (Model({**GATED, "qk_layernorm": True, "kv_channels": 12}, rope=True), 2),
    "mixtral": (Model(EXPERTS, untied=True, rope=True), 1),
    "mixtral-grouped": (Model(EXPERTS, untied=True, grouped=True, rope=True), 1),
    "qwen3_moe": (Model({**EXPERTS, "qk_layernorm": True}, rope=True), 1),
}
"""Models of Megatron-core, and the number of tensor-parallel ranks."""
TOLERANCE = 2e-5
"""Of fp32 logits around 1: the two programs add in other orders."""


def transformers(what: str, folder: Path) -> None:
    """Run a command of ``tests/support/hf_models.py``."""
    command = [sys.executable, str(ROOT / "tests" / "support" / "hf_models.py"), what, str(folder)]
    settings = environment(install("transformers", RELEASES))
    run = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.timeout(600)
def test_each_family_computes_the_same_bits_after_a_round_trip(tmp_path: Path) -> None:
    """From transformers to Megatron's tensors, or under the same names, and back."""
    transformers("make", tmp_path / "made")
    out = tmp_path / "loaded"
    for name in hf_names.FAMILIES:
        hf = load_file(tmp_path / "made" / name / "hf" / "model.safetensors")
        recorded = {"model": (tmp_path / "made" / name / "recorded.json").read_text()}
        plain = {f"weight/{key}": array for key, array in hf.items()}
        of_megatron = hf_names.megatron_tensors(name, hf, joined=True, grouped=False)
        arguments = {"megatron": {"args": hf_names.ARGUMENTS}}
        for kind, tensors, objects in (
            ("megatron", of_megatron, arguments), ("plain", plain, {"shards": {"dp0": recorded}})
        ):  # fmt: skip
            given = {"vocab_size": hf_names.VOCABULARY} if kind == "megatron" else None
            path = out / f"{name}-{kind}" / "out"
            path.parent.mkdir(parents=True)
            convert(hf_names.source(tensors, objects), HuggingFaceWriter(path, 9000, given), Options())
    transformers("load", out)
    for path in out.iterdir():
        made = np.load(tmp_path / "made" / path.name.rpartition("-")[0] / "made.npy")
        assert np.array_equal(np.load(path / "loaded.npy"), made), path.name


def megatron_logits(
    rank: int, world_size: int, model: Model, layout: Mapping[str, int], tokens: np.ndarray
) -> tuple[list[Elements], str, np.ndarray]:
    """The weights of a rank, its description of the model, and its part of the logits."""
    from megatron.core.utils import unwrap_model

    from ftckpt.megatron.state import MegatronState

    if model.grouped:
        stand_in_for_grouped_gemm()
    with parallel(layout):
        built = build(model, layout)
        state = MegatronState(built.chunks, built.optimizer, None, {})
        described = state.describe()
        weights = [piece for piece in described.stepped if piece.fragment.key.startswith("weight/")]
        for piece in weights:
            values = known(piece.fragment.key, elements.positions(piece.fragment))
            piece.tensor.copy_(torch.from_numpy(values * 0.4 + 0.1).to(piece.tensor.dtype))
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()[None, None]
        places = torch.arange(tokens.shape[1]).expand(*tokens.shape)
        with torch.no_grad():
            gpt = unwrap_model(built.chunks[0]).eval()
            found = gpt(torch.from_numpy(tokens), places, mask).float().numpy()
        return elements.held(weights), state.save_objects()["model"], found


@pytest.mark.timeout(900)
def test_megatrons_forward_and_that_of_transformers_agree(tmp_path: Path) -> None:
    tokens = np.random.default_rng(5).integers(0, hf_names.VOCABULARY, (2, 12))
    right: dict[str, Any] = {}
    for name, (model, ranks) in MODELS.items():
        results = [result.value for result in run_ranks(megatron_logits, ranks, model, {"tp": ranks}, tokens)]
        wholes = elements.wholes(each for held, _, _ in results for each in held)
        arrays = {key: data.view(np.float32).reshape(shape) for key, (_, shape, data) in wholes.items()}
        right[name] = np.concatenate([part for *_, part in results], axis=-1)
        path = tmp_path / name / "out"
        path.parent.mkdir()
        recorded = {"shards": {"tp0": {"model": results[0][1]}}}
        convert(hf_names.source(arrays, recorded), HuggingFaceWriter(path), Options())
    transformers("load", tmp_path)
    for name, logits in right.items():
        found = np.load(tmp_path / name / "loaded.npy")
        assert found.shape == logits.shape and np.ptp(logits) > 0.5, name
        np.testing.assert_allclose(found, logits, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
        kind, dtype = json.loads((tmp_path / name / "class.json").read_text())
        assert kind.lower().startswith(name.partition("-")[0].replace("_", "")) and dtype == "torch.float32"


@pytest.mark.timeout(900)
def test_exports_of_a_trainer_are_loaded(tmp_path: Path, arena_root: Path) -> None:
    """What its snapshot has of the model's configuration is all that it takes."""
    (tmp_path / "storage").mkdir()
    settings = (f"--ftckpt-persist={tmp_path / 'storage'}", "--ftckpt-persist-format=huggingface")
    assert train_gpt2(tmp_path / "run", arena_root, 0, SCRIPT, *settings)["step"] == 120
    newest = tmp_path / "storage" / (tmp_path / "storage" / "latest").read_text().strip()
    assert newest.name == "iter_0000120"
    (tmp_path / "exports" / "gpt2").mkdir(parents=True)
    newest.rename(tmp_path / "exports" / "gpt2" / "out")
    transformers("load", tmp_path / "exports")
    assert json.loads((tmp_path / "exports" / "gpt2" / "class.json").read_text())[0] == "GPT2LMHeadModel"
