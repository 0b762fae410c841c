"""The jobs of ``benchmarks/load.py``: each framework with ftckpt, and with the checkpoints that are usual for it."""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

SHORT = ("--seq", "8")
"""What is trained on: the one step that makes an optimizer's state is to take seconds."""
Config = Any


class Framework(ABC):
    """A training job with ftckpt, or with the checkpoints that are usual for it. Each rank of ``ranks[layout]`` has
    its own; ``layout`` is ``same``, in which the state was left, or ``other``."""

    peer: str
    modules: ClassVar[Sequence[str]] = ()
    """What scripts import at their begin."""
    stand_in = False
    ranks: ClassVar = {"same": 4, "other": 4}

    @abstractmethod
    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        """A job with state in its optimizer; ``loads``: the peer is to load."""

    @abstractmethod
    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        """Torch's own, which hold the moments."""

    @abstractmethod
    def restore(self, job: Any, config: Config) -> Any:
        """Attach ftckpt and restore; the checkpointer."""

    @abstractmethod
    def save(self, job: Any, path: str) -> None:
        """By the peer."""

    @abstractmethod
    def load(self, job: Any, path: str) -> None:
        """By the peer, into the tensors of the job."""

    def convert(self, source: str, destination: str) -> None:
        """Make what ``save`` left loadable in any layout; one process does."""
        Path(source).rename(destination)  # it is already


class Megatron(Framework):
    """A GPT under the distributed optimizer; ``dist_checkpointing`` in the form that every layout can load."""

    peer = "torch_dist"
    modules = ("ftckpt.megatron",)
    stand_in = True

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        common = (*size, "--heads", "8", *SHORT, "--micro-batch", "1", "--global-batch", "2")
        return _megatron([*common, *{"same": ("--tp", "2"), "other": ("--pp", "2")}[layout]])

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        from ftckpt.megatron.optimizers import leaf_optimizers

        return [leaf.optimizer for leaf in leaf_optimizers(job.optimizer)]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.megatron

        objects = {"data": job.data, "progress": job.progress}
        checkpointer = ftckpt.megatron.attach(job.model, job.optimizer, job.scheduler, objects, config=config)
        checkpointer.restore()
        return checkpointer

    def save(self, job: Any, path: str) -> None:
        from megatron.core import dist_checkpointing

        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
        }
        Path(path).mkdir(parents=True, exist_ok=True)
        dist_checkpointing.save(_sharded(job, metadata), path, content_metadata=metadata)

    def load(self, job: Any, path: str) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.utils import unwrap_model

        metadata = dist_checkpointing.load_content_metadata(path)
        loaded = dist_checkpointing.load(_sharded(job, metadata, is_loading=True), path)
        unwrap_model(job.model[0]).load_state_dict(loaded["model"])
        job.optimizer.load_state_dict(loaded["optimizer"])


def _megatron(argv: Sequence[str]) -> Any:
    """A job of launch/train_gpt.py, with the optimizer's state made up, so that there is something to save."""
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


def _sharded(job: Any, metadata: Mapping[str, Any], **loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": unwrap_model(job.model[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata, **loading)
    return state


class DeepSpeed(Framework):
    """About the same model under a pipeline and ZeRO-1; a universal checkpoint, converted before."""

    peer = "DeepSpeed universal"
    modules = ("ftckpt.deepspeed",)

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        pipeline = {"same": ("--pp", "2"), "other": ("--pp", "4")}[layout]
        job = _deepspeed([*size, "--heads", "8", *SHORT, *pipeline], loads)
        if not loads:
            import train_deepspeed

            job.engine.module.universal_checkpoint_info = {"universal_checkpoint_version": 0.2}
            train_deepspeed.train_step(job)  # the optimizer has no state before its first step
            job.engine.global_steps = 0  # a start has counted nothing, or says that it has loaded something
        return job

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        return [job.engine.basic_optimizer]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.deepspeed

        return ftckpt.deepspeed.attach(job.engine, {}, config)

    def save(self, job: Any, path: str) -> None:
        job.engine.save_checkpoint(path, tag="step")

    def load(self, job: Any, path: str) -> None:
        job.engine.load_checkpoint(path, tag="step")

    def convert(self, source: str, destination: str) -> None:
        from deepspeed.checkpoint import ds_to_universal

        cores = len(os.sched_getaffinity(0))
        arguments = argparse.Namespace(
            input_folder=f"{source}/step", output_folder=f"{destination}/step", num_extract_workers=cores,
            num_merge_workers=cores, keep_temp_folder=False, strict=False, inject_missing_state=False,
        )  # fmt: skip
        ds_to_universal.main(arguments)
        (Path(destination) / "latest_universal").write_text("step")
        (Path(destination) / "latest").write_text("step")


def _deepspeed(argv: Sequence[str], universal: bool) -> Any:
    """An engine of launch/train_deepspeed.py with the same model in ZeRO-1 under a pipeline."""
    from tests.support.standin import deepspeed as standin

    standin.install()
    import train_deepspeed

    from tests.support.ds_jobs import BASE, BF16

    # One micro-batch of one: the compute of a step is not measured.
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    config = {**BASE, **BF16, **batch, "zero_optimization": {"stage": 1}, "checkpoint": {"load_universal": universal}}
    return train_deepspeed.build(train_deepspeed.parse_args(argv), config)


class Plain(Framework):
    """Matrices sharded by rows as FSDP2 has them, with Adam; DCP loads into their tensors."""

    peer = "DCP"
    modules = ("ftckpt.torch", "torch.distributed.checkpoint")
    ranks: ClassVar = {"same": 4, "other": 2}

    def build(self, size: Sequence[str], layout: str, loads: bool) -> Any:
        return PlainJob(size)

    def optimizers(self, job: Any) -> list[torch.optim.Optimizer]:
        return [job.optimizer]

    def restore(self, job: Any, config: Config) -> Any:
        import ftckpt.torch

        checkpointer = ftckpt.torch.attach(job.net, job.optimizer, None, {"progress": job}, config)
        assert checkpointer is not None
        checkpointer.restore()
        return checkpointer

    def save(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(job.tensors(), checkpoint_id=path)

    def load(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(job.tensors(), checkpoint_id=path)


class PlainJob:
    """As many bytes as a GPT of this size has in weights and moments, in square matrices."""

    def __init__(self, size: Sequence[str]) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        given = dict(zip(size[::2], map(int, size[1::2]), strict=True))
        hidden, rows = given["--hidden"], 12 * given["--hidden"]  # of a layer of a transformer
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        own = rows // dist.get_world_size()
        sharded = [
            DTensor.from_local(torch.randn(own, hidden), mesh, [Shard(0)], run_check=False)
            for _ in range(given["--layers"])
        ]
        self.net = torch.nn.Module()
        self.net.weights = torch.nn.ParameterList([torch.nn.Parameter(one) for one in sharded])
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=True)
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name; weights and moments as DTensors."""
        found: dict[str, torch.Tensor] = {}
        for index, weight in enumerate(self.net.parameters()):
            found[f"weight.{index}"] = weight.detach()
            found |= {f"{name}.{index}": value for name, value in self.optimizer.state[weight].items()}
        return found

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


FRAMEWORKS: dict[str, Framework] = {"megatron": Megatron(), "deepspeed": DeepSpeed(), "plain": Plain()}
