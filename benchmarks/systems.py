"""Systems that snapshot a ``TrainingJob``: torch's own and peers, as each documents it for frequent use.

Packages of peers are imported when they run.
"""

from __future__ import annotations

import glob
import json
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
import signal, time
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
signal.signal(signal.SIGUSR1, lambda *_: AsyncCheckpointSaver.reset())
AsyncCheckpointSaver.start_async_saving_ckpt()
print("ready", flush=True)
while True:
    time.sleep(1)
"""


class System:
    """``save`` at the boundary, ``fence`` before the optimizer. The base does nothing: the noise of a measurement."""

    package = ""
    """Its distribution, unless that is torch or ftckpt."""
    on_stand_in = False
    """Whether it asserts CUDA: a host without a device needs the stand-in of the tests."""

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

    def restore(self) -> int | None:
        """Loads the newest snapshot into the job, in the processes of a new start; returns its iteration."""
        raise NotImplementedError

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        """Files and folders with the state of ``rank``; ``place`` has the job's name, arena and folder."""
        raise NotImplementedError

    @staticmethod
    def start_agent(name: str) -> subprocess.Popen[str] | None:
        """Starts the process that outlives the ranks of a job, if the launcher of this system has one."""

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

    def newest(self, pattern: str) -> int | None:
        """The newest iteration for which each rank finds a file; in ``pattern`` it is the asterisk."""
        begin, _, end = f"{self.folder}/{pattern}".partition("*")
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {int(path[len(begin) : -len(end)]) for path in glob.glob(f"{begin}*{end}")})
        return max(set.intersection(*found), default=None)

    def remove_old(self, pattern: str, keep: int, new: int = -1) -> None:
        """Removes all that match except the newest ``keep``, outside the training thread. The folder of iteration
        ``new``, which other ranks may have created, does not count."""
        found = {*glob.glob(f"{self.folder}/{pattern}")} - {f"{self.folder}/step{new}"}
        old = sorted(found, key=os.path.getmtime)[:-keep]
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

    def restore(self) -> int | None:
        newest = self.newest(f"step*.{self.rank}")
        if newest is not None:
            self.job.load(torch.load(f"{self.folder}/step{newest}.{self.rank}"))
        return newest

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/step*.{rank}")


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
            self.remove_old("step*", 1, iteration)
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

    def restore(self) -> int | None:
        import torch.distributed.checkpoint as dcp

        newest = self.newest("step*/.metadata")
        if newest is not None:
            dcp.load(self.named_tensors(), checkpoint_id=f"{self.folder}/step{newest}")
        return newest

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/step*/__{rank}_*")


