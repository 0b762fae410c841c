"""Trains a GPT with megatron.core on the sources of the Python standard library.

A training script of one's own, as small as hybrid parallelism allows: it builds the model, the
optimizer and the data, and loops. Everything ftckpt needs from it is in `choose_layout` and
`attach_checkpointer`, and in the lines of `main` and `train` that use what they return.

    ftckpt run --nproc-per-node 8 launch/train_gpt.py --tp 2 --pp 2 --iterations 100
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from text_data import NUM_TOKENS, Progress, TextData, add_outputs, dump, hashed, write_line

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    layout = parser.add_argument_group("layout (what is left of the ranks is data parallel)")
    layout.add_argument("--tp", type=int, default=1)
    layout.add_argument("--pp", type=int, default=1)
    layout.add_argument("--vpp", type=int, default=1, help="model chunks per pipeline stage")
    layout.add_argument("--ep", type=int, default=1)
    layout.add_argument("--sequence-parallel", action="store_true")
    layout.add_argument("--distributed-optimizer", action=argparse.BooleanOptionalAction, default=True)
    layout.add_argument("--overlap-grad-reduce", action="store_true")
    layout.add_argument("--overlap-param-gather", action="store_true")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--hidden", type=int, default=64)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument("--kv-groups", type=int, help="fewer key/value heads than heads (GQA)")
    model.add_argument("--ffn", type=int, help="default: 4 x hidden")
    model.add_argument("--swiglu", action="store_true")
    model.add_argument("--untie", action="store_true", help="own weights for the output layer")
    model.add_argument("--num-experts", type=int)
    model.add_argument("--router-bias", action="store_true", help="balance experts by a bias, not by a loss")
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--seq", type=int, default=64)
    add_training_options(parser)
    args = parser.parse_args(argv)
    args.ffn = args.ffn or 4 * args.hidden
    args.kv_groups = args.kv_groups or args.heads
    return args


def add_training_options(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch", type=int, default=2)
    training.add_argument("--global-batch", type=int, default=16)
    training.add_argument("--iterations", type=int, default=20)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--lr-warmup", type=int, default=5, help="iterations")
    training.add_argument("--lr-decay", type=int, default=1000, help="iterations")
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument("--precision", choices=sorted(DTYPES), default="bf16")
    training.add_argument("--loss-scale", type=float, default=2.0**16, help="where fp16 starts")
    training.add_argument("--loss-scale-window", type=int, default=1000)
    output = add_outputs(parser)
    output.add_argument(
        "--log-digest",
        type=Path,
        help="JSON lines: of each tensor a hash that no layout changes (in a checkout of ftckpt)",
    )
    output.add_argument(
        "--digest-until", type=int, help="after this iteration only of what is restored; default: all"
    )


@dataclass
class Job:
    args: argparse.Namespace
    config: TransformerConfig
    model: list[DistributedDataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    data: TextData
    num_micro: int
    progress: Progress = field(default_factory=Progress)
    checkpointer: Any = None
    digester: Any = None

    @property
    def iteration(self) -> int:
        return self.progress.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.progress.iteration = value

    @property
    def consumed_samples(self) -> int:
        return self.progress.consumed_samples


def build(args: argparse.Namespace) -> Job:
    """Sets up the parallel groups and everything that trains; torch.distributed must be ready."""
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        expert_model_parallel_size=args.ep,
        create_gloo_process_groups=False,
    )
    num_micro, rest = divmod(args.global_batch, args.micro_batch * mpu.get_data_parallel_world_size())
    if rest or not num_micro:
        raise ValueError("--global-batch must be a multiple of --micro-batch x data parallel size")
    # Stages differ in their weights and dropout masks, replicas of a stage do not differ in weights.
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = transformer_config(args)
    model = build_model(args, config)
    optimizer = build_optimizer(args, model)
    scheduler = build_scheduler(args, optimizer)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if args.overlap_grad_reduce:
        no_sync = [chunk.no_sync for chunk in model]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return Job(args, config, model, optimizer, scheduler, TextData(args.seq, args.seed), num_micro)


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_groups,
        ffn_hidden_size=args.ffn,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=not (args.swiglu or args.num_experts),
        hidden_dropout=args.dropout,
        attention_dropout=args.dropout,
        tensor_model_parallel_size=args.tp,
        # Megatron demands it wherever experts and tensor parallelism meet.
        sequence_parallel=args.tp > 1 and (args.sequence_parallel or bool(args.num_experts)),
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vpp if args.vpp > 1 else None,
        params_dtype=DTYPES[args.precision],
        pipeline_dtype=DTYPES[args.precision],
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        # Two stages with several chunks each need the point-to-point calls to be separate.
        overlap_p2p_comm=args.vpp > 1,
        batch_p2p_comm=args.vpp == 1,
        deallocate_pipeline_outputs=True,
        # Fused kernels need Apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(expert_settings(args) if args.num_experts else {}),
    )


def expert_settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "num_moe_experts": args.num_experts,
        "expert_model_parallel_size": args.ep,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none" if args.router_bias else "aux_loss",
        "moe_aux_loss_coeff": 0.0 if args.router_bias else 0.01,
        "moe_router_enable_expert_bias": args.router_bias,
        "moe_router_score_function": "sigmoid" if args.router_bias else "softmax",
    }


class LayerNorm(torch.nn.LayerNorm):
    """torch's, made fit for sequence parallelism: Megatron sums the marked gradients over the TP group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for param in self.parameters():
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def block_spec(args: argparse.Namespace, config: TransformerConfig, stage: int | None) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(num_experts=args.num_experts)
    layer.submodules.input_layernorm = LayerNorm
    layer.submodules.pre_mlp_layernorm = LayerNorm
    num_layers = get_num_layers_to_build(config, vp_stage=stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=LayerNorm)


