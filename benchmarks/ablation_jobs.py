"""A rank of ``benchmarks/ablation.py``: jobs of three frameworks, and ftckpt with one of its ideas switched off."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks import cost_jobs
from benchmarks.cost_jobs import BUILDERS, SYSTEMS, Block, Ftckpt
from benchmarks.jobs import DeepSpeedJob, MegatronJob, PlainJob, TrainingJob

SAVE_EVERY = 10
"""Iterations between two checkpoints on storage."""
_NODES = 2
_MADV_REMOVE = 9
_BATCH = ("--micro-batch", "1", "--global-batch", "8")


def _waiting(job: TrainingJob, block: Block) -> TrainingJob:
    """``job``, with the wait in which a device would compute before each iteration."""
    train = job.train

    def waiting(fence: Callable[[], object] = lambda: None) -> None:
        time.sleep(block.device_secs)
        train(fence)

    job.train = waiting  # type: ignore[method-assign]
    return job


def _fsdp2(block: Block) -> TrainingJob:
    return _waiting(PlainJob([*block.script, *_BATCH, "--wrap", "fsdp2", "--precision", "fp32"]), block)


def _deepspeed(block: Block) -> TrainingJob:
    return _waiting(DeepSpeedJob([*block.script], zero_optimization={"stage": 2}), block)


BUILDERS["megatron"] = lambda block: MegatronJob([*block.script, *_BATCH, "--pp", "2"], block.device_secs)
BUILDERS |= {"fsdp2": _fsdp2, "deepspeed": _deepspeed}


class TwoNodes(Ftckpt):
    """ftckpt; each half of the ranks is a node."""

    def setup(self, **settings: Any) -> None:
        super().setup(node=f"node{self.rank * _NODES // dist.get_world_size()}", **settings)


class NewSlots(TwoNodes):
    """Memory is allocated by each snapshot: the slot's pages are given back before it is written."""

    def setup(self, **settings: Any) -> None:
        super().setup(**settings)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        capture: Any = self.checkpointer.capture
        begin = capture.begin

        def begin_empty(*args: Any, slots: Any, **more: Any) -> Any:
            memory = np.frombuffer(capture.arena.slot(slots[0]), np.uint8)
            if madvise(memory.ctypes.data, memory.nbytes, _MADV_REMOVE):
                raise OSError(ctypes.get_errno(), "madvise")
            return begin(*args, slots=slots, **more)

        capture.begin = begin_empty


class WaitingSaves(TwoNodes):
    """Training waits while all ranks write a checkpoint of the same state."""

    def setup(self, **settings: Any) -> None:
        del settings["persist_interval"]
        super().setup(**settings)

    def save(self, iteration: int) -> bool:
        is_taken, begin = super().save(iteration), time.perf_counter()
        if iteration % SAVE_EVERY == 0:
            dcp.save(self.named_tensors(), checkpoint_id=f"{self.folder}/iteration{iteration}")
            self.stored_secs.append(time.perf_counter() - begin)
        return is_taken


SYSTEMS |= {"ftckpt, two nodes": TwoNodes, "new slots": NewSlots, "waiting saves": WaitingSaves}


def measure(rank: int, world_size: int, block: Block) -> dict[str, Any]:
    """See ``cost_jobs.measure``."""
    return cost_jobs.measure(rank, world_size, block)
