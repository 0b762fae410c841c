"""Systems that snapshot a ``TrainingJob``: torch's own and peers, as each documents it for frequent use.

Packages of peers are imported when they run.
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_AGENT = """
import time
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
AsyncCheckpointSaver.start_async_saving_ckpt()
print("ready", flush=True)
while True:
    time.sleep(1)
"""


class System:
    """``save`` at the boundary, ``fence`` before the optimizer. The base does nothing: the noise of a measurement."""

    package = ""
    """Its distribution, unless that is torch or ftckpt."""

    def __init__(self, job: Any, folder: str, **options: Any) -> None:
        self.job, self.folder, self.rank = job, folder, dist.get_rank()
        self.stored_secs: list[float] = []
        """From the start of a save until the files of this rank are complete, or on the disk."""
        os.makedirs(folder, exist_ok=True)
        self.setup(**options)

    def setup(self) -> None: ...

    def save(self, iteration: int) -> bool | None:
        """Starts a snapshot; False: it was skipped."""

    def fence(self) -> None: ...

    def settle(self) -> None:
        """Trains until the cost of a snapshot is constant."""

    def drain(self) -> None:
        """Waits until no save is under way, and all that it needs runs."""

    def close(self) -> None: ...

    def reset(self) -> None:
        """Forgets the figures of the warm-up."""
        self.stored_secs.clear()

    def notes(self) -> dict[str, Any]:
        """The system's own figures of its snapshots."""
        return {}

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The state by names that no other rank has."""
        return {f"rank{self.rank}.{name}": tensor for name, tensor in self.job.tensors.items()}

    def note_stored(self, future: Any) -> None:
        """Notes the time when ``future`` is done."""
        begin = time.perf_counter()
        future.add_done_callback(lambda _: self.stored_secs.append(time.perf_counter() - begin))

    def remove_old(self, pattern: str, keep: int) -> None:
        """Removes all that match except the newest ``keep``, outside the training thread."""
        old = sorted(glob.glob(f"{self.folder}/{pattern}"), key=os.path.getmtime)[:-keep]
        threading.Thread(target=lambda: [remove(Path(path)) for path in old]).start()


def remove(path: Path) -> None:
    """Removes a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


class TorchSave(System):
    """A file per rank, written while training waits, and synced by a thread; keeps two."""

    def save(self, iteration: int) -> None:
        begin, path = time.perf_counter(), f"{self.folder}/step{iteration}.{self.rank}"
        torch.save(self.job.tensors, path + ".new")
        os.rename(path + ".new", path)
        threading.Thread(target=self._sync, args=(path, begin)).start()
        self.remove_old(f"step*.{self.rank}", 2)

    def _sync(self, path: str, begin: float) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        self.stored_secs.append(time.perf_counter() - begin)


class Dcp(System):
    """torch's DefaultStager as it comes: a thread copies, to pinned memory where there is a device.

    ``writes``: ``async_save`` writes the copy, in a thread or in a ``process``, and a save waits for the one before;
    otherwise the copy stays in memory. Keeps two.
    """

    def setup(self, writes: bool = True, process: bool = True) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType as Kind

        on_cuda, self._kind = self.job.on_cuda, Kind.PROCESS if process else Kind.THREAD
        self._stager = DefaultStager(StagingOptions(on_cuda, process, True, on_cuda))
        # torch 2.11 closes it after each use, and fails at the next.
        self._stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
        self._staged: Any = None
        self._written: Any = None
        self._group = dist.new_group(backend="gloo") if writes else None

    def save(self, iteration: int) -> None:
        if self._group is None:
            self._staged = self._stager.stage(self.job.tensors)
            return
        import torch.distributed.checkpoint as dcp

        if self._written is not None:
            self._written.result()
        if self.rank == 0:
            self.remove_old("step*", 1)
        how = {"async_checkpointer_type": self._kind, "async_stager": self._stager, "process_group": self._group}
        saved: Any = dcp.async_save(self.named_tensors(), checkpoint_id=f"{self.folder}/step{iteration}", **how)
        self._staged, self._written = saved.staging_completion, saved.upload_completion
        self.note_stored(self._written)

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def drain(self) -> None:
        for future in (self._staged, self._written):
            if future is not None:
                future.result()

    def close(self) -> None:
        self.drain()
        if self._group is None:
            self._stager.close()


class Dlrover(System):
    """Flash Checkpoint's engine for sharded state, to shared memory; leaves one out while the one before is stored.

    The agent stands for that of dlrover-run: it owns locks and metadata.
    """

    package = "dlrover"

    def setup(self) -> None:
        os.environ.update(TORCHELASTIC_RUN_ID=self.job.name, GROUP_RANK="0", GROUP_WORLD_SIZE="1")
        os.environ["ROLE_NAME"] = "dlrover-trainer"
        self._agent = None
        if self.rank == 0:
            self._agent = subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, text=True)
            while "ready" not in (line := self._agent.stdout.readline()):  # type: ignore[union-attr]
                if not line:
                    raise RuntimeError("the agent of DLRover ended")
        dist.barrier()
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import DeepSpeedCheckpointEngine

        ranks = dist.get_world_size()
        self._engine = DeepSpeedCheckpointEngine(
            self.folder, PosixDiskStorage(), global_shard_num=ranks, zero_stage=3
        )

    def save(self, iteration: int) -> bool:
        state = {"job": self.job.tensors, "iteration": iteration}
        path = f"{self.folder}/{iteration}.{self.rank}"
        return bool(self._engine.save_to_memory(iteration, state, {"job": path}))

    def close(self) -> None:
        self._engine.close()
        dist.barrier()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait()


class LmResiliency(System):
    """GEMINI's slots in the trainer's memory, and at its partner where it has one."""

    package = "lm-resiliency"

    def setup(self) -> None:
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        has_partner = {"replication_jump": 1} if dist.get_world_size() > 1 else {}
        disk = {"disk_flush_interval": 0, "disk_folder": self.folder, "run_id": "bench"}
        config = InMemoryCkptConfig(interval=1, pin_memory=self.job.on_cuda, **disk, **has_partner)
        self._manager = InMemoryCheckpointManager(config)

    def save(self, iteration: int) -> None:
        self._manager.save_tensors([*self.job.tensors.values()], iteration)

    def fence(self) -> None:
        self._manager.maybe_wait()

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointing(System):
    """Staged by a thread, written by a process; keeps two. Through the page cache: its direct writes of 0.1.1 fail on
    some file systems, and are on by default."""

    package = "torch_checkpointing"

    def setup(self) -> None:
        import torch_checkpointing
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        start = CheckpointProcessConfig(subprocess_init_timeout_secs=120)  # 30 s are few where processes spin
        config = torch_checkpointing.CheckpointManager.Config(
            save=AsyncCheckpointSaverConfig(process_config=start),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        self._manager = torch_checkpointing.CheckpointManager(config)
        self._future: Any = None
        self._manager.prewarm_staging({"job": self.job.tensors})

    def save(self, iteration: int) -> None:
        self._future = self._manager.save(f"{self.folder}/step{iteration}", {"job": self.job.tensors})
        self.note_stored(self._future)
        if self.rank == 0:
            self.remove_old("step*", 2)

    def fence(self) -> None:
        with self._manager.lock():
            pass

    def drain(self) -> None:
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        self.drain()
        self._manager.close()
