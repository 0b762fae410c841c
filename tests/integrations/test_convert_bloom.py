"""The ready specification ``bloom``: a checkpoint of a DeepSpeed pipeline with the names and cuts of BLOOM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ftckpt.universal.conversion import Options, convert
from ftckpt.universal.deepspeed.reader import DeepSpeedReader
from ftckpt.universal.language.spec import Spec
from ftckpt.universal.universal_format import UniversalReader, UniversalWriter
from tests.support.ds_jobs import BF16, SMALL, zero
from tests.support.elements import read_all
from tests.support.pool import run_ranks

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.multiproc

HIDDEN, VOCABULARY, SEQ, TP = 16, 64, 8, 2
TIED = "word_embeddings.weight"
AXES = (
    (r"tied_modules\.embed\.word_embeddings\.weight", 0),
    (r"\d+\.self_attention\.query_key_value\.\w+", 0),
    (r"\d+\.mlp\.dense_h_to_4h\.\w+", 0),
    (r"\d+\.(self_attention\.dense|mlp\.dense_4h_to_h)\.weight", 1),
)
"""The axis along which tensor-parallel ranks hold parts; of all others each has a copy, which has drifted."""


class WordEmbeddings(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY // TP, HIDDEN))
        self.norm = torch.nn.LayerNorm(HIDDEN)


class Embedding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = WordEmbeddings()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings.norm(F.embedding(tokens, self.word_embeddings.weight))


def logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    return hidden @ embedding.word_embeddings.weight.t()


class Layer(torch.nn.Module):
    """A rank's part of a layer; ranks do not reduce their outputs, so that their copies drift as in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        part = HIDDEN // TP
        self.input_layernorm = torch.nn.LayerNorm(HIDDEN)
        self.self_attention, self.mlp = torch.nn.Module(), torch.nn.Module()
        self.self_attention.query_key_value = torch.nn.Linear(HIDDEN, 3 * part)
        self.self_attention.dense = torch.nn.Linear(part, HIDDEN)
        self.post_attention_layernorm = torch.nn.LayerNorm(HIDDEN)
        self.mlp.dense_h_to_4h = torch.nn.Linear(HIDDEN, 4 * part)
        self.mlp.dense_4h_to_h = torch.nn.Linear(4 * part, HIDDEN)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.self_attention.query_key_value(self.input_layernorm(hidden)).chunk(3, -1)
        hidden = hidden + self.self_attention.dense(query * key + value)
        return hidden + self.mlp.dense_4h_to_h(F.gelu(self.mlp.dense_h_to_4h(self.post_attention_layernorm(hidden))))


def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float().flatten(0, 1), labels.flatten())


def saved(rank: int, world_size: int, folder: str) -> dict[str, np.ndarray]:
    """Train as two stages of two ranks, save, and return this rank's part of each tensor, by ``TP/ROLE/NAME``."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from tests.standin import deepspeed as standin

    standin.install()
    deepspeed.init_distributed()
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=TP, num_dp=world_size // 2 // TP)
    torch.manual_seed(rank)
    # As in the pipeline of Megatron-DeepSpeed functions take numbers too: 0, 2 and 5.
    layers = [
        torch.Tensor.contiguous, TiedLayerSpec("embed", Embedding, tied_weight_attr=TIED), torch.Tensor.contiguous,
        LayerSpec(Layer), LayerSpec(Layer), torch.Tensor.contiguous, LayerSpec(torch.nn.LayerNorm, HIDDEN),
        TiedLayerSpec("embed", Embedding, forward_fn=logits, tied_weight_attr=TIED),
    ]  # fmt: skip
    model = PipelineModule(layers=layers, topology=topology, loss_fn=loss, partition_method="uniform")
    config = {**SMALL, **BF16, **zero(1), "gradient_accumulation_steps": 2}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    batches = torch.randint(0, VOCABULARY // TP, (8, 2, 2, SEQ), generator=torch.Generator().manual_seed(rank % TP))
    for _ in range(2):
        engine.train_batch(iter([(tokens, labels) for tokens, labels in batches]))
    engine.save_checkpoint(folder)
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        found[f"weight/{name}"] = parameter.detach()
        found[f"master/{name}"] = safe_get_full_fp32_param(parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            found[f"{state}/{name}"] = safe_get_full_optimizer_state(parameter, state)
    part = topology.get_coord(rank).model
    return {f"{part}/{key}": value.double().cpu().numpy() for key, value in found.items()}


def test_a_pipeline_of_bloom_is_put_together(tmp_path: Path) -> None:
    ranks = run_ranks(saved, 4, str(tmp_path / "saved"), stand_in=False)
    # The first stage is right: the last one has a copy of the normalization of embeddings that it does not train.
    parts = {key: array for rank in reversed(ranks) for key, array in rank.value.items()}
    reader = DeepSpeedReader(tmp_path / "saved", Spec.load("bloom"))
    convert(reader, UniversalWriter(tmp_path / "out"), Options())
    found = {key: value for key, value in read_all(UniversalReader(tmp_path / "out")).items() if "step/" not in key}
    assert found.keys() == {key.partition("/")[2] for key in parts} and len(found) == 4 * (3 + 24 + 2)
    drifted = 0
    for key, (dtype, shape, data) in found.items():
        copies = [parts[f"{rank}/{key}"] for rank in range(TP)]
        axis = next((axis for name, axis in AXES if re.fullmatch(rf"\w+/{name}", key)), None)
        whole = np.mean(copies, axis=0) if axis is None else np.concatenate(copies, axis)
        drifted += axis is None and not np.array_equal(*copies)
        right = torch.from_numpy(whole).to(torch.bfloat16 if key.startswith("weight/") else torch.float32)
        assert (dtype, shape) == ("BF16" if key.startswith("weight/") else "F32", tuple(right.shape)), key
        assert data.tobytes() == right.view(torch.uint8).numpy().tobytes(), key
    assert drifted > 20
