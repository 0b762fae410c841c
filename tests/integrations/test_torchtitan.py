"""The Trainer of torchtitan, killed twice and restored: the weights and losses of an unbroken run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ftckpt.torchtitan
from ftckpt import Config
from ftckpt.errors import UnsupportedError
from tests.support.trainers import install, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RELEASES = (
    "torchtitan==0.3.0", "torchdata==0.11.0", "torch_checkpointing==0.1.1", "datasets==4.7.0", "tokenizers==0.23.3",
    "tyro==1.0.17", "docstring-parser==0.18.0", "typeguard==4.6.1", "spmd_types==0.2.3", "tensorboard==2.21.0",
    "absl-py==2.5.1", "protobuf==7.36.2", "grpcio==1.85.3", "markdown==3.11.3", "werkzeug==3.1.9", "pyarrow==26.0.1",
    "pandas==3.1.1", "dill==0.4.0", "multiprocess==0.70.16", "huggingface_hub==1.31.0", "pytz==2026.6",
    "aiohttp==3.14.5", "httpx==0.28.1", "httpcore==1.0.9", "h11==0.16.0", "anyio==4.16.0", "sniffio==1.3.1",
    "hf_xet==1.8.0", "triton==3.9.0",
)  # fmt: skip
LINE = re.compile(r'^\{"step".*\}$', re.MULTILINE)


def train_llama(folder: Path, arena: Path, kills: int) -> dict[str, Any]:
    """The result and the losses of a training, of which rank 1 is killed so many times."""
    packages = install("torchtitan", RELEASES)
    result, log = train(packages, folder, arena, kills, "tests/support/torchtitan_job.py", str(folder))
    lines = [json.loads(line) for line in LINE.findall(log)]
    return {"losses": {line["step"]: line for line in lines}, **result}


@pytest.mark.timeout(900)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, arena_root: Path) -> None:
    whole = train_llama(tmp_path / "whole", arena_root, 0)
    killed = train_llama(tmp_path / "killed", arena_root, 2)
    assert len(whole["losses"]) == whole["step"] == 60
    assert killed == whole


def test_a_pipeline_with_one_stage_per_rank_is_refused() -> None:
    trainer = SimpleNamespace(parallel_dims=SimpleNamespace(pp_enabled=True), model_parts=[None], optimizers=[None])
    with pytest.raises(UnsupportedError, match="pipeline_parallel_degree"):
        ftckpt.torchtitan.attach(trainer, Config(enabled=True, job="pipeline"))
