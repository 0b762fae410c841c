"""What ranks do for ``benchmarks/reshape.py``: leave a state in one layout and take it up in another."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STEPS = 1

Job = Any


def _paths() -> None:
    for folder in (ROOT, ROOT / "launch"):
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def timed(action: Any) -> tuple[float, Any]:
    """Seconds from the moment in which all ranks are here to that in which all are done; and what it returned."""
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    result = action()
    dist.barrier()
    return time.perf_counter() - begin, result


def megatron(argv: Sequence[str]) -> Job:
    """A job of launch/train_gpt.py, with the optimizer's state made up, so that there is something to save."""
    _paths()
    import torch
    import train_gpt

    from ftckpt.frameworks.optimizers import materialise
    from ftckpt.megatron.optimizers import leaf_optimizers

    job = train_gpt.build(train_gpt.parse_args([*argv, "--iterations", "9"]))
    for leaf in leaf_optimizers(job.optimizer):
        materialise(leaf.optimizer)
        for place, state in enumerate(leaf.optimizer.state.values()):
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.numel() > 1:
                    value.fill_(1e-3 * (1 + place % 7))
    return job


def attach(job: Job, arena: str, events: str) -> Any:
    """ftckpt on, with nothing but a snapshot in memory."""
    import ftckpt.megatron
    from ftckpt.config import Config

    config = Config(
        enabled=True, job="reshape", node="node", arena=arena, events=events, protect="none", slots=2,
        replica_check_interval=0, start_timeout_secs=300.0,
    )  # fmt: skip
    objects = {"data": job.data, "progress": job.progress}
    return ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)


def leave_snapshot(rank: int, world_size: int, argv: Sequence[str], arena: str) -> float:
    """A snapshot in memory; the seconds for which training waited for it."""
    job = megatron(argv)
    checkpointer = attach(job, arena, "")
    checkpointer.restore()
    secs, _ = timed(lambda: checkpointer.step(STEPS))
    checkpointer.close(remove=False)
    return secs


def take_snapshot(rank: int, world_size: int, argv: Sequence[str], arena: str, events: str) -> dict[str, Any]:
    """Restart in another layout: the whole ``restore`` and the part of it that finds, checks and moves the state."""
    job = megatron(argv)
    checkpointer = attach(job, arena, events)
    whole, start = timed(checkpointer.restore)
    assert start == STEPS
    lines = map(json.loads, (Path(events) / f"rank{rank}.jsonl").read_text().splitlines())
    loaded = {line["event"]: line for line in lines}
    pieces = [(p.fragment.name, p.fragment.nbytes) for p in checkpointer.training_state.describe().stepped]
    checkpointer.close()
    return {
        "restore_secs": whole,
        "reshape_secs": loaded["loaded"]["time"] - loaded["joined"]["time"],
        "moved_secs": loaded["loaded"]["secs"],
        "read_bytes": loaded["loaded"]["read_bytes"],
        "needed": [piece for piece in pieces if not piece[0].startswith("weight/")],
    }


def _sharded(job: Job, metadata: Mapping[str, Any], **loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": unwrap_model(job.model[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata, **loading)
    return state


def save_job(job: Job, path: str) -> None:
    """``dist_checkpointing.save`` in the form that every layout can load."""
    from megatron.core import dist_checkpointing

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
    }
    Path(path).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_sharded(job, metadata), path, content_metadata=metadata)


def load_job(job: Job, path: str) -> None:
    """``dist_checkpointing.load`` and the ``load_state_dict`` of model and optimizer."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    from tests.support.megatron_loading import steps_aside

    metadata = dist_checkpointing.load_content_metadata(path)
    loaded = dist_checkpointing.load(_sharded(job, metadata, is_loading=True), path)
    unwrap_model(job.model[0]).load_state_dict(loaded["model"])
    with steps_aside():
        job.optimizer.load_state_dict(loaded["optimizer"])


def save_megatron(rank: int, world_size: int, argv: Sequence[str], paths: Sequence[str]) -> list[float]:
    """Seconds of each ``save_job``."""
    job = megatron(argv)
    return [timed(partial(save_job, job, path))[0] for path in paths]


def load_megatron(rank: int, world_size: int, argv: Sequence[str], paths: Sequence[str]) -> list[float]:
    """Seconds of each ``load_job``."""
    job = megatron(argv)
    return [timed(partial(load_job, job, path))[0] for path in paths]


def deepspeed(argv: Sequence[str], universal: bool = False) -> Job:
    """An engine of launch/train_deepspeed.py with the same model in ZeRO-1 under a pipeline."""
    _paths()
    from tests.support.standin import deepspeed as standin

    standin.install()
    import train_deepspeed

    from tests.support.ds_jobs import BASE, BF16

    # One micro-batch of one: what a step computes is nothing that is measured.
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = {**BASE, **BF16, **batch, "zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": universal}}
    return train_deepspeed.build(train_deepspeed.parse_args(argv), config)


def save_deepspeed(rank: int, world_size: int, argv: Sequence[str], paths: Sequence[str]) -> list[float]:
    """``save_checkpoint``."""
    job = deepspeed(argv)
    job.engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
    import train_deepspeed

    train_deepspeed.train_step(job)  # the optimizer has no state before its first step
    return [timed(partial(job.engine.save_checkpoint, path, tag="step"))[0] for path in paths]


def convert_universal(source: str, destination: str) -> None:
    """``ds_to_universal`` with as many workers as there are cores here."""
    import argparse
    import os

    from deepspeed.checkpoint import ds_to_universal

    cores = len(os.sched_getaffinity(0))
    arguments = argparse.Namespace(
        input_folder=f"{source}/step", output_folder=f"{destination}/step", num_extract_workers=cores,
        num_merge_workers=cores, keep_temp_folder=False, strict=False, inject_missing_state=False,
    )  # fmt: skip
    ds_to_universal.main(arguments)
    (Path(destination) / "latest_universal").write_text("step")
    (Path(destination) / "latest").write_text("step")


def convert_deepspeed(rank: int, world_size: int, sources: Sequence[str], destinations: Sequence[str]) -> list[float]:
    """Seconds of each ``convert_universal``."""
    pairs = zip(sources, destinations, strict=True)
    return [timed(partial(convert_universal, source, destination))[0] for source, destination in pairs]


def load_deepspeed(rank: int, world_size: int, argv: Sequence[str], paths: Sequence[str]) -> list[float]:
    """``load_checkpoint`` of a universal checkpoint."""
    job = deepspeed(argv, universal=True)
    return [timed(partial(job.engine.load_checkpoint, path, tag="step"))[0] for path in paths]


def clear(path: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
