"""What ftckpt and its peers bring back after a fault.

    python benchmarks/peer_faults.py --json FILE

Four ranks on one node, of whose state no rank has another's part, snapshot it in each iteration; all are killed
(SIGKILL), the fault follows 1.5 s later, and they start again. The restored bytes are compared with digests from
training:

- *flipped bit*: in the newest snapshot of rank 1;
- *lost shard*: everything that rank 1 stored is deleted, as with the memory of its node;
- *all processes*: the processes beside the ranks (agents, the SMP) die, too.

Of packages that are not installed the table has no row.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.common import conclude, environment, parser_of, print_table, write_json
from ftckpt.memory.directory import clean_job
from tests.support.pool import RankFailure, run_ranks

RANKS, PARAMETERS, ITERATIONS, ELEMENTS = 4, 8, 12, 1 << 16
FAULTS = ("flipped bit", "lost shard", "all processes")
_TIMEOUT_SECS, _PAUSE_SECS = 120.0, 1.5
_SHM = "/dev/shm"


class Run(NamedTuple):
    """A job of one system; ``folder`` is on a tmpfs."""

    system: str
    name: str
    folder: str


class Job(torch.nn.Module):
    """Parameters sharded by rows over all ranks, and Adam's moments."""

    def __init__(self, rank: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed + rank)
        mesh = init_device_mesh("cpu", (RANKS,))
        shards = [DTensor.from_local(torch.randn(ELEMENTS), mesh, [Shard(0)]) for _ in range(PARAMETERS)]
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(shard) for shard in shards)
        self.optimizer = torch.optim.AdamW(self.weights.parameters(), lr=1e-2)
        self.train_step()

    def train_step(self) -> None:
        for weight in self.weights:
            weight.grad = DTensor.from_local(torch.randn(ELEMENTS), weight.device_mesh, [Shard(0)])
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's part of the state."""
        found = {}
        for index, weight in enumerate(self.weights):
            state = self.optimizer.state[weight]
            parts = {"weight": weight, **{kind: state[kind] for kind in ("exp_avg", "exp_avg_sq")}}
            found |= {f"{kind}.{index}": value.to_local().detach() for kind, value in parts.items()}
        return found

    def load(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(tensors[name])

    def digest(self) -> int:
        digest = xxhash.xxh3_64()
        for tensor in self.tensors.values():
            digest.update(tensor.numpy())
        return digest.intdigest()


class System:
    """``save`` at the boundary, ``fence`` before the optimizer; ``restore`` in the processes of the next start."""

    package = ""
    on_stand_in = False
    """Whether it asserts CUDA: a stand-in of the tests takes its place."""

    def __init__(self, job: Job, run: Run) -> None:
        self.job, self.run, self.rank = job, run, dist.get_rank()
        self.setup()

    def setup(self) -> None: ...
    def fence(self) -> None: ...
    def save(self, iteration: int) -> None:
        raise NotImplementedError

    def restore(self) -> int | None:
        """The iteration that was restored."""
        raise NotImplementedError

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        """Files and folders that have the state of ``rank``."""
        raise NotImplementedError

    @staticmethod
    def start_agent(run: Run) -> subprocess.Popen[bytes] | None:
        """Starts the process that outlives the ranks, if the launcher of this system has one."""

    def path(self, iteration: int) -> str:
        return f"{self.run.folder}/step_{iteration}"

    def newest(self, marker: str) -> int | None:
        done = [path for path in glob.glob(self.path(0)[:-1] + "*") if os.path.exists(f"{path}/{marker}")]
        return max((int(path.rpartition("_")[2]) for path in done), default=None)


class Ftckpt(System):
    def setup(self) -> None:
        import ftckpt.torch
        from ftckpt.config import Config

        config = Config(enabled=True, job=self.run.name, node="node", arena=self.run.folder, interval=1)
        self._checkpointer = ftckpt.torch.attach(self.job, self.job.optimizer, None, {}, config)
        self._restored = self._checkpointer.restore()

    def save(self, iteration: int) -> None:
        self._checkpointer.step(iteration)

    def restore(self) -> int | None:
        return self._restored

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{run.folder}/ftckpt-{run.name}/node/dp{rank}.*")


class TorchSave(System):
    """A file per rank, renamed when complete."""

    def save(self, iteration: int) -> None:
        path = f"{self.path(iteration)}.rank{self.rank}"
        torch.save(self.job.tensors, path + ".new")
        os.rename(path + ".new", path)

    def restore(self) -> int | None:
        files = glob.glob(f"{self.run.folder}/step_*.rank*")
        found = [
            {int(re.findall(r"\d+", path)[-2]) for path in files if path.endswith(f"k{r}")} for r in range(RANKS)
        ]
        newest = max(set.intersection(*found), default=None)
        if newest is not None:
            self.job.load(torch.load(f"{self.path(newest)}.rank{self.rank}"))
        return newest

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{run.folder}/step_*.rank{rank}")


class Dcp(System):
    def save(self, iteration: int) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._state(), checkpoint_id=self.path(iteration))

    def restore(self) -> int | None:
        import torch.distributed.checkpoint as dcp

        newest = self.newest(".metadata")
        if newest is not None:
            dcp.load(self._state(), checkpoint_id=self.path(newest))
        return newest

    def _state(self) -> dict[str, torch.Tensor]:
        return {f"rank{self.rank}.{name}": tensor for name, tensor in self.job.tensors.items()}

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{run.folder}/step_*/__{rank}_*")


