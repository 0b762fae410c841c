"""What brings a training state to storage, behind one interface: ftckpt, its peers, and a plain write of the bytes.

Each is used as its documentation says for checkpoints that training does not wait for, where it knows such; the
calls are those that a training loop makes. ``durable`` is the time at which the bytes are on the disk: who does not
bring them there itself (``torch.save``) has a thread that does, which training does not wait for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import persist_beside

INTERVAL = "interval"


class System:
    """Off: nothing is saved. ``fence`` comes before the optimizer's step, ``boundary`` after each iteration."""

    saves = False

    def __init__(self, job: Any, folder: Path, options: dict[str, Any]) -> None:
        self.job, self.folder, self.options = job, folder, options
        self.asked = -1
        """The iteration of the checkpoint that was asked for last."""
        self._durable: float | None = None
        self.setup()

    def setup(self) -> None: ...
    def fence(self) -> None: ...
    def save(self, path: Path) -> None: ...
    def poll(self) -> None: ...
    def close(self) -> None: ...

    def boundary(self, iteration: int, wanted: bool) -> None:
        """The end of an iteration; ``wanted``: it is to come to storage, and what was before it is there."""
        if wanted:
            self.asked, self._durable = iteration, None
            self.save(self.folder / f"{iteration:07d}")
        elif self.asked >= 0 and self._durable is None:
            self.poll()

    def durable(self) -> float | None:
        """When what was asked for last came to the disk, in seconds since the epoch; None: it is on its way."""
        return self._durable

    def notes(self) -> dict[str, Any]:
        """What it says of itself."""
        return {}

    def _be_durable(self, *_: object) -> None:
        self._durable = time.time()

    def _sync(self, path: Path) -> None:
        """Bring a file to the disk, off the training thread."""

        def run() -> None:
            for place in (path, path.parent):
                descriptor = os.open(place, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            self._be_durable()

        threading.Thread(target=run, daemon=True).start()


class Ftckpt(System):
    """Snapshots in memory each iteration; now and then the SMP brings one to storage."""

    saves = True

    def setup(self) -> None:
        import ftckpt.plain
        from ftckpt.config import Config

        self.events = self.folder / "events"
        config = Config(
            enabled=True, job=self.options["name"], node="node", arena=self.options["arena"], events=str(self.events),
            protect="none", on_error="raise", persist=str(self.folder / "storage"),
            persist_interval=self.options[INTERVAL], replica_check_interval=0,
        )  # fmt: skip
        (self.folder / "storage").mkdir(exist_ok=True)
        dist.barrier()
        objects = {"progress": self.job}
        self.checkpointer = ftckpt.plain.attach(self.job.net, self.job.optimizer, None, objects, config)
        self.checkpointer.restore()

    def fence(self) -> None:
        self.checkpointer.fence()

    def boundary(self, iteration: int, wanted: bool) -> None:
        if wanted:
            self.asked, self._durable = iteration, None
        self.checkpointer.step(iteration)

    def durable(self) -> float | None:
        persisted = self.checkpointer.persisted
        if self._durable is None and persisted is not None and persisted.iteration >= self.asked:
            committed = {line["iteration"]: line["time"] for line in self._told("committed")}
            self._durable = committed[persisted.iteration]
        return self._durable

    def close(self) -> None:
        self.checkpointer.close(remove=False)

    def notes(self) -> dict[str, Any]:
        kinds = ("committed", "flushed", "storage_fails", "flush_failed", "skipped", "stretched")
        return {kind: self._told(kind) for kind in kinds}

    def _told(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for path in self.events.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [line for line in lines if line["event"] == event]


class PlainWrite(System):
    """No checkpoint: another process writes as many bytes of its own, one after the other, and one fsync."""

    saves = True

    def setup(self) -> None:
        self.secs: list[float] = []
        if self.job.rank == 0:
            self.writer = Writer(self.job.world_size * self.job.nbytes)

    def save(self, path: Path) -> None:
        if self.job.rank:
            self._be_durable()
            return
        self.writer.begin(path)
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        secs, self._durable = self.writer.end()
        self.secs.append(secs)

    def close(self) -> None:
        if self.job.rank == 0:
            self.writer.close()

    def notes(self) -> dict[str, Any]:
        return {"write_secs": self.secs}


class Writer:
    """A process that writes ``nbytes`` wherever it is told to."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        command = [sys.executable, persist_beside.__file__, "write", str(nbytes)]
        self._process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._line()

    def begin(self, path: Path) -> None:
        """Write there."""
        assert self._process.stdin is not None
        print(path, file=self._process.stdin, flush=True)

    def end(self) -> tuple[float, float]:
        """Seconds that it took, and when it was done."""
        secs, at = map(float, self._line().split())
        return secs, at

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class TorchSave(System):
    """A file for each rank, while training waits."""

    saves = True

    def save(self, path: Path) -> None:
        path = path.with_suffix(f".{self.job.rank}.pt")
        self.write(path)
        self._sync(path)

    def write(self, path: Path) -> None:
        """Training waits for this."""
        torch.save(self.job.local_tensors(), path)


class Dcp(System):
    """``async_save`` with staging buffers that are kept, written by a thread or by a process; its writer syncs."""

    saves = True

    def setup(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType as Kind

        process = self.options["process"]
        self.dcp, self.group, self.pending = dcp, dist.new_group(backend="gloo"), None
        self.kind = Kind.PROCESS if process else Kind.THREAD
        # Without a device no memory can be pinned, and no copy runs beside the host.
        self.stager = DefaultStager(
            StagingOptions(use_pinned_memory=False, use_shared_memory=process, use_async_staging=True,
                           use_non_blocking_copy=False)
        )  # fmt: skip

    def save(self, path: Path) -> None:
        if self.pending is not None:
            self.pending.upload_completion.result()
        self.pending = self.dcp.async_save(
            self.job.tensors(), checkpoint_id=path, process_group=self.group, async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )  # fmt: skip
        self.pending.upload_completion.add_done_callback(self._be_durable)

    def fence(self) -> None:
        if self.pending is not None:
            self.pending.staging_completion.result()

    def close(self) -> None:
        if self.pending is not None:
            self.pending.upload_completion.result()


class Megatron(System):
    """``dist_checkpointing.save`` with ``async_sharded_save``; its process is forked for each, and syncs."""

    saves = True

    def setup(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        self.queue = AsyncCallsQueue()
        # Cached: what Megatron does with --ckpt-assume-constant-structure, its fastest way.
        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)

    def save(self, path: Path) -> None:
        from megatron.core import dist_checkpointing

        if self.job.rank == 0:
            path.mkdir()
        dist.barrier()
        request = dist_checkpointing.save(
            self._sharded(), str(path), self.strategy, async_sharded_save=True, validate_access_integrity=False
        )
        self.queue.schedule_async_request(request)

    def _sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        rank, size = self.job.rank, self.job.world_size
        return {
            name: ShardedTensor.from_rank_offsets(name, tensor, (0, rank, size))
            if tensor.dim()
            else ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank)
            for name, tensor in self.job.local_tensors().items()
        }

    def poll(self) -> None:
        if self.queue.maybe_finalize_async_calls(blocking=False):
            self._be_durable()

    def close(self) -> None:
        self.queue.maybe_finalize_async_calls(blocking=True)
        self.queue.close()


class DeepSpeed(TorchSave):
    """A checkpoint engine of DeepSpeed, given the state as ``engine.save_checkpoint`` gives it."""

    def setup(self) -> None:
        import deepspeed
        from deepspeed.runtime.checkpoint_engine import checkpoint_engine
        from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import DecoupledCheckpointEngine
        from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
        from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config
        from deepspeed.runtime.model_checkpointing.data_parallel_writer_factory import DataParallelWriterConfig
        from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

        deepspeed.init_distributed("gloo", verbose=False)
        self._info = checkpoint_engine.CheckpointCommitInfo
        self._pending: Path | None = None
        config: Any = DeepSpeedConfig()
        config.checkpoint_config = get_checkpoint_config({"checkpoint": {"writer": {"type": self.options["writer"]}}})
        config.aio_config = get_aio_config({})
        kind = self.options["engine"]
        # As under ZeRO: each rank writes its own.
        rank = self.job.rank
        writer = DataParallelWriterConfig(1, 0, rank, rank, True)
        engines: dict[str, Callable[[], Any]] = {
            "torch": lambda: TorchCheckpointEngine(config),
            "fast": lambda: FastCheckpointEngine(config, writer, False),
            "decoupled": lambda: DecoupledCheckpointEngine(config, writer, False),
        }
        self.engine = engines[kind]()

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        self.engine.create(self._info(tag=path.name, save_dir=str(self.folder), save_latest=True))
        self._pending = path / f"rank{self.job.rank}.pt"
        self.engine.save(self.job.local_tensors(), str(self._pending))
        if not self.engine.is_decoupled():
            self._commit()

    def fence(self) -> None:
        if self._pending is not None:  # as DeepSpeed does before its step: the state must not change while it is read
            self._commit()

    def _commit(self) -> None:
        path, self._pending = self._pending, None
        assert path is not None
        self.engine.commit(self._info(tag=path.parent.name, save_dir=str(self.folder), save_latest=True))
        dist.barrier()
        self._sync(path)

    def close(self) -> None:
        if self._pending is not None:
            self._commit()
        if self.engine.is_decoupled():
            self.engine.cleanup()


class DeepSpeedConfig:
    """What the engines read of DeepSpeed's configuration."""


SYSTEMS: dict[str, tuple[type[System], dict[str, Any]]] = {
    "off": (System, {}),
    "plain write": (PlainWrite, {}),
    "ftckpt": (Ftckpt, {}),
    "torch.save": (TorchSave, {}),
    "DCP, thread": (Dcp, {"process": False}),
    "DCP, process": (Dcp, {"process": True}),
    "Megatron, async": (Megatron, {"stand_in": True}),
    "DeepSpeed, torch engine": (DeepSpeed, {"engine": "torch"}),
    "DeepSpeed, fast engine": (DeepSpeed, {"engine": "fast"}),
    "DeepSpeed, decoupled engine": (DeepSpeed, {"engine": "decoupled"}),
}
NO_CHECKPOINT = ("off", "plain write")
"""Those that save nothing from which a job could go on."""
