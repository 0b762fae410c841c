"""Runs an unmodified script with ftckpt switched on, as a worker of ``ftckpt run`` or under another launcher.

The ``--ftckpt*`` flags are removed from the script's command line. Megatron's or DeepSpeed's integration gets them:
under ``ftckpt run`` when the script imports that framework, under ``-m ftckpt.megatron`` and ``-m ftckpt.deepspeed``
before the script runs. Any other script reads them with ``Config.from_flags`` or ``add_flags``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import ftckpt.deepspeed
import ftckpt.megatron
from ftckpt import config
from ftckpt.config import Config
from ftckpt.deepspeed import active_engine, section
from ftckpt.errors import ConfigError, FtckptError
from ftckpt.forks import end_with_parent
from ftckpt.frameworks import entry, launcher
from ftckpt.frameworks.imports import ImportWatch
from ftckpt.memory.launch_record import launcher_run
from ftckpt.runner import notes
from ftckpt.session.gc_pause import imports_that_stay

_EARLY_SECS = 300.0
"""A script that fails after this time is assumed to have made progress."""
_FAILS_ALIKE: tuple[type[Exception], ...] = (SyntaxError, ImportError, NameError, AttributeError)
_FAILS_ALIKE += (TypeError, ValueError, LookupError, AssertionError)
"""Errors of the script itself; errors of files, networks and devices may not recur at the next attempt."""


class _Frameworks:
    """Switches ftckpt on for the frameworks of the script: Megatron if flags say so, or DeepSpeed."""

    def __init__(self, settings: dict[str, Any], arguments: Sequence[str]) -> None:
        self._settings = settings
        self._arguments = arguments
        self._closers: list[Callable[[], None]] = []

    def install(self, framework: str) -> None:
        """Installs hooks for ``framework`` now; if it is empty, for each framework when it is imported."""
        if framework == "deepspeed":
            self._deepspeed()
        elif framework and Config.from_flags(())[0].enabled:
            self._megatron()
            self._train_loop()
        elif not framework:
            megatron = {"megatron.core": self._megatron, "megatron.training": self._train_loop}
            ImportWatch({**megatron, "deepspeed": self._deepspeed}).install()

    def close(self) -> None:
        """Closes the integrations after the script has succeeded."""
        for closer in self._closers:
            closer()

    def _megatron(self, _: ModuleType | None = None) -> None:
        # Megatron-DeepSpeed contains a part of megatron.core.
        if self._settings and importlib.util.find_spec("megatron.core.optimizer") is not None:
            from ftckpt.frameworks.rendezvous import isolate
            from ftckpt.megatron import hooks, train_loop

            ftckpt.megatron.configure(config := Config.from_flags(())[0])
            if config.enabled:
                isolate()
            hooks.install()
            self._closers.append(train_loop.close)

    def _train_loop(self, _: ModuleType | None = None) -> None:
        from ftckpt.megatron.job import integration

        if integration.config.enabled:
            from ftckpt.megatron import train_loop

            train_loop.install()

    def _deepspeed(self, _: ModuleType | None = None) -> None:
        if self._closers:  # Megatron trains, and another module has imported DeepSpeed
            return
        from ftckpt.frameworks.rendezvous import isolate

        section.configure(self._settings)
        # Engines are destroyed after errors as well; only the runner knows how the script ends.
        active_engine.is_ended_by_runner = True
        entry.prepare_storage(section.foreseen(self._arguments))
        isolate()  # always, because the JSON that may switch ftckpt on is not read yet
        self._closers.append(ftckpt.deepspeed.close)


def start(directory: Path, words: Sequence[str], records: bool) -> None:
    """Runs ``[-m] SCRIPT ARGS...`` like a worker of torchrun, and ends the process.

    Args:
        directory: the directory of files for the agent.
        words: the command line after the interpreter.
        records: whether to record the script's imports in ``directory``.
    """
    if records:
        sys.meta_path.insert(0, notes.Recorder(directory))
    sys.argv = ["", *words]
    launcher.leave(lambda argv: _noted(directory, argv))


def main(words: Sequence[str], framework: str = "") -> int:
    """Runs ``[-m] SCRIPT ARGS...``, for ``framework`` if given; returns the exit code.

    An error of ftckpt is one line on stderr and exit code 2; all other output and codes are the script's. Does not
    run the script if an earlier attempt of the same launcher run ended the job, successfully or not.
    """
    launch = f"torchrun ... -m ftckpt.{framework}" if framework else "ftckpt run ..."
    usage = f"{launch} [-m] SCRIPT ARGS... [--ftckpt ...]"
    if not words or words[0] in ("-h", "--help"):
        config.add_flags(argparse.ArgumentParser(usage=usage, add_help=False)).print_help()
        return 0 if words else 2
    job = launcher.option("--ftckpt-job", words) or section.foreseen(words).job
    if (code := launcher.code_if_over(job)) is not None:
        return code
    try:
        return _run(words, framework, usage)
    except FtckptError as error:
        return launcher.refuse(error)


def _noted(directory: Path, words: Sequence[str]) -> int:
    begun = time.monotonic()
    try:
        code = main(words)
    except _FAILS_ALIKE as error:
        dist = sys.modules.get("torch.distributed")
        has_met = dist is not None and dist.is_available() and dist.is_initialized()
        if not has_met and time.monotonic() - begun < _EARLY_SECS:
            trace = traceback.extract_tb(error.__traceback__)[-1]
            notes.leave_failure(directory, f"{type(error).__name__} at {trace.filename}:{trace.lineno}")
        raise
    if code and launcher_run(os.environ).read().over:
        notes.leave_failure(directory, notes.OVER)
    return code


def _run(words: Sequence[str], framework: str, usage: str) -> int:
    # DeepSpeed's launcher puts this before the script's name; the script parses it.
    rank = list(words[:1]) if words[0].startswith(("--local_rank", "--local-rank")) else []
    words = [*words[len(rank) :], ""]
    is_module = words[0] == "-m"
    name = words[is_module]
    settings, arguments = section.from_flags(words[1 + is_module : -1])
    if settings:
        given = Config.of_flags(settings)
        config.taken[:] = given.flags()
        entry.prepare_storage(given)  # before imports, to report a wrong path early
    if not is_module:
        if name.startswith("-") or not Path(name).is_file():
            raise ConfigError(f"script {name!r} does not exist; usage: {usage}")
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(name).resolve().parent)  # where ``python -m`` has put the current directory
    sys.argv = [name, *rank, *arguments]
    frameworks = _Frameworks(settings, arguments)
    with imports_that_stay():
        is_deepspeed = any(word.startswith("--deepspeed") for word in arguments)
        launcher.stand_in(framework or ("deepspeed" if is_deepspeed else "megatron"))
        if "torch.distributed" in sys.modules:  # this worker was forked with the script's imports
            from ftckpt.frameworks.rendezvous import connect_promptly

            connect_promptly()
        frameworks.install(framework)
    try:
        _execute(name, is_module)
    except SystemExit as ended:
        # A script that failed or was interrupted keeps its snapshots for the next start.
        if ended.code not in (None, 0):
            raise
    frameworks.close()
    return 0


def _execute(name: str, is_module: bool) -> None:
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    # Like the interpreter; ``runpy`` would change ``sys.argv``.
    module, path = ModuleType("__main__"), os.path.join(os.getcwd(), name)
    vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    sys.modules["__main__"] = module
    exec(compile(Path(name).read_bytes(), path, "exec", dont_inherit=True), vars(module))


if __name__ == "__main__":
    end_with_parent()
    start(Path(sys.argv[1]), sys.argv[2:], os.environ.get("LOCAL_RANK") == "0")
