"""The Trainer of Hugging Face transformers, killed twice and restored: the weights and losses of an unbroken run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.trainers import install, train

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

RELEASES = (
    "transformers==5.24.0", "accelerate==1.15.0", "tokenizers==0.23.3", "huggingface_hub==2.4.0",
    "regex==2026.11.19", "httpx2==2.16.2", "httpcore2==2.16.2", "h11==0.16.0", "anyio==4.16.0", "truststore==0.10.5",
    "hf_xet==1.8.0", "click==8.5.1",
)  # fmt: skip
TRAINING = (
    "--use_cpu", "--per_device_train_batch_size=2", "--gradient_accumulation_steps=3", "--num_train_epochs=30",
    "--logging_steps=1", "--eval_strategy=epoch", "--save_strategy=no", "--report_to=none", "--disable_tqdm=True",
)  # fmt: skip
"""40 samples on two ranks: ten batches, of which the last step of an epoch has one."""
LOSS = re.compile(r"^\{'loss': '(\S+)'.*'learning_rate': '(\S+)', 'epoch': '(\S+)'\}$", re.MULTILINE)


SCRIPT, ON_CPU = "launch/train_transformers.py", "tests/support/transformers_fsdp2_job.py"
ZERO2 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2},
}


def train_gpt2(folder: Path, arena: Path, kills: int, script: str, *options: str) -> dict[str, Any]:
    """The result and the losses of a training, of which rank 1 is killed so many times."""
    arguments = script, f"--output_dir={folder}", *TRAINING, *options
    result, log = train(install("transformers", RELEASES), folder, arena, kills, *arguments)
    return {"losses": {epoch: (loss, rate) for loss, rate, epoch in LOSS.findall(log)}, **result}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "script",
    [[SCRIPT], [ON_CPU, "--fsdp=full_shard"], [SCRIPT, f"--deepspeed={json.dumps(ZERO2)}"]],
    ids=["ddp", "fsdp2", "zero2"],
)
def test_a_killed_training_is_the_unbroken_one(tmp_path: Path, arena_root: Path, script: list[str]) -> None:
    whole = train_gpt2(tmp_path / "whole", arena_root, 0, *script)
    killed = train_gpt2(tmp_path / "killed", arena_root, 2, *script)
    assert len(whole["losses"]) == whole["step"] == 120
    assert killed == whole
