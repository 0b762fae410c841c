"""Ready configurations: read by the real classes, and by the real parsers where those are installed.

``MEGATRON_LM=DIR`` names a checkout of Megatron-LM at core_v0.16.1, whose parser is not in the wheel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from tests.support.processes import run_python
from tests.support.repository import ROOT

CONFIGS = ROOT / "configs"
DEEPSPEED = sorted(CONFIGS.glob("*.json"))


@dataclass(frozen=True)
class Size:
    """The purpose of a flag file by its text: billions of parameters (tied or not), GPUs, vocabulary, GB per rank."""

    parameters: float
    world: int
    vocab: int
    memory_gb: float


SIZES = {
    "gpt-1.3b-1n": Size(1.3e9, 8, 50257, 6.4),
    "llama2-7b-4n": Size(6.7e9, 32, 32000, 9.9),
    "llama2-34b-64n": Size(33.7e9, 512, 32000, 2.8),
}


def words_of(name: str) -> list[str]:
    """The flags of a file as launch/job.sh reads it."""
    script = f'source launch/job.sh; read_flags "configs/{name}.flags"; printf "%s\\n" "${{FLAGS[@]}}"'
    return subprocess.run(
        ["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def options_of(name: str) -> dict[str, str]:
    """Options and their values; a switch has the value ''."""
    options: dict[str, str] = {}
    for word in words_of(name):
        if word.startswith("--"):
            assert word not in options, f"{word} is given twice"
            options[last := word] = ""
        else:
            assert not options[last], f"{last} has two values"
            options[last] = word
    return options


RENAMED = {"--norm-epsilon": "layernorm_epsilon", "--swiglu": "gated_linear_unit"}
"""Fields of megatron-core that are not called like their options."""
OF_THE_TRAINING_LOOP = {
    "--group-query-attention", "--seq-length", "--max-position-embeddings", "--position-embedding-type",
    "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--tokenizer-type", "--seed",
    "--distributed-timeout-minutes", "--micro-batch-size", "--global-batch-size", "--train-iters",
    "--lr-decay-style", "--lr-warmup-iters", "--lr-decay-iters", "--log-interval", "--eval-interval",
    "--eval-iters", "--save-interval", "--no-gradient-accumulation-fusion",
}  # fmt: skip
"""Known to the parser of Megatron-LM and to no class of megatron-core."""


def fields_of(options: dict[str, str], kind: Any) -> dict[str, Any]:
    """The fields of a class of megatron-core that options set."""

    def typed(text: str) -> Any:
        if not text:
            return True
        return json.loads(text) if re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", text) else text

    values = {RENAMED.get(option, option[2:].replace("-", "_")): typed(text) for option, text in options.items()}
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


@pytest.mark.parametrize("name", SIZES)
def test_flags_build_the_classes_of_megatron_core(name: str) -> None:
    distributed = pytest.importorskip("megatron.core.distributed")
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    options, size = options_of(name), SIZES[name]
    kinds = TransformerConfig, OptimizerConfig, distributed.DistributedDataParallelConfig
    own = {option: text for option, text in options.items() if option not in OF_THE_TRAINING_LOOP}
    assert all(any(fields_of({one: text}, kind) for kind in kinds) for one, text in own.items()), own
    transformer = TransformerConfig(
        **fields_of(own, TransformerConfig),
        add_bias_linear="--disable-bias-linear" not in options,
        pipeline_dtype=pytest.importorskip("torch").bfloat16,
    )
    optimizer = OptimizerConfig(**fields_of(own, OptimizerConfig))
    ddp = distributed.DistributedDataParallelConfig(**fields_of(own, distributed.DistributedDataParallelConfig))
    assert ddp.use_distributed_optimizer and optimizer.lr > optimizer.min_lr > 0

    model_parallel = transformer.tensor_model_parallel_size * transformer.pipeline_model_parallel_size
    replicas, rest = divmod(size.world, model_parallel)
    assert rest == 0 and transformer.num_layers % transformer.pipeline_model_parallel_size == 0
    micro = int(options["--micro-batch-size"])
    assert int(options["--global-batch-size"]) % (micro * replicas) == 0
    assert transformer.tensor_model_parallel_size <= 8, "tensor parallelism stays inside a node"
    assert number_of_parameters(transformer, options, size.vocab) == pytest.approx(size.parameters, rel=0.03)


def number_of_parameters(config: Any, options: dict[str, str], vocab: int) -> float:
    """Matrices only: biases and norms are far below a percent."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    attention = 2 * hidden**2 + 2 * hidden * config.kv_channels * config.num_query_groups
    mlp = (3 if config.gated_linear_unit else 2) * hidden * ffn
    embeddings = 2 if "--untie-embeddings-and-output-weights" in options else 1
    positions = 0 if "--position-embedding-type" in options else int(options["--max-position-embeddings"])
    return float(config.num_layers * (attention + mlp) + hidden * (embeddings * vocab + positions))


