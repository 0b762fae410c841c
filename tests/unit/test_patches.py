"""The source patches add calls of ours and nothing else; apply.sh puts them in whole or not at all, and out again."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftckpt.megatron
from ftckpt.config import Config
from ftckpt.frameworks.versions import TESTED
from ftckpt.megatron import callbacks
from ftckpt.megatron.job import ALIAS, CORE
from tests.support import patch_files
from tests.support.errors import lacks
from tests.support.interpreters import run_python
from tests.support.patch_files import NAMES, PATCHES
from tests.support.recorder import Recorder

IMPORT = "from ftckpt.megatron import callbacks as ftckpt"
LINES = {
    **dict.fromkeys(("add_flags", "start", "restore", "set_rng", "log_sums", "boundary"), 1),
    "listen": 3,
    "fence": 3,
    "close": 2,
}
"""What a patch calls, and how often."""
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
def test_a_patch_only_adds_lines(name: str) -> None:
    text = (PATCHES / f"{name}.patch").read_text()
    assert not [line for line in text.splitlines() if line.startswith("-") and not line.startswith("--- a/")]
    for path, parts in patch_files.hunks(name).items():
        assert [line for part in parts for line in part.added].count(IMPORT) == 1, path


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
    assert called == set(LINES)


@pytest.mark.parametrize("name", NAMES)
def test_every_place_has_its_lines(name: str) -> None:
    added = [call.func.attr for _, call, _ in calls(name) if isinstance(call.func, ast.Attribute)]
    assert {word: added.count(word) for word in LINES} == LINES
    files = {path.removesuffix(".py").replace("/", ".") for path in patch_files.hunks(name)}
    assert files == {*CORE, *(f"megatron.training.{n}" for n in ("arguments", "initialize", "training"))}


def test_each_function_is_documented_and_each_patched_release_is_known() -> None:
    readme = (PATCHES / "README.md").read_text()
    tested = TESTED["megatron-core"]
    for word in LINES:
        assert inspect.getdoc(getattr(callbacks, word)), word
        assert f"ftckpt.{word}(" in readme, word
    for name in NAMES:
        assert name in readme
        assert all(version in tested for version in patch_files.versions(name))


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
    assert callbacks.listen(config, 4, False) is config
    callbacks.fence()
    callbacks.close()
    callbacks.close(3)
    assert vars(config) == {"timers": None}
    assert "ftckpt.megatron.hooks" not in sys.modules


def test_the_module_that_megatron_imports_is_light() -> None:
    code = (
        f"import sys; {IMPORT}; print([m for m in sys.modules if m.split('.')[0] in ('torch', 'megatron', 'numpy')])"
    )
    ended = run_python(code)
    assert ended.stdout == "[]\n", ended.stderr


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ftckpt": True, "ftckpt_slots": 1}, "--ftckpt-slots 1 2"),
        ({"ftckpt": True, "ftckpt_interval": "often"}, "--ftckpt-interval often"),
        ({"ftckpt": False, "ftckpt_interval": 2}, "--ftckpt --ftckpt-*"),
    ],
)
def test_a_wrong_flag_ends_in_one_line(
    values: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        callbacks.start(argparse.Namespace(**values))
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert not lacks(error, "ftckpt", *message.split()) and error.count("\n") == 1


def test_flags_that_were_parsed_and_not_put_in_force_are_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training: Any = type(sys)("megatron.training")
    training.get_args = lambda: Tree(ftckpt=True)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    with pytest.raises(SystemExit):
        callbacks.restore([], object(), None)
    assert not lacks(capsys.readouterr().err, "initialize_megatron")


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


def test_list_names_every_patch() -> None:
    ended = apply("--list")
    assert ended.returncode == 0
    assert [line.split()[0] for line in ended.stdout.splitlines()] == NAMES


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize("name", NAMES)
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


@pytest.mark.parametrize("version", [v for name in NAMES for v in patch_files.versions(name)])
def test_each_version_of_a_release_is_recognised(version: str, tmp_path: Path) -> None:
    name = next(name for name in NAMES if version in patch_files.versions(name))
    ended = apply(patch_files.miniature(name, tmp_path, version))
    assert ended.returncode == 0, ended.stderr
    assert not lacks(ended.stdout, str(name))


def refused(tree: Path, *argv: str, path: str = "") -> str:
    """The message of a call that must fail and touch nothing."""
    before = contents(tree)
    ended = apply(tree, *argv, path=path)
    assert ended.returncode != 0, ended.stdout
    assert contents(tree) == before, "something was touched"
    return ended.stderr


def test_an_unknown_release_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    message = refused(patch_files.miniature(NAMES[0], tmp_path, "9.9.9"))
    assert not lacks(message, "9.9.9")
    assert all(name in message for name in NAMES)


def test_a_release_candidate_is_not_the_release(tmp_path: Path) -> None:
    tree = patch_files.miniature(NAMES[0], tmp_path)
    info = tree / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("PRE_RELEASE = ''", "PRE_RELEASE = 'rc1'"))
    assert not lacks(refused(tree), f"{patch_files.versions(NAMES[0])[0]}rc1")


@pytest.mark.parametrize(
    "missing",
    ["megatron/core/package_info.py", "megatron/training/training.py", "megatron/training/initialize.py"],
)
def test_what_is_no_checkout_is_refused(missing: str, tmp_path: Path) -> None:
    tree = patch_files.miniature(NAMES[0], tmp_path)
    (tree / missing).unlink()
    assert refused(tree)


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


def test_a_file_that_does_not_compile_is_refused(tmp_path: Path) -> None:
    tree = patch_files.miniature(NAMES[0], tmp_path)
    file = tree / "megatron/training/arguments.py"
    file.write_text(file.read_text() + "\nprint(\n")
    assert not lacks(refused(tree), "megatron/training/arguments.py")


def test_without_patch_and_git_the_error_says_what_to_install(tmp_path: Path, tools: Any) -> None:
    tree = patch_files.miniature(NAMES[0], tmp_path / "tree")
    assert not lacks(refused(tree, path=tools()), "patch", "git")


def test_git_does_not_take_the_repository_around_for_the_tree(tmp_path: Path, tools: Any) -> None:
    path = tools("git")
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True, timeout=60)
    tree = patch_files.miniature(NAMES[0], tmp_path / "tree")
    ended = apply(tree, path=path, TMPDIR=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert b"ftckpt.fence()" in contents(tree)["megatron/core/optimizer/optimizer.py"]


@pytest.mark.parametrize(("argv", "message"), [(["--undo"], "--undo"), ([], "patches/apply.sh")])
def test_a_wrong_command_line_shows_the_usage(argv: list[str], message: str) -> None:
    ended = apply(*argv)
    assert ended.returncode != 0
    assert not lacks(ended.stderr, *message.split()) and re.search(r"--list +the releases", ended.stderr)
