"""Trains a small language model with DeepSpeed on the sources of the Python standard library.

What DeepSpeed does (precision, ZeRO, micro-batches, offload) is in the JSON file, ftckpt too:

    ftckpt run --nproc-per-node 4 launch/train_deepspeed.py \
        --deepspeed_config configs/deepspeed_zero1_pp.json --pp 2 --iterations 100

Without a GPU it trains on CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed_model
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from text_data import NUM_TOKENS, TextData, add_outputs, dump, hashed, write_line


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--deepspeed_config", type=Path, help="JSON file")
    parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
    layout = parser.add_argument_group("layout (what is left of the ranks is data parallel)")
    layout.add_argument("--pp", type=int, default=0, help="pipeline stages; 0: no PipelineModule")
    layout.add_argument("--tp", type=int, default=1)
    layout.add_argument("--ep", type=int, default=1)
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--seq", type=int, default=64)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--tie", action="store_true", help="one weight for embedding and output layer")
    model.add_argument("--num-experts", type=int, default=0)
    model.add_argument("--freeze", action="store_true", help="do not train the embedding of positions")
    training = parser.add_argument_group("training")
    training.add_argument("--iterations", type=int, default=20)
    training.add_argument("--optimizer", choices=("json", "sgd"), default="json", help="sgd: one of the script's own")
    text = "whose position it is: a registered object's, an iterator's that the script makes, DeepSpeed's loader's"
    training.add_argument("--data", choices=("own", "iterator", "engine"), default="own", help=text)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--load", type=Path, help="folder of DeepSpeed's own checkpoints")
    training.add_argument("--load-tag", help="checkpoint to load; default: the newest")
    training.add_argument("--load-weights-only", action="store_true", help="leave the optimizer as it is")
    training.add_argument("--save", type=Path, help="the same, to save to")
    training.add_argument("--save-interval", type=int, default=5)
    add_outputs(parser)
    return parser.parse_args(argv)


class TextSamples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pairs (tokens, next tokens), each (seq,), for a loader of torch's kind."""

    def __init__(self, data: TextData, num_samples: int) -> None:
        self._data = data
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = self._data.sample(index)
        return sample[:-1], sample[1:]


class Batches:
    """This replica's micro-batches of ``data``, without end; its position is that of ``data``."""

    def __init__(self, data: TextData, micro_batch: int, dp_rank: int, dp_size: int) -> None:
        self.data = data
        self._place = (micro_batch, dp_rank, dp_size)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.data.next_batch(1, *self._place)[0]
        return batch[:, :-1].contiguous(), batch[:, 1:].contiguous()


@dataclass
class Job:
    args: argparse.Namespace
    engine: Any
    data: TextData
    batches: Iterator[Any] | None

    @property
    def is_pipeline(self) -> bool:
        return bool(self.args.pp)


def build(args: argparse.Namespace, config: Mapping[str, Any]) -> Job:
    """Process groups, model, optimizer and data. ``config`` is DeepSpeed's."""
    deepspeed.init_distributed()
    stages, topology = max(1, args.pp), None
    if args.pp or args.tp > 1:
        replicas = dist.get_world_size() // (stages * args.tp)
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=args.tp, num_dp=replicas)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(args.seed)
    data = TextData(args.seq, args.seed)
    if args.data == "own":
        register("data", data)
    model = build_model(args, topology)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parameters: Any = deepspeed_model.expert_groups(trained) if args.num_experts else trained
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=own_optimizer(args, parameters),
        model_parameters=parameters,
        training_data=TextSamples(data, 96) if args.data == "engine" else None,
        mpu=PipelineParallelGrid(topology) if args.tp > 1 and not args.pp else None,
        config=dict(config),
    )
    if args.load:
        engine.load_checkpoint(str(args.load), args.load_tag, load_optimizer_states=not args.load_weights_only)
    return Job(args, engine, data, batches_of(args, engine, data))


