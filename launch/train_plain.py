"""Trains a small language model with plain torch on the sources of the Python standard library.

A script of one's own, under DDP, FSDP2 or neither. What ftckpt needs from it are six lines, marked below.

    ftckpt run --nproc-per-node 4 --rdzv-id plain launch/train_plain.py --wrap fsdp2 --iterations 100 --ftckpt

Without a GPU it trains on CPU cores, over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from text_data import NUM_TOKENS, Progress, TextData, add_outputs, dump, hashed, write_line
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ftckpt.torch  # ftckpt: 1
from ftckpt.config import Config


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--wrap", choices=("none", "ddp", "fsdp2"), default="ddp")
    parser.add_argument(
        "--replicas", type=int, default=1, help="fsdp2: groups of ranks with a whole model each (HSDP)"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--seq", type=int, default=64)
    model.add_argument("--freeze", action="store_true", help="do not train the embedding of positions")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch", type=int, default=2)
    training.add_argument("--global-batch", type=int, default=16)
    training.add_argument("--iterations", type=int, default=20)
    text = "MODULE.CLASS: torch.optim.RMSprop, schedulefree.SGDScheduleFree; adam, adamw and sgd with usual settings"
    training.add_argument("--optimizer", default="adamw", help=text)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--seed", type=int, default=1234)
    text = "mixed: bf16 compute on fp32 weights; bf16: weights too; fp16: autocast and a scaled loss"
    training.add_argument("--precision", choices=("fp32", "mixed", "bf16", "fp16"), default="mixed", help=text)
    training.add_argument("--loss-scale", type=float, default=2.0**16, help="where fp16 starts")
    add_outputs(parser)
    args = parser.parse_args(argv)
    if args.wrap == "fsdp2" and args.precision == "fp16":
        parser.error("--precision fp16 is for --wrap none and ddp")
    return args


class Block(nn.Module):
    """One layer of a decoder."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, seq, 3, self.heads, hidden // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._drop(self.out(mixed.transpose(1, 2).reshape(batch, seq, hidden)))
        return x + self._drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, self.dropout, self.training)


class LanguageModel(nn.Module):
    """Tokens (batch, seq) to logits (batch, seq, NUM_TOKENS); 257 tokens divide evenly by no number of ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, args.hidden)
        self.positions = nn.Embedding(args.seq, args.hidden)
        self.blocks = nn.ModuleList(Block(args.hidden, args.heads, args.dropout) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen_batches", torch.zeros((), dtype=torch.int64))
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen_batches += 1
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x) * self.scale, self.tokens.weight)


@dataclass
class Job:
    args: argparse.Namespace
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: torch.amp.GradScaler
    data: TextData
    num_micro: int
    device: torch.device
    progress: Progress = field(default_factory=Progress)
    checkpointer: Any = None

    @property
    def objects(self) -> dict[str, Any]:
        """Objects that a restart must restore, besides model, optimizer and scheduler."""
        return {"data": self.data, "progress": self.progress, "scaler": self.scaler}


def build(args: argparse.Namespace) -> Job:
    """Everything that trains; torch.distributed must be ready."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    num_micro, rest = divmod(args.global_batch, args.micro_batch * dist.get_world_size())
    if rest or not num_micro:
        raise SystemExit("--global-batch must be a multiple of --micro-batch x ranks")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    model: nn.Module = LanguageModel(args).to(device, torch.bfloat16 if args.precision == "bf16" else None)
    model.positions.requires_grad_(not args.freeze)
    if args.wrap == "ddp":
        model = DistributedDataParallel(model)
    elif args.wrap == "fsdp2":
        shard(args, model, device)
    optimizer = build_optimizer(args, [parameter for parameter in model.parameters() if parameter.requires_grad])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    scaler = torch.amp.GradScaler(device.type, init_scale=args.loss_scale, enabled=args.precision == "fp16")
    torch.manual_seed(args.seed + dist.get_rank())  # each rank has its own dropout masks
    return Job(args, model, optimizer, scheduler, scaler, TextData(args.seq, args.seed), num_micro, device)


def build_optimizer(args: argparse.Namespace, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, args.lr, momentum=0.9)
    if args.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if args.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, args.lr, weight_decay=0.01)
    module, _, name = args.optimizer.rpartition(".")
    made: torch.optim.Optimizer = getattr(importlib.import_module(module), name)(parameters, lr=args.lr)
    return made


