"""``ftckpt init``: what it writes can be started, and nothing of the user's is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ftckpt.cli import init
from ftckpt.cli.main import main
from tests.support.errors import lacks
from tests.support.repository import ROOT, is_golden


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kit", init.KITS)
def test_a_kit_has_all_that_its_files_and_commands_name(
    kit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", kit, str(tmp_path / "here")]) == 0
    written = files(tmp_path / "here")
    shown = capsys.readouterr().out
    assert {f"{tmp_path}/here/{name}" for name in written} < set(shown.splitlines())
    if kit == "patches":
        is_golden("init", shown, folder=tmp_path)
    for command in re.findall(r"^  (.*)", shown, re.M):
        named = [word for word in command.split() if word.startswith(f"{tmp_path}/here/launch")]
        assert all(Path(word).is_file() for word in named), command
    for name in written:
        assert (tmp_path / "here" / name).read_bytes() == (ROOT / name).read_bytes()
        assert os.access(tmp_path / "here" / name, os.X_OK) == os.access(ROOT / name, os.X_OK)
        text = (ROOT / name).read_text()
        sourced = re.findall(r'^source "\$(?:HERE|ROOT)/(?:launch/)?(\w+\.sh)"', text, re.M)
        imported = re.findall(r"^(?:from|import) (text_data|deepspeed_model)\b", text, re.M)
        assert {f"launch/{one}" for one in sourced} | {f"launch/{one}.py" for one in imported} <= written, name


def test_files_of_the_user_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "job.sh").write_text("mine")
    assert main(["init", "torchrun", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert "launch/job.sh" in shown.err and "--force" in shown.err and not shown.out
    assert files(tmp_path) == {"launch/job.sh"} and (tmp_path / "launch" / "job.sh").read_text() == "mine"
    assert main(["init", "torchrun", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "launch" / "job.sh").read_bytes() == (ROOT / "launch" / "job.sh").read_bytes()
    capsys.readouterr()
    assert main(["init", "torchrun", str(tmp_path)]) == 0  # nothing of it differs
    assert not lacks(capsys.readouterr().out, "job.sh")


@pytest.mark.parametrize("at", ["to", "to/configs", "to/launch"])
@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_file_in_the_way_is_named_and_nothing_is_left(
    at: str, force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / at).parent.mkdir(exist_ok=True)
    (tmp_path / at).write_text("mine")
    assert main(["init", "torchrun", str(tmp_path / "to"), *force]) == 2
    assert at in capsys.readouterr().err
    assert [path for path in tmp_path.rglob("*") if path.name != "to"] == [tmp_path / at] * (at != "to")
    assert (tmp_path / at).read_text() == "mine"