_AGENT = """
import signal, time
from dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver
signal.signal(signal.SIGUSR1, lambda *_: AsyncCheckpointSaver.reset())
AsyncCheckpointSaver.start_async_saving_ckpt()
print("ready", flush=True)
while True:
    time.sleep(1)
"""


class Dlrover(System):
    """Flash Checkpoint's engine for sharded state. The agent stands for that of dlrover-run."""

    package = "dlrover"

    @staticmethod
    def start_agent(run: Run) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "TORCHELASTIC_RUN_ID": run.name}
        agent = subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, env=environ)
        assert agent.stdout is not None
        while b"ready" not in (line := agent.stdout.readline()):
            if not line:
                raise RuntimeError("the agent of DLRover ended")
        return agent

    def setup(self) -> None:
        ranks = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": str(RANKS)}
        os.environ.update(ranks, TORCHELASTIC_RUN_ID=self.run.name, ROLE_NAME="dlrover-trainer")
        from dlrover.python.common.storage import PosixDiskStorage
        from dlrover.trainer.torch.flash_checkpoint.deepspeed_engine import DeepSpeedCheckpointEngine

        disk = PosixDiskStorage()
        self._engine = DeepSpeedCheckpointEngine(self.run.folder, disk, global_shard_num=RANKS, zero_stage=3)

    def save(self, iteration: int) -> None:
        state = {"job": self.job.tensors, "iteration": iteration}
        self._engine.save_to_memory(iteration, state, {"job": f"{self.path(iteration)}.{self.rank}"})

    def restore(self) -> int | None:
        if not (state := self._engine.load()):
            return None
        self.job.load(state["job"])
        return int(state["iteration"])

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{_SHM}/{run.name}_*shm_{rank}")


class Nvrx(System):
    """LocalCheckpointManager with one replica."""

    package, on_stand_in = "nvidia-resiliency-ext", True

    def setup(self) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers import local_manager
        from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy

        replicas = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._manager = local_manager.LocalCheckpointManager(self.run.folder, repl_strategy=replicas)

    def save(self, iteration: int) -> None:
        self._manager.save(host_state(self.job.tensors), iteration, is_async=False)

    def restore(self) -> int | None:
        iteration = self._manager.find_latest()
        if iteration == -1:
            return None
        host_state({})  # the class that the file names
        self.job.load(self._manager.load()[0].state_dict)
        return int(iteration)

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{run.folder}/{rank}/*")


def host_state(tensors: dict[str, torch.Tensor]) -> Any:
    """NVRx's state of tensors, without its copies between a device and the host."""
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict as Base

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    Base.copy_tensors_to_cpu = Base.restore_tensor_device = nothing
    state = Base.__new__(Base)
    state.state_dict, state._is_hollow = dict(tensors), False
    return state


class LmResiliency(System):
    """GEMINI's slots in the trainer's memory and at its partner. SIGTERM flushes them, SIGKILL of all loses them."""

    package = "lm-resiliency"

    def setup(self) -> None:
        from lm_resiliency.checkpointing.config import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        disk = {"disk_flush_interval": 1, "disk_folder": self.run.folder, "run_id": self.run.name}
        config = InMemoryCkptConfig(interval=1, replication_jump=1, verify_integrity=True, pin_memory=False, **disk)
        self._manager = InMemoryCheckpointManager(config)

    def save(self, iteration: int) -> None:
        self._manager.save_tensors([*self.job.tensors.values()], iteration)

    def fence(self) -> None:
        self._manager.maybe_wait()

    def restore(self) -> int | None:
        if (loaded := self._manager.load_tensors()) is None:
            return None
        self.job.load(dict(zip(self.job.tensors, loaded[0], strict=True)))
        return int(loaded[1])

    @staticmethod
    def stored(run: Run, rank: int) -> list[str]:
        return glob.glob(f"{run.folder}/**/rank-{rank}.pt", recursive=True)


SYSTEMS: dict[str, type[System]] = {
    "ftckpt": Ftckpt,
    "torch.save": TorchSave,
    "DCP": Dcp,
    "DLRover": Dlrover,
    "NVRx, a replica": Nvrx,
    "lm-resiliency": LmResiliency,
}


