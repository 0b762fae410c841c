"""The usual checkpoints of each framework, of the jobs of the example scripts and of ``ShardedJob``."""

from __future__ import annotations

import argparse
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Checkpoints(ABC):
    """Saves and loads a job as is usual for its framework. Collective."""

    name: str

    @abstractmethod
    def save(self, job: Any, path: str) -> None:
        """Saves the job."""

    @abstractmethod
    def load(self, job: Any, path: str) -> None:
        """Loads into the tensors of the job."""

    def convert(self, source: str, destination: str) -> None:
        """Makes a saved checkpoint loadable in any layout, in one process."""
        Path(source).rename(destination)  # it is already


class TorchDist(Checkpoints):
    """Megatron's ``dist_checkpointing``, in the form that every layout can load."""

    name = "torch_dist"

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


def _sharded(job: Any, metadata: Mapping[str, Any], **loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {"model": unwrap_model(job.model[0]).sharded_state_dict(metadata=metadata)}
    state["optimizer"] = job.optimizer.sharded_state_dict(state, metadata=metadata, **loading)
    return state


class Universal(Checkpoints):
    """DeepSpeed's; a universal checkpoint needs a conversion."""

    name = "DeepSpeed universal"

    def save(self, job: Any, path: str) -> None:
        job.engine.save_checkpoint(path, tag="step")

    def load(self, job: Any, path: str) -> None:
        job.engine.load_checkpoint(path, tag="step")

    def convert(self, source: str, destination: str) -> None:
        from deepspeed.checkpoint import ds_to_universal

        cores = len(os.sched_getaffinity(0))
        options = {"num_extract_workers": cores, "num_merge_workers": cores, "keep_temp_folder": False}
        options |= {"strict": False, "inject_missing_state": False}
        folders = {"input_folder": f"{source}/step", "output_folder": f"{destination}/step"}
        ds_to_universal.main(argparse.Namespace(**folders, **options))
        for name in ("latest_universal", "latest"):
            (Path(destination) / name).write_text("step")


class Dcp(Checkpoints):
    """torch's distributed checkpoints of a ``ShardedJob``, loaded into its tensors."""

    name = "DCP"

    def save(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(job.optimizer_state(), checkpoint_id=path)

    def load(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(job.optimizer_state(), checkpoint_id=path)


class Fsdp2Dcp(Checkpoints):
    """DCP of ``launch/train_plain.py``, as torch's documentation has it for FSDP2."""

    name = "DCP"

    def save(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(job), checkpoint_id=path)

    def load(self, job: Any, path: str) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state(job)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def _state(self, job: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(job.model, job.optimizer)
        return {"model": model, "optimizer": optimizer}


class AsyncFsdp2Dcp(Fsdp2Dcp):
    """The same by ``async_save``, which waits for the one before; ``written`` is done when all ranks have written."""

    written: Any = None

    def save(self, job: Any, path: str) -> None:
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        if self.written is None:
            self._group = dist.new_group(backend="gloo")  # its collectives run beside those of training
        else:
            self.written.result()
        self.written = dcp.async_save(self._state(job), checkpoint_id=path, process_group=self._group)
