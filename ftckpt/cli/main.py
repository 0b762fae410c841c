"""The entry point of ``ftckpt``: parses the command line and runs one command.

Exit status: 0 success; 1 corrupt data, or a negative answer; 2 the command failed; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import ftckpt
from ftckpt.cli.check import add_check
from ftckpt.cli.clean import add_clean
from ftckpt.cli.convert import add_convert
from ftckpt.cli.ended import add_ended
from ftckpt.cli.init import add_init
from ftckpt.cli.inspect import add_inspect
from ftckpt.cli.plan import add_plan
from ftckpt.cli.report import add_report
from ftckpt.cli.run import add_run
from ftckpt.cli.save import add_save
from ftckpt.cli.smp import add_smp
from ftckpt.cli.status import add_ls, add_status
from ftckpt.cli.stored import add_list, add_pin, add_unpin, add_verify
from ftckpt.errors import ConfigError, FtckptError, SettingSyntax, settings_are_written

_COMMANDS = (
    *(add_init, add_check, add_status, add_ls, add_inspect, add_clean, add_report, add_plan, add_smp),
    *(add_convert, add_save, add_list, add_verify, add_pin, add_unpin, add_ended, add_run),
)
"""In the order of the help."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        # An abbreviation in a script could become ambiguous, or mean another option, in a later version.
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raises ConfigError for arguments that the command does not have."""
        word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
        close = difflib.get_close_matches(word, self._option_string_actions, n=1) if word.startswith("-") else []
        self.error(
            f"{word}: {self.prog.split()[-1]} takes no such argument"
            + "".join(f"; did you mean {one}?" for one in close)
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of the process) and returns its exit status."""
    parser = _Parser(prog="ftckpt", description="in-memory snapshots of training state")
    parser.add_argument("--version", action="version", version=f"ftckpt {ftckpt.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for add in _COMMANDS:
        add(commands)
    settings_are_written(SettingSyntax.FLAG)
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            commands.choices[arguments.command].refuse(unknown)
        run: Callable[[argparse.Namespace], int] = arguments.run
        status = run(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader closed the pipe, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:  # its arguments are a command's explanations
        print("; ".join(["ftckpt: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 128 + signal.SIGINT
    except (FtckptError, OSError) as error:
        # One line, for the logs of launchers.
        print(f"ftckpt: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
