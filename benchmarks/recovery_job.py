"""A rank of the jobs of ``benchmarks/recovery.py``: an example script that notes the times of its start.

    torchrun ... -m ftckpt.megatron recovery_job.py JOB STAMPS PAUSE DISK EVERY HOW [arguments of the script]

Each process writes JSON lines to ``STAMPS/<rank>.<pid>.jsonl``. With a folder ``DISK`` it saves there every ``EVERY``
iterations, as is usual for its framework, in the background if ``HOW`` is async, and starts from the newest one. It
waits ``PAUSE`` seconds between iterations, in which a device would compute.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LATEST = "latest"


def process_began_at() -> float:
    """When this process was started, or forked from another one."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


class Stamps:
    """Notes of one process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.environ['RANK']}.{os.getpid()}.jsonl"
        self._file = self._path.open("a", buffering=1)
        self.new_group_secs = 0.0

    def note(self, what: str, when: float = 0.0, **fields: Any) -> None:
        self._file.write(json.dumps({"what": what, "time": when or time.time(), **fields}) + "\n")

    def built(self) -> None:
        """The job is built, and looks for what to load."""
        self.note("built", groups_secs=self.new_group_secs)

    def around_group(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            self.new_group_secs += time.perf_counter() - begin


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function by ``around(original, ...)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


class Disk:
    """Checkpoints of a job on storage; a start loads the newest. Collective."""

    def __init__(self, framework: str, folder: Path, is_async: bool) -> None:
        from benchmarks.checkpoints import AsyncFsdp2Dcp, Fsdp2Dcp, TorchDist, Universal

        fsdp2 = AsyncFsdp2Dcp if is_async else Fsdp2Dcp
        peers: dict[str, Any] = {"megatron": TorchDist, "deepspeed": Universal, "fsdp2": fsdp2}
        self._peer, self._folder, self._is_async = peers[framework](), folder, is_async

    def save(self, job: Any, iteration: int, note: Callable[[], None]) -> None:
        """Save, and call ``note`` when the checkpoint is complete."""
        import torch.distributed as dist

        self._peer.save(job, str(self._folder / f"step{iteration}"))
        if self._is_async:
            self._peer.written.add_done_callback(lambda done: done.exception() or self._commit(iteration, note))
            return
        dist.barrier()
        self._commit(iteration, note)

    def _commit(self, iteration: int, note: Callable[[], None]) -> None:
        """Name the checkpoint as the newest, and remove the one before the last."""
        if os.environ["RANK"] == "0":
            new = self._folder / f"{LATEST}.new"
            new.write_text(str(iteration))
            new.rename(self._folder / LATEST)
            saved = sorted(self._folder.glob("step*"), key=lambda path: int(path.name.removeprefix("step")))
            for path in saved[:-2]:
                shutil.rmtree(path)
        note()

    def load(self, job: Any) -> int:
        """The iteration that was loaded; 0: there is none."""
        try:
            iteration = int((self._folder / LATEST).read_text())
        except FileNotFoundError:
            return 0
        self._peer.load(job, str(self._folder / f"step{iteration}"))
        _advance(job, iteration)
        return iteration


def _advance(job: Any, iteration: int) -> None:
    """Let counters and data of the job be those behind an iteration."""
    if hasattr(job, "engine"):  # which has its own counters
        job.data.load_state_dict({"consumed_samples": job.engine.global_samples})
        return
    samples = iteration * job.args.global_batch
    job.data.load_state_dict({"consumed_samples": samples})
    job.progress.load_state_dict({"iteration": iteration, "consumed_samples": samples})


SCRIPTS = {"megatron": "train_gpt", "deepspeed": "train_deepspeed", "fsdp2": "train_plain"}


def follow(script: Any, stamps: Stamps, pause_secs: float, disk: Disk | None, every: int) -> None:
    """Have a script note what it reaches, and save and load by ``disk``."""
    import torch.distributed as dist

    from ftckpt.frameworks import entry

    def init_process_group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        stamps.note("rendezvous")

    def start(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stamps.built()
        return original(*args, **kwargs)

    def train_step(original: Callable[..., Any], job: Any) -> Any:
        metrics = original(job)
        stamps.note("step", iteration=metrics["iteration"])
        if disk is not None and metrics["iteration"] % every == 0:
            begin, at = time.time(), metrics["iteration"]
            disk.save(job, at, lambda: stamps.note("saved", iteration=at, secs=time.time() - begin))
        time.sleep(pause_secs)
        return metrics

    def train(original: Callable[..., Any], job: Any) -> Any:
        if disk is not None:
            stamps.built()
            stamps.note("decided")
            stamps.note("loaded", iteration=disk.load(job))
        return original(job)

    wrap(dist, "init_process_group", init_process_group)
    wrap(dist, "new_group", stamps.around_group)
    wrap(entry, "start", start)
    wrap(script, "train_step", train_step)
    wrap(script, "train", train)


def main(argv: Sequence[str]) -> None:
    """Run the script of a job."""
    job, folder, pause, saved, every, how, *arguments = argv
    sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
    script = importlib.import_module(SCRIPTS[job])
    stamps = Stamps(Path(folder))
    stamps.note("process", process_began_at())
    stamps.note("imported")
    follow(script, stamps, float(pause), Disk(job, Path(saved), how == "async") if saved else None, int(every))
    script.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
