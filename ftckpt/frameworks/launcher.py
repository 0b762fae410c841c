"""Names that a launcher gives a job, and the process in which a runner runs the training script.

Names become parts of file names and of socket addresses, so that only a safe alphabet is let through; a name is never
changed to fit, because two jobs could then end up with one name.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import dis
import gc
import hashlib
import importlib
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from types import TracebackType
from typing import NoReturn

from ftckpt import forks
from ftckpt.config import node_here
from ftckpt.errors import ConfigError, FtckptError, written
from ftckpt.memory import end_notes
from ftckpt.memory.launch_record import LauncherRun, agent_of, launcher_run
from ftckpt.setting_checks import NAME_RULE, is_name

_RUN_ID = "TORCHELASTIC_RUN_ID"
_DRAWN = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""As ``uuid.uuid4`` makes them."""
# Present in every process that torchrun, mpirun, srun or a hand-written launcher has started.
_LAUNCHER_VARS = (_RUN_ID, "RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_REFUSED = 2
"""The exit code of a job that ftckpt has ended."""
_FLUSH_SECS = 60.0
"""Maximum wait for a process's files to be flushed: shared storage may be slow."""
_INTERRUPTED = 130
"""Shell convention: 128 + SIGINT."""
is_forked = False
"""True in a worker forked from a server that has imported and frozen the script's imports."""


def job_name(configured: str | None, env: Mapping[str, str]) -> str:
    """The job's name: every process of the job gets the same, and so does its next start.

    What the user says comes first: ``configured`` (a flag, the JSON section), then FTCKPT_JOB. Otherwise the
    launchers are asked: torchrun for its run id (``--rdzv-id``; its default ``none`` is no name), then Slurm, which
    makes ``slurm-<SLURM_JOB_ID>``, then torchrun's static rendezvous, whose place is the same in each attempt and on
    each node (``_static_name``). A process that no launcher has started belongs to ``default``. On a single node
    torchrun draws a run id at each start: a job that shall find its snapshots after torchrun itself has ended needs a
    name from the user (see ``is_drawn``).

    :raises ConfigError: a name has other characters than ``[A-Za-z0-9._-]`` or is too long, or a launcher is at work
        and gives none.
    """
    if configured:
        return _checked(configured, "the configured job name")
    if env.get("FTCKPT_JOB"):
        return _checked(env["FTCKPT_JOB"], "FTCKPT_JOB")
    run_id = _run_id(env)
    if run_id and run_id != "none":
        return _checked(run_id, "torchrun's run id (--rdzv-id)")
    slurm_job = env.get("SLURM_JOB_ID", "")
    if slurm_job:
        return _checked(f"slurm-{slurm_job}", "the name made from SLURM_JOB_ID")
    if name := _static_name(env):
        return name
    if any(var in env for var in _LAUNCHER_VARS):
        raise ConfigError(
            "this job has no name: give torchrun --rdzv-id NAME, configure ftckpt's job name, or set FTCKPT_JOB"
        )
    return "default"


def is_drawn(job: str, env: Mapping[str, str]) -> bool:
    """True if torchrun drew this name at random: it draws another one at its next start."""
    return job == env.get(_RUN_ID) and _DRAWN.fullmatch(job) is not None and not _asked_id(env)


def tell_if_drawn(job: str, env: Mapping[str, str]) -> None:
    """Say so on the first rank, where nobody would miss the snapshots before they are needed."""
    if is_drawn(job, env):
        log_once(
            "torchrun has drawn the job's name, %s, for this launch alone: the next one will not find its snapshots, "
            "which stay in memory; %s", job, written("name the job, by --ftckpt-job or by FTCKPT_JOB"),
        )  # fmt: skip


def _run_id(env: Mapping[str, str]) -> str:
    """As the user gave it: where all is on one node torchrun puts one that it draws in the place of that."""
    run_id = env.get(_RUN_ID, "")
    return (_asked_id(env) if _DRAWN.fullmatch(run_id) else "") or run_id


def _asked_id(env: Mapping[str, str]) -> str:
    """The run id on torchrun's command line, or in its environment."""
    agent = agent_of(env)
    if agent is None:
        return ""
    words = [word.replace("--rdzv_id", "--rdzv-id", 1) for word in agent.command]
    asked = option("--rdzv-id", words) or agent.env.get("PET_RDZV_ID", "")
    return "" if asked == "none" else asked


def node_name(configured: str | None, env: Mapping[str, str]) -> str:
    """The name of this failure domain, the same whatever rank torchrun gives the node after a restart.

    In this order: ``configured``, FTCKPT_NODE, Slurm's name of the node (SLURMD_NODENAME), the host name.
    torchrun has none to offer: its GROUP_RANK is dealt anew at each rendezvous.

    :raises ConfigError: the name has other characters than ``[A-Za-z0-9._-]`` or is longer than 64.
    """
    if configured:
        return _checked(configured, "the configured node name")
    return _checked(*node_here(env))


def _static_name(env: Mapping[str, str]) -> str:
    """A name for a job of torchrun's static rendezvous; "" where this is none.

    It has what such jobs of one user differ by: the place where ranks meet, the script and the working directory.
    """
    agent = agent_of(env)
    if agent is None or "MASTER_ADDR" not in env:
        return ""
    words = agent.command
    backends = [word.partition("=")[2] or after for word, after in zip(words, [*words[1:], ""], strict=True)
                if word.partition("=")[0].replace("_", "-") == "--rdzv-backend"]  # fmt: skip
    # With another one the port is drawn anew at each attempt, and the name would be another each time.
    if "--standalone" in words or {*backends, agent.env.get("PET_RDZV_BACKEND", "static")} != {"static"}:
        return ""
    # The agent's folder: a script may go to another one, of this attempt alone.
    script = agent.directory / sys.argv[0]
    facts = (os.geteuid(), env["MASTER_ADDR"], env.get("MASTER_PORT"), os.path.normpath(script), agent.directory)
    digest = hashlib.sha256(repr([str(fact) for fact in facts]).encode()).hexdigest()[:10]
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).strip("._-")[:40] or "job"
    return f"{stem}-{digest}"


