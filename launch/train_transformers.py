"""Trains a tiny GPT-2 with the Trainer of Hugging Face transformers.

    ftckpt run --nproc-per-node 2 --rdzv-id gpt2 launch/train_transformers.py --output_dir out --ftckpt

Arguments are those of ``TrainingArguments``, and ftckpt's. Three lines, marked below, are ftckpt's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments

import ftckpt.torch
import ftckpt.transformers
from ftckpt import Config

NUM_TOKENS, LENGTH, NUM_SAMPLES = 64, 16, 40


class RandomTokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that depend on their index alone."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, NUM_TOKENS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def main(argv: Sequence[str]) -> None:
    config, rest = Config.from_flags(argv)
    ftckpt.torch.init_process_group(config, "nccl" if torch.cuda.is_available() else "gloo")  # ftckpt: 1
    (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(list(rest))  # ftckpt: 2
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=NUM_TOKENS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=RandomTokens(), eval_dataset=RandomTokens())
    ftckpt.transformers.attach(trainer, config)  # ftckpt: 3
    trainer.train()
    write_result(trainer, Path(arguments.output_dir))
    dist.destroy_process_group()


def write_result(trainer: Any, folder: Path) -> None:
    """What an unbroken run and one that was restored have alike."""
    tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in trainer.model.state_dict().values()]
    if trainer.is_world_process_zero():
        digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in [*tensors, torch.get_rng_state()]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(
            json.dumps({"step": trainer.state.global_step, "sha256": digest.hexdigest()})
        )


if __name__ == "__main__":
    main(sys.argv[1:])
