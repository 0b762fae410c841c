"""What the launcher gives a job: its names, and a process in which a runner runs the training script.

Names become parts of file names and of socket addresses, so that only a safe alphabet is let through; a name is never
changed to fit, because two jobs could then end up with one name.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ftckpt.config import NAME_RULE, add_flags, is_name
from ftckpt.errors import ConfigError, FtckptError, LaunchError

# Present in every process that torchrun, mpirun, srun or a hand-written launcher has started.
_LAUNCHER_VARS = (
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
)


def job_name(configured: str | None, env: Mapping[str, str]) -> str:
    """The job's name: every process of the job gets the same, and so does its next start.

    What the user says comes first: ``configured`` (a flag, the JSON section), then FTCKPT_JOB. Otherwise the
    launchers are asked: torchrun for its run id (``--rdzv-id``; its default ``none`` is no name), then Slurm, which
    makes ``slurm-<SLURM_JOB_ID>``. A process that no launcher has started belongs to ``default``. ``--standalone``
    draws a new run id at each start of torchrun: a job that shall find its snapshots after torchrun itself has
    ended needs a name from the user.

    :raises ConfigError: the user's name has other characters than ``[A-Za-z0-9._-]`` or is too long.
    :raises LaunchError: the launcher's name has, or a launcher is at work and gives none.
    """
    if configured:
        return _checked(configured, "the configured job name", ConfigError)
    if env.get("FTCKPT_JOB"):
        return _checked(env["FTCKPT_JOB"], "FTCKPT_JOB", ConfigError)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    if run_id and run_id != "none":
        return _checked(run_id, "torchrun's run id (--rdzv-id)", LaunchError)
    slurm_job = env.get("SLURM_JOB_ID", "")
    if slurm_job:
        return _checked(f"slurm-{slurm_job}", "the name made from SLURM_JOB_ID", LaunchError)
    if any(var in env for var in _LAUNCHER_VARS):
        raise LaunchError(
            "this job has no name: give torchrun --rdzv-id NAME, configure ftckpt's job name, or set FTCKPT_JOB"
        )
    return "default"


def node_name(configured: str | None, env: Mapping[str, str]) -> str:
    """The name of this failure domain, the same whatever rank torchrun gives the node after a restart.

    In this order: ``configured``, FTCKPT_NODE, Slurm's name of the node (SLURMD_NODENAME), the host name.
    torchrun has none to offer: its GROUP_RANK is dealt anew at each rendezvous.

    :raises ConfigError: the name has other characters than ``[A-Za-z0-9._-]`` or is longer than 64.
    """
    if configured:
        return _checked(configured, "the configured node name", ConfigError)
    for var in ("FTCKPT_NODE", "SLURMD_NODENAME"):
        if env.get(var):
            return _checked(env[var], var, ConfigError)
    return _checked(socket.gethostname(), "the host name (FTCKPT_NODE overrides it)", ConfigError)


def _checked(name: str, origin: str, error: type[ConfigError] | type[LaunchError]) -> str:
    if not is_name(name):
        raise error(f"{origin} is {name!r}: {NAME_RULE}")
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


def main(argv: Sequence[str], program: str, usage: str, body: Callable[[Sequence[str]], int]) -> int:
    """The runner of a framework: the exit code of ``body``.

    Errors of ftckpt end in one line on stderr and exit code 2; anything else is the script's own.
    """
    if not argv or argv[0] in ("-h", "--help"):
        add_flags(argparse.ArgumentParser(prog=program, usage=usage, add_help=False)).print_help()
        return 0 if argv else 2
    try:
        return body(argv)
    except FtckptError as error:
        print_error(error)
        return 2


def print_error(error: FtckptError) -> None:
    """One line on stderr, as all that a user sees of an error which ends a process."""
    print(f"ftckpt: {error}", file=sys.stderr, flush=True)


def script_path(name: str, usage: str) -> Path:
    """The script that is to run.

    Raises:
        ConfigError: there is none of that name.
    """
    path = Path(name)
    if name.startswith("-") or not path.is_file():
        raise ConfigError(f"script {name!r} does not exist; usage: {usage}")
    return path.resolve()


def wants_stand_in() -> bool:
    """Whether ``FTCKPT_DEVICE`` names the stand-in that trains on a machine without a GPU.

    Raises:
        ConfigError: it is neither empty nor one of ``cpu``, ``cuda``.
    """
    device = os.environ.get("FTCKPT_DEVICE", "")
    if device not in ("", "cuda", "cpu"):
        raise ConfigError(f"FTCKPT_DEVICE: {device!r} is not one of cpu, cuda")
    return device == "cpu"


def prepare(script: Path, arguments: Sequence[str]) -> None:
    """Make ``sys.argv`` and the place of imports those of a script that was started by itself."""
    sys.path[0] = str(script.parent)  # where ``python -m`` has put the current directory
    sys.argv = [str(script), *arguments]


def run(script: Path, ended_well: Callable[[], None]) -> int:
    """Run ``script`` as ``__main__``, then call ``ended_well``; what the script raises goes on to the caller."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        # A script that failed, or was told to stop, keeps its snapshots for the next start.
        if ended.code not in (None, 0):
            raise
    ended_well()
    return 0