def shard(args: argparse.Namespace, model: nn.Module, device: torch.device) -> None:
    """Shard each block, and the rest, over all ranks or over each group of them."""
    shape = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))
    mesh = mesh if args.replicas > 1 else mesh["shard"]
    mixed = args.precision == "mixed"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for module in [*model.blocks, model]:  # type: ignore[misc]
        fully_shard(module, mesh=mesh, mp_policy=policy)


def train_step(job: Job) -> dict[str, Any]:
    """One iteration, up to the boundary: optimizer, LR schedule and counters have all advanced."""
    args, ranks = job.args, dist.get_world_size()
    batches = job.data.next_batch(job.num_micro, args.micro_batch, dist.get_rank(), ranks)
    total = torch.zeros((), device=job.device)
    job.optimizer.zero_grad()
    for micro, batch in enumerate(batches):
        last = micro == job.num_micro - 1
        with contextlib.nullcontext() if last or args.wrap != "ddp" else job.model.no_sync():
            loss = loss_of(job, batch.to(job.device)) / job.num_micro
            job.scaler.scale(loss).backward()
        total += loss.detach()
    parameters = [parameter for parameter in job.model.parameters() if parameter.grad is not None]
    if args.wrap == "none":
        for parameter in parameters:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
    job.scaler.unscale_(job.optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    job.scaler.step(job.optimizer)
    job.scaler.update()
    job.scheduler.step()
    job.progress.iteration += 1
    job.progress.consumed_samples = job.data.consumed_samples
    dist.all_reduce(total)
    return {
        "iteration": job.progress.iteration,
        "loss": float(total) / ranks,
        "lr": job.optimizer.param_groups[0]["lr"],
        "grad_norm": float(norm.full_tensor() if isinstance(norm, DTensor) else norm),
        "loss_scale": job.scaler.get_scale(),
        "consumed_samples": job.progress.consumed_samples,
    }


def loss_of(job: Job, batch: torch.Tensor) -> torch.Tensor:
    dtype = torch.float16 if job.args.precision == "fp16" else torch.bfloat16
    cast = job.args.precision == "fp16" or (job.args.precision == "mixed" and job.args.wrap != "fsdp2")
    with torch.autocast(job.device.type, dtype, enabled=cast):
        logits = job.model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(job: Job) -> list[dict[str, Any]]:
    history = []
    while job.progress.iteration < job.args.iterations:
        started = time.time()
        history.append(train_step(job))
        if dist.get_rank() == 0:
            write_line(job.args.log, {**history[-1], "time": time.time() - started})
        job.checkpointer.step(job.progress.iteration)  # ftckpt: 5
    return history


def numbers_in(value: Any, name: str) -> dict[str, torch.Tensor]:
    """Tensors and numbers in nested dicts and lists, by name."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: found for place, of in items for key, found in numbers_in(of, f"{name}.{place}").items()}
    return {name: torch.as_tensor(value)}


def final_hashes(job: Job) -> dict[str, str]:
    """SHA-256 of each tensor this rank holds: weights, buffers, moments, RNG and scaler."""
    tensors: dict[str, Any] = dict([*job.model.named_parameters(), *job.model.named_buffers()])
    for index, (parameter, state) in enumerate(job.optimizer.state.items()):
        tensors[f"optimizer.{index}"] = parameter
        tensors |= numbers_in(state, f"optimizer.{index}")
    for index, group in enumerate(job.optimizer.param_groups):
        tensors[f"group.{index}.lr"] = torch.tensor(group["lr"])
    tensors["scale"] = torch.tensor(job.scaler.get_scale())
    tensors["rng"] = torch.get_rng_state()
    if job.device.type == "cuda":
        tensors["rng.device"] = torch.cuda.get_rng_state()
    mine = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return hashed(mine)


def main(argv: Sequence[str]) -> None:
    config, rest = Config.from_flags(argv)
    args = parse_args(rest)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    ftckpt.torch.init_process_group(config, "nccl" if torch.cuda.is_available() else "gloo")  # ftckpt: 2
    job = build(args)
    job.checkpointer = ftckpt.torch.attach(job.model, job.optimizer, job.scheduler, job.objects, config)  # ftckpt: 3
    job.checkpointer.restore()  # ftckpt: 4
    train(job)
    if args.dump_final:
        dump(final_hashes(job), args.dump_final, f"rank{dist.get_rank()}")
    job.checkpointer.close()  # ftckpt: 6
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
