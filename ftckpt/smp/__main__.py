"""``python -m ftckpt.smp --job J [--node N] [--arena ROOT] [--detach]`` starts an SMP; ``--alive`` probes it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.config import Config, node_here
from ftckpt.errors import FtckptError, SettingSyntax, SmpError, settings_are_written
from ftckpt.smp import IDLE_SECS, MAX_SILENT_SECS, READY

if TYPE_CHECKING:
    from ftckpt.smp.daemon import Daemon

# Each try opens the lock file; ranks wait far longer for an SMP than this.
_STAND_BY_SECS = 0.5
_BUSY_STATUS = 3
"""Exit status of a starting SMP if another one serves."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of an SMP."""
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument(
        "--node", default=node_here(os.environ)[0],
        help="stable name of this machine (default: FTCKPT_NODE, Slurm's node name, or the host name: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--arena", type=Path, default=Path(Config().arena), help="tmpfs (default: %(default)s)")
    parser.add_argument(
        "--idle-secs", type=float, default=IDLE_SECS, metavar="SECS",
        help="time without a trainer after which it ends (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--stand-by", action="store_true", help="if another SMP serves, wait for its end, then serve")
    parser.add_argument(
        "--alive", action="store_true",
        help="only report by the exit status whether an SMP lives: 0, or 1 without a recent heartbeat",
    )  # fmt: skip


def serve(arguments: argparse.Namespace) -> None:
    """Run the SMP until it ends. A detached one ends its output with READY once it answers.

    Raises:
        SmpError: another one serves.
        ArenaError: the directory cannot be used.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: each of its threads allocates memory
    from ftckpt.smp.footprint import bound_process

    # Before the daemon starts threads: this sets their stack size.
    bound_process()
    daemon = _daemon(arguments)
    logging.getLogger("ftckpt").setLevel(logging.INFO)
    if arguments.detach:
        with suppress(OSError):  # the starter is gone
            os.write(1, READY)
        # Closes the starter's pipe. The log also receives the interpreter's own output, such as a fatal traceback.
        os.dup2(daemon.log.fd, 1)
        os.dup2(daemon.log.fd, 2)
    daemon.run()


def _daemon(arguments: argparse.Namespace) -> Daemon:
    from ftckpt.smp.daemon import Daemon

    told = False
    while True:
        try:
            # A trainer that starts an SMP has created the directory; if it is missing, the job has ended.
            makes = not arguments.detach
            return Daemon(arguments.arena, arguments.job, arguments.node, arguments.idle_secs, makes_directory=makes)
        except SmpError as error:
            if not arguments.stand_by:
                raise
            if not told:
                logging.getLogger("ftckpt").warning("standing by: %s", error)
            told = True
            time.sleep(_STAND_BY_SECS)


def alive(arguments: argparse.Namespace) -> int:
    """Exit status 0 if the node's SMP has a recent heartbeat; otherwise 1, and the reason on stderr. Sends no
    request: a healthy SMP on a busy node may answer late."""
    from ftckpt.memory.directory import SMP_LOCK_NAME, job_node_path
    from ftckpt.memory.heartbeat import Heartbeat
    from ftckpt.memory.locks import holder_of

    node_dir = job_node_path(arguments.arena, arguments.job, arguments.node)
    if holder_of(node_dir / SMP_LOCK_NAME) is None:
        problem = "has no SMP"
    elif (secs := Heartbeat.open(node_dir, None).smp_age_secs()) > MAX_SILENT_SECS:
        problem = f"has an SMP without a heartbeat for {secs:.0f} s"
    else:
        return 0
    print(f"ftckpt: job {arguments.job!r} on node {arguments.node!r} {problem}", file=sys.stderr)
    return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ftckpt.smp", description="snapshot management process")
    add_arguments(parser)
    parser.add_argument(
        "--detach", action="store_true", help="run in the background; its output ends when it answers"
    )
    arguments = parser.parse_args(argv)
    settings_are_written(SettingSyntax.FLAG)  # in messages; trainers translate them to their users' syntax
    if arguments.alive:
        return alive(arguments)
    if arguments.detach:
        _leave_starter()
    else:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        serve(arguments)
    except (FtckptError, OSError) as error:
        print(f"ftckpt: {error}", file=sys.stderr)
        return _BUSY_STATUS if isinstance(error, SmpError) else 2
    return 0


def _leave_starter() -> None:
    """Continue in a child of this process, which ends: the SMP is no child of the trainer that started it.

    The starter has begun a session: torchrun's kill of a worker group does not reach it. The child is not its leader,
    and so can never acquire a terminal.
    """
    if os.fork():
        os._exit(0)
    # The inherited signal mask may block SIGTERM, which ends an SMP.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
