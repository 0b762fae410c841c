"""The JSON section: the names and checks of Config, read as DeepSpeed reads it, at one with the runner's flags."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftckpt.config import Config
from ftckpt.deepspeed import section
from ftckpt.errors import ConfigError
from tests.support.errors import raises

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_flags() -> Iterator[None]:
    section.configure({})
    yield
    section.configure({})


def initialize(
    args: Any = None, model: Any = None, optimizer: Any = None, config: Any = None, config_params: Any = None
) -> None:
    """Stands for deepspeed.initialize, whose signature is what counts."""


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (True, ["ftckpt", "bool"]),
        ([], ["ftckpt", "list"]),
        ({"enabled": True, "intervall": 2}, ["intervall", "interval"]),
        ({"enabled": "yes"}, ['"enabled"', "yes"]),
        ({"enabled": True, "interval": "2"}, ['"interval"', "2"]),
        ({"enabled": True, "slots": 1}, ['"slots"', "1", "2"]),
        ({"interval": 2}, ['"enabled"']),
        ({"enabled": True, "layouts": ["tp2", "tp1"]}, ['"layouts"']),
    ],
)
def test_a_wrong_section_is_one_line_that_names_the_field(given: Any, words: list[str]) -> None:
    with raises(ConfigError, *words):
        section.merged(given)


def test_flags_and_section_are_merged() -> None:
    section.configure({"enabled": True, "interval": 2})
    assert section.merged(None) == Config(enabled=True, interval=2)
    assert section.merged({"slots": 3}) == Config(enabled=True, interval=2, slots=3)
    assert section.merged({"enabled": False}) == Config(), "of an engine that is not to be saved"
    assert section.merged({"enabled": True, "interval": 2, "slots": 3}) == Config(enabled=True, interval=2, slots=3)
    with pytest.raises(ConfigError):
        section.merged({"enabled": True, "interval": 3})


JSON = {"train_batch_size": 4, "ftckpt": {"enabled": True, "interval": 7}}


def test_the_section_is_found_wherever_deepspeed_looks(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    path = tmp_path / "ds.json"
    path.write_text("# hjson has comments\n" + json.dumps(JSON))
    coded = base64.urlsafe_b64encode(json.dumps(JSON).encode()).decode()
    for config in (JSON, str(path), coded):
        for args, kwargs in (
            ((), {"config": config}),
            ((), {"config_params": config}),
            ((), {"args": Namespace(deepspeed_config=config)}),
            ((Namespace(deepspeed_config=None), None, None, config), {}),
            ((), {"args": Namespace(deepscale_config=config)}),
        ):
            assert section.find(initialize, args, kwargs) == {"enabled": True, "interval": 7}


DOOR = """
import sys
import ftckpt.deepspeed
assert not {"deepspeed", "torch"} & set(sys.modules)
ftckpt.deepspeed.remove()
assert not any("ftckpt" in type(finder).__module__ for finder in sys.meta_path)
import deepspeed
assert not hasattr(deepspeed.initialize, "__wrapped__")
from ftckpt.deepspeed import active_engine, initialize
initialize.install()
wrapped = deepspeed.initialize
assert wrapped.__wrapped__
initialize.install()
assert deepspeed.initialize is wrapped
ftckpt.deepspeed.remove()
assert deepspeed.initialize is wrapped.__wrapped__
assert not [name for name in sys.modules if name in ("ftckpt.session.checkpointer", "ftckpt.deepspeed.session")]
"""
LATER = """
import sys
import ftckpt.deepspeed
from deepspeed import initialize
import deepspeed
assert initialize is deepspeed.initialize and initialize.__wrapped__
assert "exec_module" not in vars(deepspeed.__spec__.loader)
"""


@pytest.mark.parametrize("code", [DOOR, LATER], ids=["removed and installed again", "deepspeed comes later"])
def test_the_door_wraps_one_function_and_remove_puts_it_back(code: str) -> None:
    pytest.importorskip("deepspeed")
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr


SCRIPT = """
import json, sys
print(json.dumps([__name__, sys.argv[1:], sys.path[0] == {folder!r}, "deepspeed" in sys.modules]))
{end}
"""


def run(folder: Path, *argv: str, end: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The runner on a script; ``SCRIPT`` among the arguments stands for its path."""
    script = folder / "train.py"
    script.write_text(SCRIPT.format(folder=str(folder), end=end))
    words = [str(script) if word == "SCRIPT" else word for word in argv]
    return subprocess.run(
        [sys.executable, "-m", "ftckpt.deepspeed", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FTCKPT_DEVICE": "", **environment},
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "seen", "end", "code"),
    [
        (["SCRIPT", "--lr", "1", "--ftckpt", "--ftckpt-interval=2"], ["--lr", "1"], "sys.exit(7)", 7),
        (["--local_rank=3", "SCRIPT", "--lr", "1"], ["--local_rank=3", "--lr", "1"], "1 / 0", 1),
    ],
)
def test_the_runner_hands_the_scripts_arguments_and_its_exit_code_on(
    tmp_path: Path, argv: list[str], seen: list[str], end: str, code: int
) -> None:
    ended = run(tmp_path, *argv, end=end)
    assert ended.returncode == code, ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1)
    assert json.loads(ended.stdout) == ["__main__", seen, True, False]


WRONG = """
import deepspeed, torch
config = {"train_batch_size": 1, "ftckpt": {"enabled": True, "slot": 3}}
deepspeed.initialize(model=torch.nn.Linear(1, 1), config=config)
"""


def test_the_name_of_the_job_is_read_from_the_json_that_a_flag_names(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"ftckpt": {"enabled": true, "job": "one"}}')
    assert section.foreseen(["--deepspeed_config", str(path)]).job == "one"
    assert section.foreseen(["--x"]).job == section.foreseen(["--deepspeed_config"]).job == ""
    assert section.foreseen([f"--deepspeed_config={tmp_path / 'none'}"]).job == ""
    for wrong in ("{", "[]", '{"ftckpt": 3}', '{"ftckpt": {"job": "one"}}'):
        path.write_text(wrong)
        assert section.foreseen(["--deepspeed_config", str(path)]).job == ""