def own_optimizer(args: argparse.Namespace, parameters: Any) -> torch.optim.Optimizer | None:
    """The script's own; None leaves it to the JSON."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9) if args.optimizer == "sgd" else None


def register(name: str, value: Any) -> None:
    """Have ftckpt save an object of ours; without ftckpt there is nothing to do."""
    if "ftckpt.deepspeed" in sys.modules:
        sys.modules["ftckpt.deepspeed"].register(name, value)


def build_model(args: argparse.Namespace, topology: Any) -> torch.nn.Module:
    tp_group = deepspeed_model.tensor_group(topology) if args.tp > 1 else None
    shape = deepspeed_model.Shape(
        NUM_TOKENS, args.seq, args.hidden, args.heads, args.layers, args.dropout, args.num_experts, args.ep, tp_group
    )
    if not args.pp:
        model: torch.nn.Module = deepspeed_model.LanguageModel(shape, args.tie)
    else:
        model = PipelineModule(
            deepspeed_model.pipeline_layers(shape, args.tie),
            topology=topology,
            loss_fn=deepspeed_model.loss_function,
            partition_method="uniform",
        )
    if args.freeze:
        deepspeed_model.freeze_positions(model)
    return model


def batches_of(args: argparse.Namespace, engine: Any, data: TextData) -> Iterator[Any] | None:
    """Micro-batches; None where a PipelineEngine draws from its own loader."""
    if args.data == "engine":
        return None if args.pp else iter(deepspeed.utils.RepeatingLoader(engine.training_dataloader))
    micro_batch = engine.train_micro_batch_size_per_gpu()
    grid = engine.grid if args.pp else engine.mpu
    if grid is not None:
        dp_rank, dp_size = grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()
    else:
        dp_rank, dp_size = dist.get_rank(), dist.get_world_size()
    return Batches(data, micro_batch, dp_rank, dp_size)


def train_step(job: Job) -> dict[str, Any]:
    """One iteration, up to the boundary."""
    engine = job.engine
    if job.is_pipeline:
        loss = engine.train_batch(data_iter=job.batches)
    else:
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, labels = next(job.batches)
            device = engine.device
            losses.append(engine(tokens.to(device), labels.to(device)))
            engine.backward(losses[-1])
            engine.step()
        loss = torch.stack([loss.detach().float() for loss in losses]).mean()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    norm = engine.get_global_grad_norm()
    scale = getattr(engine.optimizer, "cur_scale", None) or getattr(engine.optimizer, "loss_scale", None) or 1.0
    return {
        "iteration": engine.global_steps,
        "loss": float(loss),
        "lr": engine.get_lr()[0],
        "grad_norm": None if norm is None else float(norm),
        "loss_scale": float(scale),
        "skipped": engine.skipped_steps,
        "consumed_samples": engine.global_samples,
    }


def train(job: Job) -> list[dict[str, Any]]:
    history = []
    while job.engine.global_steps < job.args.iterations:
        started = time.time()
        history.append(train_step(job))
        if dist.get_rank() == 0:
            write_line(job.args.log, {**history[-1], "time": time.time() - started})
        if job.args.save and job.engine.global_steps % job.args.save_interval == 0:
            job.engine.save_checkpoint(str(job.args.save))
    return history


def final_hashes(job: Job) -> dict[str, str]:
    """SHA-256 of each tensor this rank holds: weights, buffers, masters, moments, and RNG states."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in [*job.engine.module.named_parameters(), *job.engine.module.named_buffers()]:
        tensors[f"model.{name}"] = getattr(tensor, "ds_tensor", tensor)
    inner = job.engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    for index, (owner, state) in enumerate(inner.state.items()):
        tensors[f"optimizer.{index}.master"] = owner
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = torch.as_tensor(value)
    for index, group in enumerate(inner.param_groups):
        tensors[f"optimizer.group{index}.lr"] = torch.tensor(group["lr"])
    tensors["rng.torch"] = torch.get_rng_state()
    return hashed(tensors)


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if args.deepspeed_config is None:
        raise SystemExit("--deepspeed_config is missing: name a JSON file, such as one of configs/")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    job = build(args, json.loads(args.deepspeed_config.read_text()))
    train(job)
    if args.dump_final:
        dump(final_hashes(job), args.dump_final, f"rank{dist.get_rank()}")
    job.engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