def train(rank: int, world_size: int, run: Run) -> None:
    """Trains and snapshots, keeps digests beside the snapshots' folder, and dies."""
    job = Job(rank, seed=1)
    system = SYSTEMS[run.system](job, run)
    for iteration in range(1, ITERATIONS + 1):
        time.sleep(0.3)
        system.fence()
        job.train_step()
        Path(f"{run.folder}.{rank}.{iteration}").write_text(str(job.digest()))
        dist.barrier()
        system.save(iteration)
    time.sleep(0.4)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def come_back(rank: int, world_size: int, run: Run) -> tuple[int | None, bool]:
    """What a restart restores, and whether it is what training had."""
    job = Job(rank, seed=99)
    iteration = SYSTEMS[run.system](job, run).restore()
    digest = Path(f"{run.folder}.{rank}.{iteration}")
    return iteration, digest.exists() and digest.read_text() == str(job.digest())


def flip_bit(paths: Sequence[str]) -> None:
    """Flips a bit in the file of the newest snapshot."""
    files = [path for one in paths for path in ([one] if os.path.isfile(one) else glob.glob(f"{one}/slot*"))]
    number = {path: int((re.findall(r"(?:step[-_]|iter_)(\d+)", path) or ["0"])[0]) for path in files}
    newest = max(files, key=lambda path: (number[path], os.path.getmtime(path), os.path.getsize(path)))
    with open(newest, "rb+") as file:
        file.seek(int(os.path.getsize(newest) * 0.4142))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))


def outcome(run: Run, fault: str) -> dict[str, Any]:
    """Trains, kills, does the damage and restores."""
    system = SYSTEMS[run.system]
    agent = system.start_agent(run)
    options: dict[str, Any] = {"timeout_secs": _TIMEOUT_SECS, "expect_failures": True, "stand_in": system.on_stand_in}
    ended = run_ranks(train, RANKS, run, **options)
    if errors := [rank.error for rank in ended if rank.error]:
        return {"outcome": "error in training", "error": errors[0][-800:]}
    time.sleep(_PAUSE_SECS)
    stored = system.stored(run, 1)
    if fault == "flipped bit" and stored:
        flip_bit(stored)
    for path in stored if fault == "lost shard" else ():
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    if fault == "all processes":
        kill_helpers(run, agent)
        agent = system.start_agent(run)
    elif agent is not None:
        agent.send_signal(signal.SIGUSR1)  # as dlrover-run does when it restarts workers
        time.sleep(0.5)
    try:
        back = run_ranks(come_back, RANKS, run, **options)
    except RankFailure as error:
        return {"outcome": "error", "error": str(error)[-300:]}
    finally:
        kill_helpers(run, agent)
    if errors := [rank.error for rank in back if rank.error]:
        return {"outcome": "error", "error": errors[0].strip().splitlines()[-1][:300]}
    iterations = [rank.value[0] for rank in back]
    if len({*iterations}) > 1:
        return {"outcome": "ranks differ", "iterations": iterations}
    if iterations[0] is None:
        return {"outcome": "nothing"}
    is_exact = all(rank.value[1] for rank in back)
    return {"outcome": "exact" if is_exact else "WRONG BYTES", "lost": ITERATIONS - iterations[0]}


def kill_helpers(run: Run, agent: subprocess.Popen[bytes] | None) -> None:
    """Kills an agent and every process with the run's name in its command or environment."""
    if agent is not None:
        agent.kill()
        agent.wait()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
                if run.name.encode() in words:
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


def measure(system: str, fault: str) -> dict[str, Any]:
    """The outcome of one fault, on a clean tmpfs before and after."""
    name = f"faults-{uuid.uuid4().hex[:8]}"
    folder = Path(_SHM) / name
    folder.mkdir()
    try:
        return outcome(Run(system, name, str(folder)), fault)
    finally:
        clean_job(folder, name)
        for path in map(Path, glob.glob(f"{_SHM}/*{name}*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def is_installed(package: str) -> bool:
    try:
        return not package or bool(version(package))
    except PackageNotFoundError:
        return False


def main(argv: Sequence[str]) -> int:
    """Tries every fault on every system, prints the table and writes the file; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    args = parser.parse_args(argv)
    packages = {system.package for system in SYSTEMS.values() if system.package}
    about = environment(argv, "benchmarks/peer_faults.py", packages)
    content: dict[str, Any] = {"benchmark": "peer faults", "environment": about, "rows": []}
    for system in (name for name in args.systems if is_installed(SYSTEMS[name].package)):
        outcomes = {fault: measure(system, fault) for fault in FAULTS}
        content["rows"].append({"system": system, **outcomes})
        write_json(args.json, content)
    cells = [[row["system"], *(text_of(row[fault]) for fault in FAULTS)] for row in content["rows"]]
    print_table(["system", *FAULTS], cells)
    ours = [row[fault] for row in content["rows"] if row["system"] == "ftckpt" for fault in FAULTS]
    missed = [f"ftckpt: {one}" for one in ours if one["outcome"] != "exact"]
    return conclude(args.json, content, missed, quick=False)


def text_of(found: dict[str, Any]) -> str:
    lost = f", {found['lost']} iterations lost" if found.get("lost") else ""
    return f"{found['outcome']}{lost}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
