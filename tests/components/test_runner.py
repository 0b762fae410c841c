"""The runner: a wrong command line is one line on stderr and exit code 2; else the script runs as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.errors import lacks

ROOT = Path(__file__).parents[2]
USAGE = "torchrun ... -m ftckpt.megatron [-m] SCRIPT ARGS... [--ftckpt ...]"
SCRIPT = """
import json, sys
heavy = [name for name in ("torch", "megatron.core", "tests.support") if name in sys.modules]
print(json.dumps([__name__, sys.argv[1:], sys.path[0] == {folder!r}, heavy]))
import helper
{end}
"""


def run(*argv: str, device: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("FTCKPT_DEVICE", None)
    if device is not None:
        environment["FTCKPT_DEVICE"] = device
    return subprocess.run(
        [sys.executable, "-m", "ftckpt.megatron", *argv],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def script(folder: Path, end: str = "") -> str:
    (folder / "helper.py").write_text("")
    (folder / "train.py").write_text(SCRIPT.format(folder=str(folder), end=end))
    return str(folder / "train.py")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ftckpt", "--ftckpt-intervall", "2"], "--ftckpt-intervall --ftckpt-interval"),
        (["--ftckpt", "--ftckpt-interval", "often"], "--ftckpt-interval often"),
        (["--ftckpt", "--ftckpt-slots", "1"], "--ftckpt-slots 1 2 0"),
        (["--ftckpt-interval", "2"], "--ftckpt --ftckpt-*"),
    ],
)
def test_a_wrong_flag_is_one_line_and_code_2(tmp_path: Path, flags: list[str], message: str) -> None:
    ended = run(script(tmp_path), "--lr", "1", *flags)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert not lacks(ended.stderr, "ftckpt", *message.split())


@pytest.mark.parametrize("name", ["no/such/train.py", "--lr", "."])
def test_a_script_that_does_not_exist_is_named_with_the_usage(name: str) -> None:
    ended = run(name, "--ftckpt")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert not lacks(ended.stderr, "ftckpt", f"{name!r}", str(USAGE))


@pytest.mark.parametrize("device", ["cpu", "tests.standin", "tests.standin:gpu", ":cpu"])
def test_a_stand_in_that_is_none_is_named(tmp_path: Path, device: str) -> None:
    ended = run(script(tmp_path), "--ftckpt", device=device)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert not lacks(ended.stderr, "ftckpt", "FTCKPT_DEVICE", f"{device!r}")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("sys.exit()", 0), ("1 / 0", 1)])
def test_the_scripts_own_exit_code_is_kept(tmp_path: Path, end: str, code: int) -> None:
    ended = run(script(tmp_path, end))
    assert ended.returncode == code
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1)


def test_an_error_of_ftckpt_inside_the_script_is_one_line(tmp_path: Path) -> None:
    ended = run(script(tmp_path, "from ftckpt.errors import LostError\nraise LostError('iteration 4 is lost')"))
    assert (ended.returncode, ended.stderr) == (2, "ftckpt: iteration 4 is lost\n")


def test_the_stand_in_is_installed_before_the_script(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    end = "import torch\nprint(torch.cuda.is_available(), torch.zeros(1, device='cuda').device.type)"
    # What the imports have made is no matter of the collector's, which looks at the script's own as ever.
    end += "\nimport gc\nprint(gc.get_freeze_count() > 10**5, gc.isenabled())"
    ended = run(script(tmp_path, end), device="tests.standin:cpu")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[1:] == ["True cpu", "True True"]


def test_a_script_that_attaches_nothing_is_told_so_at_its_end(tmp_path: Path) -> None:
    """Its user believes that snapshots were taken."""
    told = "--ftckpt was given but nothing was attached, so no snapshot was taken"
    ended = run(script(tmp_path), "--ftckpt", "--ftckpt-job", "mine")
    assert ended.returncode == 0 and told in ended.stderr
    assert told not in run(script(tmp_path)).stderr
    failed = run(script(tmp_path, "raise SystemExit(3)"), "--ftckpt", "--ftckpt-job", "mine")
    assert failed.returncode == 3 and told not in failed.stderr