def _checked(name: str, origin: str) -> str:
    if not is_name(name):
        raise ConfigError(f"{origin} is {name!r}: {NAME_RULE}")
    return name


def world_size() -> int:
    """The number of ranks that the launcher has started; 1 where none has."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def log_to_stderr() -> logging.Logger:
    """Show ftckpt's log; a second call adds nothing."""
    log = logging.getLogger("ftckpt")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    # Where a script has configured the root logger each line would be printed twice.
    log.propagate = False
    return log


def log_once(text: str, *args: object) -> None:
    """Log a line that is the same on all ranks, on the first of them."""
    log = log_to_stderr()
    # The launcher's word: torch.distributed may not be initialised yet.
    if os.environ.get("RANK", "0") == "0":
        log.info(f"ftckpt: {text}", *args)


def isolate() -> None:
    """Keep this attempt's rendezvous apart from earlier ones, and log how.

    Raises:
        LaunchError: torchrun's store is shared among attempts and cannot be divided.
    """
    from ftckpt.frameworks.rendezvous import isolate_attempts

    log_to_stderr()  # before the wait for the other ranks, which may fail
    log_once("rendezvous: %s", isolate_attempts())


def code_if_over(job: str | None = None) -> int | None:
    """The exit code that an earlier attempt of this launcher run left for all further ones; None: go on.

    ``job`` is what the user has configured, if that is known by now: what another one came to is not its own. Where
    no name is known the run is taken for that of one job.
    """
    run = _run_of(job)
    outcome = run.before.of(run.job)
    if not outcome.over:
        return None
    run.remove_leftovers()
    # Said where it came about; again at the end of all retries, where people look first: by whichever rank comes
    # first, as the others are ended then.
    speaks = os.environ.get("GROUP_RANK", "0") == "0" and (outcome.code == 0 or _is_last_attempt(os.environ))
    if speaks and run.repeat():
        _print(outcome.text)
    return outcome.code


