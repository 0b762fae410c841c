"""torch's elastic agent, extended to detect a worker's exit at once and to fork the next workers from the server."""

from __future__ import annotations

import importlib
import os
import select
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed.run as torchrun
from torch.distributed import DistError
from torch.distributed.argparse_util import env as from_environment
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import record

from ftckpt.frameworks.launcher import log_to_stderr
from ftckpt.runner import notes
from ftckpt.runner.preload import Preloader
from ftckpt.runner.rendezvous import drop_ended, leave, poll_often
from ftckpt.runner.workers import Workers

# Attributes of these modules are replaced while torch's launcher runs.
_launcher: Any = importlib.import_module("torch.distributed.launcher.api")
_agent: Any = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")

_IMPORTS = "ftckpt.imports"
"""Key in the store of the rendezvous."""
_POLL_SECS = 1.0
"""Maximum interval between polls of the preloader."""


class Agent(LocalElasticAgent):
    """torch's agent of this node, with a preloaded server; ``settings`` are those of torch's agent."""

    def __init__(self, preloader: Preloader, **settings: Any) -> None:
        super().__init__(**settings)
        self._preloader = preloader
        handler: Any = self._worker_group.spec.rdzv_handler
        poll_often(handler, self._poll_server)
        preloader.env["TORCHELASTIC_RUN_ID"] = handler.get_run_id()  # assigns a standby's server to this launcher
        self._shared = getattr(getattr(getattr(handler, "_state_holder", None), "_backend", None), "_store", None)
        drop_ended(handler, self._shared)
        self._shared_size = 0
        self._failures: set[str] = set()
        # torch sleeps for this interval between polls of the workers; ``_wait`` returns early if a worker ends.
        spec = self._worker_group.spec
        self._interval_secs, spec.monitor_interval = spec.monitor_interval, 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        if isinstance(self._pcontext, Workers):
            self._pcontext.on_failure = self._leave
        return started

    def _leave(self) -> None:
        if self._remaining_restarts > 0:
            leave(self._worker_group.spec.rdzv_handler)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._poll_server()
        self._wait()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and self._is_hopeless():
            self._remaining_restarts = 0
        return result

    def _poll_server(self) -> None:
        """Polls the server. A standby preloads other nodes' imports, which the first node publishes in the store."""
        preloader, store = self._preloader, self._shared
        preloader.poll()
        size = notes.size_of_imports(preloader.directory)
        if store is None or size != preloader.served_size:
            return
        with suppress(DistError):  # the rendezvous itself reports errors of its store
            if not size and self._pcontext is None and store.check([_IMPORTS]):
                notes.adopt_imports(preloader.directory, store.get(_IMPORTS))
            elif size != self._shared_size and self._worker_group.group_rank == 0:
                store.set(_IMPORTS, notes.imports_as_text(preloader.directory))
                self._shared_size = size

    def _wait(self) -> None:
        """Waits until a worker ends, or until the next poll for joining nodes is due."""
        poll = select.poll()
        workers = self._pcontext.wakers() if isinstance(self._pcontext, Workers) else ()
        for fd in (*self._preloader.wakers(), *workers):
            poll.register(fd, select.POLLIN)
        poll.poll(min(self._interval_secs, _POLL_SECS) * 1000)

    def _is_hopeless(self) -> bool:
        """Whether another attempt would fail as well: a worker reported so, or failed twice at the same line before
        it joined the others."""
        before, self._failures = self._failures, notes.take_failures(self._preloader.directory)
        if notes.OVER in self._failures:
            return True
        for failure in before & self._failures:
            log_to_stderr().error("ftckpt: no further attempt: the script failed twice with %s", failure)
            return True
        return False

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any, **options: Any) -> None:
        if isinstance(self._pcontext, Workers):
            self._pcontext.is_hurried = True
        super()._stop_workers(worker_group, *more, **options)


def _start(preloader: Preloader, start_method: str, **settings: Any) -> Workers:
    workers = Workers(preloader, **settings)
    workers.start()
    return workers


def launch(words: Sequence[str]) -> None:
    """Runs a job like ``torchrun`` with these arguments, until it ends.

    Raises:
        ChildFailedError: the job failed.
        SignalException: this process received a termination signal.
    """
    parser = torchrun.get_args_parser()
    parser.prog = "ftckpt run"
    text = "Modules to preload for restarted workers, in addition to those that earlier attempts have imported; "
    text += "off: start all workers as new processes."
    parser.add_argument("--preload", action=from_environment, default="", metavar="MODULE,...", help=text)
    args = parser.parse_args(words)
    # Otherwise attempts share one store, in which restarted workers read the addresses of dead ones.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if args.no_python or args.run_path:
        record(torchrun.run)(args)
        return
    is_own = (
        os.getenv("PYTHON_EXEC", sys.executable) != sys.executable or getattr(args, "numa_binding", None) is not None
    )
    preloader = Preloader(None if is_own or args.preload == "off" else args.preload.split(","))
    before = _launcher.LocalElasticAgent, _agent.start_processes
    _launcher.LocalElasticAgent, _agent.start_processes = partial(Agent, preloader), partial(_start, preloader)
    try:
        record(torchrun.run)(args)
    finally:
        _launcher.LocalElasticAgent, _agent.start_processes = before
        preloader.close()
