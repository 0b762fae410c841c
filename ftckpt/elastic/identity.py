"""Who am I: the names of the job and of the node, the same before and after a restart.

Both become parts of file names and of socket addresses, so that only a safe alphabet is let through; a name
is never changed to fit, because two jobs could then end up with one name.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from ftckpt.errors import ConfigError, LaunchError

_NAME = re.compile(r"(?=.*[A-Za-z0-9])[A-Za-z0-9._-]{1,64}")

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
    if not _NAME.fullmatch(name):
        raise error(f"{origin} is {name!r}: use 1 to 64 of A-Z a-z 0-9 . _ - with a letter or digit among them")
    return name