def _is_last_attempt(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_RESTART_COUNT") == env.get("TORCHELASTIC_MAX_RESTARTS")


def _run_of(job: str | None = None) -> LauncherRun:
    """The launcher run, which is told of the job as far as the user has named it: see ``job_name``."""
    run = launcher_run(os.environ)
    run.job = job or run.job or os.environ.get("FTCKPT_JOB", "")
    return run


def go_on() -> None:
    """The job is not done, whatever this process has done before: another model is going to be trained, or the script
    says itself that it has failed, which is no crash in the exit of one that has not."""
    launcher_run(os.environ).resume()


def _go_on_after(error: BaseException) -> None:
    """Unless a connection to another rank failed: that one may have crashed in its exit."""
    if not is_of_another_rank(error):
        go_on()


def leave_if_over(job: str | None = None) -> None:
    """End this process where an earlier attempt of the launcher run ended the job: for doors without a runner."""
    if (code := code_if_over(job)) is not None:
        raise SystemExit(code)


def follow_uncaught() -> None:
    """From here on an error of ftckpt that a script does not catch is one line of one rank, and ends the launcher's
    retries, where it is final."""
    if not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)


class _ErrorHook:
    """Before ``shown_by``, the hook that was there; what that may call in its turn, a hook of this kind included, is
    called no second time: torch puts one of its own before the one that it finds."""

    _is_showing = False

    def __init__(self, shown_by: Callable[..., object]) -> None:
        self._shown_by = shown_by

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _ErrorHook._is_showing or forks.is_child:
            self._shown_by(kind, error, trace)
            return
        _ErrorHook._is_showing = True
        try:
            if not issubclass(kind, KeyboardInterrupt):
                blame = end_notes.CONSEQUENCE if is_of_another_rank(error) else end_notes.CAUSE
                end_notes.tell_here(int(os.environ.get("RANK") or 0), f"{kind.__name__}: {error}", blame)
            if isinstance(error, FtckptError):
                logging.getLogger("ftckpt").debug("uncaught", exc_info=(kind, error, trace))
                refuse(error)
            else:
                _go_on_after(error)
                self._shown_by(kind, error, trace)
        finally:
            _ErrorHook._is_showing = False


def refuse(error: FtckptError) -> int:
    """Say in one line on stderr what ends the job, and keep the launcher from trying again in vain; the exit code."""
    if forks.is_child:  # the job goes on without it
        _print(str(error))
        return _REFUSED
    env = os.environ
    run = _run_of()
    run.resume()
    # The ranks of a machine end each other when the first one ends: whichever comes first must speak.
    # Known under torchrun alone: another launcher names no attempts.
    is_last = "TORCHELASTIC_RESTART_COUNT" in env and _is_last_attempt(env)
    is_first = run.end(_REFUSED if error.final else None, str(error), is_last=is_last)
    speaks = env.get("GROUP_RANK" if run.name else "RANK", "0") == "0" or not error.of_all_ranks
    # A script without a runner meets it anew in each attempt, and the last one is where people look.
    if speaks and (is_first or (is_last and run.repeat())):
        _print(str(error))
    return _REFUSED


def _print(text: str) -> None:
    print(f"ftckpt: {' '.join(text.split())}", file=sys.stderr, flush=True)


_code: int | None = None  # the exit code, once ``leave`` has it


