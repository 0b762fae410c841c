"""The example script computes the same in layouts that must agree, skips what overflows, and tells what it did.

That two runs end in the same bits is what each test of a restart shows, in each layout.
"""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.pool import run_ranks

pytestmark = pytest.mark.multiproc

SMALL = ["--layers", "2", "--hidden", "32", "--seq", "32", "--global-batch", "8", "--iterations", "3"]


def train(rank: int, world_size: int, argv: list[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    from launch import train_gpt

    job = train_gpt.build(train_gpt.parse_args(argv))
    return train_gpt.train(job), train_gpt.final_hashes(job)


def losses(history: list[dict[str, Any]]) -> list[str]:
    return [metrics["loss"].hex() for metrics in history]


def test_overlap_and_sharding_do_not_change_the_losses(tmp_path: Path) -> None:
    log = ["--log-file", str(tmp_path / "log.jsonl")]
    runs = [[], ["--overlap-grad-reduce", "--overlap-param-gather"], ["--no-distributed-optimizer"]]
    histories = [run_ranks(train, 2, [*SMALL, *flags, *log])[0].value[0] for flags in runs]
    assert losses(histories[0]) == losses(histories[1]) == losses(histories[2])


def test_a_pipeline_without_dropout_computes_what_one_stage_does(tmp_path: Path) -> None:
    def last(world_size: int, *flags: str) -> dict[str, Any]:
        argv = [*SMALL, *["--layers", "4", "--precision", "fp32", "--dropout", "0"], *flags]
        argv += ["--log-file", str(tmp_path / "log.jsonl")]
        results = run_ranks(train_from_common_weights, world_size, argv)
        return results[-1].value

    one, two, interleaved = last(1), last(2, "--pp", "2"), last(2, "--pp", "2", "--vpp", "2")
    assert one == pytest.approx(two, rel=1e-5)
    assert one == pytest.approx(interleaved, rel=1e-5)


def train_from_common_weights(rank: int, world_size: int, argv: list[str]) -> list[float]:
    """Weights that depend on their layer's name alone, so that all layouts start alike."""
    from launch import train_gpt

    job = train_gpt.build(train_gpt.parse_args(argv))
    for chunk in job.model:
        first_layer = min([layer.layer_number for layer in chunk.module.decoder.layers], default=1) - 1
        for name, param in chunk.module.named_parameters():
            if name.endswith("bias") or "layernorm" in name:
                continue
            match = re.search(r"layers\.(\d+)(.*)", name)
            key = f"{int(match[1]) + first_layer}{match[2]}" if match else name
            # A tied output layer is a second copy of the embedding.
            key = key.replace("output_layer.weight", "embedding.word_embeddings.weight")
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.02)
    job.optimizer.reload_model_params()
    return [metrics["loss"] for metrics in train_gpt.train(job)]


def test_fp16_skips_overflowing_steps_then_trains(tmp_path: Path) -> None:
    scaled = ["--precision", "fp16", "--loss-scale", "262144", "--loss-scale-window", "2"]
    argv = [*SMALL, *scaled, "--iterations", "8", "--log-file", str(tmp_path / "log.jsonl")]
    history = run_ranks(train, 2, argv)[0].value[0]
    assert all(0 < metrics["loss"] < 7 for metrics in history)
    stepped = [metrics["stepped"] for metrics in history]
    assert not all(stepped)
    assert any(stepped)
    assert history[0]["loss_scale"] != history[-1]["loss_scale"]


def run_main_without_ftckpt(rank: int, world_size: int, argv: list[str]) -> None:
    from launch import train_gpt

    train_gpt.attach_checkpointer = lambda job: None
    train_gpt.main(argv)


def test_log_and_final_hashes_are_written(tmp_path: Path) -> None:
    argv = [*SMALL, "--pp", "2", "--log-file", str(tmp_path / "log.jsonl")]
    argv += ["--dump-final", str(tmp_path / "final")]
    run_ranks(run_main_without_ftckpt, 2, argv)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert [line["consumed_samples"] for line in lines] == [8, 16, 24]
    assert all(float.fromhex(line["loss_hex"]) == line["loss"] for line in lines)
    assert sorted(path.name for path in (tmp_path / "final").iterdir()) == ["tp0-pp0-dp0.json", "tp0-pp1-dp0.json"]


def read_data(rank: int, world_size: int) -> dict[str, Any]:
    from launch.train_gpt import TextData

    def batches(data: TextData, dp_size: int) -> list[list[list[int]]]:
        position = data.state_dict()
        replicas = []
        for dp_rank in range(dp_size):
            data.load_state_dict(position)
            replicas.append(data.next_batch(4 // dp_size, 2, dp_rank, dp_size))
        ordered = [batch for micro in zip(*replicas, strict=True) for batch in micro]
        return [sample.tolist() for batch in ordered for sample in batch]

    data = TextData(seq=16, seed=1, limit_bytes=600)
    one, resumed = TextData(seq=16, seed=1, limit_bytes=600), TextData(seq=16, seed=1, limit_bytes=600)
    unbroken = [batches(one, 1) for _ in range(8)]
    sharded = [batches(data, 2) for _ in range(4)]
    resumed.load_state_dict(data.state_dict())
    return {"unbroken": unbroken, "pieces": sharded + [batches(resumed, 4) for _ in range(4)]}


def test_data_continues_where_it_was_in_any_number_of_replicas() -> None:
    value = run_ranks(read_data, 1, init_process_group=False)[0].value
    assert value["unbroken"] == value["pieces"]
    # 600 tokens hold 37 samples: 64 samples reach into a second, differently shuffled, epoch.
    flat = [tuple(sample) for batch in value["unbroken"] for sample in batch]
    assert len(set(flat[:37])) > 30
    assert flat[:27] != flat[37:]
