"""Storage that a job cannot use is refused as soon as its settings are known, once, before anything is imported."""

from __future__ import annotations

import errno
import importlib.util
from pathlib import Path

import pytest

from ftckpt.config import Config
from ftckpt.errors import ConfigError
from ftckpt.frameworks.entry import prepare_storage
from tests.support.errors import raises
from tests.support.killing import fails_with
from tests.support.processes import run_python

pytestmark = pytest.mark.usefixtures("as_flags")


@pytest.mark.parametrize("form", ["snapshot", "universal"])
def test_a_directory_for_snapshots_is_made_where_its_parent_is(form: str, tmp_path: Path) -> None:
    where = tmp_path / "new"
    prepare_storage(Config(persist=str(where), persist_format=form))
    assert not where.exists(), "ftckpt is off"
    for _ in range(2):
        prepare_storage(Config(enabled=True, persist=str(where), persist_format=form))
        assert where.is_dir() and (where / "ftckpt").is_dir() is (form == "universal")


@pytest.mark.parametrize("form", ["snapshot", "universal"])
@pytest.mark.parametrize("what", ["no parent", "a file", "a link to nowhere", "private"])
def test_storage_that_no_attempt_could_use_is_refused_for_good(
    what: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "new"
    if what == "no parent":
        where /= "below"
    elif what == "a file":
        where.touch()
    elif what == "a link to nowhere":
        where.symlink_to("nowhere")
    else:
        monkeypatch.setattr(Path, "mkdir", fails_with(errno.EACCES))
    with raises(ConfigError, str(where), "--ftckpt-persist") as caught:
        prepare_storage(Config(enabled=True, persist=str(where), persist_format=form))
    assert caught.value.final and not where.is_dir()


def test_a_store_without_what_reaches_it_is_refused_by_the_name_of_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, "s3://bucket/a", "ftckpt[storage", "--ftckpt-persist") as caught:
        prepare_storage(Config(enabled=True, persist="s3://bucket/a"))
    assert caught.value.final
    monkeypatch.undo()
    prepare_storage(Config(enabled=True, persist="s3://bucket/a"))


REFUSED_EARLY = """
import sys
from ftckpt.runner.worker import main
code = main([{script!r}, "--ftckpt", "--ftckpt-persist", {where!r}], "{framework}")
assert "torch" not in sys.modules
sys.exit(code)
"""


@pytest.mark.parametrize("framework", ["megatron", "deepspeed"])
def test_storage_is_refused_before_anything_is_imported(framework: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise AssertionError")
    where = str(tmp_path / "no" / "where")
    ended = run_python(REFUSED_EARLY.format(framework=framework, script=str(tmp_path / "script.py"), where=where))
    assert ended.returncode == 2 and ended.stderr.count(where) == 1, ended.stderr