def build_model(args: argparse.Namespace, config: TransformerConfig) -> list[DistributedDataParallel]:
    # As Megatron-LM pads: rows that divide over tensor-parallel ranks. The number of them depends on the layout.
    multiple = 8 * args.tp
    chunks = []
    for chunk in range(args.vpp):
        stage = chunk if args.vpp > 1 else None
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(args, config, stage),
            vocab_size=-(-NUM_TOKENS // multiple) * multiple,
            max_sequence_length=args.seq,
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=not args.untie,
            vp_stage=stage,
        ).cuda(torch.cuda.current_device())
        gpt.model_type = ModelType.encoder_or_decoder
        chunks.append(gpt if args.precision == "fp32" else Float16Module(config, gpt))
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        # Small, so that a small model has several buckets to overlap.
        bucket_size=50_000 if args.overlap_grad_reduce else None,
    )
    return [
        DistributedDataParallel(config, ddp_config, module, disable_bucketing=chunk > 0)
        for chunk, module in enumerate(chunks)
    ]


def build_optimizer(args: argparse.Namespace, model: list[DistributedDataParallel]) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.lr / 10,
        weight_decay=0.01,
        clip_grad=1.0,
        params_dtype=DTYPES[args.precision],
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        initial_loss_scale=args.loss_scale,
        loss_scale_window=args.loss_scale_window,
        use_distributed_optimizer=args.distributed_optimizer,
        overlap_param_gather=args.overlap_param_gather,
    )
    return get_megatron_optimizer(config, model, use_gloo_process_groups=False)


def build_scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    # Counted in samples, as Megatron does.
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.lr / 10,
        lr_warmup_steps=args.lr_warmup * args.global_batch,
        lr_decay_steps=args.lr_decay * args.global_batch,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=args.lr_decay * args.global_batch,
        wd_incr_style="constant",
    )


def forward_step(batches: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(batches)
    tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels), loss_function


def loss_function(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach().clone()}


def train_step(job: Job) -> dict[str, Any]:
    """One iteration, up to the boundary: optimizer, LR schedule and counters have all advanced."""
    args = job.args
    dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    batches = job.data.next_batch(job.num_micro, args.micro_batch, dp_rank, dp_size)
    batches = [batch.cuda(non_blocking=True) for batch in batches]
    for chunk in job.model:
        chunk.zero_grad_buffer()
    job.optimizer.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in job.model],
        model=job.model,
        num_microbatches=job.num_micro,
        seq_length=args.seq,
        micro_batch_size=args.micro_batch,
        forward_only=False,
    )
    # Here is the fence: nothing before it writes weights, masters or moments.
    stepped, grad_norm, _ = job.optimizer.step()
    if stepped:
        # An iteration whose gradients overflowed moves no schedule, and is one all the same: counters go on.
        job.scheduler.step(increment=args.global_batch)
    if args.num_experts:
        clear_aux_losses_tracker()
    job.progress.iteration += 1
    job.progress.consumed_samples += args.global_batch
    return {
        "iteration": job.iteration,
        "loss": mean_loss(reports),
        "lr": job.optimizer.param_groups[0]["lr"],
        "grad_norm": float(grad_norm) if grad_norm is not None else None,
        "loss_scale": float(job.optimizer.get_loss_scale()),
        "stepped": bool(stepped),
        "consumed_samples": job.consumed_samples,
    }


def mean_loss(reports: list[dict[str, torch.Tensor]]) -> float | None:
    """Over micro-batches and replicas; None on ranks that are not of the last stage."""
    if not reports:
        return None
    loss = torch.stack([report["loss"] for report in reports]).mean()
    dist.all_reduce(loss, group=mpu.get_data_parallel_group())
    replicas: int = mpu.get_data_parallel_world_size()
    return float(loss) / replicas