class TorchSnapshot(System):
    """``Snapshot.async_take``: copies while training waits, writes in a thread; keeps two."""

    package = "torchsnapshot"

    def setup(self) -> None:
        import torchsnapshot

        self._library, self._pending = torchsnapshot, None
        self._state = {"job": torchsnapshot.StateDict(**self.job.tensors)}

    def save(self, iteration: int) -> None:
        self.drain()
        if self.rank == 0:
            self.remove_old("step*", 1, iteration)
        self._pending = self._library.Snapshot.async_take(f"{self.folder}/step{iteration}", self._state)

    def drain(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def close(self) -> None:
        self.drain()

    def restore(self) -> int | None:
        newest = self.newest("step*/.snapshot_metadata")
        if newest is not None:
            self._library.Snapshot(f"{self.folder}/step{newest}").restore(self._state)
            self.job.load(self._state["job"])
        return newest

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        found = []
        for path in Path(place.folder).glob("step*/.snapshot_metadata"):
            entries = json.loads(path.read_text())["manifest"].items()
            own = (entry for name, entry in entries if name.startswith(f"{rank}/") and "location" in entry)
            found += [str(path.parent / entry["location"]) for entry in own]
        return sorted({*found})


class MegatronDist(System):
    """Megatron's ``dist_checkpointing`` as with ``--async-save``: a forked process writes; keeps two."""

    package, on_stand_in = "megatron-core", True

    def setup(self) -> None:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self._queue = AsyncCallsQueue()

    def _sharded(self) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import ShardedTensor

        return {name: ShardedTensor.from_rank_offsets(name, one) for name, one in self.named_tensors().items()}

    def save(self, iteration: int) -> None:
        from megatron.core import dist_checkpointing

        self.drain()
        if self.rank == 0:
            self.remove_old("step*", 1, iteration)
        os.makedirs(path := f"{self.folder}/step{iteration}", exist_ok=True)
        dist.barrier()
        self._queue.schedule_async_request(dist_checkpointing.save(self._sharded(), path, async_sharded_save=True))

    def drain(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self.drain()
        self._queue.close()

    def restore(self) -> int | None:
        from megatron.core import dist_checkpointing

        newest = self.newest("step*/metadata.json")
        if newest is not None:
            loaded = dist_checkpointing.load(self._sharded(), f"{self.folder}/step{newest}")
            self.job.load({name.partition(".")[2]: tensor for name, tensor in loaded.items()})
        return newest

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/step*/__{rank}_*")


class Dlrover(System):
    """Flash Checkpoint's engine for sharded state, to shared memory; leaves one out while the one before is stored.

    The agent stands for that of dlrover-run: it owns locks and metadata. Rank 0 starts one unless it ``has_agent``.
    """

    package = "dlrover"

    @staticmethod
    def start_agent(name: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": name}
        agent = subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, text=True, env=environ)
        assert agent.stdout is not None
        while "ready" not in (line := agent.stdout.readline()):
            if not line:
                raise RuntimeError("the agent of DLRover ended")
        return agent

    def setup(self, has_agent: bool = False) -> None:
        ranks = dist.get_world_size()
        os.environ.update(TORCHELASTIC_RUN_ID=self.job.name, GROUP_RANK="0", GROUP_WORLD_SIZE="1")
        os.environ.update(ROLE_NAME="dlrover-trainer", LOCAL_WORLD_SIZE=str(ranks))
        self._agent = None if has_agent or self.rank else self.start_agent(self.job.name)
        dist.barrier()
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import DeepSpeedCheckpointEngine

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

    def restore(self) -> int | None:
        if not (state := self._engine.load()):
            return None
        self.job.load(state["job"])
        return int(state["iteration"])

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"/dev/shm/{place.name}_*shm_{rank}")


class Nvrx(System):
    """``LocalCheckpointManager``: in the background a copy, which a forked process writes, or with a replica."""

    package, on_stand_in = "nvidia-resiliency-ext", True

    def setup(self, has_replica: bool = False) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        self._queue = None if has_replica else AsyncCallsQueue(persistent=False)
        replicas = CliqueReplicationStrategy.from_replication_params(1, 2) if has_replica else None
        self._manager = local_manager.LocalCheckpointManager(self.folder, repl_strategy=replicas)

    def _state(self, tensors: dict[str, torch.Tensor]) -> Any:
        """NVRx's class of tensors, whose copies from and to a device are clones and nothing."""
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict as Base

        def copy(state: Any, **_: Any) -> None:
            if self._queue is not None:
                state.state_dict = {name: tensor.clone() for name, tensor in state.state_dict.items()}

        Base.copy_tensors_to_cpu, Base.restore_tensor_device = copy, lambda *_, **__: None
        state = Base.__new__(Base)
        state.state_dict, state._is_hollow = dict(tensors), False
        return state

    def save(self, iteration: int) -> None:
        self.drain()
        request = self._manager.save(self._state(self.job.tensors), iteration, is_async=self._queue is not None)
        if self._queue is not None:
            self._queue.schedule_async_request(request)

    def drain(self) -> None:
        if self._queue is not None:
            self._queue.maybe_finalize_async_calls(blocking=True)

    def close(self) -> None:
        self.drain()

    def restore(self) -> int | None:
        iteration = self._manager.find_latest()
        if iteration == -1:
            return None
        self._state({})  # the class that the file names
        self.job.load(self._manager.load()[0].state_dict)
        return int(iteration)

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/{rank}/*")


class LmResiliency(System):
    """GEMINI's slots in the trainer's memory, and at its partner where it has one; with ``flush`` also a file for
    each snapshot, which outlives the ranks."""

    package = "lm-resiliency"

    def setup(self, flush: bool = False) -> None:
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        has_partner = {"replication_jump": 1} if dist.get_world_size() > 1 else {}
        disk = {"disk_flush_interval": int(flush), "disk_folder": self.folder, "run_id": "bench"}
        config = InMemoryCkptConfig(
            interval=1, pin_memory=self.job.on_cuda, verify_integrity=flush, **disk, **has_partner
        )
        self._manager = InMemoryCheckpointManager(config)

    def save(self, iteration: int) -> None:
        self._manager.save_tensors([*self.job.tensors.values()], iteration)

    def fence(self) -> None:
        self._manager.maybe_wait()

    def close(self) -> None:
        self._manager.close()

    def restore(self) -> int | None:
        if (loaded := self._manager.load_tensors()) is None:
            return None
        self.job.load(dict(zip(self.job.tensors, loaded[0], strict=True)))
        return int(loaded[1])

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/**/rank-{rank}.pt", recursive=True)


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

    def restore(self) -> int | None:
        newest = self.newest(f"step*/job_{self.rank}.pt")
        if newest is not None:
            state = self._manager.load(f"{self.folder}/step{newest}", into={"job": self.job.tensors})
            self.job.load(state["job"])
        return newest

    @staticmethod
    def stored(place: Any, rank: int) -> list[str]:
        return glob.glob(f"{place.folder}/step*/*_{rank}.pt")