def leave(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """End the process with the code that ``main`` of its arguments returns, or by what it raises.

    As the interpreter would, but without its finalization: a thread of torch, CUDA or NCCL that asks for the
    interpreter after that has begun is ended by an unwinding that C++ answers with abort. A job that was done would
    be taken for one that failed.
    """
    global _code
    if not is_forked:
        atexit.register(end_process)
    try:
        code = _exit_code(main(sys.argv[1:]))
    except SystemExit as ended:
        code = _exit_code(ended.code)
        if code:
            sys.last_value = ended  # a failure, to what runs at the exit
            go_on()
        run = _run_of()
        # Behind a start that trained these arguments are good, and what is wrong with them, such as a number of ranks
        # that has changed, may be over at the next one.
        if code and _is_of_argparse(ended) and not run.before.attempts:
            run.end(code, "the script does not take its arguments: its own line above says which")
    except BaseException as error:  # noqa: BLE001 - a script's own error, shown as the interpreter shows it
        sys.last_value = error  # as the interpreter does
        _go_on_after(error)  # here, too: the script may have put a hook of its own in the place of ftckpt's
        error.__traceback__ = _of_script(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    _code = code
    sys.exit(code)


def end_process() -> None:
    """The last exit function, as it is registered first: ends the process if ``leave`` has an exit code."""
    if _code is None:
        return
    logging.shutdown()  # registered before
    # Beside: a pipe that nobody reads, or a file that another thread waits for, must not keep the process.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECS)
    os._exit(_code)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames before the script's first one, which the interpreter would not have."""
    found = trace
    while found is not None and found.tb_frame.f_globals is not vars(sys.modules["__main__"]):
        found = found.tb_next
    return found or trace


def _is_of_argparse(ended: SystemExit) -> bool:
    """Each attempt has the same arguments, and a script ends by this before any of them matters."""
    trace = ended.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == argparse.__name__


def _flush() -> None:
    """Write out what scripts and libraries have not, in files that they have left open."""
    # A look at an object writes to its page: a fork would copy its server, which is half a second of a restart.
    if not is_forked:
        gc.unfreeze()  # such a file may be frozen, as stdout is under a runner
    # By its type alone: an object may warn when it is asked for its class.
    objects = gc.get_objects()
    # In two passes: a process that has imported a framework has a million of them, of some thousand types.
    kinds = {kind for kind in {*map(type, objects)} if issubclass(kind, io.TextIOBase | io.BufferedIOBase)}
    found = [one for one in objects if type(one) in kinds]
    files = [*found, sys.__stdout__, sys.__stderr__]
    for file in sorted(files, key=lambda file: isinstance(file, io.BufferedIOBase)):  # a text is on top of its buffer
        with suppress(Exception):  # it may be detached, in use by a thread, or of a class of the script's own
            if not file.closed and file.writable():
                file.flush()
    ctypes.CDLL(None).fflush(None)  # files of C, of a library of the script


def _exit_code(code: int | str | None) -> int:
    if isinstance(code, int | None):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def stand_in(framework: str) -> None:
    """Call what ``FTCKPT_DEVICE=MODULE:NAME`` names, with the framework: it replaces CUDA in this process.

    Raises:
        ConfigError: there is none of that name.
    """
    device = os.environ.get("FTCKPT_DEVICE", "")
    if not device:
        return
    module, _, name = device.partition(":")
    try:
        install = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"FTCKPT_DEVICE: {device!r} is not MODULE:NAME of a stand-in: {error}") from None
    install(framework)


def option(flag: str, words: Sequence[str]) -> str:
    """The value that a command line gives a flag of somebody else, the last one; empty where it gives none."""
    found = ""
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else after
    return found


_COMMUNICATE = frozenset({
    "torch.distributed._functional_collectives",
    "torch.distributed.distributed_c10d",
    "torch.distributed.nn.functional",
    "torch.distributed.utils",
    "torch.nn.parallel.distributed",
    "megatron.core.pipeline_parallel.p2p_communication",
})  # fmt: skip
"""Modules that call a backend of torch.distributed."""
_GROUP = "ftckpt.group"
"""A RuntimeError of this module reports a lost rank, whatever raises it."""


def is_of_another_rank(error: BaseException) -> bool:
    """Whether ``error`` reports that a connection between ranks failed.

    That is an error type of torch.distributed, a RuntimeError that compiled code raised in a module that communicates
    (gloo has no type of its own), or an error of ftckpt that names one of these as its cause. Its text does not
    count: a failed upload of the script's own says "reset by peer" as a lost rank does.
    """
    if type(error).__module__.startswith("ftckpt.") and error.__cause__ is not None:
        return is_of_another_rank(error.__cause__)
    # Not imported: a process that has not loaded it cannot have raised its errors.
    if isinstance(error, getattr(sys.modules.get("torch.distributed"), "DistError", ())):
        return True
    return isinstance(error, RuntimeError) and _is_of_connection(error)


def _is_of_connection(error: RuntimeError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__")
    if trace is None or module not in _COMMUNICATE:
        return module == _GROUP
    # A statement ``raise`` of such a module is about wrong arguments.
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] != "RAISE_VARARGS"
