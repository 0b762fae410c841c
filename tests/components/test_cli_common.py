"""What all commands have in common: help, JSON, progress, colour, versions, and the end by Ctrl-C."""

from __future__ import annotations

import json
import re
import shlex
from importlib import import_module, metadata
from typing import Any

import pytest

from ftckpt.cli import main as cli
from ftckpt.cli.answers import Answer
from ftckpt.cli.main import COMMANDS, main
from ftckpt.frameworks.versions import TESTED, TRIED
from tests.support.repository import ROOT, is_golden

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
    assert first.startswith("ftckpt ") and torch == "torch 2.13.0: tested"
    assert megatron.endswith(": tested") and "not tested" in deepspeed and TESTED["DeepSpeed"][0] in deepspeed


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any) -> Any:
        yield "a line"
        yield Answer({"a": 1}, 1)

    monkeypatch.setattr(import_module("ftckpt.cli.clean"), "run_clean", run)
    assert main(["clean", "job"]) == 1 and capsys.readouterr().out == "a line\n"
    assert main(["clean", "job", "--json"]) == 1 and json.loads(capsys.readouterr().out) == {"a": 1}


def test_the_pages_name_the_same_releases() -> None:
    launch, trainers = (ROOT / "launch/README.md").read_text(), (ROOT / "ftckpt/integrations.md").read_text()
    table = launch.partition("<!-- environments -->")[2].partition("<!-- end of")[0]
    torch = {release for row in table.splitlines()[3:] for release in row.split("|")[2].strip().split(", ")}
    assert torch == set(TRIED["torch"])
    rows = [[cell.strip() for cell in row.split("|")] for row in trainers.splitlines() if row.startswith("| ")]
    releases = {re.sub(r"\[(.*)\].*", r"\1", row[1]).split()[0].lower(): [row[3]] for row in rows[1:]}
    assert releases == {name: of for name, of in TRIED.items() if name != "torch"}


def test_the_help_has_groups_with_an_example_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    is_golden("help", out)
    for name, command in COMMANDS.items():
        assert (f"\n  {name} " in out) != command.is_hidden, name
