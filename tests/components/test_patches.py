"""The source patches add calls of ours and nothing else; apply.sh puts them in whole or not at all, and out again."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftckpt.megatron
from ftckpt.config import Config
from ftckpt.megatron import callbacks
from ftckpt.megatron.job import ALIAS
from tests.support import patch_files
from tests.support.errors import lacks
from tests.support.patch_files import NAMES, PATCHES
from tests.support.plain import Recorder
from tests.support.processes import run_python

IMPORT = "from ftckpt.megatron import callbacks as ftckpt"
LINES = {"add_flags", "start", "restore", "set_rng", "log_sums", "boundary", "listen", "fence", "close"}
"""What a patch calls."""
NEEDED = (
    "bash", "sed", "awk", "cat", "mkdir", "mktemp", "rm", "basename", "dirname", "grep", "diff", "cmp", "paste", "wc",
)  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    ftckpt.megatron.configure(Config())


def calls(name: str) -> Iterator[tuple[str, ast.Call, ast.expr | None]]:
    """Each added line that is not an import: its text, the call, and what its value is assigned to."""
    for parts in patch_files.hunks(name).values():
        for line in (line for part in parts for line in part.added if line != IMPORT):
            (statement,) = ast.parse(line.strip()).body
            assert isinstance(statement, (ast.Expr, ast.Assign)), line
            assert isinstance(statement.value, ast.Call), line
            yield line, statement.value, statement.targets[0] if isinstance(statement, ast.Assign) else None


@pytest.mark.parametrize("name", NAMES)
def test_each_added_line_is_a_call_that_the_function_takes(name: str) -> None:
    called = set()
    for line, call, target in calls(name):
        assert isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == ALIAS, line
        assert call.func.attr in LINES, line
        assert not call.keywords and all(isinstance(argument, ast.Name) for argument in call.args), line
        inspect.signature(getattr(callbacks, call.func.attr)).bind(*call.args)
        if target is not None:  # with ftckpt off the name keeps its value
            assert ast.unparse(target) in [ast.unparse(argument) for argument in call.args], line
        called.add(call.func.attr)
    assert called == LINES


class Tree(argparse.Namespace):
    """Stands for what a line is given: passing it through is all that may happen."""


def test_with_ftckpt_off_a_line_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    training: Any = type(sys)("megatron.training")
    training.get_args = Tree
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.delitem(sys.modules, "ftckpt.megatron.hooks", raising=False)
    config = Tree(timers=None)
    callbacks.start(Tree(ftckpt=False))
    callbacks.start(Tree())
    callbacks.restore([], None, None)
    callbacks.set_rng()
    assert callbacks.log_sums({}, {}, True) is True and callbacks.log_sums({}, {}) is False
    callbacks.boundary(3, 1.0)
    assert callbacks.listen(config, False) is config
    callbacks.fence()
    callbacks.close()
    callbacks.close(3)
    assert vars(config) == {"timers": None}
    assert "ftckpt.megatron.hooks" not in sys.modules


def parse(*words: str) -> argparse.Namespace:
    return callbacks.add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def test_the_parsed_flags_are_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[Config] = []
    monkeypatch.setattr(callbacks, "switch_on", switched.append)
    flags = ["--ftckpt", "--ftckpt-interval", "3", "--ftckpt-overhead-budget=0.5", "--ftckpt-job", "a"]
    callbacks.start(parse(*flags))
    assert switched == [Config.from_flags(flags)[0]]
    assert switched[0].interval == 3
    callbacks.start(parse())
    assert len(switched) == 1, "ftckpt was switched on without --ftckpt"


def test_what_the_runner_took_off_the_command_line_stays_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(enabled=True, interval=7)
    ftckpt.megatron.configure(config)
    args = parse()
    assert (args.ftckpt, args.ftckpt_interval) == (True, 7)
    callbacks.start(args)
    assert ftckpt.megatron.door.config == config
    assert "ftckpt.megatron.hooks" not in sys.modules or not ftckpt.megatron.active()


def test_a_job_that_failed_keeps_its_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(ftckpt.megatron.door, "checkpointer", recorder)
    callbacks.fence()
    callbacks.close(3)
    callbacks.close("a signal")
    assert recorder.log == ["fence"]
    callbacks.close(0)
    callbacks.close()
    assert recorder.log == ["fence", "close", "close"]


OTHER_CORE = """
import sys, types, argparse
training = types.ModuleType("megatron.training")
training.get_args = lambda: argparse.Namespace(ftckpt=True, iteration=0)
sys.modules["megatron.training"] = training
import ftckpt.megatron
from ftckpt.config import Config
from ftckpt.megatron import callbacks
ftckpt.megatron.configure(Config(enabled=True))
callbacks.restore([], object(), None)
"""


@pytest.mark.slow
def test_a_core_without_lines_under_a_patched_loop_is_refused() -> None:
    pytest.importorskip("megatron.core")
    ended = run_python(OTHER_CORE, secs=240, PYTHONWARNINGS="ignore")
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ftckpt: ") and not lacks(last, "schedules.py")


# --- apply.sh ---


def apply(*argv: str | Path, path: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **more}
    if path:
        environment["PATH"] = path
    script = str(PATCHES / "apply.sh")
    return subprocess.run(
        [shutil.which("bash") or "bash", script, *map(str, argv)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def tools(tmp_path: Path) -> Any:
    """Gives a PATH with what apply.sh needs and, of patch and git, only what is asked for."""

    def only(*extra: str) -> str:
        folder = tmp_path / f"bin-{'-'.join(extra)}"
        folder.mkdir()
        for tool in (*NEEDED, *extra):
            where = shutil.which(tool)
            if where is None:
                pytest.skip(f"this machine has no {tool}")
            (folder / tool).symlink_to(where)
        return str(folder)

    return only


@pytest.mark.parametrize(("name", "tool"), [*((name, "patch") for name in NAMES), (NAMES[-1], "git")])
def test_a_round_trip_changes_nothing(name: str, tool: str, tmp_path: Path, tools: Any) -> None:
    path = tools(tool)
    tree = patch_files.miniature(name, tmp_path / "tree")
    before = contents(tree)
    ended = apply(tree, path=path)
    assert ended.returncode == 0, ended.stderr
    assert not lacks(ended.stdout, str(name)) and not lacks(ended.stdout, "19", "5")
    patched_tree = contents(tree)
    for file, parts in patch_files.hunks(name).items():
        text = patched_tree[file].decode()
        assert all(part.new in text for part in parts), file
    again = apply(tree, path=path)
    assert (again.returncode, contents(tree)) == (0, patched_tree)
    assert again.stdout
    ended = apply(tree, "--reverse", path=path)
    assert ended.returncode == 0, ended.stderr
    assert contents(tree) == before
    again = apply("--reverse", tree, path=path)
    assert (again.returncode, contents(tree)) == (0, before)
    assert again.stdout


def refused(tree: Path, *argv: str, path: str = "") -> str:
    """The message of a call that must fail and touch nothing."""
    before = contents(tree)
    ended = apply(tree, *argv, path=path)
    assert ended.returncode != 0, ended.stdout
    assert contents(tree) == before, "something was touched"
    return ended.stderr


def changed_lines(name: str) -> list[tuple[str, str]]:
    """One line of context of each file, the last of a hunk."""
    return [(file, parts[-1].old.splitlines()[-1]) for file, parts in patch_files.hunks(name).items()]


@pytest.mark.parametrize(("file", "line"), changed_lines(NAMES[-1]), ids=lambda value: Path(value).stem)
def test_a_file_that_someone_changed_is_refused(file: str, line: str, tmp_path: Path) -> None:
    """The number of the version alone does not say that the patch fits."""
    tree = patch_files.miniature(NAMES[-1], tmp_path)
    text = (tree / file).read_text()
    assert line.strip()
    (tree / file).write_text(text.replace(line, f"{line}  # ours"))
    message = refused(tree)
    assert not lacks(message, str(NAMES[-1]))


@pytest.mark.parametrize("argv", [[], ["--reverse"]], ids=["apply", "reverse"])
def test_lines_that_are_not_all_there_are_left_alone(argv: list[str], tmp_path: Path) -> None:
    tree = patch_files.miniature(NAMES[0], tmp_path)
    assert apply(tree).returncode == 0
    file = tree / "megatron/core/optimizer/optimizer.py"
    file.write_text(file.read_text().replace("        ftckpt.fence()\n", "", 1))
    assert refused(tree, *argv)


def test_an_unknown_release_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    message = refused(patch_files.miniature(NAMES[0], tmp_path, "9.9.9"))
    assert not lacks(message, "9.9.9")
    assert all(name in message for name in NAMES)
