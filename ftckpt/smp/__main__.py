"""``python -m ftckpt.smp --job J [--node N] [--arena ROOT] [--detach]`` starts an SMP; ``--alive`` probes it."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftckpt.config import Config, node_here
from ftckpt.errors import FtckptError, SettingSyntax, SmpError, settings_are_written
from ftckpt.smp import BUSY_STATUS, IDLE_SECS, MAX_SILENT_SECS

if TYPE_CHECKING:
    from ftckpt.smp.daemon import Daemon

_STAND_BY_SECS = 0.5
_READY = b"ready\n"
_BUSY = b"busy "


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


def serve(arguments: argparse.Namespace, ready: Callable[[], None]) -> int:
    """Run the SMP until it ends; ``ready`` is called once it answers.

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
        # The log also receives the interpreter's own output, such as a fatal traceback.
        os.dup2(daemon.log.fd, 1)
        os.dup2(daemon.log.fd, 2)
    ready()
    daemon.run()
    return 0


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
    elif (secs := Heartbeat.open(node_dir, None).smp()[1]) > MAX_SILENT_SECS:
        problem = f"has an SMP without a heartbeat for {secs:.0f} s"
    else:
        return 0
    print(f"ftckpt: job {arguments.job!r} on node {arguments.node!r} {problem}", file=sys.stderr)
    return 1


def detached(arguments: argparse.Namespace) -> int:
    """Start an SMP as a daemon in its own session; returns when it answers.

    Exit status: 0 it answers, 3 another one serves, 1 it failed; the reason is on stderr.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        _become_detached(arguments, writer)  # does not return
    # The read below ends when the last writer closes: this process must not be a writer.
    os.close(writer)
    # The first child ends as soon as it has forked the SMP.
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as pipe:
        message = pipe.read()
    if message == _READY:
        return 0
    print(message.removeprefix(_BUSY).decode("utf-8", "replace") or "it ended before it was ready", file=sys.stderr)
    return BUSY_STATUS if message.startswith(_BUSY) else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ftckpt.smp", description="snapshot management process")
    add_arguments(parser)
    parser.add_argument("--detach", action="store_true", help="run in the background; return when it answers")
    arguments = parser.parse_args(argv)
    settings_are_written(SettingSyntax.FLAG)  # in messages; trainers translate them to their users' syntax
    if arguments.alive:
        return alive(arguments)
    return detached(arguments) if arguments.detach else foreground(arguments)


def foreground(arguments: argparse.Namespace) -> int:
    """Run the SMP in this process, logging to the terminal; returns the exit status."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        return serve(arguments, lambda: None)
    except (FtckptError, OSError) as error:
        print(f"ftckpt: {error}", file=sys.stderr)
        return BUSY_STATUS if isinstance(error, SmpError) else 2


def _become_detached(arguments: argparse.Namespace, writer: int) -> None:
    """Turn the child of ``detached`` into the SMP; never returns."""
    status, reports = 1, [writer]

    def report(message: bytes) -> None:
        """Send the outcome of the start to the process that waits for it; later messages are dropped."""
        while reports:
            fd = reports.pop()
            with suppress(OSError):  # the starter is gone
                os.write(fd, message)
            os.close(fd)

    try:
        # Its own session protects it from torchrun's kill of a worker group. After the second fork it is not the
        # session's leader, and so can never acquire a terminal.
        os.setsid()
        if os.fork():
            os._exit(0)
        # The inherited signal mask may block SIGTERM, which ends an SMP.
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # The starter's directory could not be unmounted while the SMP lives.
        os.chdir("/")
        os.umask(0o077)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        # The trainer's sockets, device files and locks would stay open as long as the SMP lives.
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        status = serve(arguments, lambda: report(_READY))
    except BaseException as error:  # noqa: BLE001 - the process ends; its starter or the log gets the reason
        busy = _BUSY if isinstance(error, SmpError) else b""
        report(busy + f"{type(error).__name__}: {error}".encode())
        traceback.print_exc()
    finally:
        # Not sys.exit: the fork copied the starter's exit handlers and buffers.
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
