"""What all commands have in common: help, JSON, progress, colour, versions, and the end by Ctrl-C."""

from __future__ import annotations

import json
import shlex
from importlib import import_module, metadata
from typing import Any

import pytest

from ftckpt.cli import main as cli
from ftckpt.cli.answers import Answer
from ftckpt.cli.main import COMMANDS, main
from ftckpt.frameworks.versions import TESTED

EXAMPLES = [(name, example) for name, command in COMMANDS.items() for example in command.examples]


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
    assert first.startswith("ftckpt ") and torch == "torch 2.13.0"
    assert megatron.endswith(": tested") and "not tested" in deepspeed and TESTED["DeepSpeed"][0] in deepspeed


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> Any:
        yield "a line"
        yield Answer({"a": 1}, 1)

    monkeypatch.setattr(import_module("ftckpt.cli.clean"), "run_clean", run)
    assert main(["clean", "job"]) == 1 and capsys.readouterr().out == "a line\n"
    assert main(["clean", "job", "--json"]) == 1 and json.loads(capsys.readouterr().out) == {"a": 1}