def train(job: Job) -> list[dict[str, Any]]:
    history = []
    while job.iteration < job.args.iterations:
        started = time.time()
        metrics = train_step(job)
        history.append(metrics)
        log(job, {**metrics, "time": time.time() - started})
        log_digest(job)
        if job.checkpointer:
            # Last in the loop: at this boundary all counters of the iteration have advanced.
            job.checkpointer.step(job.iteration)
    return history


def log(job: Job, metrics: dict[str, Any]) -> None:
    """One rank of the last stage writes."""
    first_replica = mpu.get_data_parallel_rank() == 0 and mpu.get_tensor_model_parallel_rank() == 0
    if first_replica and metrics["loss"] is not None:
        write_line(job.args.log, metrics)


def make_digester(job: Job) -> Any:
    from ftckpt.group import Group
    from ftckpt.megatron.state import MegatronState

    try:
        from tests.support.elements import Digester
    except ModuleNotFoundError:
        raise SystemExit("--log-digest: only a checkout of ftckpt can make it") from None

    described = MegatronState(job.model, job.optimizer, job.scheduler, {}).describe()
    return Digester(described, Group(120).gather, dist.get_rank(), rows=NUM_TOKENS)


def log_digest(job: Job, restored: bool = False) -> None:
    """Logs a digest of the weights, masters and moments of all ranks."""
    until = job.args.digest_until
    if job.digester is not None and (restored or until is None or job.iteration <= until):
        line = {"iteration": job.iteration, "restored": restored, "digest": job.digester()}
        if dist.get_rank() == 0:
            with job.args.log_digest.open("a") as file:
                file.write(json.dumps(line) + "\n")


def final_hashes(job: Job) -> dict[str, str]:
    """SHA-256 of each tensor this rank holds: weights, buffers, masters, moments and RNG states."""
    tensors: dict[str, torch.Tensor] = {}
    for index, chunk in enumerate(job.model):
        if job.args.overlap_param_gather:
            # Gathers the weights of the last step, which the next forward pass would have done.
            chunk.disable_forward_pre_hook(param_sync=True)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            tensors[f"model{index}.{name}"] = tensor
    for index, optimizer in enumerate(getattr(job.optimizer, "chained_optimizers", [job.optimizer])):
        groups = optimizer.optimizer.param_groups if optimizer.optimizer else []
        for place, (group, param) in enumerate((g, p) for g in groups for p in g["params"]):
            prefix = f"optimizer{index}.{place}"
            tensors[f"{prefix}.master"] = param
            tensors[f"{prefix}.lr"] = torch.tensor(group["lr"])
            for name, value in optimizer.optimizer.state[param].items():
                tensors[f"{prefix}.{name}"] = torch.as_tensor(value)
    tensors["rng.cpu"], tensors["rng.cuda"] = torch.get_rng_state(), torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[f"rng.{name}"] = state
    return hashed(tensors)


def choose_layout(args: argparse.Namespace) -> None:
    """With --ftckpt-layouts: the sizes of the first that fits the ranks there are, in place of the given ones."""
    import ftckpt.megatron

    sizes = ftckpt.megatron.choose_layout(
        ftckpt.megatron.JobSizes(
            global_batch=args.global_batch,
            micro_batch=args.micro_batch,
            num_layers=args.layers,
            num_heads=args.heads,
            num_query_groups=args.kv_groups,
            num_experts=args.num_experts or 0,
            ffn=args.ffn,
            seq=args.seq,
            sequence_parallel=args.sequence_parallel or bool(args.num_experts),
        )
    )
    if sizes is not None:
        args.tp, args.pp, args.vpp, args.ep = (sizes[axis] for axis in ("tp", "pp", "vpp", "ep"))


def attach_checkpointer(job: Job) -> Any:
    """None when ftckpt is not switched on."""
    import ftckpt.megatron

    return ftckpt.megatron.attach(
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        objects={"data": job.data, "progress": job.progress},
    )


def init_distributed() -> None:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        dist.init_process_group("nccl")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    # Before anything is built: what is listed decides over the sizes.
    choose_layout(args)
    init_distributed()
    job = build(args)
    job.checkpointer = attach_checkpointer(job)
    if job.checkpointer:
        job.iteration = job.checkpointer.restore() or 0
    if args.log_digest:
        job.digester = make_digester(job)
        log_digest(job, restored=job.iteration > 0)
    train(job)
    if args.dump_final:
        tp, pp = mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank()
        dump(final_hashes(job), args.dump_final, f"tp{tp}-pp{pp}-dp{mpu.get_data_parallel_rank()}")
    if job.checkpointer:
        # Only here, where training is done: it removes the snapshots.
        job.checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