@pytest.mark.parametrize("name", SIZES)
def test_the_memory_that_a_flag_file_names_is_what_slots_and_parity_take(name: str) -> None:
    """Three slots; twice the parity of a node of eight, and of a group of up to eight nodes."""
    options, size = options_of(name), SIZES[name]
    tp, pp = int(options["--tensor-model-parallel-size"]), int(options["--pipeline-model-parallel-size"])
    share = 12 * size.parameters / (tp * pp) / (size.world // (tp * pp)) / 1e9
    nodes = min(8, size.world // 8)
    per_rank = share * (3 + 2 / 7 + (2 / (nodes - 1) if nodes > 1 else 0))
    assert per_rank == pytest.approx(size.memory_gb, rel=0.05)
    text = (CONFIGS / f"{name}.flags").read_text()
    told = re.search(r"about ([0-9.]+) GB per rank, ([0-9]+) GB on", text)
    assert told and float(told[1]) == size.memory_gb
    assert float(told[2]) == pytest.approx(8 * per_rank, rel=0.05)


MEGATRON_LM = """
import json, sys
from tests import standin  # the checkout has tests of its own
sys.path.insert(0, sys.argv.pop(1))
standin.install()
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
args = parse_args()
validate_args(args)
core_transformer_config_from_args(args)
print("\\n" + json.dumps([args.data_parallel_size, args.global_batch_size, args.use_distributed_optimizer]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_flags_pass_megatron_lms_own_parser(name: str) -> None:
    checkout = os.environ.get("MEGATRON_LM")
    if not checkout:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM")
    # Fused rotary positions need Transformer Engine, which needs a GPU.
    extra = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "32000", "--no-rope-fusion"]
    env = {"WORLD_SIZE": str(SIZES[name].world), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run = run_python(MEGATRON_LM, checkout, *words_of(name), *extra, secs=120, **env)
    assert run.returncode == 0, run.stderr[-2000:]
    options = options_of(name)
    tp, pp = int(options["--tensor-model-parallel-size"]), int(options["--pipeline-model-parallel-size"])
    expected = [SIZES[name].world // (tp * pp), int(options["--global-batch-size"]), True]
    assert json.loads(run.stdout.splitlines()[-1]) == expected


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.stem)
def test_the_section_of_a_deepspeed_file_is_a_configuration(path: Path) -> None:
    assert Config.from_mapping(json.loads(path.read_text())["ftckpt"]).enabled


DEEPSPEED_CONFIG = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
print("\\n" + json.dumps([
    [c.zero_optimization_stage, c.bfloat16_config.enabled, c.gradient_clipping, c.train_batch_size,
     c.optimizer_name, c.scheduler_name, c._param_dict["ftckpt"]["enabled"]]
    for c in map(DeepSpeedConfig, sys.argv[1:])
]))
"""


def test_deepspeeds_own_class_reads_its_files() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    run = run_python(DEEPSPEED_CONFIG, *DEEPSPEED, secs=120, DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    assert run.returncode == 0, run.stderr[-2000:]
    read = json.loads(run.stdout.splitlines()[-1])
    assert [path.stem for path in DEEPSPEED] == ["deepspeed_zero1_pp", "deepspeed_zero2", "deepspeed_zero3"]
    assert [row[0] for row in read] == [1, 2, 3]
    assert {tuple(row[1:]) for row in read} == {(True, 1.0, 32, "adamw", "WarmupCosineLR", True)}
