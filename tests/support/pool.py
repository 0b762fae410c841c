"""Runs a function on several ranks: processes forked from a server that has Megatron loaded already.

Importing torch and megatron.core takes seconds per process; the fork server does it once, and a rank
starts in some hundredths of a second with a gloo process group over a file (no ports of ours).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support import pool_child

_PRELOAD = ("__main__", "tests.support.pool_preload")
_SERVER_ENV = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Compiled functions decide when they are decorated, which is when the server imports them.
    "TORCHDYNAMO_DISABLE": "1",
    "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),  # DeepSpeed looks for a device when it is imported
    # Of a server that has asked CUDA itself for a device no child could use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
_ASSERTION = re.compile("^AssertionError", re.MULTILINE)
_KILL_WAIT_SECS = 10.0
_POLL_SECS = 0.05

_server_started = False


@dataclass(frozen=True)
class RankResult:
    """The end of one rank. `exitcode` is negative when a signal ended it; `error` is a traceback."""

    rank: int
    exitcode: int | None
    value: Any = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.exitcode == 0 and self.error is None


class RankFailure(AssertionError):
    """At least one rank failed, died or was late; `results` has what is known of each."""

    def __init__(self, message: str, results: Sequence[RankResult]) -> None:
        super().__init__(message)
        self.results = list(results)


def _start_server() -> None:
    global _server_started
    if _server_started:
        return
    root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_PRELOAD])
    with patch.dict(os.environ, {**_SERVER_ENV, "PYTHONPATH": search_path}):
        forkserver.ensure_running()
    _server_started = True


class RankGroup:
    """The running ranks of one `spawn_ranks`. Use it in a `with`: leaving it kills what still runs."""

    def __init__(self, processes: list[Any], pipes: list[Connection], folder: Path) -> None:
        self._processes = processes
        self._pipes = pipes
        self._folder = folder
        self._messages: dict[int, tuple[str, Any]] = {}
        self._open = dict(enumerate(pipes))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def alive(self) -> list[int]:
        return [rank for rank, process in enumerate(self._processes) if process.is_alive()]

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        """Sends a signal to one rank; nothing happens if it has ended."""
        if self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signum)

    def wait(self, timeout_secs: float) -> list[RankResult] | None:
        """The results once all ranks have ended, or None if some still run after `timeout_secs`."""
        deadline = time.monotonic() + timeout_secs
        while self.alive() or self._open:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._collect(min(left, _POLL_SECS * 4))
        return self.results()

    def wait_first_failure(self, timeout_secs: float) -> bool:
        """Waits until a rank has failed (True), or all have ended well or time is up (False)."""
        deadline = time.monotonic() + timeout_secs
        while True:
            if any(result.error or result.exitcode for result in self.results()):
                return True
            left = deadline - time.monotonic()
            if left <= 0 or not (self.alive() or self._open):
                return False
            self._collect(min(left, _POLL_SECS * 4))

    def results(self) -> list[RankResult]:
        """Results so far; `exitcode` None is a rank that still runs."""
        found = []
        for rank, process in enumerate(self._processes):
            kind, content = self._messages.get(rank, ("", None))
            value, error = (content if kind == name else None for name in ("value", "error"))
            found.append(RankResult(rank, process.exitcode, value, error))
        return found

    def close(self) -> None:
        """Kills the ranks that still run and removes the temporary folder."""
        for rank in self.alive():
            self.kill(rank)
        deadline = time.monotonic() + _KILL_WAIT_SECS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._collect(0.0)
        for pipe in self._pipes:
            pipe.close()
        self._open.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, timeout_secs: float) -> None:
        """Reads what ranks have sent, one message each, so that none of them blocks on a full pipe."""
        waitables: list[Any] = list(self._open.values())
        waitables += [self._processes[rank].sentinel for rank in self.alive()]
        if not waitables:
            return
        ready = wait(waitables, timeout_secs)
        for rank, pipe in list(self._open.items()):
            # Its end is nothing to wait for: workers that a rank has started hold it for seconds more.
            if pipe in ready:
                with contextlib.suppress(EOFError, ConnectionResetError):
                    self._messages[rank] = pipe.recv()
                del self._open[rank]
            elif not self._processes[rank].is_alive() and not pipe.poll():
                del self._open[rank]


def spawn_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> RankGroup:
    """Starts `fn(rank, world_size, *args)` on `world_size` ranks; `fn` is a function of a module.

    Each rank has one torch thread, and RANK, WORLD_SIZE and LOCAL_RANK in its environment; `options` are fields of
    `pool_child.Settings`.
    """
    _start_server()
    context = multiprocessing.get_context("forkserver")
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-ranks-"))
    settings = pool_child.Settings(world_size, str(folder / "store"), **options)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=pool_child.run, args=(fn, rank, args, settings, send), name=f"rank-{rank}"
            )
            pipes.append(receive)
            process.start()
            send.close()
            processes.append(process)
    except BaseException:
        RankGroup(processes, pipes, folder).close()
        raise
    return RankGroup(processes, pipes, folder)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_secs: float = 120.0,
    expect_failures: bool = False,
    grace_secs: float = 5.0,
    **options: Any,
) -> list[RankResult]:
    """Runs `fn` on all ranks and returns their results by rank; `options` are those of `spawn_ranks`.

    Without `expect_failures` the first failure or the timeout kills the rest and raises RankFailure.
    With it, ranks that still run `grace_secs` after the first death are killed and all are returned;
    but an assertion that does not hold is no failure that was expected, and raises, too.
    """
    deadline = time.monotonic() + timeout_secs
    with spawn_ranks(fn, world_size, *args, **options) as group:
        failed = group.wait_first_failure(timeout_secs)
        if failed:
            # Time for peers to tell their side, and for a traceback to arrive before its exit code.
            left = max(0.0, deadline - time.monotonic())
            group.wait(min(grace_secs, left) if expect_failures else min(0.5, left))
        late = group.alive() if not failed else []
        group.close()
        results = group.results()
    unexpected = [result for result in results if not expect_failures or _ASSERTION.search(result.error or "")]
    if late or (failed and unexpected):
        raise RankFailure(_describe(results, late, timeout_secs), results)
    return results


def _describe(results: Sequence[RankResult], late: Sequence[int], timeout_secs: float) -> str:
    lines = [f"ranks {list(late)} still ran after {timeout_secs:g} s"] if late else []
    for result in results:
        if not result.ok:
            lines.append(f"--- rank {result.rank}: exit code {result.exitcode}\n{result.error or ''}")
    return "\n".join(lines)
