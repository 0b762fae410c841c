"""Trains a tiny model with Ray Train: two workers, which Ray restarts if one dies.

    python launch/train_ray.py OUT --ftckpt --ftckpt-job tiny

Ray starts the workers and their process group; four lines, marked below, are ftckpt's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

WIDTH, NUM_STEPS = 16, 120


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(arguments: dict[str, Any]) -> None:
    """Runs in each worker."""
    import ftckpt.torch

    config, (out,) = ftckpt.Config.from_flags(arguments["argv"])  # ftckpt: 1
    torch.manual_seed(1)
    layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    progress, rank = Progress(), ray.train.get_context().get_world_rank()
    checkpointer = ftckpt.torch.attach(model, optimizer, scheduler, {"progress": progress}, config)  # ftckpt: 2
    checkpointer.restore()
    with open(Path(out) / f"losses{rank}.jsonl", "a") as losses:
        while progress.step < NUM_STEPS:
            seed = 2 * progress.step + rank
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = torch.nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            progress.step += 1
            print(json.dumps({"step": progress.step, "loss": loss.item()}), file=losses, flush=True)
            checkpointer.step(progress.step)  # ftckpt: 3
    tensors = [*model.state_dict().values(), torch.get_rng_state()]
    digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in tensors)).hexdigest()
    (Path(out) / f"result{rank}.json").write_text(json.dumps({"step": progress.step, "sha256": digest}))
    checkpointer.close()  # ftckpt: 4


def main(argv: list[str]) -> None:
    # Without a limit, Ray's object store takes a third of the memory in which snapshots reside.
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"argv": argv},
        torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
