"""Trains a tiny model with the Trainer of lightning, under DDP or FSDP2.

    ftckpt run --nproc-per-node 2 --rdzv-id digits launch/train_lightning.py --out out --ftckpt

Three lines, marked below, are ftckpt's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ftckpt.lightning
import ftckpt.torch
from ftckpt import Config

WIDTH, NUM_SAMPLES = 16, 40


class NoisySamples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that depend on their index and on random numbers, as augmented images do."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + 0.1 * torch.randn(WIDTH)


class Autoencoder(lightning.LightningModule):
    def __init__(self, out: Path, shards: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.Dropout(0.2),
            torch.nn.ReLU(),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )
        self.out, self.shards = out, shards

    def configure_model(self) -> None:
        if self.shards and not isinstance(next(self.layers.parameters()), DTensor):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch), batch)
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        line = {
            "epoch": self.current_epoch,
            "batch": number,
            "step": self.global_step,
            "lr": rate,
            "loss": loss.item(),
            "last_mean": float(self.trainer.callback_metrics.get("train_loss", 0.0)),
        }
        if self.global_rank == 0:
            print(json.dumps(line), flush=True)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(batch), batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        return [optimizer], [
            {"scheduler": warm_up, "interval": "step"},
            {"scheduler": plateau(optimizer, factor=0.5, patience=1), "monitor": "val_loss"},
            {"scheduler": plateau(optimizer, factor=0.9, patience=0), "monitor": "train_loss"},
        ]


def main(argv: Sequence[str]) -> None:
    config, rest = Config.from_flags(argv)  # ftckpt: 1
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--fsdp2", action="store_true")
    args = parser.parse_args(rest)
    ftckpt.torch.init_process_group(config, "nccl" if torch.cuda.is_available() else "gloo")  # ftckpt: 2
    lightning.seed_everything(1, verbose=False)
    model = Autoencoder(args.out, args.fsdp2)
    ranks = dist.get_world_size()
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=ranks,
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1) if args.fsdp2 else "auto",
        max_epochs=args.epochs,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("val_loss", patience=1000)],
        **dict.fromkeys(["enable_progress_bar", "enable_checkpointing", "logger"], False),
    )
    ftckpt.lightning.attach(trainer, config)  # ftckpt: 3
    loaders = [
        torch.utils.data.DataLoader(NoisySamples(), batch_size=2, shuffle=shuffle) for shuffle in (True, False)
    ]
    trainer.fit(model, *loaders)
    write_result(trainer, model, args.out)
    dist.destroy_process_group()


def write_result(trainer: Any, model: torch.nn.Module, folder: Path) -> None:
    """What an undisturbed run and one that was restored have alike."""
    tensors = [one.full_tensor() if isinstance(one, DTensor) else one for one in model.state_dict().values()]
    digest = hashlib.sha256(b"".join(one.cpu().numpy().tobytes() for one in [*tensors, torch.get_rng_state()]))
    if trainer.is_global_zero:
        folder.mkdir(parents=True, exist_ok=True)
        result = {"step": trainer.global_step, "epoch": trainer.current_epoch, "sha256": digest.hexdigest()}
        (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
