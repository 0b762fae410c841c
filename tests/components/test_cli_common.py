"""What all commands have in common: help, JSON, progress, colour, versions, and the end by Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from ftckpt.cli import answers
from ftckpt.cli import main as cli
from ftckpt.cli.answers import Answer, ProgressLine, alarming
from ftckpt.cli.main import COMMANDS, main
from ftckpt.frameworks.versions import TESTED, TRIED
from tests.support.repository import ROOT, is_golden

EXAMPLES = [(name, example) for name, command in COMMANDS.items() for example in command.examples]


def test_the_help_has_groups_with_an_example_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    is_golden("help", out)
    for name, command in COMMANDS.items():
        assert (f"\n  {name} " in out) != command.is_hidden, name


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_each_command_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and all(example in out for example in COMMANDS[name].examples)
    assert "--json" in out


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_each_example_is_a_command_line_that_the_command_takes(
    name: str, example: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"ftckpt.cli.{cli._MODULES.get(name, name)}")
    monkeypatch.setattr(module, f"run_{name}", lambda arguments: 3 if name == "run" else iter([Answer({}, 3)]))
    words = shlex.split(example)
    assert main(words[words.index("ftckpt") + 1 :]) == 3
    assert not capsys.readouterr().err


def test_what_is_no_command_is_named_with_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["statis"]) == 2
    assert "status" in capsys.readouterr().err


def test_versions_are_those_found_and_whether_they_were_tested(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"torch": "2.13.0", "megatron-core": f"{TESTED['megatron-core'][-1]}+abc", "deepspeed": "0.1"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(cli.metadata, "version", version)
    assert main(["--version"]) == 0
    first, torch, megatron, deepspeed = capsys.readouterr().out.splitlines()
    assert first.startswith("ftckpt ") and torch == "torch 2.13.0: tested"
    assert megatron.endswith(": tested") and "not tested" in deepspeed and TESTED["DeepSpeed"][0] in deepspeed


def test_the_pages_name_the_same_releases() -> None:
    launch, trainers = (ROOT / "launch/README.md").read_text(), (ROOT / "ftckpt/integrations.md").read_text()
    table = launch.partition("<!-- environments -->")[2].partition("<!-- end of")[0]
    torch = {release for row in table.splitlines()[3:] for release in row.split("|")[2].strip().split(", ")}
    assert torch == set(TRIED["torch"])
    rows = [[cell.strip() for cell in row.split("|")] for row in trainers.splitlines() if row.startswith("| ")]
    releases = {re.sub(r"\[(.*)\].*", r"\1", row[1]).split()[0].lower(): [row[3]] for row in rows[1:]}
    assert releases == {name: of for name, of in TRIED.items() if name != "torch"}


SLOW = """
import time
print("importing", flush=True)
time.sleep(60)
"""


INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
runpy.run_module("ftckpt", run_name="__main__")
"""


def test_an_interrupt_while_torch_is_imported_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", INTERRUPTIBLE, "check", "--device"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None and running.stdout.readline() == "importing\n"
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130 and err == "ftckpt: interrupted\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_red_is_for_terminals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert alarming("bad", io.StringIO()) == "bad"
    assert alarming("bad", Terminal()) == "\x1b[31mbad\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert alarming("bad", Terminal()) == "bad"


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_progress_has_bytes_and_is_rare_in_logs(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(answers.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys, "stderr", stream)
    with ProgressLine("reading", 100 << 20) as progress:
        for _ in range(24):
            now[0] += 0.5
            progress(1 << 20)
    shown = stream.getvalue()
    if stream.isatty():
        assert shown.count("\r") == 25 and shown.endswith("\r\x1b[K") and "\n" not in shown
    else:
        assert shown == "ftckpt: reading: 20.0 MiB of 100.0 MiB, 2.0 MiB/s, 10 s\n"


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> Any:
        yield "a line"
        yield Answer({"a": 1}, 1)

    monkeypatch.setattr(import_module("ftckpt.cli.clean"), "run_clean", run)
    assert main(["clean", "job"]) == 1 and capsys.readouterr().out == "a line\n"
    assert main(["clean", "job", "--json"]) == 1 and json.loads(capsys.readouterr().out) == {"a": 1}
