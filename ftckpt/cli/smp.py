"""``ftckpt smp``: runs a node's SMP in the foreground (a Slurm step, a container), queries it, or stops it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ftckpt.cli.answers import Answer, Lines
from ftckpt.errors import SmpError
from ftckpt.memory.directory import end_smp, job_node_path
from ftckpt.smp.__main__ import add_arguments, alive
from ftckpt.smp.client import SmpClient, environment

# An SMP that is hashing or sending stops at its next step: after seconds, on a busy node.
_END_SECS = 20.0


def add_smp(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    add_arguments(parser)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--status", action="store_true", help="show the state of the running SMP, as JSON")
    action.add_argument("--end", action="store_true", help="stop the running SMP; arenas stay")


def run_smp(arguments: argparse.Namespace) -> Lines:
    """Becomes the SMP, or queries or stops the running one. Raises SmpError."""
    node_dir = job_node_path(arguments.arena, arguments.job, arguments.node)
    if arguments.alive:
        yield Answer(None, alive(arguments))
    elif arguments.status:
        status = SmpClient(node_dir, arguments.arena, arguments.job, arguments.node).status()
        yield json.dumps(status, indent=2)
        yield Answer(status)
    elif not arguments.end:
        _become_smp(arguments)
    elif not end_smp(node_dir, _END_SECS):
        raise SmpError(f"the SMP of node {arguments.node} did not stop: busy, or in another container; stop it there")


def _become_smp(arguments: argparse.Namespace) -> None:
    """Replaces this process, which has loaded more than an SMP needs, by an SMP with the same pid."""
    command = [sys.executable, "-m", "ftckpt.smp", "--job", arguments.job, "--node", arguments.node]
    command += ["--arena", str(arguments.arena), "--idle-secs", str(arguments.idle_secs)]
    command += ["--stand-by"] * arguments.stand_by
    # exec discards buffered output.
    sys.stdout.flush()
    os.execve(command[0], command, environment())
