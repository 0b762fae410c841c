"""The entry point of ``ftckpt``: parses the command line and runs one command.

Exit status: 0 success; 1 corrupt data, or a negative answer; 2 the command failed; 130 interrupted.

A command is a line of ``_HELP``. Its module, which is imported only when the command runs, has ``add_NAME``, which
adds its arguments to a parser, and ``run_NAME``, a generator of lines and an ``Answer``.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module, metadata
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from ftckpt.errors import ConfigError, FtckptError, SettingSyntax, settings_are_written

if TYPE_CHECKING:
    from ftckpt.cli.answers import Lines


_HELP = """
start
  init     write launch scripts and configurations to edit
    ftckpt init torchrun my-job
    ftckpt init slurm my-job --force
  check    test whether machines meet a job's requirements; launch it like the job
    ftckpt check --host
    ftckpt check --node-memory 400GiB
    torchrun --nproc-per-node 8 -m ftckpt check
  plan     show what a job of a given size survives and costs, and its flags
    ftckpt plan --model llama3-70b --cluster dgx-h100 --nodes 16 --tp 8 --pp 4
    ftckpt plan --params 34b --gpus-per-node 8 --nodes 8 --zero 3 --node-memory 512GiB
  run      launch a job with torchrun's own arguments; restarts import nothing
    ftckpt run --nproc-per-node 8 --max-restarts 20 --rdzv-id my-run train.py --ftckpt
watch
  status   show a job's snapshots on all nodes, and which one a restart takes
    ftckpt status
    ftckpt status my-run --watch 5
  jobs     list the jobs that have memory on this machine
    ftckpt jobs
  report   write a page about a run from its event logs
    ftckpt report runs/my-run
    ftckpt report runs/my-run --iteration 1200
storage
  list     list snapshots on storage, or in memory
    ftckpt list /checkpoints/my-run
    ftckpt list my-run
  verify   read every byte of snapshots and compare checksums
    ftckpt verify /checkpoints/my-run
    ftckpt verify s3://bucket/my-run --iteration 1200
  pin      keep a checkpoint: no job removes or replaces it
    ftckpt pin /checkpoints/my-run 1200
    ftckpt pin /checkpoints/my-run/iter_0001200 --remove
  save     flush the newest snapshot of a job whose ranks have ended, on all nodes at once
    ftckpt save my-run
    ftckpt save my-run /checkpoints/final --to universal
  convert  convert a checkpoint to a format that any layout loads
    ftckpt convert /checkpoints/my-run universal-12
    ftckpt convert my-run weights --to safetensors --roles weight
tidy
  clean    delete this node's memory of a job that does not run
    ftckpt clean my-run
hidden
  ended    print the exit code and the reason if the run named by FTCKPT_RUN is over
"""
"""Groups, their commands, and examples of each; launch scripts call the hidden ones."""
_MODULES = {"jobs": "status", "list": "snapshots", "verify": "snapshots", "pin": "snapshots"}
"""Modules of commands that do not have their name."""


class Command(NamedTuple):
    """A command in the help."""

    group: str
    text: str
    examples: list[str]

    @property
    def is_hidden(self) -> bool:
        return self.group == "hidden"


def _commands() -> dict[str, Command]:
    found: dict[str, Command] = {}
    group = name = ""
    for line in _HELP.strip().splitlines():
        indent = len(line) - len(line.lstrip())
        if indent == 0:
            group = line
        elif indent == 2:
            name, text = line.split(maxsplit=1)
            found[name] = Command(group, text, [])
        else:
            found[name].examples.append(line.strip())
    return found


COMMANDS = _commands()


class _Parser(argparse.ArgumentParser):
    def __init__(self, name: str, command: Command) -> None:
        # An abbreviation in a script could become ambiguous, or mean another option, in a later version.
        super().__init__(
            prog=f"ftckpt {name}",
            description=f"{command.text[0].upper()}{command.text[1:]}.",
            epilog=_examples(command.examples) if command.examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses all of ``words``. Raises ConfigError."""
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            word = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
            known = self._option_string_actions if word.startswith("-") else ()
            self.error(f"{word}: {self.prog.split()[-1]} takes no such argument{_meant(word, known)}")
        return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: that of the process) and returns its exit status."""
    settings_are_written(SettingSyntax.FLAG)
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # the reader closed the pipe, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt as interrupt:  # its arguments are a command's explanations
        print("; ".join(["ftckpt: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        return 128 + signal.SIGINT
    except (FtckptError, OSError) as error:
        from ftckpt.cli.answers import warn

        warn(" ".join(str(error).split()))  # one line, for the logs of launchers
        return 2


def _run(words: list[str]) -> int:
    name = words[0] if words else ""
    if name in ("-h", "--help", "--version"):
        print("\n".join(_versions() if name == "--version" else _overview()))
        return 0
    if name not in COMMANDS:
        problem = f"{name}: no such command{_meant(name, COMMANDS)}" if name else "no command"
        raise ConfigError(f"{problem} (see ftckpt --help)")
    module = import_module(f"ftckpt.cli.{_MODULES.get(name, name)}")
    if name == "run":  # torchrun parses all arguments, --help among them
        return int(module.run_run(words[1:]))
    parser = _Parser(name, COMMANDS[name])
    getattr(module, f"add_{name}")(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse(words[1:])
    return _print(getattr(module, f"run_{name}")(arguments), arguments.json)


def _print(lines: Lines, as_json: bool) -> int:
    """Prints lines as they come, or the JSON value, and returns the exit status."""
    status = 0
    for line in lines:
        if isinstance(line, str):
            if not as_json:
                print(line, flush=True)
        else:
            status = line.status
            if as_json and line.value is not None:
                print(json.dumps(line.value, indent=2), flush=True)
    return status


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _examples(examples: Iterable[str]) -> str:
    return "\n".join(["examples:", *(f"  {line}" for line in examples)])


def _overview() -> Iterator[str]:
    shown = {name: command for name, command in COMMANDS.items() if not command.is_hidden}
    yield "usage: ftckpt COMMAND ...\n\nIn-memory snapshots of training state."
    for group in dict.fromkeys(command.group for command in shown.values()):
        yield f"\n{group}:"
        yield from (f"  {name:<9}{command.text}" for name, command in shown.items() if command.group == group)
    yield f"\n{_examples(command.examples[0] for command in shown.values())}"
    yield (
        "\nJOB is the name of a job that has memory on this machine, or, with a slash, a path of its memory."
        "\nSTORAGE is a directory or URL, as --ftckpt-persist has it, or one checkpoint in it."
    )
    yield "\n'ftckpt COMMAND --help' has the options of a command, 'ftckpt --version' the versions found."


def _versions() -> Iterator[str]:
    from ftckpt import __version__
    from ftckpt.frameworks.versions import TESTED, TRIED

    yield f"ftckpt {__version__}"
    for program, releases in {**TRIED, **TESTED}.items():
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(program.lower())
            verdict = "" if version.partition("+")[0] in releases else f"not tested; tested are {', '.join(releases)}"
            yield f"{program} {version}: {verdict or 'tested'}"


if __name__ == "__main__":
    sys.exit(main())
